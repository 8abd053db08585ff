"""An interrupted conversion goes on later. After an error of disk or source, nothing wrong is left."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_loads import disk_in_memory

import children
from dynswap_ext import checkpoint, cli
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.testing import assert_bit_equal

pytestmark = pytest.mark.alone

direct: Any = sys.modules["dynswap_ext.checkpoint.writing.direct"]
_BLOCK = 4 << 20
_WHOLE = 12 * _BLOCK // 2  # bytes of the result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.safetensors"
    save_file({f"layers.{i}.weight": torch.randn(3, _BLOCK // 4) for i in range(4)}, path)  # 12 blocks
    return path


def _check(path: Path, source: Path) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in load_file(source).items()}
    files = [path]
    if path.suffix == ".json":
        files = sorted({path.parent / name for name in json.loads(path.read_text())["weight_map"].values()})
    assert_bit_equal({key: value for file in files for key, value in load_file(file).items()}, expected)
    assert not list(path.parent.glob(".*")) and len(list(path.parent.glob("model*"))) == len({*files, path})


class _Stop(Exception):
    pass


def _part(source: Path, destination: Path, stop_at: int = _WHOLE // 2, **options: Any) -> Path:
    """Convert a part of the source; return the folder that is left."""

    def progress(position: int, whole: int) -> None:
        assert whole == _WHOLE
        if position >= stop_at:
            raise _Stop

    with pytest.raises(_Stop):
        checkpoint.convert(source, destination, dtype=torch.bfloat16, progress=progress, **options)
    (left,) = (path for path in source.parent.rglob("*.dynswap-partial"))
    return left


kinds = pytest.mark.parametrize(
    ("name", "options"), [("model.safetensors", {}), ("folder", {"max_shard_size": "7MB"})]
)


@kinds
def test_goes_on_where_it_was(name: str, options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    _part(source, tmp_path / name, **options)
    seen: list[int] = []
    result = checkpoint.convert(
        source, tmp_path / name, dtype=torch.bfloat16, progress=lambda at, _: seen.append(at), **options
    )
    assert result.resumed_bytes >= _WHOLE // 2 and seen[0] == result.resumed_bytes and seen[-1] == _WHOLE
    # Each missing block was written once, and no other.
    assert len(seen) - 1 == (_WHOLE - result.resumed_bytes + _BLOCK // 2 - 1) // _BLOCK or name == "folder"
    _check(result.path, source)


@kinds
def test_killed(name: str, options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys, torch
from dynswap_ext import checkpoint
def progress(position, whole):
    if position >= whole // 2:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.convert(*sys.argv[1:], dtype=torch.bfloat16, progress=progress, **{options!r})
"""
    assert children.run(script, source, tmp_path / name).returncode == -signal.SIGKILL
    result = checkpoint.convert(source, tmp_path / name, dtype=torch.bfloat16, **options)
    # Blocks that were written after the last line of the journal are written again.
    assert _WHOLE // 2 - 5 * _BLOCK <= result.resumed_bytes < _WHOLE and result.resumed_bytes > 0
    _check(result.path, source)


