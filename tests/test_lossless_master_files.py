"""Coded masters of files: what a damaged or truncated file does, and ranks that share them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import children
import forked_ranks
import pretend_cuda
from conftest import Provider

COMMON = """
import itertools, os, sys, warnings
from pathlib import Path
import torch
from torch import nn
from safetensors import safe_open
import dynswap_ext
from dynswap_ext import SourceError, checkpoint, testing
from dynswap_ext.lossless.tensor import LosslessTensor

folder, provider, device = Path(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])
path = folder / "model.safetensors"
options = dict(device=device, provider=provider, prefetch=0)

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(8))).bfloat16().requires_grad_(False)

def loaded(change=lambda path: None):
    path.unlink(missing_ok=True)
    checkpoint.save(build(), path, lossless=True)
    change(path)
    model = checkpoint.load(build, path).requires_grad_(False)
    assert isinstance(model[0].weight, LosslessTensor)
    return model

def call(model, dtype=torch.bfloat16):
    return model(torch.ones(2, 96, dtype=dtype, device=device))

def refused(call, *words):
    try:
        call()
    except SourceError as error:
        assert all(word in str(error) for word in (str(path), *words)), error
        return
    raise AssertionError("no error")

def write(block, at, new):
    # Writes over bytes of a coded tensor in its file, from a block's begin on; None: from that of the index.
    def change(path):
        with safe_open(path, "pt") as file:
            coded = bytes(file.get_tensor("3.weight").numpy())
        content = bytearray(path.read_bytes())
        begin = content.find(coded) + at
        if block is not None:
            begin += int.from_bytes(coded[8 * block : 8 * block + 8], "little")
        content[begin : begin + len(new)] = new
        path.write_bytes(content)
    return change

def cut(left):
    os.truncate(path, int(path.stat().st_size * left))
"""


def run(provider: Provider, tmp_path: Path, cases: str) -> None:
    script = COMMON + textwrap.dedent(cases) + "print('alive')\n"
    done = children.run(script, tmp_path, provider.backend, provider.device, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-3000:])


@pytest.fixture
def native(provider: Provider) -> Provider:
    if not provider.native:
        pytest.skip("pure Python reads coded bytes as torch does")
    return provider


def test_a_damaged_block(native: Provider, tmp_path: Path) -> None:
    run(
        native,
        tmp_path,
        """
        for dtype, budget in itertools.product((None, torch.float32), ("minimum", "1GiB")):
            model = loaded(write(block=1, at=0, new=bytes([9])))  # a kind of block that there is not
            handle = dynswap_ext.install(model, dtype=dtype, budget=budget, **options)
            if device.type == "cpu":  # a device decodes what it is sent, and does not look first
                for _ in range(2):
                    refused(lambda: call(model, dtype or torch.bfloat16), "'3.weight'", "block 1 ")
            handle.uninstall()
            refused(lambda: model[3].weight + 0, "3.weight")
            assert torch.equal(model[2].weight, build()[2].weight)
        """,
    )


def test_an_index_that_is_damaged_before_the_install(native: Provider, tmp_path: Path) -> None:
    run(
        native,
        tmp_path,
        """
        model = loaded(write(block=None, at=8, new=(1 << 60).to_bytes(8, "little")))
        refused(lambda: dynswap_ext.install(model, **options), "3.weight")
        assert type(model[0]) is nn.Linear and not hasattr(model[0], "_dynswap")
        """,
    )


def test_a_file_that_is_truncated(native: Provider, tmp_path: Path) -> None:
    run(
        native,
        tmp_path,
        """
        for when, left, dtype in itertools.product(("installed", "called"), (0.5, 0), (None, torch.float32)):
            model = loaded()
            handle = dynswap_ext.install(model, dtype=dtype, budget="minimum", **options)
            if when == "called":
                call(model, dtype or torch.bfloat16)
            cut(left)
            for _ in range(2):
                refused(lambda: call(model, dtype or torch.bfloat16), "truncated")
            handle.uninstall()
        """,
    )


def test_a_file_that_is_truncated_while_its_weights_are_held(native: Provider, tmp_path: Path) -> None:
    """What was written on a handed-out tensor has nowhere to go, and is compared with nothing."""
    run(
        native,
        tmp_path,
        """
        for budget, write in itertools.product(("minimum", "1GiB"), (True, False)):
            model = loaded()
            handle = dynswap_ext.install(model, dtype=torch.float32, budget=budget, **options)
            call(model, torch.float32)
            held = model[7].weight
            alias = held.data  # what is written through it is found by a comparison
            cut(0)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if write:
                    alias.add_(1)
                del held, alias
                try:
                    dict(model.named_parameters())
                    handle.flush()
                except SourceError as error:
                    assert str(path) in str(error), error
            try:
                handle.uninstall()
            except SourceError as error:
                assert str(path) in str(error), error
        """,
    )


_MODEL = """
import copy
from dynswap_ext import checkpoint, testing
from dynswap_ext.lossless.tensor import LosslessTensor

