"""Encode and decode weights without loss: by the native extension on the CPU, else by torch's operations.

Weights are coded in blocks of 4096, and any block can be decoded without the others: Note [The lossless
code]. docs/lossless.md has the layout. A tensor that would not be 5 % smaller is not coded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.functional import pad

from dynswap_ext.errors import SourceError

#: Weights of a block, and of a run in it.
BLOCK: Final = 4096
_RUN: Final = 256
#: The dtypes that are coded.
CODABLE: Final = (torch.bfloat16, torch.float16, torch.float32)
#: The code of an exponent that is not in the table, which has those of all lower codes.
_ESCAPE: Final = 7
#: Blocks take multiples of so many bytes.
UNIT: Final = 16
_HEADER: Final = 16
_DIRECTORY: Final = 2 * (BLOCK // _RUN)
#: Blocks at a time. They bound the memory on top of the result, and on the CPU they fit into its caches.
_AT_ONCE_CPU: Final = 64
_AT_ONCE_DEVICE: Final = 4096

#: Returns the native extension, or None without one. Set where the extension is imported.
extension: Callable[[], Any] = lambda: None  # noqa: E731


def encode(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the coded bytes of a plain tensor, uint8 on its device.

    None if they would not be 5 % fewer, or its dtype is not coded.
    """
    if tensor.dtype not in CODABLE or tensor.numel() == 0:
        return None
    flat = tensor.detach().reshape(-1).contiguous()
    if (native := _native(flat, "lossless_encode")) is not None:
        return native(flat)  # type: ignore[no-any-return]
    count = flat.numel()
    step = BLOCK * (_AT_ONCE_CPU if flat.is_cpu else _AT_ONCE_DEVICE)
    whole = count // BLOCK * BLOCK
    parts = [*torch.split(flat[:whole], step), flat[whole:]] if whole else [flat]
    pieces = [_encoded(part) for part in parts if part.numel()]
    sizes = torch.cat([sizes for sizes, _ in pieces])
    begin = _first_block(len(sizes))
    index = torch.zeros(begin // 8, dtype=torch.int64, device=flat.device)
    index[0] = begin
    index[1 : len(sizes) + 1] = sizes.cumsum(0) + begin
    coded = torch.cat([index.view(torch.uint8), *(piece for _, piece in pieces)])
    return coded if coded.numel() * 100 <= tensor.nbytes * 95 else None


def decode(
    coded: torch.Tensor,
    dtype: torch.dtype,
    count: int,
    first: int = 0,
    length: int | None = None,
) -> torch.Tensor:
    """Return weights of a coded tensor on its device: `length` of its `count`, from `first` on.

    SourceError if the bytes are damaged.
    """
    length = count - first if length is None else length
    if type(coded) is not torch.Tensor:  # torch traces
        return _traced(coded, dtype, count, first, length)  # type: ignore[no-any-return]
    out = torch.empty(length, dtype=dtype, device=coded.device)
    if (native := _native(coded, "lossless_decode")) is not None:
        return native(coded, dtype, count, first, out)  # type: ignore[no-any-return]
    end, at_once = first + len(out), _AT_ONCE_CPU if coded.is_cpu else _AT_ONCE_DEVICE
    index = _checked_index(coded, dtype, count) if len(out) else None
    low, whole = first // BLOCK * BLOCK, count // BLOCK * BLOCK
    while index is not None and low < end:
        high = min(low + at_once * BLOCK, -(-end // BLOCK) * BLOCK, whole) if low < whole else count
        blocks = index[low // BLOCK : -(-high // BLOCK) + 1]
        values = _decoded(coded, dtype, blocks, min(high - low, BLOCK))
        out[max(low - first, 0) : high - first] = values[max(first - low, 0) : end - low]
        low = high
    return out


@torch.library.custom_op("dynswap_ext::lossless_decode", mutates_args=())
def _traced(coded: torch.Tensor, dtype: torch.dtype, count: int, first: int, length: int) -> torch.Tensor:
    return decode(coded, dtype, count, first, length)


_traced.register_fake(lambda coded, dtype, count, first, length: coded.new_empty(length, dtype=dtype))


def fits(nbytes: int, dtype: torch.dtype, count: int) -> bool:
    """Return whether so many bytes are enough for the code of `count` weights, of which there are some."""
    whole, rest = divmod(count, BLOCK)
    of_block, of_rest = (min(_fixed(dtype, n), _HEADER + n * dtype.itemsize) for n in (BLOCK, rest))
    least = _first_block(whole + (rest > 0)) + whole * of_block + (of_rest if rest else 0)
    return count > 0 and nbytes >= least


def _native(tensor: torch.Tensor, name: str) -> Any:
    return getattr(extension(), name, None) if tensor.is_cpu else None


def _first_block(blocks: int) -> int:
    """Return where the first block begins: after the index."""
    return -(-8 * (blocks + 1) // UNIT) * UNIT


def _units(nbytes: Any) -> Any:
    return -(-nbytes // UNIT)


def _fixed(dtype: torch.dtype, weights: int) -> int:
    """Return the bytes of a coded block before its escapes."""
    padded = -(-weights // _RUN) * _RUN
    return _HEADER + _DIRECTORY + sum(_sizes(dtype, padded))


def _sizes(dtype: torch.dtype, padded: int) -> tuple[int, int, int, int]:
    """Return the bytes of the low halves, of signs and mantissas, and of the planes of codes and low bits."""
    planes = padded * 3 // 8
    return padded * (dtype.itemsize - 2), padded, planes, planes if dtype == torch.float16 else 0


def _places(begins: torch.Tensor, units: int) -> torch.Tensor:
    """Return the indices of the units of blocks that begin at `begins` and have `units` each."""
    return (begins[:, None] + torch.arange(units, device=begins.device)).reshape(-1)


def _ranks(escaped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many weights are escaped before each run of each block, and in each block."""
    in_runs = pad(escaped, (0, BLOCK - escaped.shape[1])).reshape(len(escaped), BLOCK // _RUN, _RUN).sum(2)
    ends = in_runs.cumsum(1)
    return ends - in_runs, ends[:, -1]


def _bits(count: int, device: torch.device) -> torch.Tensor:
    # Made on the device: copying a list there would block.
    return torch.arange(count, dtype=torch.uint8, device=device)


def _planes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the planes of the three bits of numbers, uint8 (blocks, weights)."""
    bits = (numbers[:, None] >> _bits(3, numbers.device)[:, None]) & 1
    packed = bits.reshape(len(bits), -1, 8) << _bits(8, numbers.device)
    return packed.sum(2, dtype=torch.uint8)


def _of_planes(planes: torch.Tensor) -> torch.Tensor:
    """Return the numbers whose bits are in planes."""
    bits = (planes.reshape(len(planes), 3, planes.shape[1] // 3, 1) >> _bits(8, planes.device)) & 1
    return (bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2).flatten(1)


# ---- encoding ----------------------------------------------------------------------------------------------


def _encoded(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sizes of coded blocks, and their bytes. Blocks are whole, or there is one shorter one."""
    weights, device = min(flat.numel(), BLOCK), flat.device
    raw = flat.view(torch.uint8).reshape(-1, weights * flat.itemsize)
    blocks, padded = len(raw), -(-weights // _RUN) * _RUN
    halves = raw.view(torch.int16).reshape(blocks, weights, flat.itemsize // 2)
    high = pad(halves[:, :, -1].int() & 0xFFFF, (0, padded - weights))
    is_half = flat.dtype == torch.float16
    top = high & 0x8000 | high >> 3 & 0xFFF if is_half else high
    is_weight = (torch.arange(padded, device=device) < weights).expand(blocks, -1)
    exponents = ((top >> 7) & 0xFF).long()

    counts = torch.zeros(blocks, 256, dtype=torch.int64, device=device)
    counts.scatter_add_(1, exponents, is_weight.long())
    order = 255 - torch.arange(256, device=device)  # of equally common exponents, the smaller comes first
    commonest = (counts * 256 + order).topk(_ESCAPE, dim=1).indices
    unused = counts.gather(1, commonest) == 0
    code_of = torch.full((blocks, 257), _ESCAPE, dtype=torch.uint8, device=device)
    numbers = _bits(_ESCAPE, device).expand(blocks, -1)
    code_of.scatter_(1, commonest.masked_fill(unused, 256), numbers)
    codes = code_of.gather(1, exponents) * is_weight
    escaped = codes == _ESCAPE
    ranks, escapes = _ranks(escaped)

    header = torch.zeros(blocks, _HEADER, dtype=torch.uint8, device=device)
    header[:, 0] = 1
    header[:, 1:8] = commonest.masked_fill(unused, 0).byte()
    header[:, 8:10] = escapes.short()[:, None].view(torch.uint8)
    low = pad(halves[:, :, :-1], (0, 0, 0, padded - weights)).reshape(blocks, -1)
    mantissa = ((top >> 8) & 0x80 | top & 0x7F).byte()
    parts = [header, ranks.short().view(torch.uint8), low.contiguous().view(torch.uint8), mantissa]
    parts += [_planes(codes), _planes((high & 7).byte())] if is_half else [_planes(codes)]
    fixed = torch.cat(parts, dim=1)
    as_coded = _units(fixed.shape[1] + escapes)
    as_raw = _units(_HEADER + raw.shape[1])
    is_raw = as_coded >= as_raw
    units = as_coded.masked_fill(is_raw, as_raw)
    ends = units.cumsum(0)
    begins = ends - units
    out = torch.zeros(int(ends[-1]), UNIT, dtype=torch.uint8, device=device)
    for chosen, content in ((~is_raw, fixed), (is_raw, pad(raw, (_HEADER, 0)))):
        rows = pad(content[chosen], (0, -content.shape[1] % UNIT)).reshape(-1, UNIT)
        out.index_copy_(0, _places(begins[chosen], _units(content.shape[1])), rows)
    escaped &= ~is_raw[:, None]
    places = begins[:, None] * UNIT + fixed.shape[1] + escaped.cumsum(1) - 1
    flat_out = out.reshape(-1)
    flat_out[places[escaped]] = exponents[escaped].byte()
    return units * UNIT, flat_out


# ---- decoding ----------------------------------------------------------------------------------------------


def _checked_index(coded: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    blocks, begin = -(-count // BLOCK), _first_block(-(-count // BLOCK))
    if coded.numel() < begin:
        raise _damaged(f"{coded.numel():,} bytes are too few for {count:,} weights")
    index = coded[: 8 * (blocks + 1)].clone().view(torch.int64)
    sizes = index.diff()
    most = _HEADER + BLOCK * dtype.itemsize
    right = (index[0] == begin) & (index[-1] == coded.numel()) & ((sizes >= _HEADER) & (sizes <= most)).all()
    if not right & (index % UNIT == 0).all():
        raise _damaged("its index does not fit its bytes")
    return index


def _decoded(coded: torch.Tensor, dtype: torch.dtype, index: torch.Tensor, weights: int) -> torch.Tensor:
    """Return the weights of neighbouring blocks. Blocks are whole, or there is one shorter one."""
    data = coded[int(index[0]) : int(index[-1])].clone()
    rows, begins = data.view(-1, UNIT), (index[:-1] - index[0]) // UNIT
    header = rows.index_select(0, begins)
    escapes = header[:, 8:10].clone().view(torch.int16)[:, 0].int() & 0xFFFF
    fixed, raw = _fixed(dtype, weights), _HEADER + weights * dtype.itemsize
    is_raw = header[:, 0] == 0
    needed = UNIT * _units(fixed + escapes).masked_fill(is_raw, _units(raw))
    if not ((header[:, 0] <= 1) & (needed == index.diff())).all():
        raise _damaged("a block's header does not fit its bytes")
    as_bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    out = torch.empty(len(begins), weights, dtype=as_bits, device=coded.device)
    stored = rows.index_select(0, _places(begins[is_raw], _units(raw))).reshape(-1, _units(raw) * UNIT)
    out[is_raw] = stored[:, _HEADER:raw].contiguous().view(as_bits)

    header, escapes, begins = header[~is_raw], escapes[~is_raw], begins[~is_raw]
    blocks, padded = len(begins), -(-weights // _RUN) * _RUN
    content = rows.index_select(0, _places(begins, fixed // UNIT)).reshape(blocks, fixed)
    sizes = [_HEADER, _DIRECTORY, *_sizes(dtype, padded)]
    _, ranks, low, mantissa, planes, low_planes = torch.split(content, sizes, dim=1)
    codes = _of_planes(planes)
    escaped = codes == _ESCAPE
    if not all(map(torch.equal, _ranks(escaped), (ranks.clone().view(torch.int16).long(), escapes.long()))):
        raise _damaged("a block's escapes are not those that it counts")
    exponents = pad(header[:, 1:8], (0, 1)).gather(1, codes.long())
    places = begins[:, None] * UNIT + fixed + escaped.cumsum(1) - 1
    exponents[escaped] = data[places[escaped]]
    if dtype == torch.float16:
        top = exponents.int() << 10 | (mantissa.int() & 0x7F) << 3 | _of_planes(low_planes)
    else:
        top = exponents.int() << 7 | mantissa & 0x7F
    top |= (mantissa.int() & 0x80) << 8
    halves = [low.clone().view(torch.int16), top.short()] if dtype.itemsize > 2 else [top.short()]
    out[~is_raw] = torch.stack(halves, dim=2).flatten(1).view(as_bits)[:, :weights]
    return out.view(dtype).reshape(-1)


def _damaged(why: str) -> SourceError:
    return SourceError(f"coded weights are damaged: {why}")
