"""The bytes around each call, compared with arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider, skip_or_fail
from dynswap_ext import ConfigError, checkpoint
from dynswap_ext.inspect import Call, MemoryProfile, memory_profile, summary
from sample_models import TinyTransformer, mlp

# Bytes of a layer's output: 4 rows of 16 in float64.
ROW = 4 * 16 * 8
WEIGHT = (16 * 16 + 16) * 8


def figures(found: MemoryProfile) -> list[tuple[str, int, int, int]]:
    return [(call.path, call.before, call.after, call.peak) for call in found.calls]


def one(found: MemoryProfile, path: str) -> Call:
    (call,) = [call for call in found.calls if call.path == path]
    return call


# Linear, GELU, Linear, GELU: each has its input and makes its output, and Sequential drops all others.
EXPECTED = [
    ("", 0, ROW, 2 * ROW),
    ("0", 0, ROW, ROW),
    ("1", ROW, 2 * ROW, 2 * ROW),
    ("2", ROW, 2 * ROW, 2 * ROW),
    ("3", ROW, 2 * ROW, 2 * ROW),
]


def test_a_plain_model_without_gradients() -> None:
    model, x = mlp(layers=2).double(), torch.ones(4, 16, dtype=torch.float64)
    with torch.no_grad():
        found = memory_profile(model, input_data=x)
    assert figures(found) == EXPECTED
    assert found.peak_bytes == 2 * ROW and found.base_bytes == 2 * WEIGHT + ROW
    assert found.measured == "storages" and found.device == torch.device("cpu")
    assert [call.kept for call in found.calls] == [ROW] * 5


def test_with_gradients_what_backward_needs_stays() -> None:
    model, x = mlp(layers=2).double(), torch.ones(4, 16, dtype=torch.float64)
    found = memory_profile(model, input_data=x)
    assert [call.after for call in found.calls[1:]] == [ROW, 2 * ROW, 3 * ROW, 4 * ROW]
    assert found.calls[0].kept == 4 * ROW


def test_an_installed_model(provider: Provider) -> None:
    """Residents count as memory before the call. On CUDA, sizes are rounded up to 512 by the allocator."""
    assert ROW % 512 == 0
    model, x = mlp(layers=2), provider.randn(4, 16)
    provider.install(model, dtype=torch.float64, budget="1MiB")
    with torch.no_grad():
        model(x)
        found = memory_profile(model, input_data=x)
    assert figures(found) == EXPECTED
    assert found.device == provider.device
    assert found.base_bytes >= 2 * WEIGHT + ROW


def test_ignored_weights_on_the_device_are_there_before(provider: Provider) -> None:
    model, x = mlp(layers=2), provider.randn(4, 16)
    model[2].to(provider.device, torch.float64)
    provider.install(model, dtype=torch.float64, budget="1MiB", ignore="2.weight")
    with torch.no_grad():
        model(x)
        found = memory_profile(model, input_data=x)
    assert found.base_bytes >= 2 * WEIGHT + ROW


def test_a_streamed_weight_counts_where_a_tensor_is_made_for_it(provider: Provider) -> None:
    model, x = mlp(layers=2), provider.randn(4, 16)
    handle = provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        found = memory_profile(model, input_data=x)
    if provider.native:  # they pass through the arena
        assert figures(found) == EXPECTED
        assert found.base_bytes >= handle.stats().arena_bytes > 0
    else:
        assert one(found, "0").peak >= ROW + WEIGHT
        assert found.calls[0].after == ROW  # no memory of weights stays


def test_modules_called_again_and_never() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ReLU()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])
            self.used = nn.ModuleList([nn.ReLU()])

        def forward(self, x: torch.Tensor, *, times: int) -> torch.Tensor:
            for _ in range(times):
                x = self.layer(x)
            return self.used[0](x)

    found = memory_profile(Repeats(), input_data={"x": torch.ones(8)}, kwargs={"times": 3})
    assert [(c.path, c.index) for c in found.calls] == [
        ("", 0),
        ("layer", 0),
        ("layer", 1),
        ("layer", 2),
        ("used.0", 0),
    ]
    assert found.not_called == ("blocks", "blocks.0")


def test_what_a_layer_makes_and_lets_go() -> None:
    class Scratch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            buffer = torch.empty(0)
            buffer.resize_(1000)
            torch.add(x, 1, out=buffer.resize_(0))
            wide = torch.cat([x] * 10)
            return x + wide[0]

    x = torch.ones(100)
    outer, middle, call = memory_profile(nn.Sequential(nn.Sequential(Scratch())), input_data=x).calls
    # A storage never shrinks, so `out=` finds enough room.
    assert (call.before, call.after, call.peak) == (0, 400, 4000 + 4000 + 400)
    assert call.extra == 8400
    assert outer.peak == middle.peak == call.peak  # memory that is freed inside counts for outer calls


def test_views_and_what_was_there_before_cost_nothing() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(10, 10))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x.add_(1)
            return x[1:].view(-1), self.table.t()

    assert memory_profile(Views(), input_data=torch.ones(4, 4)).peak_bytes == 0


def test_sparse_tensors_and_vmap() -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_sparse()

    x = torch.zeros(10, 10)
    x[1, 2] = x[3, 4] = 1
    (call,) = memory_profile(Sparse(), input_data=x).calls
    assert call.kept == 2 * 2 * 8 + 2 * 4  # two indices each, and a value

    class Mapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(torch.exp)(x)

    assert memory_profile(Mapped(), input_data=x).calls[0].kept == 400


def test_the_meta_device_needs_no_memory() -> None:
    model = checkpoint.init_empty(lambda: mlp(layers=2).double())
    with torch.no_grad():
        found = memory_profile(model, input_data=torch.ones(4, 16, dtype=torch.float64, device="meta"))
    assert figures(found) == EXPECTED and found.device.type == "meta"


def test_inference_mode() -> None:
    with torch.inference_mode():
        found = memory_profile(mlp(layers=2).double(), input_data=torch.ones(4, 16, dtype=torch.float64))
    assert figures(found) == EXPECTED


def test_the_largest_are_calls_without_calls_inside() -> None:
    found = memory_profile(TinyTransformer(), input_data=torch.zeros(2, 6, dtype=torch.long))
    largest = found.largest(3)
    assert [call.class_name for call in largest[:2]] == ["MultiheadAttention"] * 2
    assert [call.extra for call in largest] == sorted((c.extra for c in largest), reverse=True)


def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    model, x = mlp(layers=2).double().cuda(), torch.ones(4, 16, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        model(x)  # the library's workspace
        before = torch.cuda.memory_allocated()
        found = memory_profile(model, input_data=x)
    assert figures(found) == EXPECTED
    assert found.measured == "torch.cuda" and found.base_bytes == before


def test_it_prints() -> None:
    found = memory_profile(mlp(layers=1), input_data=torch.ones(4, 16))
    assert repr(found) == "<MemoryProfile on cpu: 3 calls, peak 512 bytes over 1.312 KiB>"
    assert "0: Linear" in str(found) and "measured by  storages" in str(found)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "nowhere"}, "device is 'nowhere'"),
        ({"device": 3.5}, "device is 3.5"),
        ({"kwargs": [1]}, "kwargs is a list"),
        ({"input_size": (4, 16)}, "both input_size and input_data"),
    ],
)
def test_bad_arguments(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        memory_profile(mlp(), input_data=torch.ones(4, 16), **options)


@pytest.mark.parametrize(
    "given",
    [
        {"input_size": (2, 6), "dtypes": torch.long},
        {"input_size": {"tokens": (2, 6)}, "dtypes": torch.long},
        {"input_data": {"tokens": torch.zeros(2, 6, dtype=torch.long)}},
        {"kwargs": {"tokens": torch.zeros(2, 6, dtype=torch.long)}},
    ],
)
def test_inputs_are_given_as_to_summary(given: dict[str, Any]) -> None:
    model = TinyTransformer()
    with torch.no_grad():
        (whole, *_) = memory_profile(model, **given).calls
    assert whole.output_shapes == summary(model, **given).layers[0].output_shapes == ((2, 6, 29),)


@pytest.mark.parametrize("look", [memory_profile, summary])
def test_inputs_in_the_place_of_shapes(look: Callable[..., Any]) -> None:
    """An error for inputs in the place of shapes names the option for them, also if it is misspelt."""
    for given in (torch.ones(4, 16), [torch.ones(4, 16)], {"input": torch.ones(4, 16)}):
        with pytest.raises(ConfigError, match="input_data="):
            look(mlp(), given)
    with pytest.raises(TypeError, match="Did you mean 'input_data'"):
        look(mlp(), input_dat=torch.ones(4, 16))


def test_no_module() -> None:
    with pytest.raises(ConfigError, match="model is a dict"):
        memory_profile({}, input_data=torch.ones(4, 16))  # type: ignore[arg-type]
