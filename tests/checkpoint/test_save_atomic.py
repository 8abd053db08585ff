"""checkpoint.save leaves the new checkpoint or the old one after crashes, full disks and concurrent saves."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sample_loads import disk_in_memory
from torch import nn

import children
from dynswap_ext import checkpoint
from dynswap_ext.errors import ConfigError, SourceError

_BYTES = 3 * 1000 * 1000 * 4


def _model(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def _values(path: Path) -> set[float]:
    """Return the distinct values in a checkpoint of either kind: one if the checkpoint is complete."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            named = json.loads(index.read_text())["weight_map"]
            tensors = {key: load_file(path / name)[key] for key, name in named.items()}
        else:
            tensors = load_file(path / "model.safetensors")
    else:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert len(tensors) == 3
    return {value for tensor in tensors.values() for value in tensor.unique().tolist()}


def _crash(model: nn.Module, path: Path, shard: str | None, call: str, when: int) -> bool:
    """Save in a child that dies at the given call of a function of `os`. Return whether it finished."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            function, calls = getattr(os, call), []

            def die(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == when:
                    os._exit(9)
                return function(*args, **kwargs)

            setattr(os, call, die)
            checkpoint.save(model, path, max_shard_size=shard)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


_POINTS = [
    ("pwritev", 1),
    ("pwritev", 2),
    ("fsync", 1),
    ("fsync", 2),
    ("rename", 1),
    ("rename", 2),
    ("rename", 3),
    ("replace", 1),
    ("unlink", 1),
]


@pytest.mark.parametrize(("call", "when"), _POINTS)
@pytest.mark.parametrize("kind", ["file", "shards", "shards over a file", "file over shards", "torch"])
@pytest.mark.slow
def test_a_crash_leaves_a_whole_checkpoint(kind: str, call: str, when: int, tmp_path: Path) -> None:
    path = tmp_path / {"file": "model.safetensors", "torch": "model.pt"}.get(kind, "folder")
    before, after = {
        "shards": ("5MB", "5MB"),
        "shards over a file": (None, "5MB"),
        "file over shards": ("5MB", None),
    }.get(kind, (None, None))
    checkpoint.save(_model(1.0), path, max_shard_size=before)
    crashed = _crash(_model(2.0), path, after, call, when)
    found = _values(path)
    assert found in ({1.0}, {2.0})
    if crashed and call in ("pwritev", "rename"):
        assert found == {1.0}
    # The next save works, and removes what the crash has left.
    checkpoint.save(_model(3.0), path, max_shard_size=after)
    assert _values(path) == {3.0}
    files = [entry for entry in tmp_path.rglob("*") if entry.is_file()]
    assert len(files) == (4 if after else 1), files


def test_old_shards_go_and_other_files_stay(tmp_path: Path) -> None:
    checkpoint.save(_model(1.0), tmp_path, max_shard_size="5MB")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter-00001-of-00002.safetensors").write_bytes(b"somebody else's")
    checkpoint.save(_model(2.0), tmp_path, max_shard_size="9MB")
    named = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    others = {"config.json", "adapter-00001-of-00002.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in tmp_path.iterdir()} == named | others
    assert _values(tmp_path) == {2.0}


def test_an_index_that_names_files_elsewhere_removes_none(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    index = {"weight_map": {"a": "../precious", "b": str(tmp_path / "precious"), "c": 3, "d": ".."}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint.save(_model(1.0), folder)
    assert (tmp_path / "precious").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 10 MB in memory."""
    with disk_in_memory(tmp_path / "disk", "10000k") as folder:
        yield folder


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
def test_disk_that_is_too_small(name: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(
            SourceError, match=r"needs 11.\d+ MiB \(120\d{5} bytes\), and .* has .* bytes\) free; make room"
        ):
            checkpoint.save(_model(1.0), small_disk / name)
        assert list(small_disk.rglob("*")) == []
        # As if the disk had filled up after its free space was checked.
        monkeypatch.setattr("shutil.disk_usage", lambda _: os.terminal_size((1, 1)) and _Free())


class _Free:
    free = 1 << 40


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "folder"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT])
def test_error_in_the_middle(name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    checkpoint.save(_model(1.0), path)
    before = sorted(tmp_path.rglob("*"))

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SourceError, match=rf"{name}.*cannot be written.*{os.strerror(code)}"):
            checkpoint.save(_model(2.0), path)
    assert sorted(tmp_path.rglob("*")) == before and _values(path) == {1.0}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_limit_on_the_size_of_files(name: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, hard))
    try:
        with pytest.raises(SourceError, match=rf"{name} cannot be written"):
            checkpoint.save(_model(1.0), tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    script = f"""
import os, torch
from dynswap_ext import checkpoint
from dynswap_ext.errors import SourceError
os.setegid(65534); os.seteuid(65534)
try:
    checkpoint.save(torch.nn.Linear(2, 2), {str(folder / "w.safetensors")!r})
except SourceError as error:
    print(error)
"""
    if os.geteuid():
        pytest.skip("whoever may not become another user tests this by hand")
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    done = children.run(script)
    assert done.returncode == 0, done.stderr
    assert "w.safetensors cannot be written" in done.stdout and "check the permissions" in done.stdout
    assert list(folder.iterdir()) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    import fcntl

    held = tmp_path / ".model.dynswap-partial"
    held.mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another process is writing"):
            checkpoint.save(_model(1.0), tmp_path / "model.safetensors")
    finally:
        os.close(descriptor)
    checkpoint.save(_model(1.0), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real" / "w.safetensors")
    checkpoint.save(_model(1.0), tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert _values(tmp_path / "real" / "w.safetensors") == {1.0}


def test_files_are_not_cut_for_everybody_else(tmp_path: Path) -> None:
    umask: Callable[[int], Any] = os.umask
    old = umask(0o022)
    try:
        path = checkpoint.save(_model(1.0), tmp_path / "w.safetensors")
    finally:
        umask(old)
    assert path.stat().st_mode & 0o777 == 0o644
