"""Lists the parameters and buffers that a module holds itself, and not in its children."""

from __future__ import annotations

from torch import Tensor, nn


def own_masters(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return a module's own parameters and buffers (masters): name, tensor, and whether it is a parameter.

    Nothing is copied to the device. Other threads may add or delete entries meanwhile, so each dict is copied
    first.
    """
    found: list[tuple[str, Tensor, bool]]
    found = [(name, master, True) for name, master in list(module._parameters.items()) if master is not None]
    if module._buffers:
        found += [
            (name, master, False) for name, master in list(module._buffers.items()) if master is not None
        ]
    return found
