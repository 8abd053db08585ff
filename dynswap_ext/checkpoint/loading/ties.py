"""Which names of a state dict are names of one weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["ties_of"]


def ties_of(state: Mapping[str, Any]) -> list[list[str]]:
    """The names of each tensor that has more than one.

    Ties are the model's: two modules that hold one parameter. A file that has one range of bytes under two
    names says nothing about the model; if that does not tie, it gets two parameters over one mapping.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), []).append(name)
    return [tie for tie in names.values() if len(tie) > 1]
