"""Parametrizations, pruning and fake quantisation: a weight is computed from other masters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_moved, assert_same_training_step
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, prune

import dynswap_ext
from coded_masters import stored_bytes
from conftest import Provider
from dynswap_ext import testing

Change = Callable[[nn.Module], object]

# Deprecated functions of torch are still in use.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def seeded(change: Change) -> Change:
    """Return a change that draws the same random numbers (vectors of spectral_norm) for both models."""

    def run(module: nn.Module) -> object:
        torch.manual_seed(5)
        return change(module)

    return run


#: For each kind: how to put it on a layer, and how to take it off.
CHANGES: dict[str, tuple[Change, Change]] = {
    "old weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "old weight_norm of all": (lambda m: nn.utils.weight_norm(m, dim=None), nn.utils.remove_weight_norm),
    "old spectral_norm": (seeded(nn.utils.spectral_norm), nn.utils.remove_spectral_norm),
    "weight_norm": (
        parametrizations.weight_norm,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
    "spectral_norm": (
        seeded(parametrizations.spectral_norm),
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
    "orthogonal": (
        seeded(parametrizations.orthogonal),
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
    "pruned": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
    "pruned in rows": (
        lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=0),
        lambda m: prune.remove(m, "weight"),
    ),
}


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def pair(provider: Provider, change: Change) -> tuple[nn.Sequential, nn.Sequential, dynswap_ext.Handle]:
    """Make the change on a model to be installed and on its moved copy.

    The change is made twice because torch cannot copy some of the modules that it makes.
    """
    model = layers()
    change(model[0])
    moved = layers()
    change(moved[0])
    moved.load_state_dict(model.state_dict())
    moved.to(provider.device, torch.float64)
    return model, moved, provider.install(model, dtype=torch.float64)


def assert_close_in(model: nn.Module, moved: nn.Module, x: torch.Tensor) -> None:
    """Assert that outputs and gradients are equal up to the rounding of one model's masters to float32."""
    for m in (model, moved):
        m.zero_grad()
    outputs = [m(x) for m in (model, moved)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    masters = dict(model.named_parameters())
    for name, p in moved.named_parameters():
        grad = masters[name].grad
        assert (grad is None) == (p.grad is None), name
        if grad is not None:
            torch.testing.assert_close(
                grad.double().cpu(), p.grad.cpu(), rtol=1e-4, atol=1e-4, msg=f"gradient of {name}"
            )


def assert_plain_again(model: nn.Sequential, moved: nn.Sequential, x: torch.Tensor) -> None:
    """Assert that the model is uninstalled and computes as the moved one.

    It is cast to float64, because a tensor that was computed from handed-out ones has their dtype and
    device.
    """
    plain = model.to("cpu", torch.float64).eval()
    assert not any(dynswap_ext.is_installed(m) for m in model.modules())
    with torch.no_grad():
        expected = moved.eval()(x).cpu()
        torch.testing.assert_close(plain(x.cpu()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CHANGES)
def test_put_on_before_the_install(provider: Provider, case: str) -> None:
    model, moved, handle = pair(provider, CHANGES[case][0])
    x = provider.randn(5, 6)
    for training in (False, True):
        model.train(training)
        moved.train(training)
        # The uses of a master, in the norm and beside it, may be summed in either precision.
        assert_same_training_step(model, moved, lambda m: m(x), close=True)
    assert_moved(handle, model)
    before = [type(m) for m in moved.modules()]
    handle.uninstall()
    assert [t.__name__ for t in before] == [type(m).__name__ for m in model.modules()]
    assert_plain_again(model, moved, x)


@pytest.mark.parametrize("case", CHANGES)
def test_put_on_while_installed(provider: Provider, case: str) -> None:
    model, moved, handle = pair(provider, lambda m: m)
    x = provider.randn(5, 6)
    testing.assert_bit_equal(model(x), moved(x), "output before")
    CHANGES[case][0](model[0])
    CHANGES[case][0](moved[0])
    assert set(model.state_dict()) == set(moved.state_dict())
    for name, buffer in moved.named_buffers():  # drawn where each has its masters
        model.get_buffer(name).copy_(buffer)
    for training in (True, False):
        model.train(training)
        moved.train(training)
        assert_close_in(model, moved, x)
    assert dynswap_ext.is_installed(model[0])
    handle.uninstall()
    assert_plain_again(model, moved, x)


@pytest.mark.parametrize("case", CHANGES)
def test_taken_off_while_installed(provider: Provider, case: str) -> None:
    if "pruned" in case and provider.device.type not in ("cpu", "cuda"):
        pytest.skip("torch does not let a tensor of this type of device become the data of one in RAM")
    model, moved, handle = pair(provider, CHANGES[case][0])
    x = provider.randn(5, 6)
    with torch.no_grad():
        model.eval()(x)
        moved.eval()(x)
    CHANGES[case][1](model[0])
    CHANGES[case][1](moved[0])
    assert set(model.state_dict()) == set(moved.state_dict()) == set(layers().state_dict())
    master = model[0]._parameters["weight"]
    assert isinstance(master, nn.Parameter)
    assert master.is_leaf
    assert_close_in(model, moved, x)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, moved)]
    for optimizer in optimizers:
        optimizer.step()
    assert_close_in(model, moved, x)
    assert dynswap_ext.is_installed(model[0])
    handle.uninstall()
    assert type(model[0]) is nn.Linear
    assert_plain_again(model, moved, x)


