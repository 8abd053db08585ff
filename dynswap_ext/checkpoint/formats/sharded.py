"""Checkpoints in several files, with an index: ``{"metadata": ..., "weight_map": {name: file}}``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, is_inside, opened, parse_json, pread, shown
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: An index has a line for each tensor; the largest models have a hundred thousand.
_SIZE_LIMIT = 100_000_000

#: What opens one shard.
Open = Callable[[Path], Checkpoint]


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be an index."""
    return head.lstrip()[:1] == b"{" and b"\0" not in head


class Sharded(Checkpoint):
    """An index and its shards, which have to hold what it says: no tensor less and no tensor more.

    The shards are opened at once: only their headers say what the tensors are.
    """

    format = "sharded"

    def __init__(self, path: Path, open_shard: Open) -> None:
        by_shard = _read_index(path)
        self._shards: dict[str, Checkpoint] = {}
        entries: dict[str, Entry] = {}
        objects: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        versions: dict[str, Any] = {}
        for shard, names in by_shard.items():
            checkpoint = _open(path, shard, open_shard, names)
            self._shards.update(dict.fromkeys(checkpoint.entries, checkpoint))
            entries.update(checkpoint.entries)
            objects.update(checkpoint.objects)
            metadata = {**checkpoint.metadata, **metadata}
            versions = {**(checkpoint.versions or {}), **versions}
        super().__init__(
            path,
            entries,
            files=tuple(path.parent / shard for shard in by_shard),
            metadata=metadata,
            objects=objects,
            versions=versions or None,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._shards[name].tensor(name)


def _read_index(path: Path) -> dict[str, set[str]]:
    """The shards in the order of their names, each with the names that it should hold."""
    with opened(path) as (descriptor, size):
        if size > _SIZE_LIMIT:
            raise SourceError(f"{path} has {size:,} bytes, an index at most {_SIZE_LIMIT:,}; {AGAIN}")
        data = pread(descriptor, size, 0)
    try:
        index = parse_json(data)
    except ValueError as error:
        raise SourceError(f"{path} is no index of shards, or a damaged one: {error}; {AGAIN}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        has = shown(list(index)) if isinstance(index, dict) else f"a {type(index).__name__}"
        raise SourceError(
            f"{path} is no index of shards: it has {has}, expected an object with a weight_map of names and "
            f"files; name the checkpoint itself, or {AGAIN}"
        )
    by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A file of the index's own folder, which may be a link to a file elsewhere.
        if not isinstance(shard, str) or (shard not in by_shard and not is_inside(shard)):
            raise SourceError(
                f"{path} puts {shown(name)} into {shown(shard)}, which is not a file in the index's folder; "
                "put the shards next to the index and write their names alone into weight_map"
            )
        by_shard.setdefault(shard, set()).add(name)
    return {shard: by_shard[shard] for shard in sorted(by_shard)}


def _open(path: Path, shard: str, open_shard: Open, names: set[str]) -> Checkpoint:
    """Open a shard, and check that it holds what the index lists."""
    file = path.parent / shard
    if not os.path.lexists(file):
        raise SourceError(
            f"{path} lists {len(names):,} tensors in {file}, and there is no such file; download that shard "
            "too, or the whole folder again"
        )
    try:
        checkpoint = open_shard(file)
    except SourceError as error:
        raise SourceError(f"a shard of {path} cannot be used: {error}") from error
    held = checkpoint.entries.keys()
    for problem, wrong in (
        (f"in {shard}, which does not have it", names - held - checkpoint.objects.keys()),
        (f"not in {shard}, which has it", held - names),
    ):
        if wrong:
            more = f" ({len(wrong):,} such)" if len(wrong) > 1 else ""
            raise SourceError(
                f"{path} lists {shown(min(wrong))}{more} {problem}; the index and {file} are not of one "
                "save: download both again"
            )
    return checkpoint
