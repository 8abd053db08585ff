"""Every encoding of GGUF by its name: blocks of a few bits for each value, decoded on the blocks' device.

The layouts are those of ggml-common.h; the arithmetic follows `gguf.quants`, operation by operation, so
that the values are equal to the bit. Nothing here waits for the device.
The grids of codes that are points, 4 or 8 values each, are the `gguf` package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dynswap_ext.errors import ConfigError

__all__ = ["ENCODINGS", "decode", "encoding_of"]

#: Values decoded at one time, which bounds the memory on top of the result: on the CPU few enough for its
#: caches, on a device enough to keep it busy.
_AT_ONCE_CPU = 1 << 18
_AT_ONCE_DEVICE = 1 << 24


@dataclass(frozen=True)
class Encoding:
    """One quantised type: `values` values of a row in `nbytes` bytes."""

    values: int
    nbytes: int
    #: From uint8 (n, nbytes) to float32 (n, values).
    decode: Callable[[torch.Tensor], torch.Tensor]


def copied(part: torch.Tensor) -> torch.Tensor:
    """The part by itself: a single row is contiguous where it is, and may begin at any byte."""
    return part.clone(memory_format=torch.contiguous_format)


def halves(part: torch.Tensor) -> torch.Tensor:
    """Pairs of bytes as float16, in float32."""
    return copied(part).view(torch.float16).float()


def fields(part: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The bit fields of bytes, uint8 (n, values).

    Of each `width` bytes first the lowest fields, then the next.
    """
    # Made on the device: a list would be copied there, and waited for.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=part.device).reshape(1, 1, -1, 1)
    fields = part.reshape(part.shape[0], -1, 1, width) >> shifts
    return fields.bitwise_and_((1 << bits) - 1).reshape(part.shape[0], -1)


def signed(fields: torch.Tensor, middle: int) -> torch.Tensor:
    """Fields of less than 8 bits, less `middle`."""
    return fields.view(torch.int8) - middle


