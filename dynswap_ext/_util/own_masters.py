"""The parameters and buffers that a module holds itself."""

from __future__ import annotations

from torch import Tensor, nn


def own_masters(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return a module's own masters: name, tensor, whether it is a parameter. Nothing is fetched.

    Other threads may register and delete some meanwhile: what there is is taken at one time.
    """
    found: list[tuple[str, Tensor, bool]]
    found = [(name, master, True) for name, master in list(module._parameters.items()) if master is not None]
    if module._buffers:
        found += [
            (name, master, False) for name, master in list(module._buffers.items()) if master is not None
        ]
    return found
