"""A summary of a model's layers: shapes, calls, parameters, ties."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import ConfigError, checkpoint
from dynswap_ext.inspect import Layer, Summary, summary
from sample_models import ConvNet, Recurrent, Tied, TinyTransformer, mlp


def layer(found: Summary, path: str) -> Layer:
    return next(layer for layer in found.layers if layer.path == path)


def test_shapes_and_counts_by_hand() -> None:
    found = summary(ConvNet(), (2, 3, 5, 5))
    assert [(row.path, row.class_name, row.depth, row.output_shapes) for row in found.layers] == [
        ("", "ConvNet", 0, ((2, 5),)),
        ("conv", "Conv2d", 1, ((2, 8, 5, 5),)),
        ("norm", "BatchNorm2d", 1, ((2, 8, 5, 5),)),
        ("head", "Linear", 1, ((2, 5),)),
    ]
    assert layer(found, "head").input_shapes == ((2, 8),)
    assert [row.parameters for row in found.layers] == [216 + 16 + 45, 216, 16, 45]
    assert [row.calls for row in found.layers] == [1, 1, 1, 1]
    assert found.total_parameters == found.trainable_parameters == 277
    assert found.parameter_bytes == 277 * 4
    assert found.buffer_bytes == (8 + 8) * 4 + 8  # statistics, and how many batches there were
    assert layer(found, "norm").nbytes == 16 * 4 + 72
    assert found.bytes_by_place == {"RAM": 277 * 4 + 72}


def test_without_an_input_nothing_runs() -> None:
    class Refuses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    found = summary(Refuses(3, 4))
    assert found.total_parameters == 16
    assert found.layers[0].calls is None and found.layers[0].output_shapes is None
    assert "output" not in str(found)


def test_frozen_parameters() -> None:
    model = mlp(4, layers=2)
    model[0].requires_grad_(False)
    found = summary(model)
    assert (found.total_parameters, found.trainable_parameters, found.frozen_parameters) == (40, 20, 20)
    assert layer(found, "0").trainable_parameters == 0
    assert "trains" in str(found) and "trains" not in str(summary(mlp(4)))


def test_what_is_shared_counts_once() -> None:
    found = summary(Tied())
    assert found.total_parameters == 18 and found.parameter_bytes == 72
    assert layer(found, "embedding").parameters == layer(found, "head").parameters == 18
    assert [(w.name, w.tied_to) for w in found.weights] == [
        ("embedding.weight", None),
        ("head.weight", "embedding.weight"),
    ]
    assert "18 (is embedding.weight)" in str(found)


class Repeats(nn.Module):
    """A layer that is called often under two names, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.again = nn.ModuleDict({"same": self.first[0], "never": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        for _ in range(3):
            x = self.first(x) * scale
        return {"x": x, "both": (x[:1], [x[0]])}


def test_a_module_that_comes_again_and_one_that_is_never_called() -> None:
    found = summary(Repeats(), (2, 4))
    assert found.layers[0].output_shapes == ((2, 4), (1, 4), (4,))
    assert layer(found, "first.0").calls == 3 and layer(found, "again.never").calls == 0
    assert layer(found, "again.same").same_as == "first.0"
    assert layer(found, "again").parameters == found.total_parameters == 40
    assert len(found.weights) == 4
    text = str(found)
    assert "(3 calls)" in text and "not called" in text and "(as first.0)" in text


def test_a_tree_with_a_cycle_ends() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential())
    model[1]._modules["up"] = model
    found = summary(model)
    assert [row.same_as for row in found.layers] == [None, None, None, ""]
    assert found.total_parameters == 6


def test_depth_is_for_the_text_alone() -> None:
    deep, shallow = summary(TinyTransformer(), depth=None), summary(TinyTransformer(), depth=1)
    assert deep.layers == shallow.layers
    assert "self_attn" in str(deep) and "self_attn" not in str(shallow)
    assert "4,448" in str(shallow)  # the blocks' parameters stand where the blocks are closed
    table, _, _ = str(summary(TinyTransformer(), depth=0)).partition("\n\n")
    assert len(table.splitlines()) == 3 and "4,912" in table


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"input_size": [(2, 3), (2, 3)]}, ((2, 3), (2, 3))),
        ({"input_size": {"a": (2, 3), "b": [3]}}, ((2, 3), (3,))),
        ({"input_data": (torch.ones(2, 3), torch.ones(1, 3))}, ((2, 3), (1, 3))),
        ({"input_data": {"a": torch.ones(2, 3), "b": torch.ones(1)}}, ((2, 3), (1,))),
        ({"input_data": torch.ones(2, 3), "kwargs": {"b": torch.ones(1)}}, ((2, 3), (1,))),
        ({"kwargs": {"a": torch.ones(2, 3), "b": torch.ones(1)}}, ((2, 3), (1,))),
    ],
)
def test_ways_to_give_inputs(given: dict[str, Any], expected: Any) -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    found = summary(Adds(), **given)
    assert found.layers[0].input_shapes == expected
    assert found.layers[0].output_shapes == ((2, 3),)


