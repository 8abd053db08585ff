"""Models of known size for tests of host RAM, and files that are not in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import disk_bytes_read
from dynswap_ext.profile.host_memory import HostMemory

LAYER = 4 << 20
LAYERS = 6


def layers(count: int = LAYERS) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))


def cold(path: Path) -> Path:
    """Take a new file out of the page cache. Skip the test if reads of it are not counted as disk reads."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # dirty pages cannot be dropped
    drop_file_cache(path)
    before = disk_bytes_read()
    path.read_bytes()
    if disk_bytes_read() == before:
        pytest.skip("this file system is in memory, or reads are not counted")
    drop_file_cache(path)
    return path


def run(provider: Provider, *models: nn.Module, passes: int = 4) -> None:
    x = provider.randn(1, 1024, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(passes):
            for model in models:
                model(x)


def host_of(handle: dynswap_ext.Handle) -> HostMemory:
    host = handle.report().host
    assert host is not None
    return host
