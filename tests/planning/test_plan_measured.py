"""Measured plans: a model runs, its modules are timed, and it is left as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import checkpoint, planning
from dynswap_ext.errors import ConfigError

pytestmark = pytest.mark.alone


class Slow(nn.Linear):
    """A linear layer that waits before it computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__(8, 8)
        self.pause = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return super().forward(x)


class Model(nn.Module):
    """Calls its modules in another order than it registers them, works between them, and never calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Slow(0.0)
        self.unused = nn.Linear(8, 8)
        self.first = Slow(0.05)
        self.middle = Slow(0.0)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        y = self.middle(self.first(x))
        time.sleep(0.02)  # compute between two modules, like attention
        result: torch.Tensor = self.last(y) * scale
        return result


def snapshot(model: nn.Module) -> list[Any]:
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return [[type(module) for module in model.modules()], [id(p) for p in model.parameters()], hooks]


def test_compute_and_order_of_use() -> None:
    model = Model()
    before = snapshot(model)
    found = planning.measure(model, torch.randn(2, 8), device="cpu", passes=3)
    assert snapshot(model) == before and not dynswap_ext.is_installed(model)
    units = list(dict.fromkeys(weight.name.partition(".")[0] for weight in found.weights))
    assert units == ["first", "middle", "last", "unused"]  # after the one that is registered before it
    seconds = {name: sum(w.seconds for w in found.weights if w.name.startswith(name)) for name in units}
    assert 0.05 <= seconds["first"] < 0.5 and 0.02 <= seconds["middle"] < 0.5
    assert seconds["last"] < seconds["middle"] and seconds["unused"] == 0
    assert len(found.compute_seconds) == 3 and min(found.compute_seconds) >= 0.07
    assert found.bandwidth > 0 and any("1 of 4 modules" in note for note in found.notes)


def test_masters_of_a_file_stream_from_it(tmp_path: Path) -> None:
    checkpoint.save(Model(), tmp_path / "model.safetensors")
    model = checkpoint.load(Model, tmp_path / "model.safetensors")
    found = planning.measure(model, torch.randn(2, 8), device="cpu", dtype=torch.bfloat16, passes=1)
    assert "model.safetensors" in found.bandwidth_kind and found.bandwidth > 0
    assert sum(w.nbytes for w in found.weights) * 2 == sum(w.moved_bytes for w in found.weights)


def test_coded_masters_of_a_file_stream_from_it(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()

    checkpoint.save(make(), tmp_path / "coded.safetensors", lossless=True)
    model = checkpoint.load(make, tmp_path / "coded.safetensors")
    found = planning.measure(model, torch.randn(2, 256).bfloat16(), device="cpu", passes=1)
    assert "coded.safetensors" in found.bandwidth_kind
    assert sum(w.moved_bytes for w in found.weights) < 0.8 * sum(w.nbytes for w in found.weights)


@pytest.mark.parametrize(
    "make",
    [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x, "scale": 2.0}],
    ids=["tensor", "tuple", "list", "mapping"],
)
def test_inputs(make: Callable[[torch.Tensor], Any]) -> None:
    planning.measure(Model(), make(torch.randn(2, 8)), device="cpu", dtype=torch.float64, passes=1, warm_up=1)


def test_a_tie_computes_where_it_is_used_first() -> None:
    model = nn.Sequential(Slow(0.01), Slow(0.01))
    model[1].weight = model[0].weight
    model[1].bias = model[0].bias
    found = planning.measure(model, torch.randn(2, 8), device="cpu", passes=1)
    assert [w.name for w in found.weights] == ["0.weight", "0.bias"]
    assert sum(w.seconds for w in found.weights) >= 0.02


def test_after_an_error_nothing_is_left() -> None:
    class Failing(Model):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            super().forward(x)
            raise RuntimeError("on purpose")

    model = Failing()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        planning.measure(model, torch.randn(2, 8), device="cpu")
    assert snapshot(model) == before and not dynswap_ext.is_installed(model)


def test_what_cannot_be_measured_is_named() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ConfigError, match="expected a torch"):
        planning.measure("model", x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no weights"):
        planning.measure(nn.Tanh(), x, device="cpu")
    with pytest.raises(ConfigError, match="passes is 0"):
        planning.measure(Model(), x, device="cpu", passes=0)
    model = Model()
    with (
        dynswap_ext.install(model, device="cpu") as handle,
        pytest.raises(ConfigError, match="uninstall it"),
    ):
        planning.measure(model, x, device="cpu")
    assert not handle.active


def test_the_machine() -> None:
    machine = planning.measure_machine("cpu")
    assert machine.bandwidth > 1e6 and machine.memory > 1e6 and machine.arithmetic > 1e6
    assert "cpu" in machine.name and machine.bandwidth_kind == "copies in memory"
