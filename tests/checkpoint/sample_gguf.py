"""GGUF files written by the `gguf` package's own writer, and blocks of every encoding."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from dynswap_ext.checkpoint.gguf import GGUFTensor
from dynswap_ext.checkpoint.gguf_tensors.encodings import ENCODINGS

#: Where the float16 scales of a block are.
_SCALES = {
    "TQ1_0": (52,),
    "NVFP4": (),
    "IQ1_M": (),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "MXFP4": (),
}


def random_blocks(encoding: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return blocks of a weight of that shape: any bytes, with scales like those of models."""
    generator = np.random.default_rng(seed)
    layout = ENCODINGS[encoding]
    count = shape[-1] // layout.values
    blocks = generator.integers(0, 256, (*shape[:-1], count, layout.nbytes), dtype=np.uint8)
    for start in _SCALES.get(encoding, (0,)):
        scales = (generator.standard_normal((*shape[:-1], count, 1)) / 100).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    if encoding == "MXFP4":
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:-1])
    return torch.from_numpy(blocks.reshape(*shape[:-1], count * layout.nbytes))


def random_weight(
    encoding: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GGUFTensor:
    return GGUFTensor(random_blocks(encoding, *shape, seed=seed), encoding, dtype)


def reference(blocks: torch.Tensor, encoding: str) -> torch.Tensor:
    """Return the values as the `gguf` package decodes them."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(
            gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[encoding]).copy()
        )


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor | np.ndarray[Any, Any]],
    architecture: str = "llama",
    values: Mapping[str, Any] | None = None,
) -> Path:
    """Write a file of tensors, quantised or not, and of key-values: text, integers, or lists of them."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, GGUFTensor):
            kind = gguf.GGMLQuantizationType[tensor.encoding]
            writer.add_tensor(name, tensor.blocks.numpy(), raw_dtype=kind)
        elif isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.asarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw_header(
    tensors: Sequence[tuple[str, Sequence[int], int, int]] = (),
    pairs: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a header as bytes, right or wrong. A tensor is its name, ggml's dimensions, kind and offset."""
    raw = struct.pack("<4sIQQ", b"GGUF", version, *(counts or (len(tensors), len(pairs)))) + b"".join(pairs)
    for name, dimensions, kind, offset in tensors:
        raw += _text(name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset
        )
    return raw + bytes(-len(raw) % 32)


def number(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", 4, value)


def array_of_strings(key: str, values: Sequence[str]) -> bytes:
    return _text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(_text, values))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()