def looked_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of a small table on the CPU, (n, values)."""
    # From pageable memory a copy this small does not wait for the device, if it need not.
    there = table.to(index.device, non_blocking=True)
    return there.index_select(0, index.reshape(-1).int()).reshape(index.shape[0], -1)


def scaled(scales: torch.Tensor, fields: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """`scales` (n, groups) times the values of each group, less `minima`."""
    count, groups = scales.shape
    values = scales.unsqueeze(-1) * fields.reshape(count, groups, -1)
    if minima is not None:
        values -= minima.unsqueeze(-1)
    return values.reshape(count, -1)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


def _table(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8, device="cpu").unsqueeze(1)


# ---- blocks of 32 ------------------------------------------------------------------------------------------


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * signed(fields(blocks[:, 2:], 16, 4), 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * fields(blocks[:, 4:], 16, 4) + halves(blocks[:, 2:4])


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return fields(low, 16, 4) | (fields(high, 1, 1) << 4)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * signed(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + halves(blocks[:, 2:4])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * blocks[:, 2:].view(torch.int8)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, :2]) * looked_up(fields(blocks[:, 2:], 16, 4), _table(_IQ4_VALUES))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # Half of 2 ** (e - 127), as the values are doubled; the two smallest exponents are subnormal.
    e = blocks[:, :1].int()
    scale = torch.where(e < 2, (e + 1) << 21, (e - 1) << 23).view(torch.float32)
    return scale * looked_up(fields(blocks[:, 1:], 16, 4), _table(_FP4_VALUES))


# ---- blocks of 256, in groups with scales of their own -----------------------------------------------------


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes, both = blocks[:, :16], blocks[:, 16:80], halves(blocks[:, 80:])
    return scaled(both[:, :1] * (scales & 15), fields(codes, 32, 2), both[:, 1:] * (scales >> 4))


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = fields(packed[:, :8], 8, 4) | (fields(packed[:, 8:], 4, 2) << 4)
    # A high bit that is set means that nothing is subtracted.
    codes = fields(low, 32, 2).view(torch.int8) - ((fields(high, 32, 1) ^ 1) << 2).view(torch.int8)
    return scaled(halves(blocks[:, 108:]) * signed(scales, 32), codes)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: 8 scales and 8 minima, of 6 bits each, from 12 bytes."""
    both, (d, m, rest) = halves(blocks[:, :4]), torch.split(blocks[:, 4:16], 4, dim=1)
    scales = torch.cat([d & 63, (rest & 15) | ((d >> 2) & 48)], dim=1)
    minima = torch.cat([m & 63, (rest >> 4) | ((m >> 2) & 48)], dim=1)
    return both[:, :1] * scales, both[:, 1:] * minima


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return scaled(scales, fields(blocks[:, 16:], 32, 4), minima)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = fields(blocks[:, 48:], 32, 4) | (fields(blocks[:, 16:48], 32, 1) << 4)
    return scaled(scales, codes, minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(torch.int8)
    codes = fields(low, 64, 4) | (fields(high, 32, 2) << 4)
    return scaled(halves(blocks[:, 208:]) * scales, signed(codes, 32))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = fields(blocks[:, 4:8], 1, 4) | (fields(blocks[:, 2:4], 1, 2) << 4)
    codes = looked_up(fields(blocks[:, 8:], 16, 4), _table(_IQ4_VALUES))
    return scaled(halves(blocks[:, :2]) * signed(scales, 32), codes)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[:, 64:]) * signed(fields(blocks[:, :64], 32, 2), 1)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Five values of three in a byte, as the digits of a fraction in base 3."""
    powers = 3 ** torch.arange(5, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    bytes_of = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    # The product keeps its lowest 8 bits: the digits before are the whole numbers of the fraction.
    codes = [(part.unsqueeze(1) * powers[:digits]).flatten(1) for part, digits in bytes_of]
    return halves(blocks[:, 52:]) * signed(((torch.cat(codes, dim=1).short() * 3) >> 8).byte(), 1)


# ---- blocks of 64 ------------------------------------------------------------------------------------------


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Four groups; their scales are e4m3 without a sign, halved as the values are doubled."""
    raw = blocks[:, :4].int()
    exponent, mantissa = (raw >> 3) & 15, (raw & 7).float()
    power = ((exponent + 117) << 23).view(torch.float32)  # 2 ** (exponent - 10)
    scale = torch.where(exponent == 0, mantissa * 2**-9, (8 + mantissa) * power) * 0.5
    scale = torch.where(raw == 0x7F, 0.0, scale)  # no number
    return scaled(scale, looked_up(fields(blocks[:, 4:], 8, 4), _table(_FP4_VALUES)))


# ---- blocks of 256, whose codes are points of a grid -------------------------------------------------------


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
    "Q4_0": Encoding(32, 18, _q4_0),
    "Q4_1": Encoding(32, 20, _q4_1),
    "Q5_0": Encoding(32, 22, _q5_0),
    "Q5_1": Encoding(32, 24, _q5_1),
    "Q8_0": Encoding(32, 34, _q8_0),
    "Q2_K": Encoding(256, 84, _q2_k),
    "Q3_K": Encoding(256, 110, _q3_k),
    "Q4_K": Encoding(256, 144, _q4_k),
    "Q5_K": Encoding(256, 176, _q5_k),
    "Q6_K": Encoding(256, 210, _q6_k),
    "IQ4_NL": Encoding(32, 18, _iq4_nl),
    "IQ4_XS": Encoding(256, 136, _iq4_xs),
    "TQ1_0": Encoding(256, 54, _tq1_0),
    "TQ2_0": Encoding(256, 66, _tq2_0),
    "MXFP4": Encoding(32, 17, _mxfp4),
    "NVFP4": Encoding(64, 36, _nvfp4),
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
