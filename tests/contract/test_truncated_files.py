"""A checkpoint file that is truncated while a model uses it: an error names it, and the process goes on.

A read of a mapping beyond the end of its file ends the process with SIGBUS, so each test runs its cases in a
process of its own.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import children
from conftest import Provider

COMMON = """
import itertools, os, sys, warnings
from pathlib import Path
import torch
from torch import nn
from safetensors.torch import load_file, save_file
import dynswap_ext
from dynswap_ext import SourceError, checkpoint

folder, provider, device = Path(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])
path = folder / "model.safetensors"

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16))))

def mapped(how):
    path.unlink(missing_ok=True)
    save_file(build().state_dict(), path)
    if how == "load":
        return checkpoint.load(build, path)
    model = build()
    model.load_state_dict(load_file(path), assign=True)
    return model

def call(model, dtype):
    return model(torch.ones(2, 16, dtype=dtype, device=device))

def refused(call, *arguments):
    try:
        call(*arguments)
    except SourceError as error:
        assert str(path) in str(error) and "truncated" in str(error), error
        assert "load it again" in str(error), error
        return
    raise AssertionError("no error")
"""


def run(provider: Provider, tmp_path: Path, cases: str) -> None:
    script = COMMON + textwrap.dedent(cases) + "print('alive')\n"
    done = children.run(script, tmp_path, provider.backend, provider.device, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-3000:])


@pytest.mark.slow
def test_small_weights_of_a_file_that_is_truncated(provider: Provider, tmp_path: Path) -> None:
    run(
        provider,
        tmp_path,
        """
        ways = ("load", "assign"), ("before", "installed", "called")
        for how, when, (training, left), dtype in itertools.product(
            *ways, ((False, 0.5), (True, 0)), (None, torch.float64)
        ):
            model = mapped(how).train(training)
            cut = lambda: os.truncate(path, int(path.stat().st_size * left))
            if when == "before":
                cut()
            handle = dynswap_ext.install(model, device=device, provider=provider, dtype=dtype, prefetch=0)
            if when == "called":
                call(model, dtype or torch.float32)
            if when != "before":
                cut()
            for _ in range(2):
                refused(call, model, dtype or torch.float32)
            handle.uninstall()
        """,
    )


@pytest.mark.slow
def test_statistics_that_were_written_to_the_mapping(provider: Provider, tmp_path: Path) -> None:
    # Private pages that this process has written are lost with the end of the file, too.
    run(
        provider,
        tmp_path,
        """
        for budget, left in itertools.product((None, "1GiB"), (0.5, 0)):
            model = mapped("load").train()
            handle = dynswap_ext.install(
                model, device=device, provider=provider, dtype=torch.float64, budget=budget, prefetch=0
            )
            for _ in range(3):
                call(model, torch.float64)
            held = model[1].running_mean, model[-1].running_var, model[-2].weight
            os.truncate(path, int(path.stat().st_size * left))
            with torch.no_grad():
                for tensor in held:
                    tensor.add_(1)  # has nowhere to go
            refused(call, model, torch.float64)
            del tensor, held
            refused(call, model.eval(), torch.float64)
            handle.uninstall()
        """,
    )


def test_weights_in_a_shared_mapping(provider: Provider, tmp_path: Path) -> None:
    # A shared mapping is no checkpoint: weights are read through its memory, not from the file.
    run(
        provider,
        tmp_path,
        """
        values = torch.ones(64, 64)
        path.write_bytes(values.numpy().tobytes())
        model = nn.Linear(64, 64, bias=False)
        model.weight.data = torch.from_file(str(path), shared=True, size=64 * 64).view(64, 64)
        for dtype in (torch.float64, torch.bfloat16):
            handle = dynswap_ext.install(model, device=device, provider=provider, dtype=dtype)
            x = torch.ones(2, 64, dtype=dtype, device=device)
            assert model(x).unique().tolist() == [64.0]
            os.truncate(path, 0)
            refused(model, x)
            handle.uninstall()
            path.write_bytes(values.numpy().tobytes())
        """,
    )
