"""Opens checkpoints of several files with an index: ``{"metadata": ..., "weight_map": {name: file}}``."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path

from dynswap_ext.checkpoint.formats.common import AGAIN, content_of, is_inside, parse_json, shown
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import SourceError

#: The most bytes of an index. It has a line for each tensor; the largest models have a hundred thousand.
_SIZE_LIMIT = 100_000_000


def joined(path: Path, format: str, parts: Mapping[Path, Checkpoint]) -> Checkpoint:
    """Return one checkpoint of several files, in which no two tensors have the same name.

    If files have different values for a key of the metadata, that of the first file is taken.
    """
    owners = {name: part for part in parts.values() for name in part.entries}
    return Checkpoint(
        path,
        format,
        entries={name: part.entries[name] for name, part in owners.items()},
        files=tuple(parts),
        tensor=lambda name: owners[name].tensor(name),
        metadata=dict(ChainMap(*(part.metadata for part in parts.values()))),
        objects=dict(ChainMap(*(part.objects for part in parts.values()))),
        versions=dict(ChainMap(*(dict(part.versions or {}) for part in parts.values()))) or None,
    )


def read_index(path: Path, open_shard: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Return the checkpoint of an index and its shards. SourceError unless both name the same tensors.

    All shards are opened here, because only their headers have the dtypes and shapes.
    """
    try:
        index = parse_json(content_of(path, _SIZE_LIMIT, "an index"))
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
        # The shard is in the index's own folder, perhaps as a link to a file elsewhere.
        if not isinstance(shard, str) or (shard not in by_shard and not is_inside(shard)):
            raise SourceError(
                f"{path} puts {shown(name)} into {shown(shard)}, which is not a file in the index's folder; "
                "put the shards next to the index and write their names alone into weight_map"
            )
        by_shard.setdefault(shard, set()).add(name)
    shards: dict[Path, Checkpoint] = {}
    for shard, names in sorted(by_shard.items()):
        if (file := path.parent / shard) in shards:
            raise SourceError(f"{path} names {file} in two ways; {AGAIN}")
        shards[file] = _open(path, file, open_shard, names)
    return joined(path, "sharded", shards)


def _open(path: Path, file: Path, open_shard: Callable[[Path], Checkpoint], names: set[str]) -> Checkpoint:
    """Open a shard. SourceError unless it has exactly the tensors that the index lists for it."""
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
        (f"in {file.name}, which does not have it", names - held - checkpoint.objects.keys()),
        (f"not in {file.name}, which has it", held - names),
    ):
        if wrong:
            more = f" ({len(wrong):,} such)" if len(wrong) > 1 else ""
            raise SourceError(
                f"{path} lists {shown(min(wrong))}{more} {problem}; the index and {file} are not of one "
                "save: download both again"
            )
    return checkpoint