def test_outputs_of_any_kind() -> None:
    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        cache: list[torch.Tensor] | None = None
        count: int = 3

    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> Output:
            return Output(x[None], [x, x[0]])

    assert summary(Makes(), (2, 3)).layers[0].output_shapes == ((1, 2, 3), (2, 3), (3,))
    lstm = layer(summary(Recurrent(), (2, 5, 6)), "lstm")
    assert lstm.output_shapes == ((2, 5, 8), (2, 2, 8), (2, 2, 8))


def test_dtypes_of_made_up_inputs() -> None:
    found = summary(TinyTransformer(), (2, 6), dtypes=torch.long)
    assert found.layers[0].output_shapes == ((2, 6, 29),)
    with pytest.raises(RuntimeError) as error:
        summary(TinyTransformer(), (2, 6))
    assert "dtypes=torch.long" in "".join(getattr(error.value, "__notes__", ["dtypes=torch.long"]))
    assert summary(mlp(4).double(), (2, 4)).layers[0].output_shapes == ((2, 4),)


def test_a_skeleton() -> None:
    model = checkpoint.init_empty(TinyTransformer)
    found = summary(model)
    assert found.total_parameters == summary(TinyTransformer()).total_parameters
    assert {weight.place for weight in found.weights} == {"meta"}
    assert summary(model, (2, 6), dtypes=torch.long).layers[0].output_shapes == ((2, 6, 29),)


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    before = summary(model)
    assert before.layers[1].class_name == "LazyLinear" and before.total_parameters == 0
    assert before.weights[0].shape is None and "not made yet" in str(before)
    after = summary(model, (2, 5))
    assert after.layers[1].class_name == "Linear" and after.total_parameters == 18


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_shows_its_weights_and_no_shapes() -> None:
    model = nn.Sequential(torch.jit.script(mlp(4)), nn.Linear(4, 2))
    found = summary(model, (2, 4))
    assert found.layers[1].calls is None and found.layers[1].parameters == 60
    assert found.layers[0].output_shapes == ((2, 2),)


def test_an_installed_model_looks_as_its_plain_self(provider: Provider) -> None:
    plain = summary(TinyTransformer(), (2, 6), dtypes=torch.long)
    model = TinyTransformer()
    provider.install(model, dtype=torch.float64)
    found = summary(model, (2, 6), dtypes=torch.long)
    assert found.device == provider.device

    def told(found: Summary) -> list[Any]:
        return [dataclasses.replace(row, weights=()) for row in found.layers]

    assert told(found) == told(plain)
    assert found.parameter_bytes == plain.parameter_bytes  # masters are as they were


def test_it_is_data() -> None:
    found = summary(mlp(4), (2, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.total_parameters = 3  # type: ignore[misc]
    assert json.dumps([dataclasses.asdict(row) for row in found.layers], default=str)
    assert repr(found) == "<Summary of Sequential: 7 layers, 60 parameters>"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"input_size": (2, 4), "input_data": torch.ones(2, 4)}, "both input_size and input_data"),
        ({"depth": -1}, "depth is -1"),
        ({"depth": True}, "depth is True"),
        ({"depth": "2"}, "depth is '2'"),
        ({"input_size": 4}, "input_size is 4"),
        ({"input_size": (2, -4)}, r"input_size is \(2, -4\)"),
        ({"input_size": []}, "input_size is"),
        ({"input_size": {"input": 4}}, "input_size is"),
        ({"input_size": (2, 4), "dtypes": [torch.long] * 2}, "dtypes is"),
        ({"input_size": {"input": (2, 4)}, "dtypes": {"x": torch.long}}, "dtypes is"),
        ({"dtypes": torch.long}, "there is no input_size"),
        (
            {"input_data": {"input": 1}, "kwargs": {"input": 1}},
            "multiple values for .*'input'",
        ),
        ({"kwargs": [1]}, "kwargs is a list"),
    ],
)
def test_bad_arguments(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        summary(mlp(4), **options)


def test_no_module() -> None:
    with pytest.raises(ConfigError, match="model is a function"):
        summary(lambda x: x)  # type: ignore[arg-type]
