"""CUDA's rules for page-locked memory that is unmapped, and for processes that end or fork.

A GPU keeps registered pages as long as the registration lasts. The pretend device reads what is mapped, or
nothing.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import PRETEND, needs_cuda_runtime

pytestmark = pytest.mark.device
TESTS = Path(__file__).resolve().parent.parent

_BEGIN = """
import ctypes, mmap, os, sys
sys.path[:0] = [{tests!r}, {device!r}]
import torch
from cuda_runtime import PAGE, Runtime
cuda = Runtime()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
SIZE = 1024 * PAGE
def mapping():
    return libc.mmap(None, SIZE, 3, 0x22, -1, 0)
def fill(at, value):
    ctypes.memset(ctypes.c_void_p(at), value, SIZE)
there = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
stream = torch.cuda.Stream()
torch.cuda.synchronize()
def arrives(at):
    code = cuda.copy(there.data_ptr(), at, SIZE, stream)
    torch.cuda.synchronize()
    return code, there[0].item(), there[-1].item()
at = mapping(); fill(at, 1)
assert cuda.register(at, SIZE) == 0
"""


def in_a_process(code: str) -> str:
    """Run code in a process that has 4 MiB of ones registered at `at`; return its output and exit status."""
    needs_cuda_runtime()
    begin = _BEGIN.format(tests=str(TESTS), device=str(TESTS / "device"))
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    print(done.stderr[-2000:])
    return f"{done.stdout.strip()} | {done.returncode}"


reads_old_pages = pytest.mark.skipif(PRETEND, reason="the pretend device reads what is mapped now")


def test_memory_that_was_unmapped() -> None:
    """The registration of unmapped memory stays, and can be ended."""
    said = in_a_process("""
        assert libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(SIZE)) == 0
        print(cuda.kind_of(at), cuda.unregister(at))
    """)
    assert said == "1 0 | 0"


def test_a_copy_of_what_was_unmapped_reads_the_old_pages() -> None:
    said = in_a_process("""
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(SIZE))
        print(*arrives(at))
    """)
    assert said == ("0 0 0 | 0" if PRETEND else "0 1 1 | 0")


@reads_old_pages
def test_another_mapping_at_the_same_address() -> None:
    """The device does not read a new mapping at a registered address until it is registered again."""
    said = in_a_process("""
        fixed = libc.mmap(at, SIZE, 3, 0x32, -1, 0)
        assert fixed == at
        fill(at, 2)
        print(*arrives(at))
        print(cuda.register(at, SIZE), cuda.unregister(at), cuda.register(at, SIZE), *arrives(at))
    """)
    assert said == "0 1 1\n712 0 0 0 2 2 | 0"


@reads_old_pages
def test_pages_that_were_given_back() -> None:
    """After MADV_DONTNEED the device still reads the old pages."""
    said = in_a_process("""
        assert libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(SIZE), 4) == 0
        fill(at, 2)
        print(*arrives(at), cuda.unregister(at))
    """)
    assert said == "0 1 1 0 | 0"


def test_a_process_ends_with_memory_that_was_unmapped() -> None:
    said = in_a_process("""
        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(SIZE))
        print("ends")
    """)
    assert said == "ends | 0"


def test_a_parent_writes_after_a_fork() -> None:
    """After a fork, page-locked pages stay with the parent; the child gets copies."""
    said = in_a_process("""
        child = os.fork()
        if not child:
            os._exit(ctypes.c_char.from_address(at).value[0])
        fill(at, 2)
        print(*arrives(at), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 2))
    """)
    assert said == "0 2 2 True | 0"


@pytest.mark.skipif(PRETEND, reason="the pretend runtime serves a child; what torch is told there is tested")
def test_a_child_asks_for_memory() -> None:
    """A forked child gets cudaErrorInitializationError, as it cannot use the parent's context."""
    said = in_a_process("""
        child = os.fork()
        if not child:
            block = ctypes.c_void_p()
            os._exit(cuda.call("cudaHostAlloc", ctypes.byref(block), PAGE, ctypes.c_uint(0)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert said == "3 | 0"
