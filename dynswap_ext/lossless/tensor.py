"""A weight whose bytes are coded without loss, and that behaves as the plain tensor in everything.

Note [A coded weight is an exact weight]
----------------------------------------
A `LosslessTensor` holds coded bytes, mapped from a file or in RAM. An operation that reads it gets decoded
values, which are freed after it. The first write in place (an optimizer's step, `copy_`, `data.mul_`) decodes
the tensor for good: from then on it holds plain values, and the coded bytes are dropped. Views and aliases
(`detach()`, `.data`, `w[0]`, `w.t()`) share the content, so what is written on one is seen on all, and a view
of a coded tensor decodes only the range that it shows. The coded bytes themselves are never written to, so
copies share them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.lossless.code import CODABLE, decode, encode, fits

aten = torch.ops.aten
_data: Any = torch.Tensor.data
#: Held while a content becomes plain, so that of two threads that write at once one takes the other's values.
_first_writes = threading.Lock()


@dataclass(eq=False)
class Content:
    """What a `LosslessTensor` and its aliases hold: coded bytes, or plain values once one was written to."""

    coded: torch.Tensor | None
    plain: torch.Tensor | None
    #: The dtype and the number of the coded weights.
    dtype: torch.dtype
    count: int
    #: What errors call them.
    origin: str
    #: An address that the native provider gives it, to know which masters share it. No memory has it.
    place: int | None = field(default=None, init=False)
    _shown: torch.UntypedStorage | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "place": None, "_shown": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Content:
        return memo.setdefault(id(self), replace(self, plain=copy.deepcopy(self.plain, memo)))  # type: ignore[no-any-return]

    @property
    def held(self) -> torch.Tensor:
        """The coded bytes or the plain values."""
        coded = self.coded  # read first: it is dropped after `plain` is set
        return cast("torch.Tensor", self.plain) if coded is None else coded

    def storage(self) -> torch.UntypedStorage:
        """Return a storage of the bytes that are held.

        It is another object than that of `held`: while torch traces, no two tensors may have the same one.
        """
        held = self.held
        if type(held) is not torch.Tensor:  # torch traces
            return held.untyped_storage()
        if (shown := self._shown) is None:
            begin, end = held.storage_offset(), held.storage_offset() + held.numel()
            storage: Any = held.untyped_storage()
            shown = self._shown = storage[:] if held is self.plain else storage[begin:end]
        return shown

    @property
    def nbytes(self) -> int:
        """Bytes of the storage of the plain values, or of all values while they are coded."""
        plain = self.plain
        return self.count * self.dtype.itemsize if plain is None else plain.untyped_storage().nbytes()

    def shown(self, dtype: torch.dtype, size: Any, stride: Any, offset: int) -> torch.Tensor:
        """Return a view of the plain values, or decode the range of them that a view shows."""
        held = self.held
        if held is self.plain:
            if _geometry(held) == (dtype, tuple(size), stride, offset):
                return held
            return (held if dtype == held.dtype else held.view(dtype)).as_strided(size, stride, offset)
        own, other = self.dtype.itemsize, dtype.itemsize
        begin, end = offset * other // own, -(-self.end_of(dtype, size, stride, offset) * other // own)
        flat = self.decoded(held, begin, end - begin).view(dtype)
        return flat.as_strided(size, stride, offset - begin * own // other)

    def wrapped(self, dtype: torch.dtype, size: Any, stride: Any, offset: int) -> LosslessTensor:
        """Return a `LosslessTensor` of this content."""
        return _wrapper(self, dtype, size, stride, offset)

    def end_of(self, dtype: torch.dtype, size: Any, stride: Any, offset: int) -> int:
        """Return after which element a view ends. RuntimeError if the view is outside of what is held."""
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        end: int = offset if 0 in size else offset + last + 1
        if min(*size, *stride, offset, 0) < 0 or end * dtype.itemsize > self.nbytes:
            raise RuntimeError(f"{size} with strides {stride} from {offset} is outside the tensor")
        return end

    def decoded(self, coded: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Return decoded weights, in one dimension. SourceError if the bytes are damaged; it has `origin`."""
        try:
            return decode(coded, self.dtype, self.count, first, length)
        except SourceError as error:
            raise SourceError(f"{self.origin or 'a weight'} cannot be read: {error}") from error

    def make_plain(self) -> None:
        """Decode all values for good, and drop the coded bytes."""
        if (coded := self.coded) is not None:
            # While torch traces, the values of a real tensor are real, too.
            real = type(coded) is torch.Tensor
            with _disable_current_modes() if real else nullcontext(), torch.inference_mode(False):
                plain = self.decoded(coded, 0, self.count)
            with _first_writes:
                if self.coded is not None:
                    self.plain, self.coded, self._shown = plain, None, None


