"""Writes checkpoints larger than RAM: sparse files, whose zeros take no room on the disk."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from sample_checkpoints import write_index
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, metadata

#: Each weight is a float32 matrix of SIDE x SIDE elements, which take WEIGHT bytes.
SIDE = 4096
WEIGHT = SIDE * SIDE * 4


def names(count: int) -> list[str]:
    """Return the names of `count` weights in an `nn.ModuleList` called ``layers``."""
    return [f"layers.{number}.weight" for number in range(count)]


def write_safetensors(folder: Path, count: int) -> Path:
    listed = {
        name: {"dtype": "F32", "shape": [SIDE, SIDE], "data_offsets": [at * WEIGHT, (at + 1) * WEIGHT]}
        for at, name in enumerate(names(count))
    }
    header = json.dumps(listed).encode()
    header += b" " * (-len(header) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + count * WEIGHT)
    return path


def write_torch(folder: Path, count: int) -> Path:
    path = folder / "model.pt"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({name: torch.empty(SIDE, SIDE) for name in names(count)}, path)
    return path


def write_sharded(folder: Path, count: int) -> Path:
    """Write an index and one shard, so that a single file is larger than RAM."""
    shard = write_safetensors(folder, count)
    return write_index(folder / "model.safetensors.index.json", dict.fromkeys(names(count), shard.name))


def write_gguf(folder: Path, count: int) -> Path:
    import gguf
    import numpy as np

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name in names(count):
        writer.add_tensor_info(name, (SIDE, SIDE), np.dtype(np.float32), WEIGHT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 32 + count * WEIGHT)
    return path


def write_dcp(folder: Path, count: int) -> Path:
    """Write one file of tensors, each a zip file of ``torch.save``. They differ only in their offsets."""
    one = folder / "one.pt"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.empty(SIDE, SIDE), one)
    content, path = one.read_bytes(), folder / "__0_0.distcp"
    one.unlink()
    head, tail = content[:4096], content[WEIGHT:]
    with path.open("wb") as file:
        for number in range(count):
            file.seek(number * len(content))
            file.write(head)
            file.seek(number * len(content) + WEIGHT)
            file.write(tail)
    size, start = torch.Size([SIDE, SIDE]), torch.Size([0, 0])
    listing = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=torch.float32),
        size,
        [metadata.ChunkStorageMetadata(start, size)],
    )
    saved = metadata.Metadata(
        state_dict_metadata=dict.fromkeys(names(count), listing),
        planner_data={name: (name,) for name in names(count)},
        storage_data={
            metadata.MetadataIndex(name, start): filesystem._StorageInfo(
                path.name, number * len(content), len(content)
            )
            for number, name in enumerate(names(count))
        },
    )
    (folder / ".metadata").write_bytes(pickle.dumps(saved))
    return folder


WRITERS: dict[str, Callable[[Path, int], Path]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "sharded": write_sharded,
    "gguf": write_gguf,
    "dcp": write_dcp,
}
