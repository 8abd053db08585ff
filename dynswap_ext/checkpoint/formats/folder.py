"""What to open when a folder was named."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dynswap_ext.checkpoint.formats import dcp
from dynswap_ext.errors import SourceError

#: Best first: hubs keep the same weights as safetensors and as pickles, or as lossy conversions.
_TIERS = ((".safetensors",), (".bin", ".pt", ".pth"), (".gguf",))

#: What trainers write beside the weights.
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|random_states|rng_state)(_\d+)*\.(bin|pt|pth|safetensors)"
)
#: What each process of a distributed save in the safetensors format writes: a part of each tensor.
_PARTS = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def choose(path: Path) -> Path:
    """The one checkpoint in a folder: an index, a file, or the folder itself.

    Raises
    ------
    SourceError
        There is none, more than one, or one that was not finished. Names them.
    """
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
