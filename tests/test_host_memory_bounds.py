"""The bound `host_budget` ends with its install, and is adjusted when installs and models come and go."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import BudgetError, ConfigError, checkpoint
from dynswap_ext._installation import Installation
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.memory import format_bytes
from sample_host_memory import LAYER, cold, host_of, layers, run

#: Bytes for the buffers of copies to an accelerator.
STAGING = 64 << 20


def beside(provider: Provider, layers: float) -> int:
    """Return a budget with room for that many layers besides masters."""
    return int(layers * LAYER) + (0 if provider.device.type == "cpu" else STAGING)


@pytest.fixture
def mapped(provider: Provider, tmp_path: Path) -> nn.Module:
    """Return a model of 24 MiB in a file that is not in the page cache."""
    if not provider.native:
        pytest.skip("pure Python reads through mappings, whose cache is the system's")
    path = tmp_path / "model.safetensors"
    checkpoint.save(layers(), path)
    cold(path)
    model = checkpoint.load(layers, path)
    drop_file_cache(path)  # the system reads more than the header
    return model


def test_lazy_masters_take_nothing(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    handle = provider.install(model, dtype=torch.float32, host_budget="1GiB")
    assert host_of(handle).masters == sum(p.nbytes for p in model[0].parameters())


def test_storages_that_overlap_are_counted_once(provider: Provider) -> None:
    memory: npt.NDArray[np.float32] = np.ones((1024, 1024), dtype=np.float32)
    model = nn.Linear(1024, 1024, bias=False)
    model.weight.data = torch.from_numpy(memory)
    model.register_buffer("tail", torch.from_numpy(memory[1:]))
    handle = provider.install(model, dtype=torch.float32, host_budget=beside(provider, 1))
    assert host_of(handle).weights == LAYER


def test_a_refused_install_takes_no_room(provider: Provider, mapped: nn.Module) -> None:
    handle = provider.install(mapped, dtype=torch.float32, host_budget=beside(provider, 4))
    refused = layers(3)
    with pytest.raises(BudgetError):
        provider.install(refused, dtype=torch.float64, budget="1KB")
    run(provider, mapped)
    assert 2 * LAYER < host_of(handle).page_cache <= 4 * LAYER


def test_an_install_is_put_back_whatever_weights_take_by_then(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.save(layers(), path)
    model = checkpoint.load(layers, path)
    bound = beside(provider, 1)
    provider.install(model, dtype=torch.float32, host_budget=bound)
    other = layers(bound // LAYER + 1)
    taken = format_bytes(bound + LAYER)
    with pytest.warns(
        UserWarning, match=rf"in RAM take {taken} .* more than the {format_bytes(bound)} that host_budget="
    ):
        provider.install(other, dtype=torch.float32)
    begin = Installation.begin

    def fails(install: Installation, *arguments: nn.Module) -> None:
        begin(install, *arguments)  # type: ignore[arg-type]
        if install.options.prefetch == 1:
            raise RuntimeError("no more")

    monkeypatch.setattr(Installation, "begin", fails)
    with pytest.raises(RuntimeError, match="no more"):
        provider.install(model, dtype=torch.float32, prefetch=1)
    assert dynswap_ext.is_installed(model)
    run(provider, model, other)
    with pytest.raises(ConfigError, match=f"RAM .* take {taken}.*: give at least"):
        provider.install(model, dtype=torch.float32, host_budget=LAYER)


def test_a_bound_ends_with_its_model(provider: Provider, mapped: nn.Module) -> None:
    gone = nn.Linear(8, 8)
    kept = provider.install(gone, dtype=torch.float32, host_budget=beside(provider, 1))
    del gone
    assert not kept.active
    handle = provider.install(mapped, dtype=torch.float32, host_budget=beside(provider, 10))
    run(provider, mapped)
    assert host_of(handle).page_cache > 5 * LAYER


def test_a_bound_follows_masters_that_come_later(provider: Provider, mapped: nn.Module) -> None:
    handle = provider.install(mapped, dtype=torch.float32, host_budget=beside(provider, 4))
    some = layers(2).state_dict()
    mapped.load_state_dict(some, strict=False, assign=True)
    run(provider, mapped, passes=6)
    host = host_of(handle)
    assert host.masters == 2 * LAYER
    assert host.page_cache > 0
    assert host.limit is not None and host.total <= host.limit


NO_DIRECT_READS = """
import ctypes, errno, struct, sys, torch, dynswap_ext
from pathlib import Path
from torch import nn
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import disk_bytes_read

def no_direct_reads():
    load, equal, any_of, answer = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, RET|K
    program = [
        (load, 0, 0, 0), (equal, 0, 3, 257),       # openat
        (load, 0, 0, 32), (any_of, 0, 1, 0x4000),  # its flags: O_DIRECT
        (answer, 0, 0, 0x00050000 | errno.EINVAL), (answer, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0  # PR_SET_SECCOMP

no_direct_reads()
path = Path(sys.argv[1])
build = lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
model = checkpoint.load(build, path)
drop_file_cache(path)
handle = dynswap_ext.install(
    model, device="cpu", dtype=torch.float64, provider="native", host_budget=8 << 20
)
with torch.no_grad():
    for _ in range(4):
        before = disk_bytes_read()
        model(torch.zeros(1, 1024, dtype=torch.float64))
read, host = disk_bytes_read() - before, handle.report().host
assert 0 < host.page_cache <= 8 << 20, host
assert read >= 15 << 20, (read, host)  # so most of it did not stay in the cache
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows this machine's calls")
def test_a_bound_holds_where_direct_reads_are_refused(provider: Provider, tmp_path: Path) -> None:
    if provider.name != "native-host":
        pytest.skip("the process that it starts computes with the native provider, on the CPU")
    path = tmp_path / "model.safetensors"
    checkpoint.save(layers(), path)
    cold(path)
    command = [sys.executable, "-c", textwrap.dedent(NO_DIRECT_READS), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
