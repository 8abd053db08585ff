"""The file of the demo's weights: made when it is needed, and gone afterwards unless it is kept."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.progress import ProgressCallback, ProgressOption, shown
from dynswap_ext.checkpoint.save import write
from dynswap_ext.checkpoint.writing.layout import Piece, split
from dynswap_ext.checkpoint.writing.target import Target
from dynswap_ext.demo.model import Decoder, DecoderConfig
from dynswap_ext.errors import SourceError


def cache_folder() -> Path:
    """Return where checkpoints go if nothing else is said.

    It is not the temporary folder: that is memory on many systems, and nothing would come from a disk.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dynswap_ext")


@contextmanager
def checkpoint_file(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    keep: bool = False,
    progress: ProgressOption = False,
) -> Iterator[Path]:
    """Write random weights of a decoder to a safetensors file, and drop it from the page cache.

    Raises
    ------
    SourceError
        There is no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"demo-{config.hidden}x{config.layers}-{str(dtype).removeprefix('torch.')}.safetensors"
    path = folder / name
    if not path.exists():
        size, free = config.parameters * dtype.itemsize, shutil.disk_usage(folder).free
        if free < 1.1 * size:
            raise SourceError(
                f"the demo's checkpoint has {size:,} bytes and {folder} has {free:,} free; "
                "choose a smaller size or another folder"
            )
        with torch.device("meta"):
            skeleton = Decoder(config)
        with shown(progress, "writing the checkpoint") as tell:
            write_random(path, skeleton, dtype, tell)
    try:
        drop_file_cache(path)
        yield path
    finally:
        if not keep:
            path.unlink(missing_ok=True)


def write_random(
    path: Path, skeleton: nn.Module, dtype: torch.dtype, progress: ProgressCallback | None = None
) -> None:
    """Write random weights, always the same, for a model on the meta device to a safetensors file.

    Matrices are normal with variance 1/columns, so that activations keep their size; vectors are ones. A
    weight that is shared is written once, under its first name.
    """
    pieces = [
        Piece((name,), dtype, tuple(parameter.shape), partial(_fill, name, parameter.shape))
        for name, parameter in skeleton.named_parameters()
    ]
    target = Target(path.parent, path.stem, path, one_file=True)
    write(target, split(pieces, None, {}), progress)


def _fill(name: str, shape: torch.Size, first: int, into: Tensor) -> None:
    """Make the elements of a weight from number `first` on: the source of what is written."""
    if len(shape) < 2:
        into.fill_(1)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {first}".encode()))
    into.copy_(torch.randn(into.numel(), generator=generator).mul_(shape[-1] ** -0.5))
