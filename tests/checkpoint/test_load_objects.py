"""checkpoint.load keeps a model's parameter objects, and restores everything after an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sample_loads import saved
from torch import nn

from conftest import Provider
from dynswap_ext import checkpoint, testing
from dynswap_ext._util.file_mappings import mapped_ranges
from dynswap_ext.errors import ConfigError, DynswapWarning
from sample_models import ConvNet, mlp


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.fixture(params=["real", "meta", "init_empty"])
def skeleton(request: pytest.FixtureRequest) -> Callable[[Callable[[], nn.Module]], nn.Module]:
    makers: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
        "real": lambda make: make(),
        "meta": on_meta,
        "init_empty": checkpoint.init_empty,
    }
    return makers[request.param]


Skeleton = Callable[[Callable[[], nn.Module]], nn.Module]


@pytest.mark.parametrize(
    "make", [lambda: mlp(), ConvNet, lambda: nn.LSTM(4, 8, 2)], ids=["mlp", "conv", "lstm"]
)
def test_an_optimizer_made_before_steps_what_was_loaded(
    skeleton: Skeleton, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    reference = make()
    path = saved(reference, tmp_path / "w")
    model = skeleton(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffers = list(model.buffers())
    checkpoint.load(model, path)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    ranges = mapped_ranges(path)
    assert all(any(s <= p.data_ptr() < s + n for s, n in ranges) for p in model.parameters())
    x = (
        torch.randn(2, 3, 8, 8)
        if make is ConvNet
        else torch.randn(2, 16 if isinstance(model, nn.Sequential) else 4)
    )
    losses = []
    for each in (model, reference):
        each.train()
        if each is reference:
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            y = each(x)
            loss = (y[0] if isinstance(y, tuple) else y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    testing.assert_bit_equal(dict(model.state_dict()), dict(reference.state_dict()), "state")


def test_gradients_go_and_attributes_and_hooks_stay(tmp_path: Path) -> None:
    path = saved(mlp().bfloat16(), tmp_path / "w")
    model, calls = mlp(), []
    weight = model[0].weight
    weight.mark = "kept"
    weight.register_hook(lambda grad: calls.append(grad.dtype))
    model(torch.randn(2, 16)).sum().backward()
    checkpoint.load(model, path)
    assert weight is model[0].weight and weight.grad is None and weight.mark == "kept"
    model(torch.randn(2, 16, dtype=torch.bfloat16)).sum().backward()
    assert calls == [torch.float32, torch.bfloat16]


def test_attributes_of_a_meta_parameter_stay(tmp_path: Path) -> None:
    model = on_meta(mlp)
    model[0].weight.mark = "kept"
    checkpoint.load(model, saved(mlp(), tmp_path / "w"))
    assert model[0].weight.mark == "kept"


def test_a_graph_from_before_says_that_its_weights_have_changed(tmp_path: Path) -> None:
    model = mlp()
    loss = model(torch.randn(2, 16, requires_grad=True)).sum()
    checkpoint.load(model, saved(mlp(), tmp_path / "w"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_torch_cannot_swap_is_warned_of(tmp_path: Path) -> None:
    model = on_meta(mlp)
    reference = weakref.ref(model[0].weight)
    held = model[0].weight
    with pytest.warns(DynswapWarning, match=r"1 tensor.*Linear\.weight.*optimizers"):
        checkpoint.load(model, saved(mlp(), tmp_path / "w"))
    assert reference() is held and model[0].weight is not held and not model[0].weight.is_meta


def test_two_models_of_the_same_names_and_path(tmp_path: Path) -> None:
    first_values, second_values = mlp(), mlp()
    path = saved(first_values, tmp_path / "w")
    first = checkpoint.load(mlp, path)
    twin = checkpoint.load(mlp, path)
    with torch.no_grad():
        first[0].weight.fill_(5)
    testing.assert_bit_equal(twin[0].weight.detach(), first_values[0].weight.detach())
    path.unlink()
    second = checkpoint.load(mlp, saved(second_values, path))
    testing.assert_bit_equal(dict(second.state_dict()), dict(second_values.state_dict()), "second")
    testing.assert_bit_equal(dict(twin.state_dict()), dict(first_values.state_dict()), "first")


def facts(model: nn.Module) -> list[Any]:
    members = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, id(value), value.data_ptr(), value.dtype, None if value.grad is None else id(value.grad))
        for name, value in members
    ]


class Extra(nn.Linear):
    state = "mine"

    def get_extra_state(self) -> str:
        return self.state

    def set_extra_state(self, state: str) -> None:
        self.state = state


FAILURES: dict[str, Callable[[nn.Module, pytest.MonkeyPatch], object]] = {
    "a hook": lambda model, _: model.register_load_state_dict_post_hook(lambda m, keys: 1 / 0),
    "a swap": lambda _, patch: patch.setattr(torch.autograd.graph, "increment_version", lambda t: 1 / 0),
    "a missing key": lambda model, _: model.register_parameter("more", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("swapping", [False, True])
def test_all_is_put_back_after(
    failure: str, swapping: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"linear": Extra(4, 4), "norm": nn.BatchNorm1d(4), "cell": nn.GRUCell(4, 4)})

    source = make()
    source["linear"].state = "theirs"
    torch.save(source.state_dict(), tmp_path / "w")
    model = make()
    model["linear"](torch.ones(1, 4)).sum().backward()
    FAILURES[failure](model, monkeypatch)
    before, state = facts(model), {name: value.clone() for name, value in model.named_parameters()}
    if swapping and failure == "a swap":
        pytest.skip("torch swaps by itself then")
    torch.__future__.set_swap_module_params_on_conversion(swapping)
    try:
        with pytest.raises((ConfigError, ZeroDivisionError)):
            checkpoint.load(model, tmp_path / "w")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert facts(model) == before
    testing.assert_bit_equal(dict(model.named_parameters()), state, "parameters")
    assert model["linear"].state == "mine"


def test_an_lstm_computes_with_its_own_weights_after_a_failed_load(tmp_path: Path) -> None:
    save_file({**nn.LSTM(3, 4).state_dict(), "more": torch.ones(1)}, tmp_path / "w")
    model, x = nn.LSTM(3, 4), torch.randn(2, 3)
    before = model(x)[0]
    with pytest.raises(ConfigError, match="more"):
        checkpoint.load(model, tmp_path / "w")
    assert torch.equal(model(x)[0], before)


def test_a_lazy_module_takes_its_shape_from_the_file(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    path = saved(source, tmp_path / "w")
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    with pytest.raises(ConfigError):
        checkpoint.load(model, path, rename={"^1": "2"})
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    checkpoint.load(model, path)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), source(x))


@pytest.mark.parametrize("make", [ConvNet, lambda: nn.LSTM(16, 8)], ids=["conv", "lstm"])
@pytest.mark.parametrize("assign", [True, False])
def test_an_installed_model(
    provider: Provider, make: Callable[[], nn.Module], assign: bool, tmp_path: Path
) -> None:
    source = make().eval()
    path = saved(source, tmp_path / "w")
    model = make().eval()
    masters = list(model.parameters())
    handle = provider.install(model)
    x = (
        provider.randn(2, 3, 8, 8, dtype=torch.float32)
        if make is ConvNet
        else provider.randn(2, 16, dtype=torch.float32)
    )
    with torch.no_grad():
        model(x)
        assert checkpoint.load(model, path, assign=assign) is model
        for _ in range(2):
            testing.assert_bit_equal(model(x), testing.moved(source, provider.device)(x))
    assert all(a is b for a, b in zip(masters, model.parameters(), strict=True))
    handle.uninstall()
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.state_dict()), "state")
