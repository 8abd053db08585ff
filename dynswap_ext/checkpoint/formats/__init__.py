"""Opens a checkpoint of any format, which its content shows; each format has a file here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dynswap_ext.checkpoint.formats import dcp, gguf, safetensors_file, sharded, torch_zip
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
        others in it. The content of a file shows its format.
    weights_only
        False lets a pickle run code: only for files from people whose code you would run.

    Raises
    ------
    SourceError
        The file is not there, cut short, damaged, or of another format. Names file, key and remedy.
    """
    if os.path.isdir(path):
        path = _choose(path)
    if path.name == dcp.METADATA:
        path = path.parent
    if os.path.isdir(path):
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
        "save the model with dynswap_ext.checkpoint.save(model, path)"
    )


def _head(path: Path) -> bytes:
    with opened(path) as (descriptor, _):
        return pread(descriptor, 64, 0)


# ---- folders -----------------------------------------------------------------------------------------------

#: Best first: hubs keep the same weights as safetensors and as pickles, or as lossy conversions.
_TIERS = ((".safetensors",), (".bin", ".pt", ".pth"), (".gguf",))

#: What trainers write next to the weights.
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|random_states|rng_state)(_\d+)*\.(bin|pt|pth|safetensors)"
)
#: What each process of a distributed save in the safetensors format writes: a part of each tensor.
_PARTS = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def _choose(path: Path) -> Path:
    """Return the one checkpoint in a folder: an index, a file, or the folder itself."""
    try:
        names = sorted(os.listdir(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path} cannot be read: {reason}; check its permissions") from error
    if dcp.METADATA in names:
        return path
    if any(name.endswith(".distcp") for name in names):
        raise SourceError(
            f"{path} has files of torch.distributed.checkpoint and no {dcp.METADATA}, which is written last: "
            "the save did not finish, or the file was not copied; copy it too, or take an earlier checkpoint"
        )
    for suffix in ("safetensors.index.json", "index.json"):
        if found := [name for name in names if name.endswith(f".{suffix}")]:
            return _only(path, found, "indexes")
    if any(_PARTS.fullmatch(name) for name in names):
        raise SourceError(
            f"{path} has parts of tensors, one file for each process that saved; join them "
            "with consolidate_safetensors_files of torch.distributed.checkpoint, or save with "
            "HuggingFaceStorageWriter(..., enable_consolidation=True)"
        )
    weights = [name for name in names if not _NO_WEIGHTS.fullmatch(name)]
    for tier in _TIERS:
        if found := [name for name in weights if name.endswith(tier)]:
            return _only(path, found, "checkpoints")
    shown = f"it has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "it is empty"
    raise SourceError(
        f"{path} is a folder without a checkpoint ({shown}); name the file or folder that has it"
    )


def _only(path: Path, found: list[str], what: str) -> Path:
    if len(found) == 1:
        return path / found[0]
    listed = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "")
    raise SourceError(f"{path} has {len(found)} {what} ({listed}); name the one that is meant")
