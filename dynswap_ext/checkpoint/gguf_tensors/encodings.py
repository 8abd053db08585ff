"""Decodes the blocks of GGUF's quantised types, in which a value takes a few bits, on the blocks' device.

The layouts are those of ggml-common.h. The arithmetic follows `gguf.quants`, operation by operation, so that
the values are equal to the bit. Nothing here waits for the device. In some types a code is a point of a grid,
which stands for 4 or 8 values; the grids are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from dynswap_ext.errors import ConfigError

#: Values decoded at a time. They bound the memory on top of the result. On the CPU they fit into its caches;
#: on an accelerator they are enough to keep it busy.
_AT_ONCE_CPU = 1 << 18
_AT_ONCE_DEVICE = 1 << 24


def words(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as numbers of `dtype`. Copies them first, because a row may begin at an unaligned byte."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def halves(part: torch.Tensor) -> torch.Tensor:
    """Convert pairs of bytes, which are numbers in float16, to float32."""
    return words(part, torch.float16).float()


def fields(part: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Return the fields of `bits` bits in rows of bytes, uint8 (n, values).

    For each run of `width` bytes, the lowest field of every byte comes first, then the next of every byte.
    """
    # Made on the device, as the copy of a list would be waited for.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=part.device).reshape(1, 1, -1, 1)
    fields = part.reshape(part.shape[0], -1, 1, width) >> shifts
    return fields.bitwise_and_((1 << bits) - 1).reshape(part.shape[0], -1)


def signed(fields: torch.Tensor, middle: int) -> torch.Tensor:
    """Subtract `middle` from fields of less than 8 bits, in int8."""
    return fields.view(torch.int8) - middle


def looked_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the rows of a small table on the CPU at `index` (n, k), joined to (n, values)."""
    # With non_blocking, a copy this small from pageable memory does not wait for the device.
    there = table.to(index.device, non_blocking=True)
    return there.index_select(0, index.reshape(-1).int()).reshape(index.shape[0], -1)


def scaled(scales: torch.Tensor, fields: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply the fields of each group by its scale (n, groups), and subtract its minimum."""
    count, groups = scales.shape
    values = scales.unsqueeze(-1) * fields.reshape(count, groups, -1)
    if minima is not None:
        values -= minima.unsqueeze(-1)
    return values.reshape(count, -1)


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # the values of e2m1 times 2


def of_four_bits(part: torch.Tensor, width: int, values: tuple[int, ...]) -> torch.Tensor:
    """Use fields of 4 bits as indices, and return the `values` there."""
    table = torch.tensor(values, dtype=torch.int8, device="cpu").unsqueeze(1)
    return looked_up(fields(part, width, 4), table)


