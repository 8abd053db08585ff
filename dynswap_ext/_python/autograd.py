"""Autograd functions that take gradients from handed-out tensors to their master (pure-Python provider)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from dynswap_ext._python.master_state import NotedWrites
from dynswap_ext._util.modes import unseen_by_modes

# The functions have the older form, whose `forward` takes `ctx`. The newer form, `setup_context`, is for
# functorch, whose tensors do not come here. It inspects signatures at each call, and takes thrice the time.


class Fetch(torch.autograd.Function):
    """Carries the gradient to a master, once the gradients of all uses of the weight have been added.

    The output of this function represents the weight in the graph, and takes no memory. All tensors that are
    handed out for the weight are computed from it: Note [Uses of a weight share a node].
    """

    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, data: torch.Tensor, noted: NotedWrites) -> torch.Tensor:
        """Return a tensor that represents the master, with the shape, dtype and device of `data`."""
        ctx.set_materialize_grads(False)
        ctx.noted = noted
        ctx.device, ctx.dtype = master.device, master.dtype
        with torch._C._DisableTorchDispatch():  # modes that count or record operators are not told of it
            if type(data) is torch.Tensor:
                return one_element(data.dtype, data.device).expand(data.shape)
            return data.new_empty(()).expand(data.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Return the gradient on the device and in the dtype of the master (Invariant 7)."""
        ctx.noted.count += 1  # an optimizer step is likely to follow, which may bump no version
        return (None if grad is None else grad.to(device=ctx.device, dtype=ctx.dtype)), None, None


@functools.cache
def one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of one element, which is expanded to represent a weight without its bytes.

    It is NaN where the dtype has it, so that a computation with it would be noticed.
    """
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
        return torch.full((), value, dtype=dtype, device=device)


class HandOut(torch.autograd.Function):
    """Returns an alias of `data` whose gradient goes to `fetched`, an output of `Fetch`."""

    @staticmethod
    def forward(ctx: Any, fetched: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Return an alias of `data` that shares its version counter."""
        ctx.materialize_grads = False
        ctx.fetched = fetched  # alive for later uses of the weight, as long as a graph has this use
        return data.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        """Pass the gradient on. Those of all uses are added on the device, before `Fetch` moves the sum."""
        return grad, None


#: `Function.apply` of the class in C++. The one in Python only adds support for functorch. No tensor of
#: functorch comes here, and no transform is active, which would refuse functions of the older form.
fetch: Final[Callable[..., torch.Tensor]] = super(torch.autograd.Function, Fetch).apply
alias: Final[Callable[..., torch.Tensor]] = super(torch.autograd.Function, HandOut).apply


def is_fetched(tensor: torch.Tensor, master: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether an output of `Fetch` represents the present master, and has the form of `data`."""
    if tensor.shape != data.shape or tensor.dtype is not data.dtype or tensor.device != data.device:
        return False
    assert tensor.grad_fn is not None
    node, output = tensor.grad_fn.next_functions[0]
    if not master.is_leaf:
        return node is master.grad_fn and output == master.output_nr
    return getattr(node, "variable", None) is master
