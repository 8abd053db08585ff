"""A weight that is kept as GGUF's quantised blocks, and decoded on its device when it is computed with.

Note [Blocks are the weight]
----------------------------
A weight is a wrapper around one tensor: the blocks, as they are in the file. The blocks are mapped, moved and
streamed. The wrapper has the encoding, and the shape and dtype of the decoded values. So a cast costs nothing
and shares the blocks. Blocks run along rows, so operations that select whole rows return blocks again. Every
other operation gets the decoded values, which are freed after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from dynswap_ext.checkpoint.gguf_tensors.encodings import decode, encoding_of
from dynswap_ext.errors import ConfigError

aten = torch.ops.aten


class GGUFTensor(torch.Tensor):
    """A floating-point weight, held as quantised blocks. Not trainable; gradients pass through it to inputs.

    Parameters
    ----------
    blocks
        uint8 (..., bytes of a row): the blocks of each row, one after the other.
    encoding
        ggml's name of the type, such as "Q4_K".
    dtype
        The dtype of the decoded values. They are computed in float32 and cast.

    Raises
    ------
    ConfigError
        The encoding is unknown, the dtype is not floating-point, or the rows are not whole blocks of uint8.
    """

    blocks: torch.Tensor
    encoding: str

    @staticmethod
    def __new__(cls, blocks: torch.Tensor, encoding: str, dtype: torch.dtype = torch.float32) -> GGUFTensor:
        """Make an empty wrapper of the shape that the blocks are decoded to."""
        layout = encoding_of(encoding)
        if not dtype.is_floating_point:
            raise ConfigError(f"blocks of {encoding} are decoded to a floating-point dtype, not to {dtype}")
        if blocks.dtype != torch.uint8 or blocks.dim() == 0 or blocks.shape[-1] % layout.nbytes:
            raise ConfigError(
                f"blocks of {encoding} are uint8 rows of whole blocks ({layout.nbytes} bytes each), not "
                f"{blocks.dtype} of shape {list(blocks.shape)}"
            )
        shape = (*blocks.shape[:-1], blocks.shape[-1] // layout.nbytes * layout.values)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=blocks.device, requires_grad=False
        )

    def __init__(self, blocks: torch.Tensor, encoding: str, dtype: torch.dtype = torch.float32) -> None:
        self.blocks, self.encoding = blocks, encoding

    def dequantize(self) -> torch.Tensor:
        """Decode the blocks, and return a plain tensor of the same shape, dtype and device."""
        return decode(self.blocks, self.encoding, self.dtype)

    def data_ptr(self) -> int:
        """Return the address of the blocks, by which tied weights are recognised."""
        return self.blocks.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GGUFTensor({self.encoding}, {list(self.shape)}, {self.dtype}, {self.device})"

    # ---- taking apart, copying, pickling -------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["blocks"], (self.encoding, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> GGUFTensor:
        return cls(inner["blocks"], *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> GGUFTensor:
        # Torch's would copy the blocks twice, once as the tensor and once as its attribute.
        if id(self) not in memo:
            rebuild, (blocks, *rest) = self.__reduce_ex__(2)
            memo[id(self)] = rebuild(blocks.clone(), *rest)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parameter = isinstance(self, torch.nn.Parameter)
        return _rebuilt, (self.blocks.detach(), self.encoding, self.dtype, parameter)

    # ---- operations ----------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return _linear(*args, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], GGUFTensor):
            raise _unwritable(args[0])  # it would write to decoded values, which are dropped
        if _asks_for_gradient(func, args, kwargs):
            raise ConfigError(
                f"{args[0]!r} cannot be trained, as its blocks have no gradient: call requires_grad_(False) "
                "on the parameter it takes the place of, and train an adapter, or w.dequantize()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEPT and isinstance(args[0], GGUFTensor):
            result = _KEPT[func](func, *args, **kwargs)
            if isinstance(result, GGUFTensor):
                return return_and_correct_aliasing(func, args, kwargs, result)  # type: ignore[no-untyped-call]
            if result is not None:
                return result
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                if isinstance(written, GGUFTensor):
                    raise _unwritable(written)
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


def _decoded(value: Any) -> Any:
    return value.dequantize() if isinstance(value, GGUFTensor) else value


def _unwritable(tensor: GGUFTensor) -> ConfigError:
    return ConfigError(
        f"{tensor!r} holds quantised blocks, to which values cannot be written; compute with w.dequantize(), "
        "or replace the parameter (load_state_dict(assign=True))"
    )


def _asks_for_gradient(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.requires_grad_:
        return bool((*args[1:], *kwargs.values(), True)[0])
    # Equal and not identical: each access of the attribute makes a new object.
    return func == torch.Tensor.requires_grad.__set__ and bool(args[1])  # type: ignore[attr-defined]


# ---- operations that keep the blocks -----------------------------------------------------------------------


def _like(tensor: GGUFTensor, blocks: torch.Tensor) -> GGUFTensor:
    return GGUFTensor(blocks, tensor.encoding, tensor.dtype)


def _each(func: Any, tensor: GGUFTensor, **_: Any) -> GGUFTensor:
    return _like(tensor, func(tensor.blocks))


def _to_copy(func: Any, tensor: GGUFTensor, **options: Any) -> GGUFTensor | None:
    dtype = options.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        return None
    # If the device stays, the result shares the blocks, as a cast does not change them.
    blocks = tensor.blocks.to(options.get("device"), non_blocking=options.get("non_blocking", False))
    return GGUFTensor(blocks, tensor.encoding, dtype)


def _copy(func: Any, tensor: GGUFTensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(source, GGUFTensor) or source.encoding != tensor.encoding:
        return None
    tensor.blocks.copy_(source.blocks, non_blocking)
    return tensor


def _rows(func: Any, tensor: GGUFTensor, dim: int = 0, *which: Any, **named: Any) -> GGUFTensor | None:
    along_a_row = dim % tensor.dim() == tensor.dim() - 1
    return None if along_a_row else _like(tensor, func(tensor.blocks, dim, *which, **named))


def _split(func: Any, tensor: GGUFTensor, sizes: Any, dim: int = 0) -> list[GGUFTensor] | None:
    along_a_row = dim % tensor.dim() == tensor.dim() - 1
    return None if along_a_row else [_like(tensor, part) for part in func(tensor.blocks, sizes, dim)]


def _embedding(func: Any, weight: GGUFTensor, indices: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # The other arguments (padding, scaling) only concern the gradient of the weight, which has none.
    rows = decode(weight.blocks.index_select(0, indices.reshape(-1)), weight.encoding, weight.dtype)
    return rows.reshape(*indices.shape, weight.shape[1])


def _shape_only(func: Any, tensor: GGUFTensor, *arguments: Any, **options: Any) -> Any:
    stand_in = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return func(stand_in, *arguments, **options)


#: Operations that do not need all values, with their implementations. If one returns None, this call needs
#: them all.
_KEPT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default), _each),
    **dict.fromkeys((aten.slice.Tensor, aten.index_select.default, aten.select.int), _rows),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default), _shape_only),
    **dict.fromkeys((aten.new_empty.default, aten.new_zeros.default), _shape_only),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.embedding.default: _embedding,
}


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    if isinstance(weight, GGUFTensor) and torch.is_grad_enabled():
        return _Linear.apply(_decoded(input), weight, _decoded(bias))  # type: ignore[no-any-return, no-untyped-call]
    return functional.linear(_decoded(input), _decoded(weight), _decoded(bias))


class _Linear(torch.autograd.Function):
    """Computes a linear layer, and saves the blocks for backward. Torch would save the decoded values."""

    @staticmethod
    def forward(input: torch.Tensor, weight: GGUFTensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(input, weight.dequantize(), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            of_input = gradient @ weight.dequantize().to(gradient.dtype)  # autocast makes the dtypes differ
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, None, of_bias


def _rebuilt(blocks: torch.Tensor, encoding: str, dtype: torch.dtype, parameter: bool) -> GGUFTensor:
    tensor = GGUFTensor(blocks, encoding, dtype)
    # The type stays GGUFTensor: nn.Parameter only marks a tensor subclass as a parameter.
    return cast("GGUFTensor", torch.nn.Parameter(tensor, requires_grad=False)) if parameter else tensor


# So that torch.load reads back what torch.save wrote, with weights_only=True as well.
torch.serialization.add_safe_globals([_rebuilt])
