"""Reads of a checkpoint by the engine enter the page cache only as far as `host_budget` allows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conftest import Provider
from dynswap_ext import checkpoint
from dynswap_ext._util.peak_memory import disk_bytes_read
from dynswap_ext.errors import SourceError
from sample_host_memory import cold

pytestmark = pytest.mark.alone

LAYER = 1024 * 1024 * 4
LAYERS = 6


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint of 24 MiB that is not in the page cache."""
    path = tmp_path / "model.safetensors"
    save_file(build().state_dict(), path)
    return cold(path)


def read_by_each_pass(provider: Provider, path: Path, **options: Any) -> list[float]:
    """Return the layers that storage delivered to each of four passes. All layers but one are streamed."""
    if not provider.native:
        pytest.skip("pure Python reads through mappings, and leaves the page cache to the system")
    model = checkpoint.load(build, path)
    handle = provider.install(model, budget=3 * LAYER + (1 << 20), prefetch=1, **options)
    x = provider.randn(1, 1024, dtype=torch.float32)
    counts, outputs = [], []
    for _ in range(4):
        before = disk_bytes_read()
        with torch.inference_mode():
            outputs.append(model(x))
        counts.append((disk_bytes_read() - before) / LAYER)
    assert handle.stats().bytes_moved > 4 * (LAYERS - 2) * LAYER
    handle.uninstall()
    with torch.inference_mode():
        resident = checkpoint.load(build, path).to(provider.device)(x)
    assert all(torch.equal(output, resident) for output in outputs)
    return counts


def counted_where_little_is_read_at_once(provider: Provider) -> None:
    if provider.device.type != "cpu":
        pytest.skip("reads for a GPU are long, and a disk may read as far ahead as the file goes")


@pytest.mark.parametrize("host_budget", ["auto", "1GiB"])
def test_comes_from_memory_from_the_third_pass_on(provider: Provider, path: Path, host_budget: str) -> None:
    counted_where_little_is_read_at_once(provider)
    first, second, _, last = read_by_each_pass(provider, path, host_budget=host_budget)
    assert first > LAYERS - 2 and second > 1  # the first read bypasses the cache, the second fills it
    assert last < 0.5


def test_does_not_grow_when_asked(provider: Provider, path: Path) -> None:
    counts = read_by_each_pass(provider, path, host_budget="minimum")
    assert min(counts) > LAYERS - 3


def test_grows_by_what_is_allowed(provider: Provider, path: Path) -> None:
    counted_where_little_is_read_at_once(provider)
    last = read_by_each_pass(provider, path, host_budget=2 * LAYER)[-1]
    assert 1 < last < LAYERS - 2


@pytest.mark.parametrize("change", ["shrunk", "emptied", "overwritten"])
def test_a_file_changed_under_an_installed_model_is_an_error(
    provider: Provider, path: Path, change: str
) -> None:
    # It is never SIGBUS, as the engine reads the file and no page of its mapping.
    if not provider.native:
        pytest.skip("pure Python reads through mappings, and asks for the length of the file alone")
    model = checkpoint.load(build, path)
    handle = provider.install(model, prefetch=0)
    x = provider.randn(1, 1024, dtype=torch.float32)
    with torch.inference_mode():
        model(x)
        whole = path.read_bytes()
        if change == "overwritten":
            with path.open("rb+") as file:
                file.write(whole)
        else:
            os.truncate(path, len(whole) // 2 if change == "shrunk" else 0)
        with pytest.raises(SourceError, match=r"weight '\d\.weight'.*load it again") as raised:
            model(x)
        assert str(path) in str(raised.value)
        assert ("truncated" in str(raised.value)) == (change != "overwritten")
    handle.uninstall()


def test_a_replaced_file_goes_on_as_it_was(provider: Provider, path: Path) -> None:
    # A careful writer replaces the file: the name goes to a new one, and ours lives until it is closed.
    model = checkpoint.load(build, path)
    x = provider.randn(1, 1024, dtype=torch.float32)
    handle = provider.install(model, prefetch=0)
    with torch.inference_mode():
        before = model(x)
        other = path.with_name("other")
        save_file(build().state_dict(), other)
        other.replace(path)
        assert torch.equal(model(x), before)
    handle.uninstall()
