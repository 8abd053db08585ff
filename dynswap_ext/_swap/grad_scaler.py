"""GradScaler beside gradients that are on the host.

Note [The scale is where the gradients are]
    A `torch.amp.GradScaler` keeps its scale on the device of the loss, and sends it to the device of the
    gradients with ``.to(device, non_blocking=True)``. To a GPU that is in order. To the host, where the
    gradients of an installed model arrive, it is not: the host would divide by the scale, and decide whether
    to step, before either has come. So while an install computes on the device of the loss, the scale is kept
    on the host. From there everything that GradScaler sends is in order, as a copy from pageable memory has
    read it when the call returns; and what it found on a device, for gradients that are there, is fetched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.amp import GradScaler

from dynswap_ext._util.log import logger

#: What is used of it beside its public methods; the same in torch 2.11 to 2.15.
_KNOWN: Final = ("_unscale_grads_", "_lazy_init_scale_growth_tracker")

_wrapped = False


def keep_scales_on_host(while_: Callable[[torch.device], bool]) -> None:
    """From now on, a scaler of losses on a device for which `while_` holds keeps its scale on the host."""
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
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
    """The device of the first tensor in what GradScaler.scale() takes."""
    if isinstance(outputs, torch.Tensor):
        return outputs.device
    if isinstance(outputs, list | tuple) and outputs:
        return _device_of(outputs[0])
    return None
