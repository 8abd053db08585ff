"""The way of gradients from handed-out tensors to their master (pure-Python provider)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from dynswap_ext._python.master_state import NotedWrites
from dynswap_ext._util.modes import unseen_by_modes

# Functions in the older form, with `ctx`: the newer one inspects signatures at each call, and takes thrice
# the time. What it is for, functorch, does not get here.


class Fetch(torch.autograd.Function):
    """Carries the gradient to a master, once the gradients of all uses of the weight have been added.

    The output of this function stands for the weight in the graph, and takes no memory. All tensors that are
    handed out for the weight are computed from it: Note [Uses of a weight share a node].
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, data: torch.Tensor, noted: NotedWrites) -> torch.Tensor:
        """Stand for the master on the device of `data`, in its dtype."""
        ctx.set_materialize_grads(False)
        ctx.noted = noted
        ctx.device, ctx.dtype = master.device, master.dtype
        with torch._C._DisableTorchDispatch():  # modes that count or record operators are not told of it
            if type(data) is torch.Tensor:
                return one_element(data.dtype, data.device).expand(data.shape)
            return data.new_empty(()).expand(data.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Gradients reach the master in its own dtype (Invariant 7)."""
        ctx.noted.count += 1  # an optimizer step is likely to follow, which may bump no version
        return (None if grad is None else grad.to(device=ctx.device, dtype=ctx.dtype)), None, None


@functools.cache
def one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what stands for the bytes of a weight. Were it ever computed with, that should show."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
        return torch.full((), value, dtype=dtype, device=device)


class HandOut(torch.autograd.Function):
    """Identity whose output has the bytes of `data`, and whose gradient goes to what was fetched."""

    @staticmethod
    def forward(ctx: Any, fetched: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Alias `data`, sharing its version counter."""
        ctx.materialize_grads = False
        ctx.fetched = fetched  # for the uses that follow, while a graph has this one
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Gradients stay on the device until all uses' are added."""
        return grad, None


#: `Function.apply` without what that does for functorch, in Python. What comes here is none of functorch's
#: tensors, and no transform of functorch's is active, which would refuse a function of the older form.
fetch: Final[Callable[..., torch.Tensor]] = super(torch.autograd.Function, Fetch).apply
alias: Final[Callable[..., torch.Tensor]] = super(torch.autograd.Function, HandOut).apply


def is_fetched(tensor: torch.Tensor, master: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a result of `Fetch` stands for the master as it is now, with the device and dtype of `data`."""
    if tensor.shape != data.shape or tensor.dtype is not data.dtype or tensor.device != data.device:
        return False
    assert tensor.grad_fn is not None
    node, output = tensor.grad_fn.next_functions[0]
    if not master.is_leaf:
        return node is master.grad_fn and output == master.output_nr
    return getattr(node, "variable", None) is master
