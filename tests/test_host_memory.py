"""The RAM of the host that the weights of all installed models take, and the bound `host_budget`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import ConfigError, ShortfallError, checkpoint
from dynswap_ext._util.memory import format_bytes
from sample_host_memory import LAYER, LAYERS, host_of, layers, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint of 24 MiB."""
    path = tmp_path / "model.safetensors"
    checkpoint.save(layers(), path)
    return path


def staging(provider: Provider) -> int:
    """Return the bytes of the buffers that an install may need for copies to a device."""
    return 64 << 20 if provider.device.type != "cpu" and provider.native else 0


def test_the_masters_of_all_installed_models_are_counted_once(provider: Provider, path: Path) -> None:
    mapped, in_ram = checkpoint.load(layers, path), layers(2)
    tied = nn.Sequential(in_ram[0], nn.Linear(8, 8))
    handle = provider.install([mapped, in_ram], dtype=torch.float32)
    other = provider.install(tied[1], dtype=torch.float32)
    small = sum(p.nbytes for p in tied[1].parameters())
    for host in (host_of(handle), host_of(other)):
        assert host.masters == 2 * LAYER + small
        assert host.weights == (LAYERS + 2) * LAYER + small
        assert host.limit is None
    other.uninstall()
    assert host_of(handle).masters == 2 * LAYER
    assert f"{format_bytes(2 * LAYER)} of masters" in handle.report().text(width=200)
    handle.uninstall()
    assert host_of(handle).weights == 0


def test_written_pages_of_a_file_are_ram(provider: Provider, path: Path) -> None:
    model = checkpoint.load(layers, path)
    bound = 2 * LAYER + (200 << 20)  # with buffers for copies to a device
    handle = provider.install(model, dtype=torch.float32, host_budget=bound)
    run(provider, model)
    assert host_of(handle).written == 0
    with torch.no_grad():
        list(model.parameters())[1].add_(1)
    written = host_of(handle).written
    assert LAYER <= written <= LAYER + (1 << 20)
    assert host_of(handle).masters == 0


def test_a_bound_that_is_exceeded_is_told(provider: Provider, path: Path) -> None:
    model = checkpoint.load(layers, path)
    handle = provider.install(model, dtype=torch.float64, host_budget=2 * LAYER + staging(provider))
    with torch.no_grad():
        for parameter in list(model.parameters()):
            parameter.add_(1)
    with torch.no_grad():
        model(provider.randn(1, 1024))
    with pytest.raises(ShortfallError, match=r"more of the host's RAM than host_budget= allows: .*written"):
        handle.check()


def test_a_page_cache_that_fills_the_bound_gives_way(provider: Provider, path: Path, tmp_path: Path) -> None:
    """It has what was left of the bound; what is written later comes on top, and the system makes room."""
    if provider.device.type != "cpu":
        pytest.skip("saved tensors are page-locked there, and fill no page cache")
    model = checkpoint.load(layers, path)
    bound = LAYER + (1 << 20)
    handle = provider.offload(model, "1MiB", activations_folder=tmp_path, host_budget=bound, prefetch=0)
    x = torch.randn(2048, 1024)
    for _ in range(2):
        model(x).square().mean().backward()
    with torch.no_grad():
        list(model.parameters())[1].add_(1)
    host = host_of(handle)
    assert 0 < host.page_cache <= bound < host.total
    assert host.written >= LAYER
    handle.check(stalled=None)


def test_masters_that_take_more_are_refused(provider: Provider, path: Path) -> None:
    earlier = layers(2)
    before = provider.install(earlier, dtype=torch.float32)
    model = layers(1)
    least = format_bytes(3 * LAYER + staging(provider))
    with pytest.raises(
        ConfigError, match=rf"host_budget is 8 MiB, .*give at least {least} .*from_pretrained"
    ):
        provider.install(model, dtype=torch.float32, host_budget=2 * LAYER)
    assert type(model) is nn.Sequential and before.active
    mapped = checkpoint.load(layers, path)
    provider.install(mapped, dtype=torch.float32, host_budget=2 * LAYER + staging(provider))
    run(provider, mapped, earlier)


def test_a_bound_holds_for_installs_that_come_later(provider: Provider, path: Path) -> None:
    if not provider.native:
        pytest.skip("pure Python reads through mappings, whose cache is the system's")
    mapped = checkpoint.load(layers, path)
    bound = 4 * LAYER + staging(provider)
    handle = provider.install(mapped, dtype=torch.float32, host_budget=bound)
    other = layers(3)
    second = provider.install(other, dtype=torch.float32)
    run(provider, mapped, other)
    host = host_of(handle)
    assert host.masters == 3 * LAYER
    assert host.limit == bound
    assert host.total <= bound
    assert host_of(second).total == host.total
    second.uninstall()
    run(provider, mapped)
    assert host_of(handle).total <= bound


def test_minimum_takes_nothing_beside_masters(provider: Provider, path: Path) -> None:
    mapped, in_ram = checkpoint.load(layers, path), layers(2)
    handle = provider.install([mapped, in_ram], dtype=torch.float32, host_budget="minimum")
    run(provider, mapped, in_ram)
    host = host_of(handle)
    assert (host.copies, host.page_cache, host.locked) == (0, 0, 0)
    assert host.total == host.masters + host.staging


def pss() -> int:
    """Return the memory of this process, in bytes. Memory that it shares counts in part."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    pytest.skip("this system does not tell the memory of a process")


@pytest.mark.alone
@pytest.mark.parametrize("place", ["file", "RAM"])
def test_a_model_is_in_memory_once(provider: Provider, tmp_path: Path, place: str) -> None:
    if place == "file" and not provider.native:
        pytest.skip("pure Python reads through mappings, whose pages count while the system keeps them")

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(32)))

    path = tmp_path / "model.safetensors"
    checkpoint.save(build(), path)
    layers(1).to(provider.device)(provider.randn(1, 1024, dtype=torch.float32))  # lets torch set up
    before = pss()
    model = checkpoint.load(build, path) if place == "file" else build()
    weights = sum(p.nbytes for p in model.parameters())
    handle = provider.install(model, dtype=torch.float32, budget=64 << 20)
    x = provider.randn(1, 2048, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    assert handle.stats().bytes_moved > 3 * weights
    host = host_of(handle)
    masters = weights if place == "RAM" else 0
    assert host.total - host.page_cache - host.copies <= masters + 0.05 * weights + host.staging
    # On the CPU, the device's memory is RAM. The C library keeps some memory that pure Python has freed.
    device = handle.stats().peak_bytes + (0 if provider.native else 2 * 2048 * 2048 * 4)
    assert pss() - before <= masters + device + host.staging + host.copies + 0.05 * weights
