"""checkpoint.load with dtype, device and transform: one tensor after the other, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sample_loads import SharedWeight, is_mapped, saved
from torch import nn

from conftest import skip_or_fail
from dynswap_ext import checkpoint
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.loading import entries
from dynswap_ext.errors import ConfigError, SourceError

MiB = 1 << 20


class Mixed(nn.Module):
    """Floats of two dtypes, integers, a scalar, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 200)
        self.small = nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("count", torch.arange(5))
        self.register_buffer("scalar", torch.tensor(1.25))
        self.register_buffer("none", torch.empty(0, 3))


def layers(count: int, width: int = 1024) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@pytest.fixture(params=["safetensors", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("size", [1 << 30, 4096], ids=["one window", "many windows"])
def test_floats_are_cast_and_the_rest_stays_mapped(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_WINDOW", size)
    source = Mixed()
    path = saved(source, tmp_path / "w", kind)
    state = checkpoint.load(Mixed, path, dtype=torch.bfloat16).state_dict()
    for name, value in source.state_dict().items():
        expected = value.bfloat16() if value.is_floating_point() else value
        assert state[name].dtype == expected.dtype and torch.equal(state[name], expected), name
    assert {name for name in state if is_mapped(state[name], path)} == {"small", "count"}


def test_memory_of_a_cast_is_the_result_and_a_window(tmp_path: Path) -> None:
    path = saved(layers(48), tmp_path / "w")  # 192 MiB
    checkpoint.load(lambda: layers(1, 8), saved(layers(1, 8), tmp_path / "s"), dtype=torch.float16)
    meter = PeakMemory()
    model = checkpoint.load(lambda: layers(48), path, dtype=torch.bfloat16)
    growth = meter.more()
    if growth is None:
        pytest.skip("the system does not tell the highest memory")
    assert growth < (96 + 16 + 8) * MiB
    assert model[47].weight.dtype is torch.bfloat16


def test_memory_of_a_transform_is_what_it_returns_and_a_window(tmp_path: Path) -> None:
    path = saved(layers(48), tmp_path / "w")
    checkpoint.load(
        lambda: layers(1, 8), saved(layers(1, 8), tmp_path / "s"), transform=lambda _, t: t[:1].expand(8, 8)
    )
    meter = PeakMemory()
    checkpoint.load(lambda: layers(48), path, transform=lambda _, t: t[:1].clone().expand(1024, 1024))
    growth = meter.more()
    if growth is None:
        pytest.skip("the system does not tell the highest memory")
    assert growth < 24 * MiB


def test_a_transform_sees_the_models_names_and_the_wanted_dtype(kind: str, tmp_path: Path) -> None:
    source = Mixed()
    path = saved(source, tmp_path / "w", kind)
    seen: dict[str, Any] = {}

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() and not tensor.requires_grad
        seen[name] = tensor.dtype
        return tensor.neg() if name == "linear.weight" else tensor

    class Renamed(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = self.small
            del self.small

    model = checkpoint.load(
        Renamed, path, dtype=torch.bfloat16, rename={"small": "tiny"}, transform=transform
    )
    assert seen == {
        "linear.weight": torch.bfloat16,
        "linear.bias": torch.bfloat16,
        "tiny": torch.bfloat16,
        "count": torch.int64,
        "scalar": torch.bfloat16,
        "none": torch.bfloat16,
    }
    assert torch.equal(model.linear.weight, -source.linear.weight.bfloat16())
    assert is_mapped(model.tiny, path) and not is_mapped(model.linear.bias, path)


def test_a_transform_that_writes_in_place_changes_the_model_and_not_the_file(
    kind: str, tmp_path: Path
) -> None:
    source = Mixed()
    path = saved(source, tmp_path / "w", kind)
    content = path.read_bytes()

    def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor.data.mul_(2)  # bumps no version
        return tensor

    opened = open_checkpoint(path)
    model = checkpoint.load(Mixed, opened, transform=double)
    assert torch.equal(model.linear.weight, source.linear.weight * 2)
    assert torch.equal(model.count, source.count * 2)
    assert torch.equal(opened["linear.weight"], source.linear.weight) and path.read_bytes() == content


def test_other_shapes_from_a_transform(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(3, 4), "bias": torch.randn(3)}, tmp_path / "w")
    make = lambda: nn.Linear(3, 4, bias=False)  # noqa: E731
    only = {"bias$": "unused"}
    with pytest.raises(ConfigError, match=r"weight: the model has \[4, 3\], the file \[3, 4\]"):
        checkpoint.load(make, tmp_path / "w", rename=lambda n: n if n == "weight" else None)
    model = checkpoint.load(
        make, tmp_path / "w", rename=lambda n: n if n == "weight" else None, transform=lambda _, t: t.t()
    )
    assert model.weight.shape == (4, 3)
    with pytest.raises(ConfigError, match=r"weight: the model has \[4, 3\], the file \[3, 4\]"):
        checkpoint.load(make, tmp_path / "w", rename=only, transform=lambda _, t: t, strict=False)


def test_a_failing_transform_names_the_key_and_leaves_the_model(tmp_path: Path) -> None:
    source = nn.Linear(4, 4)
    path = saved(source, tmp_path / "w")
    model = nn.Linear(4, 4)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}

    def fails(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "kernel":
            raise ArithmeticError("no scale")
        return tensor + 1

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))

    with pytest.raises(
        ConfigError, match=r"kernel \(weight in the file\).*ArithmeticError: no scale"
    ) as caught:
        checkpoint.load(Kernel, path, rename={"weight": "kernel"}, transform=fails)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    for wrong in (None, 3, torch.empty(4, 4, device="meta")):
        with pytest.raises(ConfigError, match="the transform made"):
            checkpoint.load(model, path, transform=lambda name, tensor, made=wrong: made)
    assert before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}