@pytest.mark.parametrize("last", ["uninstall", "take off"])
def test_one_more_and_one_less_while_installed(provider: Provider, last: str) -> None:
    model, moved, handle = pair(provider, parametrizations.weight_norm)
    x = provider.randn(5, 6)
    for m in (model, moved):
        parametrize.register_parametrization(m[0], "bias", nn.Tanh(), unsafe=True)
    assert_close_in(model, moved, x)
    for m in (model, moved):
        parametrize.remove_parametrizations(m[0], "weight")
    assert_close_in(model, moved, x)
    if last == "uninstall":
        handle.uninstall()
    for m in (model, moved):
        parametrize.remove_parametrizations(m[0], "bias")
    handle.uninstall()
    assert type(model[0]) is nn.Linear
    assert_plain_again(model, moved, x)


def test_a_parametrization_of_the_users_own_with_weights(provider: Provider) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((6, 1), 1.5))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.scale

        def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / self.scale

    model = layers()
    parametrize.register_parametrization(model[0], "weight", Scale())
    moved, handle = provider.pair(model)
    x = provider.randn(5, 6)
    assert_same_training_step(model, moved, lambda m: m(x))

    def run_cached(m: nn.Module) -> list[torch.Tensor]:
        with parametrize.cached():  # one context each: torch's cache takes a copy for its original
            return [m(x), m(2 * x)]

    assert_same_training_step(model, moved, run_cached, close=True)
    new = provider.randn(6, 6, seed=3)
    model[0].weight = new
    moved[0].weight = new
    torch.testing.assert_close(model(x), moved(x), rtol=1e-5, atol=1e-5)  # one of them was rounded
    master = model[0].parametrizations["weight"].get_parameter("original")
    assert master.dtype == torch.float32
    assert_moved(handle, model)


@pytest.mark.parametrize("installed", [False, True], ids=["before the install", "while installed"])
def test_global_pruning(provider: Provider, installed: bool) -> None:
    def prune_all(m: nn.Sequential) -> None:
        prune.global_unstructured([(m[0], "weight"), (m[2], "weight")], prune.L1Unstructured, amount=0.4)

    model, moved = layers(), layers()
    moved.load_state_dict(model.state_dict())
    if not installed:
        prune_all(model)
    provider.install(model, dtype=torch.float64)
    if installed:
        prune_all(model)
    prune_all(moved)
    moved.to(provider.device, torch.float64)
    x = provider.randn(5, 6)
    torch.testing.assert_close(model(x), moved(x), rtol=1e-6, atol=1e-6)
    for name, mask in moved.named_buffers():
        torch.testing.assert_close(model.state_dict()[name].double().cpu(), mask.cpu(), rtol=0, atol=0)
    assert 0 < sum(int((m == 0).sum()) for m in model.buffers()) < 60


def test_quantisation_stubs(provider: Provider) -> None:
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(6, 4), quantization.DeQuantStub())
    moved, handle = provider.pair(model)
    x = provider.randn(5, 6)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert_moved(handle, model)


def fake_quantise(per_channel: bool) -> nn.Module:
    if per_channel:
        observer = quantization.MovingAveragePerChannelMinMaxObserver
        return quantization.FakeQuantize(
            observer, quant_min=-128, quant_max=127, dtype=torch.qint8, ch_axis=1
        )
    return quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
def test_fake_quantisation(provider: Provider, per_channel: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), fake_quantise(per_channel))
    # float32 throughout: fake quantisation knows no float64, and bfloat16 weights make the masters stream.
    model.bfloat16()
    moved, handle = provider.pair(model, torch.float32)
    for step in range(2):
        x = provider.randn(5, 6, dtype=torch.float32, seed=step)
        outputs = [m(x) for m in (model, moved)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)
        for output in outputs:
            output.sum().backward()
    assert model.state_dict()["1.scale"].shape == moved[1].scale.shape
    torch.testing.assert_close(
        model.state_dict()["1.scale"].float().cpu(), moved[1].scale.cpu(), rtol=2e-2, atol=1e-3
    )
    for m in (model, moved):
        m.apply(torch.ao.quantization.disable_observer)
        m.apply(torch.ao.quantization.disable_fake_quant)
    testing.assert_bit_equal(model[1].fake_quant_enabled, moved[1].fake_quant_enabled)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output without fake quantisation")
    assert_moved(handle, model)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Adapting(nn.Module):
    """Parametrises a weight during its forward only, as peft does for LoRA on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Doubled())
            layer.parametrizations["weight"].original.requires_grad_(False)
            with parametrize.cached():
                x = layer(x)
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return x


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_put_on_and_taken_off_inside_a_forward(provider: Provider, budget: str | None) -> None:
    model = Adapting()
    masters = dict(model.named_parameters())
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(5, 6)
    passes = []
    for _ in range(4):
        before = handle.stats().bytes_moved
        testing.assert_bit_equal(model(x), moved(x))
        passes.append(handle.stats().bytes_moved - before)
        now = dict(model.named_parameters())
        assert {name: id(master) for name, master in now.items()} == {n: id(m) for n, m in masters.items()}
    if provider.native:  # there is no new plan, and each weight is copied once
        assert max(passes) <= sum(stored_bytes(master) for master in masters.values())
        assert budget is None or passes[1:] == [0, 0, 0]
    with torch.no_grad():
        for m in (model, moved):
            m.layers[0].weight.data.copy_(torch.eye(6))
    testing.assert_bit_equal(model(x), moved(x))
    assert model.layers[0].get_parameter("weight").equal(torch.eye(6))
    handle.uninstall()
    assert all(master is masters[name] for name, master in model.named_parameters())
