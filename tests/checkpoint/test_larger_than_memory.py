"""A checkpoint file larger than RAM can be loaded, streamed, written to, summed up and converted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from sample_sparse import SIDE, WEIGHT, WRITERS, names, write_safetensors

import children
from dynswap_ext import _provider, checkpoint
from dynswap_ext.checkpoint.formats import file_mapping
from dynswap_ext.errors import SourceError

pytestmark = pytest.mark.slow

#: The number of weights that take a fifth more bytes than there are in RAM.
COUNT = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 6 // 5 // WEIGHT + 1

#: Loads argv[1], streams some of it, and prints the provider and by how many bytes its peak memory grew.
CHILD = f"""
import sys, torch, dynswap_ext
from dynswap_ext import checkpoint
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({SIDE}, {SIDE}, bias=False) for _ in range({COUNT}))

    def forward(self, x):
        return sum(layer(x) for layer in [*self.layers[::100], self.layers[-1]])

def memory(of):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(of))

torch.set_num_threads(1)
torch.ones(1, {SIDE}) @ torch.ones({SIDE}, 1)
before = memory("VmRSS")
model = checkpoint.load(Model, sys.argv[1])
with torch.no_grad(), dynswap_ext.install(model, device="cpu", budget="200MiB") as handle:
    x = torch.ones(1, {SIDE})
    assert model(x)[0, 7].item() == 3
    model.get_parameter("layers.0.weight")[7, 0] = 5  # copies the page, so the file does not change
    assert model(x)[0, 7].item() == 8
print(handle.provider, memory("VmHWM") - before)
"""


@pytest.fixture(scope="module", params=WRITERS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of zeros, except for a 3 in the last weight."""
    if request.param == "gguf":
        pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp(request.param)
    path = WRITERS[request.param](folder, COUNT)
    if sum(file.stat().st_blocks * 512 for file in folder.iterdir()) > 1 << 30:
        pytest.skip("this file system has no files with holes")
    last = checkpoint.open_checkpoint(path).entries[names(COUNT)[-1]]
    assert last.offset is not None
    with last.file.open("r+b") as file:
        file.seek(last.offset + 7 * SIDE * 4)
        file.write(torch.tensor(3.0).numpy().tobytes())
    return path


@pytest.mark.parametrize("backend", ["native", "python"])
def test_is_loaded_and_streamed_in_little_memory(large: Path, backend: str) -> None:
    if backend == "native" and _provider.native_unavailable(torch.device("cpu")):
        pytest.skip("the extension is not built")
    done = children.run(CHILD, large, env={**os.environ, "DYNSWAP_PROVIDER": backend})
    assert done.returncode == 0, done.stderr
    provider, grown = done.stdout.split()
    read_once = (COUNT // 100 + 2) * WEIGHT  # pure Python reads through the mapping, so its pages count
    assert provider == backend
    assert int(grown) < (400 << 20 if backend == "native" else read_once + (200 << 20))


def test_its_masters_can_be_written_to(large: Path) -> None:
    opened = checkpoint.open_checkpoint(large)
    last = opened[names(COUNT)[-1]]
    assert last[7, 0] == 3
    last[7, 0] = 4
    assert opened[names(COUNT)[-1]][7, 0] == 4
    assert checkpoint.open_checkpoint(large)[names(COUNT)[-1]][7, 0] == 3


def test_it_can_be_looked_at_converted_and_saved(large: Path, tmp_path: Path) -> None:
    last = names(COUNT)[-1]
    found = checkpoint.summary(large)
    assert found.total_bytes == COUNT * WEIGHT and found.smallest_budget < WEIGHT + (1 << 20)

    def only_last(name: str) -> str | None:
        return "weight" if name == last else None

    converted = tmp_path / "converted.safetensors"
    checkpoint.convert(large, converted, rename=only_last, dtype=torch.bfloat16)
    assert checkpoint.open_checkpoint(converted)["weight"][7, 0] == 3

    layer = checkpoint.load(lambda: torch.nn.Linear(SIDE, SIDE, bias=False), large, rename=only_last)
    checkpoint.save(layer, tmp_path / "saved.safetensors")
    assert checkpoint.verify(tmp_path / "saved.safetensors")
    assert checkpoint.open_checkpoint(tmp_path / "saved.safetensors")["weight"][7, 0] == 3


# ---- what the system may still refuse ----------------------------------------------------------------------

LIMITED = """
import resource, sys, torch
from dynswap_ext import checkpoint
from dynswap_ext.errors import SourceError
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint.load(torch.nn.Identity(), sys.argv[1], strict=False)
except SourceError as error:
    print(error)
"""


@pytest.mark.parametrize("format", WRITERS)
def test_a_limit_of_address_space_is_named(format: str, tmp_path: Path) -> None:
    if format == "gguf":
        pytest.importorskip("gguf")
    path = WRITERS[format](tmp_path, (40 << 30) // WEIGHT)

    def load(limit: int) -> str:
        done = children.run(LIMITED, path, limit)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = load(32 << 30)
    assert "40 GiB of address space" in said and "may have 32 GiB in all" in said
    assert "ulimit -v" in said and "download" not in said
    assert load(48 << 30) == ""  # it is mapped once


def test_the_other_limits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_safetensors(tmp_path, 1)
    monkeypatch.setattr(file_mapping, "_mapped", refuse)
    for setting, advice in {"2": "sysctl vm.overcommit_memory=0", "0": "vm.max_map_count"}.items():
        monkeypatch.setattr(file_mapping, "_read", lambda path, setting=setting: setting)
        with pytest.raises(SourceError, match=advice) as caught:
            checkpoint.open_checkpoint(path)
        assert str(path) in str(caught.value) and "download" not in str(caught.value)


def refuse(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
