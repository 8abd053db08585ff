"""Dtypes as people write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynswap_ext.errors import ConfigError

if TYPE_CHECKING:
    import torch


def parse_dtype(text: str | None) -> torch.dtype | None:
    """The floating dtype that ``--dtype`` names; None for None.

    Raises
    ------
    ConfigError
        It names none.
    """
    import torch

    if text is None:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, short.get(text, text.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"--dtype is {text!r}; expected bf16, fp16, fp32 or another floating dtype of torch"
        )
    return found
