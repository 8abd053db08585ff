"""checkpoint.load(assign=False): values are copied into the module's own tensors, one after the other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sample_loads import SharedWeight, saved
from torch import nn

from dynswap_ext import checkpoint, testing
from dynswap_ext._util.file_mappings import mapped_ranges
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext.errors import ConfigError, SourceError
from sample_models import ConvNet, mlp

MiB = 1 << 20


def test_objects_memory_dtype_and_gradients_stay(tmp_path: Path) -> None:
    source = ConvNet()
    path = saved(source, tmp_path / "w")
    model = ConvNet().double()
    members = [*model.parameters(), *model.buffers()]
    before = [(id(t), t.data_ptr(), t.dtype) for t in members]
    gradient = members[0].grad = torch.ones_like(members[0])
    assert checkpoint.load(model, path, assign=False) is model
    assert before == [(id(t), t.data_ptr(), t.dtype) for t in (*model.parameters(), *model.buffers())]
    assert members[0].grad is gradient
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.double().state_dict()), "state")
    assert mapped_ranges(path) == []


def test_memory_is_a_window(tmp_path: Path) -> None:
    def layers(width: int = 1024) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(32)))

    checkpoint.load(layers(8), saved(layers(8), tmp_path / "s"), assign=False)
    path, model = saved(layers(), tmp_path / "w"), layers()  # 128 MiB
    meter = PeakMemory()
    checkpoint.load(model, path, assign=False)
    growth = meter.more()
    if growth is None:
        pytest.skip("the system does not tell the highest memory")
    assert growth < 24 * MiB


def test_a_transform_runs_for_each(tmp_path: Path) -> None:
    source = mlp()
    model = mlp()
    names: list[str] = []

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return tensor.neg()

    checkpoint.load(model, saved(source, tmp_path / "w"), assign=False, transform=transform)
    assert names == list(source.state_dict())
    assert all(torch.equal(a, -b) for a, b in zip(model.parameters(), source.parameters(), strict=True))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"0.bias": None}, r"missing.*: 1\n +0\.bias"),
    "unexpected": ({"more": torch.ones(2)}, r"unexpected.*: 1\n +more"),
    "shape": ({"4.bias": torch.ones(2)}, r"4\.bias: the model has \[16\], the file \[2\]"),
    "kind": ({"4.bias": torch.ones(16, dtype=torch.int8)}, r"4\.bias: the model has torch.float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_can_be_checked_is_before_the_first_byte(wrong: str, tmp_path: Path) -> None:
    change, said = WRONG[wrong]
    state = {
        name: value for name, value in {**mlp(layers=3).state_dict(), **change}.items() if value is not None
    }
    save_file(state, tmp_path / "w")
    model = mlp(layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=said):
        checkpoint.load(model, tmp_path / "w", assign=False)
    testing.assert_bit_equal(dict(model.state_dict()), before, "state")


def test_a_skeleton_without_memory_is_refused(tmp_path: Path) -> None:
    path = saved(mlp(), tmp_path / "w")
    for target in (mlp, checkpoint.init_empty(mlp)):
        with pytest.raises(ConfigError, match=r"0\.weight.*to_empty"):
            checkpoint.load(target, path, assign=False)
    model = checkpoint.load(checkpoint.init_empty(mlp).to_empty(device="cpu"), path, assign=False)
    assert torch.equal(model[0].weight, checkpoint.load(mlp, path)[0].weight)


def test_a_failing_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(mlp(), tmp_path / "w")

    class Failing(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda *_: Failing())
    with pytest.raises(SourceError, match=rf"{path} cannot be read at 0\.weight: Input/output error"):
        checkpoint.load(mlp(), path, assign=False)


def test_shared_weights_and_a_hook_that_renames(tmp_path: Path) -> None:
    class Renaming(SharedWeight):
        def __init__(self) -> None:
            super().__init__()
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
            for name in list(state):
                if name.endswith("kernel"):
                    state[name.replace("kernel", "weight")] = state.pop(name)

    save_file({"a.kernel": torch.full((3, 3), 2.0), "b.kernel": torch.full((3, 3), 2.0)}, tmp_path / "w")
    model = Renaming()
    weight = model.a.weight
    checkpoint.load(model, tmp_path / "w", assign=False)
    assert model.a.weight is weight is model.b.weight and weight.unique().tolist() == [2]
