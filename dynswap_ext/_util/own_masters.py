"""The parameters and buffers that a module holds itself."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def own_masters(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield a module's own masters: name, tensor, whether it is a parameter. Nothing is fetched."""
    for members, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for name, master in members.items():
            if master is not None:
                yield name, master, is_parameter
