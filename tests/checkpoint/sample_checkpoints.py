"""Small checkpoints of each format, made by their own libraries, for the tests that damage them."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dynswap_ext.checkpoint import convert
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import SourceError


@dataclass(frozen=True)
class Sample:
    """A checkpoint: the path that is opened, and the file of it that a test damages."""

    opened: Path
    damaged: Path


def state() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(12.0).reshape(4, 3),
        "layer.bias": torch.arange(4, dtype=torch.int16),
        "scale": torch.tensor(0.5),
    }


def make_safetensors(folder: Path) -> Sample:
    path = folder / "model.safetensors"
    save_file(state(), path, metadata={"format": "pt"})
    return Sample(path, path)


def make_torch(folder: Path) -> Sample:
    path = folder / "model.pt"
    torch.save({"model": state(), "epoch": 3}, path)
    return Sample(path, path)


def make_index(folder: Path) -> Sample:
    return Sample(folder, write_sharded(folder))


def write_sharded(folder: Path, suffix: str = "safetensors") -> Path:
    """Write an index and a file for each tensor, as hubs have them. Return the index."""
    names = {name: f"model-{number:05}-of-00003.{suffix}" for number, name in enumerate(state(), 1)}
    for name, file in names.items():
        tensors = {name: state()[name]}
        if suffix == "safetensors":
            save_file(tensors, folder / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / file)
    return write_index(folder / f"model.{suffix}.index.json", names)


def write_index(path: Path, weight_map: Any) -> Path:
    path.write_text(json.dumps({"metadata": {"total_size": 60}, "weight_map": weight_map}))
    return path


def save_distributed(content: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no process group
        dcp.save(content, checkpoint_id=folder, **options)
    return folder


def make_dcp_metadata(folder: Path) -> Sample:
    save_distributed({"model": state(), "step": torch.tensor(3)}, folder)
    return Sample(folder, folder / ".metadata")


def make_dcp_items(folder: Path) -> Sample:
    save_distributed({"model": state()}, folder)
    return Sample(folder, folder / "__0_0.distcp")


def make_gguf(folder: Path) -> Sample:
    from sample_gguf import random_weight, write_gguf

    tensors = {"a.weight": random_weight("Q4_K", 4, 256), "a.bias": torch.ones(4)}
    path = write_gguf(folder / "model.gguf", tensors, values={"x.words": ["one", "two"]})
    return Sample(path, path)


def make_lossless(folder: Path) -> Sample:
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {"a.weight": torch.randn(40, 60, generator=generator).bfloat16(), **state()}
    save_file(weights, folder / "plain.safetensors")
    convert(folder / "plain.safetensors", path, lossless=True)
    return Sample(path, path)


SAMPLES = {
    "safetensors": make_safetensors,
    "lossless": make_lossless,
    "torch": make_torch,
    "index": make_index,
    "dcp-metadata": make_dcp_metadata,
    "dcp-items": make_dcp_items,
    "gguf": make_gguf,
}


def look(path: Path) -> Checkpoint | None:
    """Open a checkpoint, and check the shape and the ends of each tensor.

    Return None after a SourceError, which has to name the file.
    """
    try:
        checkpoint = open_checkpoint(path)
        for name, entry in checkpoint.entries.items():
            tensor = checkpoint[name]
            assert tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
                for end in (0, -1):  # a read of missing memory ends the process
                    assert tensor[(end,) * tensor.dim()].clone().dim() == 0
    except SourceError as error:
        assert str(path) in str(error) and len(str(error)) < 4000, error
        return None
    return checkpoint


def refused(path: Path, pattern: str, **options: Any) -> None:
    """Assert that a path cannot be opened, and that the error names it and matches `pattern`."""
    try:
        open_checkpoint(path, **options)
    except SourceError as error:
        text = str(error)
    else:
        raise AssertionError(f"{path} can be opened")
    assert str(path) in text and len(text) < 1000 and re.search(pattern, text), text


class Canary:
    """Makes a folder when it is unpickled, which shows that code has run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint[name] for name in checkpoint.entries}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name
