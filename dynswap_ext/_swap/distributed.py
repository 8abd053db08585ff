"""Refuses to install a model that torch's FSDP manages, and to apply FSDP to an installed model.

Both make a module compute with other tensors than its own, and `fully_shard` changes its class, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from dynswap_ext._swap.state import modules_of, named_modules_of, session_of
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError

_CONTRACT = "torch.distributed._composable.contract"
_SHARD = "fully_shard"
_FSDP = "FullyShardedDataParallel"
_MANAGED = "_is_fsdp_managed_module"
_WRAPPING = "torch.distributed.fsdp.fully_sharded_data_parallel"
#: The end of an error: what lets each rank bring a part of the weights.
_INSTEAD = (
    ". Ranks that share frozen weights can bring a part of them each without it: share_masters(model), then "
    "install(model, mesh=mesh)"
)
_SWAPPED = "dynswap_ext._swap.class_swap"


def refuse_to_install(modules: Sequence[nn.Module]) -> None:
    """Raise ConfigError if FSDP or `fully_shard` manages one of the modules, a model's in their order."""
    classes = {id(cls): cls for cls in map(type, modules)}
    wrappers = {key for key, cls in classes.items() if any(base.__name__ == _FSDP for base in cls.__mro__)}
    for module in modules if wrappers else [module for module in modules if _MANAGED in module.__dict__]:
        wrapper = id(type(module)) in wrappers
        if wrapper or module.__dict__.get(_MANAGED):
            by = _FSDP if wrapper else "fully_shard"
            others = ", ".join(f"install(model{part})" for part in _unmanaged(modules[0]))
            remedy = f". What it does not manage can be installed: {others}" if others and not wrapper else ""
            raise ConfigError(
                f"a {type(module).__qualname__} of the model is managed by torch's {by}, which moves its "
                "weights by itself; expected modules that are not sharded. There is no way back: to stream "
                f"these modules, begin with a model that was not sharded{_INSTEAD}{remedy}"
            )


def _unmanaged(root: nn.Module) -> Iterator[str]:
    """Yield the largest parts of a tree that have weights and none that is sharded, as `.layers[0].mlp`."""
    taken: tuple[str, ...] = ()
    for path, module in named_modules_of(root):
        parts = modules_of(module)
        if not path or path.startswith(taken) or any(each.__dict__.get(_MANAGED) for each in parts):
            continue
        if any(map(own_masters, parts)):
            taken += (f"{path}.",)
            yield "".join(f"[{word}]" if word.isdecimal() else f".{word}" for word in path.split("."))


def _refuse_wrapping(module: nn.Module) -> None:
    """Raise ConfigError if FullyShardedDataParallel is about to wrap an installed module."""
    if _WRAPPING not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(2)
    ours_and_torchs = (nn.Module.__module__, __name__, _SWAPPED)
    while frame is not None and frame.f_globals.get("__name__") in ours_and_torchs:
        frame = frame.f_back
    # FSDP asks a module for its parameters before it flattens them.
    if frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp."):
        raise ConfigError(
            f"{_FSDP} was called on a {type(module).__qualname__} that is installed, or on a model around "
            "it; expected one that is not. Call dynswap_ext.uninstall(model) first"
        )


def refuse_sharding(module: nn.Module) -> None:
    """Raise ConfigError if FSDP or `fully_shard` is about to shard an installed module.

    Call this where the parameters of a module are asked for. Both ask for them before they change anything
    but one thing: `fully_shard` has registered its call on the module. That is undone here, so that the
    module can be sharded after an uninstall.
    """
    contract: Any = sys.modules.get(_CONTRACT)
    if contract is None or session_of(module) is None:
        return
    _refuse_wrapping(module)
    held = vars(module)
    registry = held.get(contract.REGISTRY_KEY)
    sharded = any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    if not registry or _SHARD not in registry or sharded:
        return
    states = held.get(contract.STATE_KEY, {})
    del registry[_SHARD]
    for function in [function for function in states if function.__name__ == _SHARD]:
        del states[function]
    for key in (contract.REGISTRY_KEY, contract.STATE_KEY):
        if not held.get(key, True):
            del held[key]
    raise ConfigError(
        f"fully_shard was called on a {type(module).__qualname__} that is installed; expected one that is "
        f"not. Call dynswap_ext.uninstall(model) first{_INSTEAD}"
    )