class LosslessTensor(torch.Tensor):
    """A floating tensor, held as coded bytes until it is written to. It has the same values, to the bit.

    Parameters
    ----------
    coded
        uint8, one dimension: the bytes that `dynswap_ext.lossless.code.encode` makes. Only their number is
        checked before they are read.
    dtype
        The dtype of the weights: bfloat16, float16 or float32.
    shape
        Their shape.
    origin
        What errors call the tensor, for instance its name and its file.

    Raises
    ------
    ConfigError
        The dtype is never coded, or `coded` is not bytes in one dimension, or too short for the shape.
    """

    _dynswap_content: Content

    @staticmethod
    def __new__(
        cls, coded: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], origin: str = ""
    ) -> LosslessTensor:
        """Return a wrapper around coded bytes."""
        if dtype not in CODABLE:
            raise ConfigError(f"dtype is {dtype}; expected one that is coded: {', '.join(map(str, CODABLE))}")
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        count = stand_in.numel()
        if coded.dtype != torch.uint8 or coded.dim() != 1 or not fits(coded.numel(), dtype, count):
            raise ConfigError(
                f"coded is {coded.dtype} of shape {list(coded.shape)}; expected uint8, in one dimension, "
                f"that can be the lossless code of {list(shape)} weights of {dtype}"
            )
        return _alias(Content(coded.contiguous(), None, dtype, count, origin), stand_in)

    def __init__(
        self, coded: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], origin: str = ""
    ) -> None:
        pass  # `__new__` has made it

    @property
    def coded(self) -> torch.Tensor | None:
        """The coded bytes, which aliases share; None once the tensor is plain."""
        return self._dynswap_content.coded

    @property
    def plain(self) -> torch.Tensor | None:
        """A plain view of the values, through which they can be written; None as long as they are coded."""
        if self.coded is not None:
            return None
        # While torch traces, a view of a real tensor is no operation of the graph.
        real = type(self._dynswap_content.plain) is torch.Tensor
        with _disable_current_modes() if real else nullcontext():
            return self.decoded()

    def decoded(self) -> torch.Tensor:
        """Return a plain tensor of the values: a new one while they are coded, and else in their memory."""
        return self._dynswap_content.shown(*_geometry(self))

    def make_plain(self) -> torch.Tensor:
        """Decode for good, also for all aliases, and return the plain values."""
        self._dynswap_content.make_plain()
        return self.decoded()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        held = "plain" if self.coded is None else f"coded in {self.coded.numel():,} bytes"
        return f"LosslessTensor({list(self.shape)}, {self.dtype}, {self.device}, {held})"

    # ---- memory --------------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """An alias without gradients. Assigned values replace those of this tensor, not of its aliases."""
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        new: Any = value.detach()
        if type(new) is torch.Tensor:
            new = of_plain(new.resolve_conj().resolve_neg())  # a wrapper shows no lazy views
        _data.__set__(self, new)  # raises for a tensor of another class
        self._dynswap_content = new._dynswap_content

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the bytes that are held now, coded or plain. Aliases have the same."""
        return self._dynswap_content.storage()

    def _typed_storage(self) -> Any:
        return self.make_plain()._typed_storage()  # type: ignore[no-untyped-call]

    def is_shared(self) -> bool:
        """Return whether other processes can share the bytes."""
        return self._dynswap_content.held.is_shared()  # type: ignore[no-any-return, no-untyped-call]

    def data_ptr(self) -> int:
        """Return the address of the plain values, which may be written there. Decodes for good."""
        return self.make_plain().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that shares the memory of the values. Decodes for good unless `force` copies."""
        return (self.decoded() if force else self._given_away()).numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._given_away().__dlpack__(**options)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.decoded().tolist()

    def _given_away(self) -> torch.Tensor:
        # With requires_grad, so that torch refuses it as it refuses a plain tensor.
        return self.make_plain().detach().requires_grad_(self.requires_grad)

    # ---- taking apart, copying, pickling -------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        content = self._dynswap_content
        names = ["plain" if content.coded is None else "coded"]
        return names, (
            content.dtype,
            content.count,
            getattr(self, "_is_param", False),
            *_geometry(self),
        )  # equal for equal layers, so that one graph serves all

    def _stable_hash_for_caching(self) -> str:
        return repr((self.__tensor_flatten__(), self._dynswap_content.held.shape))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> LosslessTensor:
        dtype, count, is_parameter, *geometry = context
        if (plain := inner.get("plain")) is not None:
            made = of_plain(plain)
        else:
            made = _wrapper(Content(inner["coded"], None, dtype, count, ""), *geometry)
        if is_parameter:
            made._is_param = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> LosslessTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]  # raises
        made = _rebuilt(copy.deepcopy(attributes_of(self), memo), *copy.deepcopy(self._rest(), memo))
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.coded is not None:
            return _rebuilt, (attributes_of(self), *self._rest())
        values = self.decoded().detach()
        if isinstance(self, torch.nn.Parameter):
            values = torch.nn.Parameter(values, self.requires_grad)
        vars(values).update(attributes_of(self))
        return values.requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _rest(self) -> tuple[Any, ...]:
        kind = self.requires_grad, isinstance(self, torch.nn.Parameter)
        return self._dynswap_content, *_geometry(self), *kind

    # ---- operations ----------------------------------------------------------------------------------------

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode, composite operations such as `to` and `contiguous` arrive here, too.
        if func._can_decompose() and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
            return made
        first, parameters = args[0] if args else None, func._schema.arguments
        if isinstance(first, LosslessTensor):
            alias = parameters[0].alias_info
            if alias is not None and not alias.is_write:
                return first._view(func, args, kwargs)
            if func._schema.name.startswith("aten::new_") or func._schema.name.endswith("_like"):
                return func(first._stand_in(), *args[1:], **{"device": first.device, **kwargs})
            if func in _COPIES and first.is_whole() and (copied := _copied(first, **kwargs)) is not None:
                return copied
            if func is aten.record_stream.default:
                return func(first._dynswap_content.held, *args[1:])
            if func is aten.set_.source_Tensor and (args[1].dtype, args[1].device) == (
                first.dtype,
                first.device,
            ):
                first.data = args[1]
                return first
        if torch.Tag.inplace_view in func.tags:
            raise ConfigError(
                f"{first!r} keeps its shape and memory, which {func} would change in place; call the "
                "operation that returns a new tensor, or assign to its `data`"
            )
        if func._schema.is_mutable:
            names = [each.name for each in parameters]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            written = [each.name for each in parameters if each.alias_info and each.alias_info.is_write]
            for value in tree_iter([given.get(name) for name in written]):
                if isinstance(value, LosslessTensor):
                    value._dynswap_content.make_plain()
        values: dict[int, torch.Tensor] = {}
        givers: dict[int, LosslessTensor] = {}

        def decoded(value: Any) -> Any:
            if not isinstance(value, LosslessTensor):
                return value
            if id(value) not in values:
                values[id(value)] = value.decoded()
                givers[id(values[id(value)])] = value
            return values[id(value)]

        result = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        if func is aten._to_copy.default:
            return of_plain(result)  # of the same class, so that a module's `to` keeps its parameter objects
        # An operation that returns its argument returns the wrapper that was given.
        return tree_map(lambda value: givers.get(id(value), value), result)

    def is_range(self) -> bool:
        """Return whether the elements are a contiguous range of the weights that were coded."""
        return self.dtype == self._dynswap_content.dtype and self.is_contiguous()

    def make_plain_unless_range(self) -> None:
        """Decode for good what no copy can decode on its way: a transposed view, for example."""
        coded = self.coded
        if coded is not None and type(coded) is torch.Tensor and not self.is_range():
            self.make_plain()

    def is_whole(self) -> bool:
        """Return whether the coded bytes stand for this tensor, and not for one of which it is a view."""
        content = self._dynswap_content
        return content.coded is not None and self.numel() == content.count and self.is_range()

    def _stand_in(self) -> torch.Tensor:
        """Return a tensor without memory that has the same geometry."""
        length = self._dynswap_content.nbytes // self.dtype.itemsize
        return torch.empty(length, dtype=self.dtype, device="meta").as_strided(*_geometry(self)[1:])

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._neg_view.default:  # a wrapper shows no lazy views
            return func(self.make_plain())
        with torch.inference_mode(self.is_inference()):  # a view of an inference tensor is one
            made = func(self._stand_in(), *args[1:], **kwargs)
            return tree_map(lambda each: _alias(self._dynswap_content, each), made)


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that other code has set on a tensor, plain or a `LosslessTensor`."""
    own = ("_is_param", "_dynswap_content")
    return {name: value for name, value in vars(tensor).items() if name not in own}


def encoded(tensor: torch.Tensor, origin: str = "") -> torch.Tensor:
    """Return a `LosslessTensor` of a plain tensor's values, or that tensor where `encode` returns None."""
    coded = encode(tensor)
    return tensor if coded is None else LosslessTensor(coded, tensor.dtype, tensor.shape, origin)


