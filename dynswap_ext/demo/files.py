"""The file of the demo's weights: made when it is needed, and gone afterwards unless it is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dynswap_ext.demo.measure import drop_file_cache
from dynswap_ext.demo.model import Decoder, DecoderConfig
from dynswap_ext.demo.weights import write_random
from dynswap_ext.errors import SourceError


class Watcher:
    """Told what goes on; the command line's draws progress bars."""

    def begin(self, what: str, total: int) -> None:
        """A piece of work with `total` steps begins."""

    def step(self, count: int = 1) -> None:
        """So many steps of it are done."""


def cache_folder() -> Path:
    """Where checkpoints go if nothing else is said.

    It is not the temporary folder: that is memory on many systems, and nothing would come from a disk.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dynswap_ext")


@contextmanager
def checkpoint_file(
    folder: Path, config: DecoderConfig, dtype: torch.dtype, watcher: Watcher, *, keep: bool
) -> Iterator[Path]:
    """Random weights for a decoder in a safetensors file, with none of it in the page cache.

    Raises
    ------
    SourceError
        There is no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = config.parameters * dtype.itemsize
    name = f"demo-{config.hidden}x{config.layers}-{str(dtype).removeprefix('torch.')}.safetensors"
    path = folder / name
    if not path.exists():
        free = shutil.disk_usage(folder).free
        if free < 1.1 * size:
            raise SourceError(
                f"the demo's checkpoint has {size:,} bytes and {folder} has {free:,} free; "
                "choose a smaller size or another folder"
            )
        with torch.device("meta"):
            skeleton = Decoder(config)
        watcher.begin("writing the checkpoint", size)
        write_random(path, skeleton, dtype, progress=watcher.step)
    try:
        drop_file_cache(path)
        yield path
    finally:
        if not keep:
            path.unlink(missing_ok=True)
