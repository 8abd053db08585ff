"""The way of gradients from handed-out tensors to their master (pure-Python provider)."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dynswap_ext._python.memory_watch import MemoryWatch

__all__ = ["Fetching"]

# Functions in the older form, with `ctx`: the newer one inspects signatures at each call, and takes thrice
# the time. What it is for, functorch, does not get here.


class Fetch(torch.autograd.Function):
    """Takes a master's gradient to it, once the gradients of all uses of the weight have been added.

    See Note [Uses of a weight share a node]: all tensors that are handed out of a weight are results of one
    output of this function, which has no memory.
    """

    @staticmethod
    def forward(
        ctx: Any, master: torch.Tensor, data: torch.Tensor, watch: MemoryWatch | None
    ) -> torch.Tensor:
        """Stand for the master on the device of `data`, in its dtype."""
        ctx.set_materialize_grads(False)
        ctx.watch = watch
        ctx.device, ctx.dtype, ctx.destination = master.device, master.dtype, (data.device, data.dtype)
        with torch._C._DisableTorchDispatch():  # modes that count or record operators are not told of it
            return _one_element(data).expand(data.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Gradients reach the master in its own dtype (Invariant 7)."""
        if ctx.watch is not None:
            ctx.watch.note_write()  # an optimizer step is likely to follow, which may bump no version
        return (None if grad is None else grad.to(device=ctx.device, dtype=ctx.dtype)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> torch.Tensor | None:
        """Forward-mode: the tangent moves as the master did."""
        return None if tangent is None else tangent.to(device=ctx.destination[0], dtype=ctx.destination[1])


def _one_element(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same device and dtype, which holds nothing."""
    key = data.device, data.dtype
    if key not in _one_elements:
        if type(data) is not torch.Tensor:
            return data.new_empty(())
        _one_elements[key] = data.new_empty(())
    return _one_elements[key]


_one_elements: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


class HandOut(torch.autograd.Function):
    """Identity whose output has the bytes of `data`, and whose gradient goes to what was fetched."""

    @staticmethod
    def forward(ctx: Any, fetched: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Alias `data`, sharing its version counter."""
        ctx.set_materialize_grads(False)
        ctx.fetched = fetched  # for the uses that follow, while a graph has this one
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Gradients stay on the device until all uses' are added."""
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> torch.Tensor | None:
        """Forward-mode: the tangent is there already."""
        return tangent


class Fetching:
    """What a weight's handed-out tensors are results of, for as long as some graph has it."""

    __slots__ = ("_fetched", "_watch")

    def __init__(self) -> None:
        self._fetched: weakref.ref[torch.Tensor] | None = None
        self._watch: MemoryWatch | None = None

    def connected(self, master: torch.Tensor, data: torch.Tensor, watch: MemoryWatch | None) -> torch.Tensor:
        """Return an alias of `data`, the weight's bytes on the device, in the graph of the master."""
        fetched = self._fetched() if self._fetched is not None and self._watch is watch else None
        if fetched is None or not _is_of(fetched, master, data):
            fetched = Fetch.apply(master, data, watch)  # type: ignore[no-untyped-call]
            self._fetched, self._watch = weakref.ref(fetched), watch
        return HandOut.apply(fetched, data)  # type: ignore[no-untyped-call,no-any-return]


def _is_of(fetched: torch.Tensor, master: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether it stands for this master, as it is now, on the device and in the dtype of `data`."""
    if (fetched.device, fetched.dtype, fetched.shape) != (data.device, data.dtype, data.shape):
        return False
    assert fetched.grad_fn is not None
    node, output = fetched.grad_fn.next_functions[0]
    if not master.is_leaf:
        return node is master.grad_fn and output == master.output_nr
    return getattr(node, "variable", None) is master