def of_plain(values: torch.Tensor) -> LosslessTensor:
    """Return a `LosslessTensor` that is plain already, and shares the memory of `values`."""
    return _alias(Content(None, values, values.dtype, values.numel(), ""), values)


def _geometry(tensor: torch.Tensor) -> tuple[torch.dtype, Any, Any, Any]:
    return tensor.dtype, tuple(tensor.size()), tensor.stride(), tensor.storage_offset()


def _alias(content: Content, like: torch.Tensor) -> LosslessTensor:
    return _wrapper(content, *_geometry(like))


def _wrapper(content: Content, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> LosslessTensor:
    options = {"dtype": dtype, "device": content.held.device, "strides": stride, "storage_offset": offset}
    made: Any = torch.Tensor._make_wrapper_subclass(LosslessTensor, size, **options)
    made._dynswap_content = content
    return made  # type: ignore[no-any-return]


def _copied(
    tensor: LosslessTensor, dtype: Any = None, device: Any = None, non_blocking: bool = False, **options: Any
) -> LosslessTensor | None:
    """Return a copy of a whole coded tensor, perhaps on another device; None if it cannot stay coded."""
    content = tensor._dynswap_content
    as_they_are = (None, False, torch.strided, torch.preserve_format, torch.contiguous_format)
    changes = any(value not in as_they_are for value in options.values()) or dtype not in (None, tensor.dtype)
    if content.coded is None or changes or (device is not None and torch.device(device).type == "meta"):
        return None
    return _alias(replace(content, coded=content.coded.to(device, non_blocking=non_blocking)), tensor)


def _rebuilt(attributes: dict[str, Any], content: Content, *rest: Any) -> LosslessTensor:
    *geometry, requires_grad, parameter = rest
    if content.coded is not None:  # a file may have any bytes
        LosslessTensor(content.coded, content.dtype, (content.count,))
    content.end_of(*geometry)
    made = _wrapper(content, *geometry)
    # The type stays: nn.Parameter only marks a tensor subclass as a parameter.
    made = cast("LosslessTensor", torch.nn.Parameter(made)) if parameter else made
    vars(made).update({**attributes, **vars(made)})
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


_COPIES = (aten.clone.default, aten._to_copy.default)

# So that torch.load reads back what torch.save wrote, with weights_only=True as well.
torch.serialization.add_safe_globals([_rebuilt, Content])
