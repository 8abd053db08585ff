"""`load_state_dict` for a model of many modules, and for tensors that are not all there at once."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from dynswap_ext._swap.class_swap import original_class
from dynswap_ext._swap.state import session_of
from dynswap_ext._swap.subclasses import is_plain

__all__ = ["LazyState", "Outcome", "custom_loaders", "load_state"]


class LazyState(UserDict[str, Any]):
    """A state dict in which a `functools.partial` is called when its value is asked for, and not kept."""

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return value() if isinstance(value, partial) else value


@dataclass
class Outcome:
    """The keys and errors that `load_state_dict` reports."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def load_state(model: nn.Module, state: Mapping[str, Any], *, assign: bool) -> Outcome:
    """Do what ``model.load_state_dict(state, strict=False, assign=assign)`` does, with every hook.

    Torch looks through all keys of a module for each of its children, which takes more than a minute for
    10,000 layers in a row; here each key is looked at once a level. A model with a `load_state_dict` of its
    own is left to that.

    Without `assign`, a tensor that is more than its bytes, in the model or in the state, goes through
    `module_load`, as under ``torch.__future__.set_swap_module_params_on_conversion(True)``.
    """
    metadata = getattr(state, "_metadata", None)
    if not isinstance(state, LazyState):
        state = OrderedDict(state)  # modules may change it
        state._metadata = metadata  # type: ignore[attr-defined]
    module_load, outcome = _ThroughModuleLoad(), Outcome()

    def load(module: nn.Module, state: Any, prefix: str) -> None:
        local = dict((metadata or {}).get(prefix[:-1], {}))
        if assign:
            local["assign_to_params_buffers"] = True
        module_load.module = module
        module._load_from_state_dict(
            state, prefix, local, True, outcome.missing, outcome.unexpected, outcome.errors
        )
        states = _states_of_children(state, prefix, module)
        for name, child in module._modules.items():
            if child is not None:
                load(child, states[name], f"{prefix}{name}.")
        keys = _IncompatibleKeys(outcome.missing, outcome.unexpected)
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, keys) is not None:
                raise AssertionError(
                    "a hook of register_load_state_dict_post_hook returned a value; it has to change the "
                    "keys that it is given in place"
                )

    with nullcontext() if assign else module_load:
        if not _overrides(model, "load_state_dict"):
            try:
                load(model, state, "")
            finally:
                module_load.module = None  # `load` refers to itself, and would keep it
            return outcome
        if isinstance(state, LazyState):
            state = OrderedDict(state)
            state._metadata = metadata  # type: ignore[attr-defined]
        keys = model.load_state_dict(state, strict=False, assign=assign)
    return Outcome(list(getattr(keys, "missing_keys", ())), list(getattr(keys, "unexpected_keys", ())))


def custom_loaders(model: nn.Module) -> list[str]:
    """Return the prefixes of modules that may take other keys than those of their state dict."""
    return [
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or _overrides(module, "_load_from_state_dict")
        or (not path and _overrides(module, "load_state_dict"))
    ]


#: They only add what a file of an early version lacks, `num_batches_tracked`.
_KNOWN = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, nn.Module.load_state_dict)


def _overrides(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(original_class(type(module)), method) not in _KNOWN


def _states_of_children(state: Any, prefix: str, module: nn.Module) -> dict[str, Any]:
    """The state of each child, with whatever the module's hooks have made of it."""
    lazy = isinstance(state, LazyState)
    states: dict[str, Any] = {name: LazyState() if lazy else {} for name in module._modules}
    for key, value in (state.data if lazy else state).items():
        if states and key.startswith(prefix):
            name, _, rest = key[len(prefix) :].partition(".")
            if rest and name in states:
                states[name][key] = value
    return states


_COPY: Final[Any] = torch.Tensor.copy_


class _ThroughModuleLoad(TorchFunctionMode):
    """Takes tensors that `copy_` has no means to write into, or to read, through `module_load`."""

    def __init__(self) -> None:
        super().__init__()
        self.module: nn.Module | None = None  # that is being loaded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _COPY and self.module is not None and len(args) > 1:
            own, given = args[:2]
            members = (*self.module._parameters.values(), *self.module._buffers.values())
            if not (is_plain(own) and is_plain(given)) and any(own is member for member in members):
                return self._load(self.module, own, given)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _load(module: nn.Module, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        loaded: Any = own.module_load(given, assign=False)  # type: ignore[no-untyped-call]
        if loaded is given or loaded is own:
            raise RuntimeError(
                f"{type(own).__name__}.module_load returned one of its arguments; it has to return a new "
                "tensor, for instance its .detach()"
            )
        if is_plain(own) and is_plain(loaded):
            return own.copy_(loaded)  # its memory stays, and so does its dtype
        if isinstance(own, nn.Parameter):
            if not isinstance(loaded, nn.Parameter):
                loaded = nn.Parameter(loaded, own.requires_grad)
            loaded.requires_grad_(own.requires_grad)
        session = session_of(module)
        if session is not None:
            session.release(module)
        torch.utils.swap_tensors(own, loaded)  # type: ignore[no-untyped-call]
        return own
