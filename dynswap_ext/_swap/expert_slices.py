"""Fused experts as a forward gets them: a parameter whose slices are fetched when they are used.

Note [Slices of a parameter]
Fused experts are one parameter. Each slice along its first dimension is an expert, and a router chooses some
of them for each token: `self.down_proj[expert]` in a loop, `self.down_proj[experts]`, or
`grouped_mm(x, self.down_proj, offs=...)`. To hand out the whole parameter would move every expert for each
token. So a forward gets an `ExpertSlices`: a tensor with the shape, dtype and device of the whole parameter,
and no bytes. An index along the first dimension fetches the slices that it names, and grouped_mm() those that
have rows. That is done one slice after the other, so that no more than one has to be on the device. Copies
are issued ahead for all slices that are known to be chosen. In a loop over a tensor of experts, these are the
elements that follow in the memory of the tensor. In the session each slice is a weight: cached, fetched again
for backward, written back and watched like any other.

Every other operation gets the whole parameter, which is copied for it, outside the budget. If a model reads a
parameter in this way (`torch.bmm` over all experts), it is streamed as a whole from the next call on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils._pytree import tree_map

from dynswap_ext._swap.next_experts import Guesses, following
from dynswap_ext._util.untraced import untraced

#: An index may be an element of a larger tensor. All of that is read if it has no more elements than this: no
#: known model has more experts.
_MOST_INDICES: Final = 4096


class SliceSource(Guesses, Protocol):
    """A session that serves fused experts by their slices."""

    def fetch_slice(self, master: torch.Tensor, index: int) -> torch.Tensor | None:
        """Return one slice of a parameter on the device; None if it is no longer served by slices."""

    def fetch_whole(self, master: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter on the device."""

    def expect_slices(self, master: torch.Tensor, indices: Sequence[int]) -> None:
        """Fetch slices ahead, as far as there is room. They will be asked for next, in this order."""

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        """Note that these masters are written, perhaps without a new version, as they get a gradient."""


_Views = tuple[Callable[[torch.Tensor], torch.Tensor], ...]
_plain: Final[Any] = torch.Tensor

#: What was handed out for each master, by the master's id, while it is alive. Each access returns the same.
_alive: Final[weakref.WeakValueDictionary[int, ExpertSlices]] = weakref.WeakValueDictionary()


