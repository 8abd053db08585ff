"""Opens a checkpoint of any format: told apart by content, one file here for each."""

from __future__ import annotations

from pathlib import Path

from dynswap_ext.checkpoint.formats import dcp, folder, gguf, safetensors_file, sharded, torch_zip
from dynswap_ext.checkpoint.formats.common import AGAIN, opened, pread
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import SourceError

__all__ = ["open_checkpoint"]

#: How files begin that people take for checkpoints, and what to do with them.
_RELATED: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF", "an HDF5 file; convert it with safetensors.torch.save_file(tensors, path)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
    (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19",
        "a pickle in the format of torch before 1.6; rewrite it once with "
        "torch.save(torch.load(path, weights_only=True), new_path)",
    ),
)


def open_checkpoint(path: Path, *, weights_only: bool = True) -> Checkpoint:
    """Open a checkpoint; nothing is read but headers.

    Parameters
    ----------
    path
        A safetensors file, a zip file written by ``torch.save``, a GGUF file, an index of several such files
        (``*.index.json``), a folder that ``torch.distributed.checkpoint`` wrote, or a folder with one of the
        others in it. Files are told apart by content.
    weights_only
        False lets a pickle run code: only for files from somebody whose code you would run.

    Raises
    ------
    SourceError
        The file is not there, cut short, damaged, or of another format. Names file, key and remedy.
    """
    if _is_folder(path):
        path = folder.choose(path)
    if path.name == dcp.METADATA:
        path = path.parent
    if _is_folder(path):
        return dcp.DistributedCheckpoint(path, weights_only=weights_only)
    head = _head(path)
    if sharded.matches(head):
        return sharded.Sharded(path, lambda shard: _open_file(shard, _head(shard), weights_only))
    return _open_file(path, head, weights_only)


def _open_file(path: Path, head: bytes, weights_only: bool) -> Checkpoint:
    """A file that is a checkpoint by itself."""
    if path.suffix == ".distcp":
        raise SourceError(
            f"{path} is a part of a folder of torch.distributed.checkpoint; name the folder, {path.parent}"
        )
    if torch_zip.matches(head):
        return torch_zip.TorchZip(path, weights_only=weights_only)
    if gguf.matches(head):
        return gguf.GGUFFile(path)
    if safetensors_file.matches(head):
        return safetensors_file.SafetensorsFile(path)
    for start, meaning in _RELATED:
        if head.startswith(start):
            raise SourceError(f"{path} is {meaning}")
    if not head:
        raise SourceError(f"{path} is empty; {AGAIN}")
    if len(head) < 9:
        raise SourceError(
            f"{path} is cut short: it has {len(head)} bytes, no checkpoint is so small; {AGAIN}"
        )
    raise SourceError(
        f"{path} is neither a safetensors file, nor a zip file of torch.save, nor GGUF (it begins with "
        f"{head[:8]!r}); "
        "save the weights with safetensors.torch.save_file(model.state_dict(), path)"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False  # opening it says what is wrong


def _head(path: Path) -> bytes:
    with opened(path) as (descriptor, _):
        return pread(descriptor, 64, 0)
