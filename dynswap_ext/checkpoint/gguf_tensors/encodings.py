"""Every encoding of GGUF by its name, and those whose codes are points of a grid, 4 or 8 values each.

The grids are the `gguf` package's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dynswap_ext.checkpoint.gguf_tensors import blocks
from dynswap_ext.checkpoint.gguf_tensors.blocks import Encoding, copied, fields, halves, looked_up, scaled
from dynswap_ext.errors import ConfigError

__all__ = ["ENCODINGS", "decode", "encoding_of"]

#: Values decoded at one time, which bounds the memory on top of the result: on the CPU few enough for its
#: caches, on a device enough to keep it busy.
_AT_ONCE_CPU = 1 << 18
_AT_ONCE_DEVICE = 1 << 24


@cache
def _arrays(name: str) -> tuple[Any, Any]:
    """The grid (points, values) and the sign bytes, in int8 and uint8.

    Numpy's, as a tensor made while torch traces would be none of the process's other threads.
    """
    try:
        import gguf.quants
        import numpy as np
    except ImportError as error:
        raise ConfigError(
            f"blocks of {name} are decoded by the tables of a package that is not here ({error}); install it "
            "with `pip install dynswap-ext[gguf]`"
        ) from error
    kind = getattr(gguf.quants, name)
    kind.init_grid()
    grid = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    return grid, np.frombuffer(gguf.quants.IQ2_XXS.ksigns, dtype=np.uint8).copy()


def _points(index: torch.Tensor, name: str) -> torch.Tensor:
    return looked_up(index, torch.from_numpy(_arrays(name)[0]))


def _signs(index: torch.Tensor) -> torch.Tensor:
    """Bytes of 8 signs, of which 7 are stored."""
    return looked_up(index, torch.from_numpy(_arrays("IQ2_XXS")[1]).unsqueeze(1))


def _turned(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return values * (1 - 2 * fields(signs, 1, 1).view(torch.int8))


def _words(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Little-endian words, as int32, with the sign bit where it is."""
    return copied(part).view(dtype).int()


def _shifted(words: torch.Tensor, step: int, count: int) -> torch.Tensor:
    """Each of the words (n, k) shifted right by 0, `step`, ...: (n, k * count)."""
    shifts = torch.arange(0, step * count, step, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).flatten(1)


def _iq2_xxs(rows: torch.Tensor) -> torch.Tensor:
    words = rows[:, 2:].reshape(rows.shape[0], 8, 8)
    index, rest = words[:, :, :4].flatten(1), _words(words[:, :, 4:].flatten(1), torch.int32)
    scales = halves(rows[:, :2]) * (0.5 + ((rest >> 28) & 15).float()) * 0.25
    return scaled(scales, _turned(_points(index, "IQ2_XXS"), _signs(_shifted(rest, 7, 4) & 127)))


def _iq2_xs(rows: torch.Tensor) -> torch.Tensor:
    words = _words(rows[:, 2:66], torch.int16)
    scales = halves(rows[:, :2]) * (0.5 + fields(rows[:, 66:], 1, 4).float()) * 0.25
    return scaled(scales, _turned(_points(words & 511, "IQ2_XS"), _signs((words >> 9) & 127)))


def _iq2_s(rows: torch.Tensor) -> torch.Tensor:
    index = rows[:, 2:34].int() | (fields(rows[:, 66:74], 1, 2).int() << 8)
    scales = halves(rows[:, :2]) * (0.5 + fields(rows[:, 74:], 1, 4).float()) * 0.25
    return scaled(scales, _turned(_points(index, "IQ2_S"), rows[:, 34:66]))


def _iq3_xxs(rows: torch.Tensor) -> torch.Tensor:
    rest = _words(rows[:, 66:], torch.int32)
    scales = halves(rows[:, :2]) * (0.5 + ((rest >> 28) & 15).float()) * 0.5
    return scaled(scales, _turned(_points(rows[:, 2:66], "IQ3_XXS"), _signs(_shifted(rest, 7, 4) & 127)))


def _iq3_s(rows: torch.Tensor) -> torch.Tensor:
    index = rows[:, 2:66].int() | (fields(rows[:, 66:74], 1, 1).int() << 8)
    scales = halves(rows[:, :2]) * (1 + 2 * fields(rows[:, 106:], 1, 4))
    return scaled(scales, _turned(_points(index, "IQ3_S"), rows[:, 74:106]))


def _offset(points: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Points of -1, 0 and 1, each group moved by an eighth up or down."""
    return points.reshape(*negative.shape, -1) + (0.125 - 0.25 * negative.float()).unsqueeze(-1)


def _iq1_s(rows: torch.Tensor) -> torch.Tensor:
    rest = _words(rows[:, 34:], torch.int16)
    scales = halves(rows[:, :2]) * (2 * ((rest >> 12) & 7) + 1)
    index = rows[:, 2:34].int() | ((_shifted(rest, 3, 4) & 7) << 8)
    return scaled(scales, _offset(_points(index, "IQ1_S"), (rest & 0x8000) != 0))


def _iq1_m(rows: torch.Tensor) -> torch.Tensor:
    words = _words(rows[:, 48:], torch.int16)
    # The scale of the block is the highest 4 bits of each of the four words.
    top = (words >> 12) & 15
    whole = top[:, :1] | (top[:, 1:2] << 4) | (top[:, 2:3] << 8) | (top[:, 3:] << 12)
    scales = whole.short().view(torch.float16).float() * (2 * (_shifted(words, 3, 4) & 7) + 1)
    high = fields(rows[:, 32:48], 1, 4)
    index = rows[:, :32].int() | ((high & 7).int() << 8)
    return scaled(scales, _offset(_points(index, "IQ1_S"), (high & 8) != 0))


#: By ggml's names.
ENCODINGS: dict[str, Encoding] = {
    **blocks.ENCODINGS,
    "IQ1_S": Encoding(256, 50, _iq1_s),
    "IQ1_M": Encoding(256, 56, _iq1_m),
    "IQ2_XXS": Encoding(256, 66, _iq2_xxs),
    "IQ2_XS": Encoding(256, 74, _iq2_xs),
    "IQ2_S": Encoding(256, 82, _iq2_s),
    "IQ3_XXS": Encoding(256, 98, _iq3_xxs),
    "IQ3_S": Encoding(256, 110, _iq3_s),
}


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
