"""Models that tests save and load, and what such tests need: mappings, and a small disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dynswap_ext._util.file_mappings import mapped_ranges

kinds = pytest.mark.parametrize("kind", ["safetensors", "torch"])


class Net(nn.Module):
    """Two layers, a saved buffer, a buffer that no checkpoint holds, and a tensor kept as an attribute."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.offset = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.norm(self.first(x)).relu())
        return hidden * self.scale + self.offset


class SharedWeight(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def saved(model: nn.Module, path: Path, kind: str = "safetensors") -> Path:
    """Save a model's state as the format's library does, and return the path."""
    if kind == "safetensors":
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    return path


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Return whether a tensor begins in a mapping of the file."""
    return any(start <= tensor.data_ptr() < start + length for start, length in mapped_ranges(path))


@contextmanager
def disk_in_memory(folder: Path, size: str) -> Iterator[Path]:
    """Yield a new folder that is a disk of that size in memory. Skip the test if it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
