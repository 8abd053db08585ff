"""checkpoint.load and files that are not what they should be: each error names the file and the remedy."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import children
from dynswap_ext import checkpoint
from dynswap_ext.errors import SourceError


def _model() -> nn.Module:
    return nn.Linear(64, 64)


def _raises(path: Path, pattern: str) -> None:
    with pytest.raises(SourceError, match=pattern) as caught:
        checkpoint.load(_model, path)
    assert str(path) in str(caught.value)


@pytest.fixture
def safetensors_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(_model().state_dict(), path)
    return path


@pytest.fixture
def torch_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(_model().state_dict(), path)
    return path


def test_not_there_suggests_a_neighbour(safetensors_file: Path) -> None:
    _raises(safetensors_file.with_name("modle.safetensors"), r"no such file.*did you mean model\.safetensors")
    _raises(safetensors_file.parent / "nowhere" / "model.safetensors", "nor is there a folder")


def test_folder_with_one_checkpoint(safetensors_file: Path) -> None:
    loaded = checkpoint.load(_model, safetensors_file.parent)
    assert set(checkpoint.load(_model, safetensors_file).state_dict()) == set(loaded.state_dict())


class TestNotAFile:
    """Paths that exist but cannot be mapped. None of them may block."""

    def test_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        _raises(tmp_path / "pipe", "a device or a pipe, not a file that can be mapped; copy its content")

    def test_device(self) -> None:
        _raises(Path("/dev/zero"), "a device or a pipe, not a file")

    def test_socket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            _raises(Path("socket"), "cannot be read")

    def test_links_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        _raises(tmp_path / "a", "symbolic link that leads back to itself; link it to the file again")

    def test_link_to_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("blobs/0")
        _raises(tmp_path / "a", "no such file.*a link to blobs/0, which does not exist")

    def test_below_a_file(self, safetensors_file: Path) -> None:
        _raises(safetensors_file / "weights", "cannot be read: Not a directory")

    def test_name_that_is_too_long(self, tmp_path: Path) -> None:
        _raises(tmp_path / ("x" * 300), "cannot be read: File name too long")

    def test_name_with_a_nul(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"is no file name.*correct the name"):
            checkpoint.load(_model, tmp_path / "a\0b")

    @pytest.mark.parametrize("what", ["file", "folder"])
    def test_no_permission(self, what: str, reachable: Path) -> None:
        save_file(_model().state_dict(), reachable / "w")
        locked = reachable / "w" if what == "file" else reachable
        locked.chmod(0)
        asked = children.run(_AS_NOBODY, locked)
        assert f"{locked} cannot be read: Permission denied; check its permissions" in asked.stdout


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Yield a folder that other users can reach, which tmp_path is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


#: Permissions do not stop root, so this process gives up its rights after its imports.
_AS_NOBODY = """
import os, sys
from pathlib import Path
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.errors import SourceError
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    open_checkpoint(Path(sys.argv[1]))
except SourceError as error:
    print(error)
"""


@pytest.mark.parametrize("kept", [1, 4, 5, 8, 40, 100, 8192, -1])
def test_cut_safetensors(safetensors_file: Path, kept: int) -> None:
    safetensors_file.write_bytes(safetensors_file.read_bytes()[:kept])
    _raises(safetensors_file, "cut short.*download or copy it again")
    if kept > 8 or kept == -1:
        _raises(safetensors_file, r"cut short.*needs .*\d+ bytes\)?, the file has .*\d+ bytes")


@pytest.mark.parametrize("kept", [4, 100, 8192, -1])
def test_cut_torch_file(torch_file: Path, kept: int) -> None:
    torch_file.write_bytes(torch_file.read_bytes()[:kept])
    _raises(torch_file, "cut short.*download or copy it again")


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    _raises(tmp_path / "empty", "is empty")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"hello, this is no checkpoint", "neither"),
        (b"PK\x03\x04 but nothing of a zip file", "cut short"),
    ],
)
def test_other_formats(content: bytes, pattern: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    _raises(tmp_path / "file", pattern)


class TestTorchFiles:
    def test_format_before_zip_files(self, tmp_path: Path) -> None:
        torch.save(_model().state_dict(), tmp_path / "w", _use_new_zipfile_serialization=False)
        _raises(tmp_path / "w", r"before 1\.6; rewrite it once")

    def test_two_state_dicts_are_ambiguous(self, tmp_path: Path) -> None:
        torch.save({"model": _model().state_dict(), "ema": _model().state_dict()}, tmp_path / "w")
        _raises(tmp_path / "w", r"2 state dicts \(model, ema\)")

    def test_no_state_dict(self, tmp_path: Path) -> None:
        torch.save([1, 2], tmp_path / "w")
        _raises(tmp_path / "w", "no state dict.*list")

    def test_a_whole_module_is_not_unpickled(self, tmp_path: Path) -> None:
        torch.save(_model(), tmp_path / "w")
        _raises(tmp_path / "w", r"more than tensors.*torch\.save\(model\.state_dict\(\)")