def made():
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    return nn.Sequential(*layers).requires_grad_(False).bfloat16()

def moved_by(handle, call):
    before = handle.stats().bytes_moved
    call()
    return handle.stats().bytes_moved - before
"""


@pytest.mark.skipif(sys.platform == "win32" or not dist.is_available(), reason="the ranks are forks")
@pytest.mark.parametrize("dtype", ["None", "torch.float32"])
def test_ranks_share_out_copies(
    native: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    if native.device.type != "cpu" and not pretend_cuda.active() and torch.accelerator.device_count() < 2:
        pytest.skip("it needs two GPUs")
    monkeypatch.setenv("DYNSWAP_MESH", "always")
    code = (
        _MODEL
        + """
folder, dtype = arguments[0], eval(arguments[1])
path = f"{folder}/model.safetensors"
if rank == 0:
    checkpoint.save(made(), path, lossless=True)
dist.barrier()
model = checkpoint.load(made, path).requires_grad_(False)
assert isinstance(model[0].weight, LosslessTensor)
x = torch.randn(3, 512, dtype=dtype or torch.bfloat16, device=device)
plain = made().to(device, dtype)
options = dict(device=device, dtype=dtype, budget="minimum")
with dynswap_ext.install(model, **options) as handle:
    for _ in range(3):
        alone = moved_by(handle, lambda: testing.assert_bit_equal(model(x), plain(x)))
with dynswap_ext.install(model, mesh=dist.group.WORLD, **options) as handle:
    told["shares"] = [moved_by(handle, lambda: testing.assert_bit_equal(model(x), plain(x))) / alone
                      for _ in range(5)]
    handle.check()
assert all(p.coded is not None for n, p in model.named_parameters() if "weight" in n)
"""
    )
    told = forked_ranks.run(code, 2, tmp_path, tmp_path, dtype, device_type=native.device.type)
    for rank in told:
        assert rank["shares"][-1] <= 0.53, rank
    assert sum(rank["shares"][-1] for rank in told) >= 0.99


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a file is Linux's")
def test_shared_masters(tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
from dynswap_ext import share_masters
sys.path.insert(0, arguments[1])
from coded_masters import code_masters
model, plain = code_masters(made()), made()
x = torch.randn(3, 512).bfloat16()
summary = share_masters(model)
testing.assert_bit_equal(model(x), plain(x))
with dynswap_ext.install(model, device="cpu", dtype=torch.float32, budget="minimum"):
    testing.assert_bit_equal(model(x.float()), plain.float()(x.float()))
coded = [p.coded for p in model.parameters() if isinstance(p, LosslessTensor)]
told["coded"] = len(coded) > 0 and all(each is not None for each in coded)
"""
    )
    told = forked_ranks.run(code, 2, tmp_path, tmp_path, Path(__file__).parent)
    assert all(rank["coded"] for rank in told)
