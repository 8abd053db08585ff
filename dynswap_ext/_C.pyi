"""The native provider (csrc/bindings/module.cpp)."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

@final
class Attribute:
    """Serves one managed name of a swap class."""

    name: str
    def __new__(cls, name: str) -> Attribute: ...
    def __get__(self, module: Any, owner: type | None = None) -> Any: ...
    def __set__(self, module: Any, value: Any) -> None: ...
    def __delete__(self, module: Any) -> None: ...

@final
class Session:
    """One install: a model's weights and their engine."""

    provider: str
    backend: str
    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        prefetch: int,
        budget: int | None,
        strict_budget: bool,
        pin: bool | None,
        backend: str,
        warn: Callable[[str], None],
    ) -> None: ...
    def attach(self, root: nn.Module, swap_class: Callable[[type], type | None]) -> int: ...
    def detach(self, root: nn.Module) -> None: ...
    def adopt(self, module: nn.Module, name: str) -> None: ...
    def flush(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def reset_stats(self) -> None: ...
    def close(self) -> None: ...

def build_info() -> dict[str, Any]: ...
def simulate(
    weights: list[tuple[str, int, float, int]],
    budget: int,
    prefetch: int,
    bandwidth: float,
    latency: float,
    passes: int,
) -> dict[str, Any]: ...
