"""Tells sessions of the steps of torch's optimizers, and keeps the scale of a `GradScaler` on the host.

A fused optimizer bumps no version counter of what it writes, so sessions are told of every step.

Note [The scale is where the gradients are]
    A `torch.amp.GradScaler` keeps its scale on the device of the loss, and sends it to the device of the
    gradients with ``.to(device, non_blocking=True)``. A copy to a GPU is done before the GPU uses it. A copy
    to the host, where the gradients of an installed model arrive, need not be: the host would divide by the
    scale, and decide whether to step, before the values have arrived. So while an install computes on the
    device of the loss, the scale is kept on the host. What GradScaler sends from there is in order, because a
    copy from pageable memory has been read when the call returns. What it finds in gradients on a device is
    copied to the host, and waited for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dynswap_ext._swap.protocol import Session
from dynswap_ext._util.log import logger

_sessions: Final[weakref.WeakSet[Session]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


def add_step_listener(session: Session) -> None:
    """Tell a session of the steps of every `torch.optim.Optimizer`, until `remove_step_listener`."""
    _sessions.add(session)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def remove_step_listener(session: Session) -> None:
    """Stop telling a session of optimizers' steps. No effect if it is not told."""
    _sessions.discard(session)
    while _hooks and not _sessions:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A closure may give other masters a gradient. Writes to those are noticed, too, at a page fault per page.
    masters = [master for master in _masters_of(optimizer) if master.grad is not None]
    for session in tuple(_sessions):
        session.expect_writes(masters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    masters = _masters_of(optimizer)  # the step may have dropped their gradients
    for session in tuple(_sessions):
        session.note_writes(masters)


def _masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if torch.compiler.is_compiling():
        return []
    return [master for group in optimizer.param_groups for master in group["params"] if master.requires_grad]


#: The private methods of GradScaler that are used here, which are the same in torch 2.11 to 2.15.
_KNOWN: Final = ("_unscale_grads_", "_lazy_init_scale_growth_tracker")


@functools.cache  # a second call would wrap the methods again
def keep_scales_on_host(while_: Callable[[torch.device], bool]) -> None:
    """Make each `GradScaler` keep its scale on the host while ``while_(device of the loss)`` is true.

    This wraps methods of torch's class, for good. Note [The scale is where the gradients are] has the reason.
    """
    if not all(hasattr(GradScaler, name) for name in _KNOWN):
        logger.warning(
            "the GradScaler of torch %s is not the one that dynswap_ext knows: with gradients on the host it "
            "may read its scale before it has come; train in bfloat16, or without a scaler",
            torch.__version__,
        )
        return
    scale_of_torch: Any = GradScaler.scale
    unscale_of_torch: Any = GradScaler._unscale_grads_

    @functools.wraps(scale_of_torch)
    def scale(self: Any, outputs: Any) -> Any:
        if not self._enabled:  # it has no scale
            return scale_of_torch(self, outputs)
        kept, device = self._scale, _device_of(outputs)
        if kept is None and device is not None and while_(device):
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))
        elif kept is not None and kept.device.type != "cpu" and while_(kept.device):
            self._scale, self._growth_tracker = kept.cpu(), self._growth_tracker.cpu()
        return scale_of_torch(self, outputs)

    @functools.wraps(unscale_of_torch)
    def unscale(self: Any, optimizer: Any, inv_scale: Any, *args: Any, **kwargs: Any) -> Any:
        found = unscale_of_torch(self, optimizer, inv_scale, *args, **kwargs)
        if inv_scale.device.type != "cpu":
            return found
        return {device: infinite.cpu() for device, infinite in found.items()}

    GradScaler.scale = scale  # type: ignore[method-assign]
    GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def _device_of(outputs: Any) -> torch.device | None:
    """Return the device of the first tensor in the argument of `GradScaler.scale`; None if it has none."""
    if isinstance(outputs, torch.Tensor):
        return outputs.device
    if isinstance(outputs, list | tuple) and outputs:
        return _device_of(outputs[0])
    return None