def five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return fields of 5 bits: the highest bit of each is in `high`, the other 4 are in `low`."""
    return fields(low, 16, 4) | (fields(high, 1, 1) << 4)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # The scale is half of 2 ** (e - 127), as the values are doubled. For e < 2 it is subnormal.
    e = blocks[:, :1].int()
    scale = torch.where(e < 2, (e + 1) << 21, (e - 1) << 23).view(torch.float32)
    return scale * of_four_bits(blocks[:, 1:], 16, _FP4_VALUES)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes, both = blocks[:, :16], blocks[:, 16:80], halves(blocks[:, 80:])
    return scaled(both[:, :1] * (scales & 15), fields(codes, 32, 2), both[:, 1:] * (scales >> 4))


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = fields(packed[:, :8], 8, 4) | (fields(packed[:, 8:], 4, 2) << 4)
    # If the high bit is not set, 4 is subtracted.
    codes = fields(low, 32, 2).view(torch.int8) - ((fields(high, 32, 1) ^ 1) << 2).view(torch.int8)
    return scaled(halves(blocks[:, 108:]) * signed(scales, 32), codes)


def _q4_or_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    both, (d, m, rest) = halves(blocks[:, :4]), torch.split(blocks[:, 4:16], 4, dim=1)
    # There are 8 scales and 8 minima of 6 bits each.
    scales = torch.cat([d & 63, (rest & 15) | ((d >> 2) & 48)], dim=1)
    minima = torch.cat([m & 63, (rest >> 4) | ((m >> 2) & 48)], dim=1)
    codes = fields(blocks[:, -128:], 32, 4)
    if blocks.shape[1] == 176:  # Q5_K
        codes |= fields(blocks[:, 16:48], 32, 1) << 4
    return scaled(both[:, :1] * scales, codes, both[:, 1:] * minima)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(torch.int8)
    codes = fields(low, 64, 4) | (fields(high, 32, 2) << 4)
    return scaled(halves(blocks[:, 208:]) * scales, signed(codes, 32))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = fields(blocks[:, 4:8], 1, 4) | (fields(blocks[:, 2:4], 1, 2) << 4)
    return scaled(halves(blocks[:, :2]) * signed(scales, 32), of_four_bits(blocks[:, 8:], 16, _IQ4_VALUES))


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode TQ1_0. A byte over 256 is a fraction. Its first five digits in base 3 are the values plus 1."""
    powers = 3 ** torch.arange(5, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    bytes_of = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    # Times 3 ** i, the first i digits become the whole part of the fraction, which overflows and is lost.
    codes = [(part.unsqueeze(1) * powers[:digits]).flatten(1) for part, digits in bytes_of]
    return halves(blocks[:, 52:]) * signed(((torch.cat(codes, dim=1).short() * 3) >> 8).byte(), 1)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Decode NVFP4: four groups with scales in unsigned e4m3. They are halved, as the values are doubled."""
    raw = blocks[:, :4].int()
    exponent, mantissa = (raw >> 3) & 15, (raw & 7).float()
    power = ((exponent + 117) << 23).view(torch.float32)  # 2 ** (exponent - 10)
    scale = torch.where(exponent == 0, mantissa * 2**-9, (8 + mantissa) * power) * 0.5
    scale = torch.where(raw == 0x7F, 0.0, scale)  # NaN
    return scaled(scale, of_four_bits(blocks[:, 4:], 8, _FP4_VALUES))


# ---- blocks of 256 values, whose codes are points of a grid ------------------------------------------------


@cache
def _arrays(name: str) -> tuple[Any, Any]:
    """Return the grid of a type, int8 (points, values), and the table of sign bytes, uint8 (128,).

    They are cached as NumPy arrays: a tensor that is made while torch traces is of no use afterwards.
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


def _points(name: str, index: torch.Tensor) -> torch.Tensor:
    return looked_up(index, torch.from_numpy(_arrays(name)[0]))


def _turned(values: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Negate the values whose bits in `signs` are set; a byte has the bits of 8 values."""
    return values * (1 - 2 * fields(signs, 1, 1).view(torch.int8))


def _signs(index: torch.Tensor) -> torch.Tensor:
    """Return the byte of 8 signs for each index of 7 bits. The eighth sign follows from the others."""
    return looked_up(index, torch.from_numpy(_arrays("IQ2_XXS")[1]).unsqueeze(1))


def _shifted(words: torch.Tensor, step: int, count: int) -> torch.Tensor:
    """Shift each of the words (n, k) right by 0, `step`, 2 * `step` and so on, and return (n, k * count)."""
    shifts = torch.arange(0, step * count, step, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).flatten(1)


def _xxs(name: str, d: torch.Tensor, index: torch.Tensor, rest: torch.Tensor, unit: float) -> torch.Tensor:
    """Decode IQ2_XXS or IQ3_XXS. Each word of `rest` holds a scale and four indices of signs."""
    scales = d * (0.5 + ((rest >> 28) & 15).float()) * unit
    return scaled(scales, _turned(_points(name, index), _signs(_shifted(rest, 7, 4) & 127)))


def _iq2_xxs(rows: torch.Tensor) -> torch.Tensor:
    both = rows[:, 2:].reshape(rows.shape[0], 8, 8)
    rest = words(both[:, :, 4:].flatten(1), torch.int32)
    return _xxs("IQ2_XXS", halves(rows[:, :2]), both[:, :, :4].flatten(1), rest, 0.25)


def _iq3_xxs(rows: torch.Tensor) -> torch.Tensor:
    return _xxs("IQ3_XXS", halves(rows[:, :2]), rows[:, 2:66], words(rows[:, 66:], torch.int32), 0.5)


def _iq2_xs(rows: torch.Tensor) -> torch.Tensor:
    codes = words(rows[:, 2:66], torch.int16).int()
    scales = halves(rows[:, :2]) * (0.5 + fields(rows[:, 66:], 1, 4).float()) * 0.25
    return scaled(scales, _turned(_points("IQ2_XS", codes & 511), _signs((codes >> 9) & 127)))


def _iq2_s(rows: torch.Tensor) -> torch.Tensor:
    index = rows[:, 2:34].int() | (fields(rows[:, 66:74], 1, 2).int() << 8)
    scales = halves(rows[:, :2]) * (0.5 + fields(rows[:, 74:], 1, 4).float()) * 0.25
    return scaled(scales, _turned(_points("IQ2_S", index), rows[:, 34:66]))


def _iq3_s(rows: torch.Tensor) -> torch.Tensor:
    index = rows[:, 2:66].int() | (fields(rows[:, 66:74], 1, 1).int() << 8)
    scales = halves(rows[:, :2]) * (1 + 2 * fields(rows[:, 106:], 1, 4))
    return scaled(scales, _turned(_points("IQ3_S", index), rows[:, 74:106]))


def _iq1(scales: torch.Tensor, index: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Decode IQ1_S or IQ1_M: points of -1, 0 and 1. An eighth is added to each group, or subtracted."""
    points = _points("IQ1_S", index).reshape(*negative.shape, -1)
    return scaled(scales, points + (0.125 - 0.25 * negative.float()).unsqueeze(-1))


def _iq1_s(rows: torch.Tensor) -> torch.Tensor:
    rest = words(rows[:, 34:], torch.int16).int()
    index = rows[:, 2:34].int() | ((_shifted(rest, 3, 4) & 7) << 8)
    return _iq1(halves(rows[:, :2]) * (2 * ((rest >> 12) & 7) + 1), index, (rest & 0x8000) != 0)


def _iq1_m(rows: torch.Tensor) -> torch.Tensor:
    packed = words(rows[:, 48:], torch.int16).int()
    # The scale of the block is a float16, whose bits are the highest 4 of each of the four words.
    top = (packed >> 12) & 15
    whole = top[:, :1] | (top[:, 1:2] << 4) | (top[:, 2:3] << 8) | (top[:, 3:] << 12)
    scales = whole.short().view(torch.float16).float() * (2 * (_shifted(packed, 3, 4) & 7) + 1)
    high = fields(rows[:, 32:48], 1, 4)
    return _iq1(scales, rows[:, :32].int() | ((high & 7).int() << 8), (high & 8) != 0)


# ---- all of them -------------------------------------------------------------------------------------------


class Encoding(NamedTuple):
    """A quantised type of GGUF: one block holds `values` values in `nbytes` bytes."""

    values: int
    nbytes: int
    #: Decodes blocks, uint8 (n, nbytes), to values, float32 (n, values).
    decode: Callable[[torch.Tensor], torch.Tensor]


#: All types that can be decoded, by ggml's names.
ENCODINGS: dict[str, Encoding] = {
    "Q4_0": Encoding(32, 18, lambda b: halves(b[:, :2]) * signed(fields(b[:, 2:], 16, 4), 8)),
    "Q4_1": Encoding(32, 20, lambda b: halves(b[:, :2]) * fields(b[:, 4:], 16, 4) + halves(b[:, 2:4])),
    "Q5_0": Encoding(32, 22, lambda b: halves(b[:, :2]) * signed(five_bits(b[:, 2:6], b[:, 6:]), 16)),
    "Q5_1": Encoding(32, 24, lambda b: halves(b[:, :2]) * five_bits(b[:, 4:8], b[:, 8:]) + halves(b[:, 2:4])),
    "Q8_0": Encoding(32, 34, lambda b: halves(b[:, :2]) * b[:, 2:].view(torch.int8)),
    "Q2_K": Encoding(256, 84, _q2_k),
    "Q3_K": Encoding(256, 110, _q3_k),
    "Q4_K": Encoding(256, 144, _q4_or_q5_k),
    "Q5_K": Encoding(256, 176, _q4_or_q5_k),
    "Q6_K": Encoding(256, 210, _q6_k),
    "IQ4_NL": Encoding(32, 18, lambda b: halves(b[:, :2]) * of_four_bits(b[:, 2:], 16, _IQ4_VALUES)),
    "IQ4_XS": Encoding(256, 136, _iq4_xs),
    "TQ1_0": Encoding(256, 54, _tq1_0),
    "TQ2_0": Encoding(256, 66, lambda b: halves(b[:, 64:]) * signed(fields(b[:, :64], 32, 2), 1)),
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
    """Return the encoding of a name, such as "Q4_K". The ConfigError for an unknown name lists all."""
    if name in ENCODINGS:
        return ENCODINGS[name]
    raise ConfigError(
        f"GGUF blocks of type {name} are not decoded here, only {', '.join(ENCODINGS)}; "
        "quantise the model to one of these (llama-quantize), or use its safetensors file"
    )


def decode(blocks: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode rows of blocks, uint8 (..., bytes of a row), to (..., values of a row) on their device.

    `name` is the encoding, such as "Q4_K". Values are computed in float32 and cast to `dtype`.
    """
    encoding = encoding_of(name)
    rows = blocks.reshape(-1, encoding.nbytes)
    values = torch.empty(rows.shape[0], encoding.values, dtype=dtype, device=blocks.device)
    at_once = _AT_ONCE_CPU if blocks.device.type == "cpu" else _AT_ONCE_DEVICE
    step = max(1, at_once // encoding.values)
    for start in range(0, rows.shape[0], step):
        values[start : start + step] = encoding.decode(rows[start : start + step])
    return values.reshape(*blocks.shape[:-1], blocks.shape[-1] // encoding.nbytes * encoding.values)
