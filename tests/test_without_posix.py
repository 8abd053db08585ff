"""The pure-Python provider without POSIX: a process on Linux in which what Windows lacks is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dynswap_ext
from dynswap_ext._util import warn

# Torch and the standard library need POSIX on Linux, so they are imported before anything is removed.
WITHOUT_POSIX = """
import ctypes, importlib.abc, mmap, os, pathlib, struct, sys
import safetensors.torch, torch

MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
FUNCTIONS = '''
    fdatasync fork forkpty getpgid getuid geteuid major minor memfd_create mkfifo pread preadv pwrite pwritev
    posix_fadvise posix_fallocate register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile
    statvfs sysconf uname wait O_CLOEXEC O_DIRECT O_NOCTTY O_NONBLOCK O_SYNC
'''

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in MODULES:
    sys.modules.pop(name, None)
for name in FUNCTIONS.split():
    delattr(os, name)
for name in dir(mmap):
    if name.startswith(("MAP_", "PROT_", "MADV_")):
        delattr(mmap, name)

def load(name, *args, library=ctypes.CDLL, **kwargs):
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    return library(name, *args, **kwargs)

def read_text(path, *args, read=pathlib.Path.read_text, **kwargs):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return read(path, *args, **kwargs)

class Kernel32:
    def GlobalMemoryStatusEx(self, status):
        memory = (ctypes.c_char * 64).from_address(ctypes.addressof(status._obj))
        if struct.unpack_from("=I", memory)[0] != len(memory):
            return 0
        struct.pack_into("=IQQ", memory, 4, 25, 16 << 30, 12 << 30)  # load, all, free
        return 1

class Libraries:
    kernel32 = Kernel32()

ctypes.CDLL, ctypes.windll, pathlib.Path.read_text = load, Libraries, read_text
sys.platform = "win32"
"""

USE = """
import dynswap_ext
from dynswap_ext import checkpoint
from dynswap_ext._util.memory import all_bytes, free_bytes
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        for layer in self.layers:
            x = layer(x).relu()
        return x

path, x = sys.argv[1], torch.linspace(0, 1, 256, dtype=torch.float64)
plain = Model()
plain.load_state_dict(safetensors.torch.load_file(path))
plain.double()
model = checkpoint.load(Model, path)
with dynswap_ext.install(model, device="cpu", dtype=torch.float64, budget=2 << 20) as handle:
    assert handle.provider == "python", handle
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    assert handle.stats().bytes_moved > 0, handle.stats()
    for each in (model, plain):
        each.layers[0].weight.data.mul_(0.5)
    assert torch.equal(model(x), plain(x))
assert torch.equal(model.seen, torch.tensor([4.0])), model.seen
assert (all_bytes(torch.device("cpu")), free_bytes(torch.device("cpu"))) == (16 << 30, 12 << 30)
try:
    checkpoint.save(model, path + ".copy.safetensors")
except dynswap_ext.errors.ConfigError as error:
    assert "on Linux only" in str(error), error
else:
    raise AssertionError("it was saved")
print("used")
"""


def test_a_warning_is_of_the_callers_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the package are known by their folder, also where folders end in a backslash."""
    monkeypatch.setattr(os, "sep", "\\")
    package, source = Path(dynswap_ext.__file__).parent, Path(warn.__file__).read_text()
    names: dict[str, Any] = {"__file__": warn.__file__, "__name__": "warn"}
    exec(compile(source, rf"{package}\_util\warn.py", "exec"), names)
    exec(compile("frame = caller()", rf"{package}\install.py", "exec"), names)
    assert names["frame"].f_code.co_filename == __file__


def test_a_checkpoint_is_opened_installed_and_run(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes = {"weight": (256, 256), "bias": (256,)}
    layers = {
        f"layers.{i}.{name}": torch.randn(shape) / 16 for i in range(6) for name, shape in shapes.items()
    }
    save_file({**layers, "seen": torch.zeros(1)}, path)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + USE, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "DYNSWAP_PROVIDER": "python"},
    )
    assert (done.returncode, done.stdout) == (0, "used\n"), done.stderr
    assert path.read_bytes() == before  # mapped copy-on-write
