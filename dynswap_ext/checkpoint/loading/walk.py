"""A `load_state_dict` that is fast for many modules, and does not need all tensors in memory at once."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from dynswap_ext._swap.state import original_class, session_of
from dynswap_ext._swap.subclasses import is_plain

_COPY: Final[Any] = torch.Tensor.copy_
#: Torch's own methods for loading. They take the keys of the state dict alone, but BatchNorm's adds
#: `num_batches_tracked` for old files.
_KNOWN: Final = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, nn.Module.load_state_dict)


class LazyState(UserDict[str, Any]):
    """A state dict in which a value may be a `functools.partial`. Each read of its key calls it."""

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return value() if isinstance(value, partial) else value


def load_state(model: nn.Module, state: Mapping[str, Any], *, assign: bool) -> tuple[list[str], list[str]]:
    """Do what ``model.load_state_dict(state, strict=False, assign=assign)`` does, with every hook.

    Torch looks through all keys of a module for each of its children, which takes more than a minute for
    10,000 layers in a row. Here each key is looked at once per level. If the model's class overrides
    `load_state_dict`, that is called instead. `state` may be changed.

    Without `assign`, a tensor subclass, in the model or in the state, is loaded through `module_load`, as
    with ``torch.__future__.set_swap_module_params_on_conversion(True)``.

    Returns missing and unexpected keys. Raises RuntimeError for tensors that do not fit, by their shape for
    instance.
    """
    walk = _Walk(getattr(state, "_metadata", None) or {}, assign)
    with nullcontext() if assign else walk:
        if _overrides(model, "load_state_dict"):
            whole = OrderedDict(state)
            whole._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
            keys: Any = model.load_state_dict(whole, strict=False, assign=assign)
            return list(getattr(keys, "missing_keys", ())), list(getattr(keys, "unexpected_keys", ()))
        walk.load(model, state, "")
    if walk.errors:
        raise RuntimeError("\n  ".join(["", *walk.errors]))
    return walk.missing, walk.unexpected


def custom_loaders(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of modules whose hooks or overrides may accept keys of other names."""
    return tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or _overrides(module, "_load_from_state_dict")
        or (not path and _overrides(module, "load_state_dict"))
    )


def _overrides(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(original_class(type(module)), method) not in _KNOWN


class _Walk(TorchFunctionMode):
    """Loads one module after the other. As a mode, it loads tensor subclasses with `module_load`."""

    def __init__(self, metadata: Mapping[str, Any], assign: bool) -> None:
        super().__init__()
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self._metadata, self._assign = metadata, assign
        self._module: nn.Module | None = None  # the one that is being loaded

    def load(self, module: nn.Module, state: Any, prefix: str) -> None:
        local = dict(self._metadata.get(prefix[:-1], {}))
        if self._assign:
            local["assign_to_params_buffers"] = True
        self._module = module
        module._load_from_state_dict(state, prefix, local, True, self.missing, self.unexpected, self.errors)
        states = _states_of_children(state, prefix, module)
        for name, child in module._modules.items():
            if child is not None:
                self.load(child, states[name], f"{prefix}{name}.")
        keys = _IncompatibleKeys(self.missing, self.unexpected)
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, keys) is not None:
                raise AssertionError(
                    "a hook of register_load_state_dict_post_hook returned a value; it has to change the "
                    "keys that it is given in place"
                )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _COPY and self._module is not None and len(args) > 1:
            own, given = args[:2]
            members = (*self._module._parameters.values(), *self._module._buffers.values())
            if not (is_plain(own) and is_plain(given)) and any(own is member for member in members):
                return _through_module_load(self._module, own, given)
        return func(*args, **(kwargs or {}))


def _states_of_children(state: Any, prefix: str, module: nn.Module) -> dict[str, Any]:
    """Split a module's state into those of its children, by name. The module's hooks have run before."""
    lazy = isinstance(state, LazyState)
    states: dict[str, Any] = {name: LazyState() if lazy else {} for name in module._modules}
    for key, value in (state.data if lazy else state).items():
        if states and key.startswith(prefix):
            name, _, rest = key[len(prefix) :].partition(".")
            if rest and name in states:
                states[name][key] = value
    return states


def _through_module_load(module: nn.Module, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    loaded: Any = own.module_load(given, assign=False)  # type: ignore[no-untyped-call]
    if loaded is given or loaded is own:
        raise RuntimeError(
            f"{type(own).__name__}.module_load returned one of its arguments; it has to return a new tensor, "
            "for instance its .detach()"
        )
    if is_plain(own) and is_plain(loaded):
        return own.copy_(loaded)  # keeps memory and dtype
    if isinstance(own, nn.Parameter):
        if not isinstance(loaded, nn.Parameter):
            loaded = nn.Parameter(loaded, own.requires_grad)
        loaded.requires_grad_(own.requires_grad)
    session = session_of(module)
    if session is not None:
        session.release(module)
    torch.utils.swap_tensors(own, loaded)  # type: ignore[no-untyped-call]
    return own
