"""GGUF's quantised blocks, decoded by torch on whatever device they are.

The layouts are those of ggml's `ggml-common.h`; the arithmetic follows `gguf.quants`, operation by operation,
so that the values are equal to the bit. Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from dynswap_ext.checkpoint.gguf import blocks as plain
from dynswap_ext.checkpoint.gguf import grids
from dynswap_ext.checkpoint.gguf.parts import Encoding
from dynswap_ext.errors import ConfigError

__all__ = ["ENCODINGS", "decode", "encoding_of"]

#: Values decoded at one time, which bounds the memory beside the result: on the CPU few enough for its
#: caches, on a device enough to keep it busy.
_AT_ONCE_CPU = 1 << 18
_AT_ONCE_DEVICE = 1 << 24


#: By ggml's names.
ENCODINGS: dict[str, Encoding] = {**plain.ENCODINGS, **grids.ENCODINGS}


def encoding_of(name: str) -> Encoding:
    """The encoding of that name, such as "Q4_K".

    Raises
    ------
    ConfigError
        It is none that is decoded here. Lists those that are.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        raise ConfigError(
            f"GGUF blocks of type {name} are not decoded here, only {', '.join(ENCODINGS)}; "
            "quantise the model to one of these (llama-quantize), or use its safetensors file"
        ) from None


def decode(blocks: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode rows of blocks.

    Parameters
    ----------
    blocks
        uint8 (..., bytes of a row), on any device.
    name
        The encoding, such as "Q4_K".
    dtype
        The result's: values are computed in float32 and cast.

    Returns
    -------
    torch.Tensor
        (..., values of a row), on the device of the blocks.
    """
    encoding = encoding_of(name)
    rows = blocks.reshape(-1, encoding.nbytes)
    values = torch.empty(rows.shape[0], encoding.values, dtype=dtype, device=blocks.device)
    at_once = _AT_ONCE_CPU if blocks.device.type == "cpu" else _AT_ONCE_DEVICE
    step = max(1, at_once // encoding.values)
    for start in range(0, rows.shape[0], step):
        values[start : start + step] = encoding.decode(rows[start : start + step])
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // encoding.nbytes * encoding.values)