def test_the_command_is_interrupted_and_goes_on(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "model.safetensors"
    code = "import dynswap_ext.cli as c, sys; sys.exit(c.main())"
    command = [sys.executable, "-c", code, "convert", str(source), str(destination), "--dtype", "bf16"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / ".model.dynswap-partial" / "journal"
    while running.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 1):
        time.sleep(0.001)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate()
    assert running.returncode in (0, 130)  # 0: it was done before the interrupt
    if running.returncode == 130:
        assert error == "dynswap: interrupted\n"
        assert cli.main(command[3:]) == 0
    _check(destination, source)


def test_shards_that_had_their_names_before_the_crash(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            replace: Any = lambda *_: os._exit(9)  # noqa: E731
            monkeypatch.setattr(os, "replace", replace)
            checkpoint.convert(source, tmp_path / "folder", dtype=torch.bfloat16, max_shard_size="7MB")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert list((tmp_path / "folder").glob("model-*"))
    result = checkpoint.convert(source, tmp_path / "folder", dtype=torch.bfloat16, max_shard_size="7MB")
    assert result.resumed_bytes == _WHOLE and result.files[0].name.startswith("model-00001-of-")
    _check(result.path, source)


@pytest.mark.parametrize("damage", ["bytes", "cut", "gone", "journal line", "journal block"])
def test_what_is_left_is_believed_only_by_its_checksum(damage: str, source: Path, tmp_path: Path) -> None:
    left = _part(source, tmp_path / "model.safetensors")
    file, journal = left / "00001.safetensors", left / "journal"
    if damage == "bytes":
        data = bytearray(file.read_bytes())
        data[4096 : 4096 + _WHOLE : 1000] = bytes(len(range(4096, 4096 + _WHOLE, 1000)))
        file.write_bytes(data)
    elif damage == "cut":
        os.truncate(file, 5000)
    elif damage == "gone":
        file.unlink()
    elif damage == "journal line":
        journal.write_bytes(journal.read_bytes()[:-5] + b"\n1 x 3\nnonsense\n1")
    else:
        with journal.open("a") as lines:
            lines.write("7 0 0\n0 99 0\n0 -1 0\n")
    result = checkpoint.convert(source, tmp_path / "model.safetensors", dtype=torch.bfloat16)
    assert (result.resumed_bytes == 0) == (damage in ("bytes", "cut", "gone"))
    _check(result.path, source)


def test_other_arguments_and_another_source_are_told_apart(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "model.safetensors"
    left = _part(source, destination)
    before = (left / "journal").read_bytes()
    for options in ({}, {"dtype": torch.float16}, {"dtype": torch.bfloat16, "rename": {"layers": "blocks"}}):
        with pytest.raises(
            ConfigError, match=r"dynswap-partial has a part .* delete the folder, or overwrite"
        ):
            checkpoint.convert(source, destination, **options)  # type: ignore[arg-type]
    os.utime(source, (1, 1))
    with pytest.raises(ConfigError, match="another source, one that has changed"):
        checkpoint.convert(source, destination, dtype=torch.bfloat16)
    assert (left / "journal").read_bytes() == before
    assert checkpoint.convert(source, destination, dtype=torch.bfloat16, overwrite=True).resumed_bytes == 0
    _check(destination, source)


def test_a_source_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    def progress(position: int, whole: int) -> None:
        os.utime(source, (1, position))

    with pytest.raises(SourceError, match=r"source\.safetensors has changed while it was converted"):
        checkpoint.convert(source, tmp_path / "model.safetensors", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_a_source_that_is_cut_meanwhile(source: Path, tmp_path: Path) -> None:
    def progress(position: int, whole: int) -> None:
        os.truncate(source, 1 << 20)

    with pytest.raises(SourceError, match=r"source\.safetensors is cut short"):
        checkpoint.convert(source, tmp_path / "model.safetensors", progress=progress)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_disk_that_does_not_keep_what_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = direct.DirectFile.write

    def flawed(self: Any, begin: int, count: int, buffer: Any) -> None:
        write(self, begin, count, buffer)
        if begin == 4096 + 3 * _BLOCK:
            os.pwrite(self.descriptor, buffer[:4096][::-1] if self._cached else _page(buffer), begin)

    def _page(buffer: Any) -> Any:
        page = mmap.mmap(-1, 4096)
        page[:] = buffer[:4096][::-1]
        return page

    with monkeypatch.context() as patch:
        patch.setattr(direct.DirectFile, "write", flawed)
        with pytest.raises(
            SourceError, match=r"does not keep what is written.*4,194,304 bytes at 12,587,008"
        ):
            checkpoint.convert(source, tmp_path / "model.safetensors", dtype=torch.bfloat16)
    assert not (tmp_path / "model.safetensors").exists()
    _check(checkpoint.convert(source, tmp_path / "model.safetensors", dtype=torch.bfloat16).path, source)


def test_an_error_in_the_middle_names_what_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = direct.DirectFile.write, []

    def full(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *arguments)

    destination = tmp_path / "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(direct.DirectFile, "write", full)
        with pytest.raises(
            SourceError, match=r"No space left.*needs 24 MiB .*free.*kept in .*dynswap-partial, and"
        ):
            checkpoint.convert(source, destination, dtype=torch.bfloat16)
    result = checkpoint.convert(source, destination, dtype=torch.bfloat16)
    assert result.resumed_bytes > 0
    _check(result.path, source)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 20 MB in memory."""
    with disk_in_memory(tmp_path / "disk", "20000k") as folder:
        yield folder


def test_a_disk_that_is_full_from_the_start(source: Path, small_disk: Path) -> None:
    with pytest.raises(SourceError, match=r"too full.*needs .* MiB \(251\d{5} bytes\), and .* has .* free"):
        checkpoint.convert(source, small_disk / "model.safetensors", dtype=torch.bfloat16)
    assert list(small_disk.iterdir()) == []


def test_file_systems_without_direct_reads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(descriptor, command, flags)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        result = checkpoint.convert(source, tmp_path / "model.safetensors", dtype=torch.bfloat16)
    _check(result.path, source)


def test_file_systems_that_refuse_each_direct_transfer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(call: Any) -> Any:
        def transfer(descriptor: int, views: Any, offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            done: int = call(descriptor, views, offset)
            return done

        return transfer

    with monkeypatch.context() as patch:
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        result = checkpoint.convert(source, tmp_path / "model.safetensors", dtype=torch.bfloat16)
    _check(result.path, source)
