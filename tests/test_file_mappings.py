"""The index from an address in memory to a place in a file."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from dynswap_ext import checkpoint, inspect
from dynswap_ext._util.file_mappings import FileMappings

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a file").write_bytes(bytes(range(256)) * (8 * PAGE // 256))
    return tmp_path / "a file"


def _mapped(path: Path) -> torch.Tensor:
    with path.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_every_address_of_a_mapping(file: Path) -> None:
    tensor = _mapped(file)
    mappings = FileMappings()
    for offset in (0, 1, PAGE, 8 * PAGE - 1):
        found = mappings.find(tensor.data_ptr() + offset)
        assert found is not None and found.path == file
        assert found.offset + tensor.data_ptr() + offset - found.begin == offset
    assert (after := mappings.find(tensor.data_ptr() + 8 * PAGE)) is None or after.name != str(file)
    assert mappings.find(torch.empty(1 << 20).data_ptr()) is None and mappings.find(0) is None


def test_a_mapping_that_the_kernel_has_split_is_one(file: Path) -> None:
    tensor = _mapped(file)
    begin = tensor.data_ptr()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.madvise(begin + 2 * PAGE, PAGE, 16) == 0  # MADV_DONTDUMP
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    assert len(lines) == 3
    found = FileMappings().find(begin + 5 * PAGE)
    assert found is not None and (found.begin, found.end - found.begin, found.offset) == (begin, 8 * PAGE, 0)


def test_a_file_that_is_deleted_or_replaced_has_no_path(file: Path, tmp_path: Path) -> None:
    tensor = _mapped(file)
    (tmp_path / "new").write_bytes(bytes(8 * PAGE))
    os.replace(tmp_path / "new", file)
    found = FileMappings().find(tensor.data_ptr())
    assert found is not None and found.path is None
    file.unlink()
    assert (again := FileMappings().find(tensor.data_ptr())) is not None and again.path is None


def test_shared_memory_is_no_file() -> None:
    shared = torch.ones(PAGE).share_memory_()
    assert FileMappings().find(shared.data_ptr()) is None


def test_a_weight_that_is_not_contiguous_is_still_in_its_file(tmp_path: Path) -> None:
    linear = torch.nn.Linear(40, 30)
    torch.save({"weight": linear.weight.detach().t().contiguous().t(), "bias": linear.bias}, tmp_path / "w")
    model = checkpoint.load(lambda: torch.nn.Linear(40, 30), tmp_path / "w")
    assert not model.weight.is_contiguous()
    assert "file (gone)" not in str(inspect.summary(model))
