"""`load_state_dict` for a model of many modules, and for tensors that are not all there at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from dynswap_ext._class_swap import original_class
from dynswap_ext._state import session_of
from dynswap_ext._subclasses import is_plain
from dynswap_ext.checkpoint.loading.incoming import LazyState

__all__ = ["Outcome", "load_state", "own_ways"]


@dataclass
class Outcome:
    """What there was to say of a load: as `load_state_dict` says it."""

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
    walk = _Walk(assign, getattr(state, "_metadata", None) or {})
    with nullcontext() if assign else walk.through_module_load:
        if _has_own_way(model, "load_state_dict"):
            said = model.load_state_dict(_copy(state), strict=False, assign=assign)
            return Outcome(
                list(getattr(said, "missing_keys", ())), list(getattr(said, "unexpected_keys", ()))
            )
        walk.load(model, state if isinstance(state, LazyState) else _copy(state), "")
    return walk.outcome


def own_ways(model: nn.Module) -> list[str]:
    """The prefixes of modules that may take other keys than their state dict has: what they say counts."""
    return [
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or _has_own_way(module, "_load_from_state_dict")
        or (not path and _has_own_way(module, "load_state_dict"))
    ]


#: They only add what a file of an early version lacks, `num_batches_tracked`.
_KNOWN = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict, nn.Module.load_state_dict)


def _has_own_way(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(original_class(type(module)), method) not in _KNOWN


class _Walk:
    def __init__(self, assign: bool, versions: Mapping[str, Any]) -> None:
        self.outcome = Outcome()
        self.through_module_load = _ThroughModuleLoad()
        self._assign = assign
        self._versions = versions

    def load(self, module: nn.Module, state: Any, prefix: str) -> None:
        said = self.outcome
        if not (self._assign and _is_simple(module) and _assign(module, state, prefix, said)):
            local = dict(self._versions.get(prefix[:-1], {}))
            if self._assign:
                local["assign_to_params_buffers"] = True
            self.through_module_load.module = module
            module._load_from_state_dict(
                state, prefix, local, True, said.missing, said.unexpected, said.errors
            )
        if module._modules:
            parts = _parts(state, prefix, module)
            for name, child in module._modules.items():
                if child is not None:
                    self.load(child, parts[name], f"{prefix}{name}.")
        if module._load_state_dict_post_hooks:
            keys = _IncompatibleKeys(said.missing, said.unexpected)
            for hook in module._load_state_dict_post_hooks.values():
                if hook(module, keys) is not None:
                    raise AssertionError(
                        "a hook of register_load_state_dict_post_hook returned a value; it has to change "
                        "the keys that it is given in place"
                    )


def _is_simple(module: nn.Module) -> bool:
    """Whether nothing but `nn.Module._load_from_state_dict` has a say in what an assignment is."""
    cls = type(module)
    return (
        cls._load_from_state_dict is nn.Module._load_from_state_dict
        and cls.__setattr__ is nn.Module.__setattr__
        and cls.set_extra_state is nn.Module.set_extra_state
        and not module._load_state_dict_pre_hooks
        and "_load_from_state_dict" not in vars(module)
        and not torch.__future__.get_swap_module_params_on_conversion()
    )


def _assign(module: nn.Module, state: Mapping[str, Any], prefix: str, said: Outcome) -> bool:
    """Do with the module's own tensors what torch does, in a third of the time; False: torch has to look."""
    assigned: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    missing: list[str] = []
    names: set[str] = set()
    for members in (module._parameters, module._buffers):
        for name, own in members.items():
            if own is None or (members is module._buffers and name in module._non_persistent_buffers_set):
                continue
            names.add(name)
            given = state.get(prefix + name, said)
            if given is said:
                missing.append(prefix + name)
            elif type(given) is not torch.Tensor or type(own) not in _OWN or given.shape != own.shape:
                return False
            else:
                new = given if type(own) is torch.Tensor else nn.Parameter(given, own.requires_grad)
                assigned.append((members, name, new))
    for home, name, new in assigned:
        home[name] = new
    said.missing += missing
    if len(state) > len(assigned):
        for key in state:
            first, _, rest = key[len(prefix) :].partition(".")
            if key.startswith(prefix) and first not in (module._modules if rest else names):
                said.unexpected.append(key)
    return True


_OWN: Final = (torch.Tensor, nn.Parameter)


def _parts(state: Any, prefix: str, module: nn.Module) -> dict[str, Any]:
    """The state of each child, with whatever the module's hooks have made of it."""
    raw = state.data if isinstance(state, LazyState) else state
    parts: dict[str, Any] = {name: {} for name in module._modules}
    for key, value in raw.items():
        if key.startswith(prefix):
            name, _, rest = key[len(prefix) :].partition(".")
            if rest and name in parts:
                parts[name][key] = value
    if isinstance(state, LazyState):
        return {name: LazyState(part) for name, part in parts.items()}
    return parts


def _copy(state: Mapping[str, Any]) -> Mapping[str, Any]:
    copied = OrderedDict(state)  # modules may change it
    copied._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return copied


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
            if not (is_plain(own) and is_plain(given)) and self._is_member(own):
                return self._load(own, given)
        return func(*args, **(kwargs or {}))

    def _is_member(self, tensor: object) -> bool:
        assert self.module is not None
        members = (*self.module._parameters.values(), *self.module._buffers.values())
        return any(tensor is member for member in members)

    def _load(self, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        made: Any = own.module_load(given, assign=False)  # type: ignore[no-untyped-call]
        if made is given or made is own:
            raise RuntimeError(
                f"{type(own).__name__}.module_load returned one of its arguments; it has to return a new "
                "tensor, for instance its .detach()"
            )
        if is_plain(own) and is_plain(made):
            return own.copy_(made)  # its memory stays, and so does its dtype
        if isinstance(own, nn.Parameter):
            made = made if isinstance(made, nn.Parameter) else nn.Parameter(made, own.requires_grad)
            made.requires_grad_(own.requires_grad)
        session = session_of(self.module) if self.module is not None else None
        if session is not None:
            session.release(self.module)
        torch.utils.swap_tensors(own, made)  # type: ignore[no-untyped-call]
        return own
