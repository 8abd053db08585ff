"""Refuses to combine an install with hooks of other libraries that move or cast a module's weights.

Note [Two that move weights]
accelerate and diffusers add hooks to a module's forward that replace its parameters around each call. When a
master is read, it may then be elsewhere, in another dtype, or gone. So such a model is not installed. On an
installed model such a hook is refused when the library sets its first attribute on the module, before it has
changed anything else. Hooks that only move whole models (`enable_model_cpu_offload`) work with an install,
because an installed model stays on its device. So do hooks that do not touch weights, such as caches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

from torch import nn

from dynswap_ext._swap.state import session_of
from dynswap_ext.errors import ConfigError

#: By the attribute in which a library keeps its hooks, and by the hook's class: the functions that add it.
_HOOKS: Final = {
    "_hf_hook": {
        "AlignDevicesHook": "cpu_offload, disk_offload, dispatch_model, device_map, or a pipeline's "
        "enable_sequential_cpu_offload",
        "LayerwiseCastingHook": "attach_layerwise_casting_hooks",
    },
    "_diffusers_hook": {
        "GroupOffloadingHook": "enable_group_offload",
        "LazyPrefetchGroupOffloadingHook": "enable_group_offload",
        "LayerExecutionTrackerHook": "enable_group_offload",
        "LayerwiseCastingHook": "enable_layerwise_casting",
    },
}
_LIBRARY: Final = {"_hf_hook": "accelerate", "_diffusers_hook": "diffusers"}
#: How to remove a hook, by its library; by its class if it cannot be removed.
_REMOVAL: Final = {
    "accelerate": "To remove it, call accelerate.hooks.remove_hook_from_submodules(model), or "
    "pipe.remove_all_hooks() for a pipeline",
    "diffusers": "To remove it, call remove_hook(name) of "
    "diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model), for the names "
    '"group_offloading", "lazy_prefetch_group_offloading" and "layer_execution_tracker"',
    "LayerwiseCastingHook": "Its weights have lost precision by now: load the model again in the dtype to "
    "store them in, and call install(model, dtype=...) with the one to compute in",
}

#: The attributes that libraries set first when they hook a module, before they change anything else of it.
WATCHED: Final = frozenset({"_old_forward", "_diffusers_hook", "forward"})
#: Functions of diffusers that set `_diffusers_hook` first: by name, the class of the hook that they add.
_ADDING: Final = {
    "_apply_group_offloading_hook": "GroupOffloadingHook",
    "_apply_lazy_group_offloading_hook": "GroupOffloadingHook",
    "apply_layerwise_casting_hook": "LayerwiseCastingHook",
}


def refuse_to_install(modules: Sequence[nn.Module]) -> None:
    """Raise ConfigError if a hook of another library moves or casts the weights of one of the modules."""
    for attribute, known in _HOOKS.items():
        for module in [module for module in modules if attribute in module.__dict__]:
            for hook in _hooks_in(module.__dict__[attribute]):
                if (name := _named(hook, known)) is not None:
                    raise ConfigError(
                        f"a {type(module).__qualname__} of the model has {_described(attribute, name)}. "
                        f"{_removal(attribute, name)}"
                    )


def refuse_hook(module: nn.Module, attribute: str) -> None:
    """Raise ConfigError if another library adds, to an installed module, a hook that moves or casts weights.

    Call this where one of the attributes `WATCHED` is set.
    """
    if session_of(module) is None:
        return
    kept_as, name = _hook_being_added(attribute, sys._getframe(2))
    if name is not None:
        raise ConfigError(
            f"a {type(module).__qualname__} that is installed was to get {_described(kept_as, name)}. Call "
            "dynswap_ext.uninstall(model) first. Other modules may have the hook by now. "
            f"{_removal(kept_as, name)}"
        )


def _hook_being_added(attribute: str, frame: FrameType | None) -> tuple[str, str | None]:
    """Return the attribute that holds a library's hooks, and the class name of the hook that it is adding.

    `attribute` is what the code of `frame` sets on the module. The name is None if no known hook is added.
    """
    kept_as = "_hf_hook" if attribute == "_old_forward" else "_diffusers_hook"
    for _ in range(4):
        if frame is None or not str(frame.f_globals.get("__name__")).startswith(_LIBRARY[kept_as]):
            break
        if attribute != "_diffusers_hook" and frame.f_code.co_name in ("add_hook_to_module", "register_hook"):
            hooks = _hooks_in(frame.f_locals.get("hook"))
            return kept_as, next(filter(None, (_named(h, _HOOKS[kept_as]) for h in hooks)), None)
        if frame.f_code.co_name in _ADDING:
            return kept_as, _ADDING[frame.f_code.co_name]
        frame = frame.f_back
    return kept_as, None


def _hooks_in(kept: Any) -> Iterator[Any]:
    """Yield the hooks that a library keeps under one attribute, also those inside a sequence or registry."""
    several: Any = getattr(kept, "hooks", None)  # of accelerate's SequentialHook, of diffusers' registry
    for hook in several.values() if isinstance(several, dict) else several or ():
        yield from _hooks_in(hook)
    if kept is not None:
        yield kept


def _named(hook: Any, known: dict[str, str]) -> str | None:
    return next((base.__name__ for base in type(hook).__mro__ if base.__name__ in known), None)


def _described(attribute: str, name: str) -> str:
    return (
        f"the {name} of {_LIBRARY[attribute]} ({_HOOKS[attribute][name]}), which moves or casts weights by "
        "itself. Install the model or let the hook do it, not both"
    )


def _removal(attribute: str, name: str) -> str:
    return _REMOVAL.get(name, _REMOVAL[_LIBRARY[attribute]])
