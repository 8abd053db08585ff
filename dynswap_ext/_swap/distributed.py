"""What `fully_shard` and an install would do to each other: either is refused while the other is there.

Both hand a module's computation other tensors than its masters, and both change its class.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from dynswap_ext._swap.state import session_of
from dynswap_ext.errors import ConfigError

_CONTRACT = "torch.distributed._composable.contract"
_SHARD = "fully_shard"


def refuse_to_install(module: nn.Module) -> None:
    """Raise ConfigError if `fully_shard` manages the module."""
    if vars(module).get("_is_fsdp_managed_module"):
        raise ConfigError(
            f"a {type(module).__qualname__} of the model is managed by torch's fully_shard, which moves its "
            "weights by itself; expected a model that is not sharded. Install the model or shard it, not both"
        )


def refuse_sharding(module: nn.Module) -> None:
    """Raise ConfigError if `fully_shard` has just begun with an installed module.

    Torch registers the call on the module, and looks at the parameters before it changes anything: this is
    called then. The registration is undone, so that the module can be sharded after an uninstall.
    """
    contract: Any = sys.modules.get(_CONTRACT)
    if contract is None or session_of(module) is None:
        return
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
        "not. Call dynswap_ext.uninstall(model) first"
    )
