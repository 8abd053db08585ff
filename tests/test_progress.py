"""`progress=True` shows the first pass, loads and conversions, with a bar on terminals or by a function."""

from __future__ import annotations

import gc
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import children
import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, checkpoint
from sample_models import mlp

pytestmark = pytest.mark.alone

Steps = list[tuple[int, int]]


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dynswap_ext first pass"]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def told() -> tuple[Steps, Callable[[int, int], None]]:
    steps: Steps = []
    return steps, lambda done, whole: steps.append((done, whole))


def assert_complete(steps: Steps, whole: int) -> None:
    assert steps[-1] == (whole, whole) and {step[1] for step in steps} == {whole}
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)


class Slow(nn.Module):
    """Waits after each layer."""

    def __init__(self, seconds: float, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.seconds = seconds

    def forward(self, x: torch.Tensor, stop: int = 3) -> torch.Tensor:
        for layer in self.layers[:stop]:
            x = layer(x)
            time.sleep(self.seconds)
        return x


def test_the_first_pass(provider: Provider) -> None:
    steps, tell = told()
    model = Slow(0.15)
    handle = provider.install(model, dtype=torch.float64, progress=tell)
    assert len(watchers()) == 1 and steps == []  # no progress before the model is used
    model(provider.randn(2, 64))
    wait_until(lambda: not watchers())
    assert_complete(steps, sum(row.bytes for row in handle.report().rows))
    if not provider.native:
        assert 0 < steps[0][0] < steps[0][1]  # seen while it ran
    told_so_far = len(steps)
    model(provider.randn(2, 64))
    assert len(steps) == told_so_far


def test_a_weight_that_takes_long_is_waited_for(provider: Provider) -> None:
    steps, tell = told()
    model = Slow(1.5)
    handle = provider.install(model, dtype=torch.float64, progress=tell)
    model(provider.randn(2, 64))
    wait_until(lambda: not watchers())
    assert_complete(steps, sum(row.bytes for row in handle.report().rows))


def test_it_ends_with_a_pass_that_does_not_use_all(provider: Provider) -> None:
    steps, tell = told()
    model = Slow(0, width=1024)
    provider.install(model, dtype=torch.float64, prefetch=0, progress=tell)
    model(provider.randn(2, 1024), stop=1)
    wait_until(lambda: not watchers())
    done, whole = steps[-1]
    assert 0 < done < whole


@pytest.mark.parametrize("used", [False, True])
def test_an_uninstall_ends_it(provider: Provider, used: bool) -> None:
    model = Slow(0, width=1024)
    handle = provider.install(model, dtype=torch.float64, prefetch=0, progress=lambda done, whole: None)
    if used:
        model(provider.randn(2, 1024), stop=1)
    handle.uninstall()
    assert watchers() == []


def test_the_model_s_death_ends_it(provider: Provider) -> None:
    model = mlp()
    provider.install(model, dtype=torch.float64, progress=True)
    assert len(watchers()) == 1
    del model
    gc.collect()
    wait_until(lambda: not watchers())


def test_another_install_takes_its_place(provider: Provider) -> None:
    model = mlp()
    for _ in range(2):
        provider.install(model, dtype=torch.float64, progress=True)
        assert len(watchers()) == 1
    dynswap_ext.uninstall(model)
    assert watchers() == []


def test_without_it_there_is_no_thread(provider: Provider) -> None:
    provider.install(mlp(), dtype=torch.float64)
    assert watchers() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(mlp(features=64).state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


WHOLE = 3 * (64 * 64 + 64) * 4


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"assign": False}], ids=str)
def test_loads(path: Path, options: dict[str, object]) -> None:
    steps, tell = told()
    checkpoint.load(mlp(features=64), path, progress=tell, **options)  # type: ignore[arg-type]
    assert_complete(steps, WHOLE)
    assert len(steps) == 7 and steps[0] == (0, WHOLE)


def test_a_tied_weight_is_counted_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "model.pt")
    steps, tell = told()
    checkpoint.load(model, tmp_path / "model.pt", dtype=torch.float16, progress=tell)
    assert_complete(steps, 8 * 8 * 4)


def test_conversions(path: Path, tmp_path: Path) -> None:
    steps, tell = told()
    checkpoint.convert(path, tmp_path / "half.safetensors", dtype=torch.float16, progress=tell)
    assert_complete(steps, WHOLE // 2)


def test_what_is_neither_a_bool_nor_a_function(path: Path) -> None:
    model = mlp(features=64)
    for call in (
        lambda: dynswap_ext.install(model, progress="yes"),  # type: ignore[arg-type]
        lambda: checkpoint.load(model, path, progress=1),  # type: ignore[arg-type]
        lambda: checkpoint.convert(path, path.parent / "x.safetensors", progress="bar"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"progress is .*; expected True for a bar"):
            call()
    assert not dynswap_ext.is_installed(model)


SCRIPT = """
import sys, time, torch, dynswap_ext
from dynswap_ext import checkpoint
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
checkpoint.load(model, sys.argv[1], dtype=torch.bfloat16, progress=True)
handle = dynswap_ext.install(model, device="cpu", provider="python", dtype=torch.float32, progress=True)
model(torch.randn(2, 64))
time.sleep(1)
checkpoint.convert(sys.argv[1], sys.argv[1] + ".half.safetensors", progress=True)
"""


@pytest.fixture
def sequential(tmp_path: Path) -> Path:
    state = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).state_dict()
    save_file(state, tmp_path / "sequential.safetensors")
    return tmp_path / "sequential.safetensors"


def test_bars_on_a_terminal(sequential: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(sequential)], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    text = shown.decode()
    assert process.wait(60) == 0, text
    for what in ("loading", "first pass", "converting"):
        assert what in text
    assert "48.8/48.8 KiB" in text  # 3 x (64 x 64 + 64) x 4 bytes


def test_nothing_where_stderr_is_no_terminal(sequential: Path) -> None:
    ended = children.run(SCRIPT, sequential)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_program_ends_while_it_waits() -> None:
    code = (
        "import torch, dynswap_ext\n"
        "model = torch.nn.Linear(4, 4)\n"
        "dynswap_ext.install(model, device='cpu', provider='python', dtype=torch.float64, progress=True)\n"
    )
    ended = children.run(code, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
