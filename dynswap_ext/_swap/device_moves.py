"""Keeps masters where they are when an installed model is moved to the device on which it computes.

Note [Sent where it computes]
Programs and libraries move a model to the device before they use it: ``model.to("cuda")``, ``pipe.to(...)``,
a trainer's own placement. An installed model computes there already, and its masters are elsewhere because
they do not fit. To move them would undo the install and run out of memory. So torch's own methods (`to`,
`cuda` and the like) leave masters where they are, as they leave a tensor that is on the device already. That
is done in `_apply`, which all of these methods call, also if they were called on a wrapper that is not
installed, or if a class overrides `to`. Plain tensors of a class that overrides `_apply` do move. Casts and
memory formats that are asked for in the same call are done.

On the CPU, masters are where the model computes. But torch copies a tensor that is sent to "cpu:0", as
accelerate does in a process that a launcher started: mapped masters would be read into RAM, and shared ones
copied for each process. So there an index is dropped, and all else is left to torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dynswap_ext._swap.models import models_in
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.warn import caller, warn

_Function = Callable[[torch.Tensor], torch.Tensor]
#: Where torch defines `Module.to()`, `Module.cuda()` and the like, and such methods for other backends.
_TORCH: Final = (nn.Module.__module__, torch.utils.backend_registration.__name__)

#: Modules of trainers and pipelines, which place each model before they use it. Their users have not asked
#: for a move, and get no warning.
_PLACING: Final = (
    "transformers.trainer",
    "transformers.pipelines",
    "accelerate.accelerator",
    "lightning.pytorch.strategies",
    "lightning.fabric",
    "pytorch_lightning.strategies",
    "lightning_fabric",
)

#: Sessions for which no warning is due: there was one, or the user knows.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def staying(module: nn.Module, function: _Function) -> _Function:
    """Return what `_apply` applies to the tensors of an installed module in place of `function`.

    A function of torch's own methods is wrapped, so that masters stay. Any other is returned as it is: its
    caller may well mean to move masters.
    """
    if isinstance(function, _Staying):  # made for the module's parent, which may belong to another install
        function = function.function
    session = session_of(module)
    if session is None or getattr(function, "__module__", None) not in _TORCH:
        return function
    held = vars(module)
    own = [tensor for key in ("_parameters", "_buffers") for tensor in held[key].values()]
    on_cpu = session.device.type == "cpu"
    masters = [t for t in own if t is not None and not t.is_meta and (on_cpu or t.device != session.device)]
    return _Staying(function, session, masters) if masters else function


class _Staying(TorchFunctionMode):
    """Calls a function, and leaves masters where they are if it sends them to the session's device."""

    def __init__(self, function: _Function, session: Any, masters: list[torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self._session = session
        # A gradient is where its master is.
        grads = [t.grad for t in masters if t.is_leaf and t.grad is not None]
        self._tensors = {id(tensor): tensor for tensor in (*masters, *grads)}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:  # a plain tensor, of a class that overrides `_apply`
            return self.function(tensor)
        with self:
            return self.function(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device: torch.device = self._session.device
        if func is torch.Tensor.to:
            target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
            if target is not None and _canonical(target) == device:
                options = {} if memory_format is None else {"memory_format": memory_format}
                if device.type == "cpu":
                    return args[0].to(device, dtype, non_blocking, **options)
                _tell(self._session)
                return args[0].to(args[0].dtype if dtype is None else dtype, non_blocking, **options)
        elif device.type != "cpu" and func is getattr(torch.Tensor, device.type, None):  # as `Tensor.cuda`
            given = args[1] if len(args) > 1 else kwargs.get("device")
            if _canonical(_device_named(device.type, given)) == device:
                _tell(self._session)
                return args[0]
        return func(*args, **kwargs)


def _device_named(kind: str, given: Any) -> torch.device:
    if given is None:
        return torch.device(kind)
    return torch.device(kind, given) if isinstance(given, int) else torch.device(given)


def _canonical(device: torch.device) -> torch.device:
    """Return the device as tensors name theirs: an accelerator has an index, the CPU has none."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None or device.type == "meta":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def note_told(*sessions: Any) -> None:
    """Suppress the warning that a move of the models of these sessions moves nothing."""
    _told.update(sessions)


def _tell(session: Any) -> None:
    """Warn once for each session that a move moves nothing, unless a trainer or a pipeline asked for it."""
    if session in _told:
        return
    frame = caller(passing_on=("to", session.device.type))
    if f"{frame.f_globals.get('__name__')}.".startswith(tuple(f"{name}." for name in _PLACING)):
        return
    _told.add(session)
    root = model_of(session)
    several = root is None or len(models_in(root)) > 1
    name = "the model" if root is None or several else type(root).__name__
    warn(
        f"{name} is installed and computes on {session.device} already: model.to(...) moves nothing, and "
        "its masters stay where they are. To keep weights on the device, give install a larger budget. To "
        "move the masters anyway, call dynswap_ext.uninstall(model) first",
        always=True,
        frame=frame,
    )