class ExpertSlices(torch.Tensor):
    """A parameter on the device, whose slices along the first dimension are fetched when they are used."""

    _master: torch.Tensor
    _source: SliceSource
    #: Functions to apply to each slice, if the parameter was transposed in its other dimensions.
    _views: _Views

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        serve = _SERVED.get(func) or _SERVED_BY_NAME.get(getattr(func, "__name__", ""))
        if serve is not None and torch._C._functorch.peek_interpreter_stack() is None:
            served = serve(func, *args, **kwargs)
            if served is not NotImplemented:
                return served
        args, kwargs = tree_map(_whole_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_whole_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Fetch one slice after the other; with gradients all at once, as torch's own method does."""
        if torch.is_grad_enabled() and self.requires_grad:
            return iter(self.unbind(0))  # its backward stacks the gradients, and so keeps the sign of a zero
        return (self._slice(index) for index in range(len(self)))

    def _from_first(self, index: int) -> int:
        """Return an index counted from the first slice; IndexError if there is no such slice."""
        count = self._master.shape[0]
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of bounds for dimension 0 with size {count}")
        return index % count

    def _slice(self, index: int) -> torch.Tensor:
        index = self._from_first(index)
        fetched = self._source.fetch_slice(self._master, index)
        if fetched is None:  # the install was ended or replaced, or has a new plan, since this was handed out
            fetched = self._source.fetch_whole(self._master)[index]
        return self._viewed(fetched)

    def _viewed(self, fetched: torch.Tensor) -> torch.Tensor:
        for view in self._views:
            fetched = view(fetched)
        return fetched


@untraced
def slices_of(
    master: torch.Tensor, source: SliceSource, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor that a forward gets for fused experts; the same object while that is alive."""
    known = _alive.get(id(master))
    if (
        known is not None
        and known._master is master
        and known._source is source
        and known.requires_grad == master.requires_grad
    ):
        return known
    made = _made(master, source, device, dtype, ())
    made._is_param = True
    _alive[id(master)] = made
    return made


def _made(
    master: torch.Tensor,
    source: SliceSource,
    device: torch.device,
    dtype: torch.dtype,
    views: _Views,
) -> ExpertSlices:
    with torch.inference_mode(False):
        like = torch.empty(master.shape, device="meta") if views else master
        for view in views:
            like = view(like)
        made: Any = _plain._make_wrapper_subclass(
            ExpertSlices,
            like.shape,
            strides=like.stride() if views else None,
            dtype=dtype,
            device=device,
            requires_grad=master.requires_grad,
        )
    made._master, made._source, made._views = master, source, views
    return made  # type: ignore[no-any-return]


def _whole_of(value: Any) -> Any:
    if not isinstance(value, ExpertSlices):
        return value
    whole = value._source.fetch_whole(value._master)
    for view in value._views:  # they count dimensions from the last one, so they are right for the whole, too
        whole = view(whole)
    return whole


# ------------------------------------------------------------------------------ what is served by slices


def _item(_: Any, slices: ExpertSlices, index: Any) -> Any:
    first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if isinstance(first, bool) or first is None or first is Ellipsis:
        return NotImplemented
    if isinstance(first, torch.Tensor):
        if first.dtype in (torch.bool, torch.uint8) or first.is_floating_point() or first.dim() > 1:
            return NotImplemented
        first = first.tolist() if first.dim() == 1 else _number(slices, first)
    if isinstance(first, int):
        fetched = slices._slice(first)
        return fetched[rest] if rest else fetched
    if rest:
        return NotImplemented
    if isinstance(first, slice):
        if first.step is not None and not (isinstance(first.step, int) and first.step > 0):
            return NotImplemented  # torch refuses it
        if not (torch.is_grad_enabled() and slices.requires_grad):
            return NotImplemented  # it is a view of the whole, through which experts may be written
        first = list(range(*first.indices(len(slices))))
    if isinstance(first, list) and all(type(row) is int for row in first):
        return _gathered(slices, first)
    return NotImplemented


def _number(slices: ExpertSlices, index: torch.Tensor) -> int:
    """Return the value of an index, and have slices fetched ahead that a loop will ask for next.

    The index may be an element of a tensor that a loop goes through: the elements after it come next.
    """
    of = index.untyped_storage()
    if of.nbytes() > _MOST_INDICES * index.itemsize or of.nbytes() % index.itemsize:
        return int(index.item())
    values = torch.empty(0, dtype=index.dtype, device=index.device).set_(of).tolist()
    at = int(index.storage_offset())
    later = [value for value in values[at + 1 :] if 0 <= value < len(slices)]
    if later and 0 <= values[at] < len(slices):
        slices._source.expect_slices(slices._master, list(dict.fromkeys([values[at], *later])))
    return int(values[at])


def _transposed(func: Any, slices: ExpertSlices, *dims: Any, **named: Any) -> Any:
    mt = func == _MT
    if named or (not mt and len(dims) != 2):
        return NotImplemented
    count = slices.dim()
    if not mt and not all(-count <= dim < count for dim in dims):
        return NotImplemented  # torch refuses it
    first, second = (count - 2, count - 1) if mt else (dim % count for dim in dims)
    if 0 in (first, second):
        return NotImplemented
    # Dimensions are counted from the last one, as a slice lacks the first.
    view = functools.partial(torch.transpose, dim0=first - count, dim1=second - count)
    views: _Views = (*slices._views, view)
    return _made(slices._master, slices._source, slices.device, slices.dtype, views)


def _hooked(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "dynswap_ext: register_hook() on fused experts in a forward: each expert that is used has a gradient "
        "of its own there. Register the hook on the model's parameter, outside the forward"
    )


def _converted(_: Any, slices: ExpertSlices, *wanted: Any, **named: Any) -> Any:
    """Return the slices themselves for a `.to()` the device and dtype that they have; else NotImplemented."""
    if named.keys() - {"dtype", "device", "non_blocking"}:
        return NotImplemented
    for value in (*wanted, *(named[name] for name in ("dtype", "device") if name in named)):
        same = value == (slices.dtype if isinstance(value, torch.dtype) else slices.device)
        if isinstance(value, bool) or not isinstance(value, torch.dtype | torch.device) or not same:
            return NotImplemented
    return slices


def _grouped(
    func: Any, rows: torch.Tensor, slices: Any, offs: torch.Tensor | None = None, **named: Any
) -> Any:
    """Compute `grouped_mm` one expert after the other. The rows of expert i end at ``offs[i]``."""
    if not isinstance(slices, ExpertSlices) or offs is None or rows.dim() != 2:
        return NotImplemented
    if any(value is not None for value in named.values()):
        return NotImplemented
    after = following(slices._master)
    ranked = None if after is None else after.ranked(slices._source, rows)
    ends = offs.tolist()
    begins = [0, *ends[:-1]]
    hit = [index for index, end in enumerate(ends) if end > begins[index]]
    slices._source.expect_slices(slices._master, hit)
    if after is not None and ranked is not None:
        after.guess(slices._source, ranked, len(hit))
    parts = []
    for index in hit:
        begin, end = begins[index], ends[index]
        expert = slices._slice(index).unsqueeze(0)
        parts.append(func(rows[begin:end], expert, offs=offs.new_full((1,), end - begin)))
        del expert
    beyond = rows.shape[0] - (ends[-1] if ends else 0)
    if beyond or not parts:
        parts.append(rows.new_zeros(beyond, slices.shape[-1], dtype=slices.dtype))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


# --------------------------------------------------------------------------------------- several slices


def _gathered(slices: ExpertSlices, rows: list[int]) -> torch.Tensor:
    """Return the slices of these indices, copied into one tensor, with one slice at a time on the device."""
    rows = [slices._from_first(row) for row in rows]
    # For a leaf, `apply` would take a mutex with the GIL held: Note [Autograd's mutex is taken without the
    # GIL].
    master = slices._master.view_as(slices._master)
    return _Gather.apply(master, (slices,), rows)  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, of: tuple[ExpertSlices], rows: list[int]) -> torch.Tensor:
        (slices,) = of  # in a tuple, as it is no input of the graph
        ctx.master, ctx.source, ctx.views = slices._master, slices._source, slices._views
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row, []).append(place)
        ctx.places = places
        # It has the strides of an index of the whole parameter, because kernels are chosen by strides.
        like = slices._viewed(torch.empty(master.shape, device="meta"))[[0] * len(rows)]
        gathered = torch.empty_strided(like.shape, like.stride(), dtype=slices.dtype, device=slices.device)
        slices._source.expect_slices(slices._master, list(places))
        for row, at in places.items():
            fetched = slices._slice(row)
            for place in at:
                gathered[place].copy_(fetched)
            del fetched
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        master: torch.Tensor = ctx.master
        number = {row: at for at, row in enumerate(ctx.places)}
        into = torch.empty(gradient.shape[0], dtype=torch.long)
        for row, at in ctx.places.items():
            into[at] = number[row]
        # Gradients are added as the backward of an index adds them, but only of the slices that were used.
        compact = gradient.new_zeros((len(number), *gradient.shape[1:]))
        compact.index_put_((into.to(gradient.device),), gradient, accumulate=True)
        for view in reversed(ctx.views):
            compact = view(compact)
        whole = torch.zeros_like(master)
        whole[list(number)] = compact.to(device=master.device, dtype=master.dtype)
        ctx.source.note_writes([master])
        return whole, None, None


_MT: Final = torch.Tensor.mT.__get__  # type: ignore[attr-defined]

_METADATA: Final[frozenset[Any]] = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in [
                "device",
                "dtype",
                "grad_fn",
                "is_cpu",
                "is_cuda",
                "is_leaf",
                "is_meta",
                "is_mkldnn",
                "is_nested",
                "is_quantized",
                "is_sparse",
                "is_sparse_csr",
                "itemsize",
                "layout",
                "nbytes",
                "ndim",
                "requires_grad",
                "shape",
            ]
        ),
        *(
            getattr(torch.Tensor, name)
            for name in [
                "__len__",
                "dim",
                "element_size",
                "get_device",
                "is_complex",
                "is_contiguous",
                "is_floating_point",
                "nelement",
                "ndimension",
                "numel",
                "size",
                "storage_offset",
                "stride",
            ]
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)

_SERVED: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.__getitem__: _item,
    torch.Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    _MT: _transposed,
    torch.Tensor.to: _converted,
    torch.Tensor.register_hook: _hooked,
}
#: torch has had `grouped_mm` under two names; transformers has a function of its own for older torch.
_SERVED_BY_NAME: Final[dict[str, Callable[..., Any]]] = {
    "grouped_mm": _grouped,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
}