def test_what_does_not_fit_is_said_before_anything_is_read(tmp_path: Path) -> None:
    save_file({**nn.Linear(4, 4).state_dict(), "more": torch.ones(1)}, tmp_path / "w")
    called: list[str] = []

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        called.append(name)
        return tensor

    with pytest.raises(ConfigError, match="more"):
        checkpoint.load(nn.Linear(4, 4), tmp_path / "w", transform=transform)
    assert called == []
    with pytest.warns(UserWarning, match="more"):
        checkpoint.load(nn.Linear(4, 4), tmp_path / "w", transform=transform, strict=False)
    assert set(called) == {"weight", "bias"}


def test_a_shared_weight_is_transformed_once(tmp_path: Path) -> None:
    called: list[str] = []
    save_file({"b.weight": torch.ones(3, 3)}, tmp_path / "w")
    model = checkpoint.load(SharedWeight, tmp_path / "w", transform=lambda n, t: called.append(n) or t * 3)
    assert model.a.weight is model.b.weight and model.a.weight[0, 0] == 3
    assert called == ["b.weight"]


def test_a_file_that_was_cut_meanwhile(tmp_path: Path) -> None:
    path = saved(layers(2, 64), tmp_path / "w")
    opened = open_checkpoint(path)
    assert opened["0.weight"].shape == (64, 64)  # mapped before the file was cut
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(SourceError, match=r"is cut short: 1\.weight needs"):
        checkpoint.load(lambda: layers(2, 64), opened, dtype=torch.float16)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "meta"}, r"meta.*init_empty"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; expected torch.bfloat16"),
        ({"dtype": "bf17"}, "dtype is 'bf17'; expected a floating dtype"),
        ({"transform": 3}, "transform is 3"),
        ({"assign": False, "dtype": torch.float16}, "leave device and dtype out"),
        ({"rename": {"(": ""}}, "rename is"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = saved(nn.Linear(2, 2), tmp_path / "w")
    with pytest.raises(ConfigError, match=said):
        checkpoint.load(nn.Linear(2, 2), path, **options)


def test_masters_on_an_accelerator(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    source = Mixed()
    path = saved(source, tmp_path / "w")
    model = checkpoint.load(Mixed, path, device="cuda", dtype=torch.float16)
    for name, value in source.state_dict().items():
        expected = value.half() if value.is_floating_point() else value
        assert model.state_dict()[name].device.type == "cuda"
        assert torch.equal(model.state_dict()[name].cpu(), expected)
