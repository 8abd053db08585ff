"""If the kernel tracks no pages, masters are sampled, with a warning. Optimizers' steps are still noticed.

A seccomp filter refuses PAGEMAP_SCAN, so that this kernel behaves like one before 6.7.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest

OLDER_KERNEL = """
import ctypes, errno, struct

def older_kernel():
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = [
        (load, 0, 0, 0), (equal, 0, 3, 16),             # ioctl
        (load, 0, 0, 24), (equal, 0, 1, 0xC0606610),    # its request: PAGEMAP_SCAN
        (answer, 0, 0, 0x00050000 | errno.ENOTTY), (answer, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0  # PR_SET_SECCOMP

older_kernel()
"""

PROGRAM = """
import copy, torch, warnings, dynswap_ext
from torch import nn
from dynswap_ext import testing
torch.manual_seed(0)

def train(model, make, steps=6):
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(100, 108)).square().sum().backward()
        optimizer.step()
    return model

class InHand:
    "An optimizer that is not one of torch's, and bumps no version."
    def __init__(self, parameters): self.parameters = list(parameters)
    def zero_grad(self):
        for p in self.parameters: p.grad = None
    def step(self):
        for p in self.parameters: p.data.sub_(0.1 * p.grad)

def as_masters(model):
    tokens = torch.arange(100, 108)
    with torch.no_grad():
        expected = testing.moved(model, torch.device("cpu"), torch.float64)(tokens)
        testing.assert_bit_equal(model(tokens), expected)

said = []
for make in (lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
             lambda p: torch.optim.AdamW(p, weight_decay=0.0, fused=True), InHand):
    for budget in (None, "1GiB"):
        model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 4))
        options = {"device": "cpu", "dtype": torch.float64, "provider": BACKEND}
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            handle = dynswap_ext.install(model, budget=budget, **options)
        said += [str(warning.message) for warning in now]
        train(model, make)
        as_masters(model)
        with torch.no_grad():
            model[0]._parameters["weight"].data.mul_(2)  # the whole
        as_masters(model)
        report = handle.report()
        assert report.sampled_bytes >= 20_000 * 16 * 4, report.sampled_bytes
        assert "sampled" in str(report), str(report)
        handle.uninstall()
assert len(said) == 1 and "sampling" in said[0], said
print("as it should be")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the filter is for Linux on x86-64"
)
@pytest.mark.parametrize("backend", ["native", "python"])
@pytest.mark.slow
def test_a_kernel_that_tracks_no_pages(backend: str) -> None:
    program = textwrap.dedent(OLDER_KERNEL) + f"BACKEND = {backend!r}\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "as it should be" in done.stdout
