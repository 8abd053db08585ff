"""Opens checkpoints of any format. The content of a file shows its format. Each format has a module here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dynswap_ext._util.listing import listed
from dynswap_ext.checkpoint.formats.common import AGAIN, opened, pread
from dynswap_ext.checkpoint.formats.dcp import METADATA, read_distributed
from dynswap_ext.checkpoint.formats.gguf import read_gguf
from dynswap_ext.checkpoint.formats.safetensors_file import read_safetensors
from dynswap_ext.checkpoint.formats.sharded import read_index
from dynswap_ext.checkpoint.formats.torch_zip import read_torch
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import SourceError

#: The first bytes of files that people take for checkpoints, and what to do with such a file.
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
    """Open a checkpoint, and read only its headers.

    Parameters
    ----------
    path
        A safetensors file, a zip file written by ``torch.save``, a GGUF file, an index of several such files
        (``*.index.json``), a folder that ``torch.distributed.checkpoint`` wrote, or a folder that contains
        one of these files. The format is recognised by the content of the file.
    weights_only
        False lets a pickle run code: only for files from people whose code you would run.

    Raises
    ------
    SourceError
        The file does not exist, is cut short, damaged, or of another format; or a folder has several
        checkpoints. Names file, key and remedy.
    """
    if os.path.isdir(path):
        path = _choose(path)
    if path.name == METADATA:
        return read_distributed(path.parent, weights_only)
    head = _head(path)
    if head.lstrip()[:1] == b"{" and b"\0" not in head:
        return read_index(path, lambda shard: _open_file(shard, _head(shard), weights_only))
    return _open_file(path, head, weights_only)


def _head(path: Path) -> bytes:
    with opened(path) as (descriptor, _):
        return pread(descriptor, 64, 0)


def _open_file(path: Path, head: bytes, weights_only: bool) -> Checkpoint:
    """Open a file that is no index, by its first bytes (`head`)."""
    if path.suffix == ".distcp":
        raise SourceError(
            f"{path} is a part of a folder of torch.distributed.checkpoint; name the folder, {path.parent}"
        )
    if head.startswith(b"PK\x03\x04"):
        return read_torch(path, weights_only)
    if head.startswith(b"GGUF"):
        return read_gguf(path)
    if head[8:9] == b"{":
        return read_safetensors(path)
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
        f"{head[:8]!r}); save the model with dynswap_ext.checkpoint.save(model, path)"
    )


# ---- folders -----------------------------------------------------------------------------------------------

#: Suffixes of checkpoints, the preferred ones first: hubs keep the same weights as safetensors, as pickles,
#: and as lossy conversions.
_TIERS = ((".safetensors",), (".bin", ".pt", ".pth"), (".gguf",))

#: Names of files that trainers write next to the weights.
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|random_states|rng_state)(_\d+)*\.(bin|pt|pth|safetensors)"
)
#: Names of files in which the processes of a distributed save each write their part of every tensor.
_PARTS = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def _choose(path: Path) -> Path:
    """Return the file by which the checkpoint in a folder is opened. SourceError if there is not just one."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    if METADATA in names:
        return path / METADATA
    if any(name.endswith(".distcp") for name in names):
        raise SourceError(
            f"{path} has files of torch.distributed.checkpoint and no {METADATA}, which is written last: "
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
    has = f"it has {listed(names, 5)}" if names else "it is empty"
    raise SourceError(f"{path} is a folder without a checkpoint ({has}); name the file or folder that has it")


def _only(path: Path, found: list[str], what: str) -> Path:
    if len(found) == 1:
        return path / found[0]
    raise SourceError(f"{path} has {len(found)} {what} ({listed(found, 20)}); name the one that is meant")
