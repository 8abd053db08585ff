"""Masters of tensor subclasses: inner tensors are streamed, attributes survive, none is dequantised."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import trace
from sample_subclasses import Linear8, Params8, ScaledInt8, bytes_mlp, quantised_mlp


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    ScaledInt8.dequantised = Params8.dequantised = 0
    yield


def map_inner(model: nn.Module, path: Path) -> nn.Module:
    """Map payloads and scales from a file, as if they were loaded from a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for name, master in model.named_parameters():
        if isinstance(master, ScaledInt8):
            found[f"{name}.payload"], found[f"{name}.scale"] = master.payload, master.scale
        else:
            found[name] = master.data
    torch.save(found, path)
    loaded = torch.load(path, mmap=True, weights_only=True)
    for name, master in model.named_parameters():
        if isinstance(master, ScaledInt8):
            master.payload, master.scale = loaded[f"{name}.payload"], loaded[f"{name}.scale"]
        else:
            master.data = loaded[name]
    return model


def inner_bytes(model: nn.Module) -> int:
    return sum(p.inner_bytes() if isinstance(p, ScaledInt8) else p.nbytes for p in model.parameters())


def streams(provider: Provider) -> bool:
    """Return whether the engine moves payloads. Pure Python moves a subclass whole, by its own `.to()`."""
    return provider.native


def test_a_wrapper_is_handed_out_as_what_it_is(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model)
    weight, master = model[0].weight, model[0]._parameters["weight"]
    assert isinstance(weight, ScaledInt8) and isinstance(weight, nn.Parameter)
    assert weight.tag == "mine" and weight.dtype == torch.float32
    assert weight.device == weight.payload.device == weight.scale.device == provider.device
    testing.assert_bit_equal(weight.payload.cpu(), master.payload)
    testing.assert_bit_equal(weight.scale.cpu(), master.scale)
    assert ScaledInt8.dequantised == 0


def test_a_wrapper_streams_its_payload(provider: Provider, tmp_path: Path) -> None:
    model = map_inner(quantised_mlp(features=256, layers=5), tmp_path / "model.pt").eval()
    moved = testing.moved(model, provider.device)
    handle = provider.install(model)
    x = provider.randn(2, 256, dtype=torch.float32)
    size, dequantised_size = inner_bytes(model), sum(p.numel() * 4 for p in model.parameters())
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
        assert ScaledInt8.dequantised == 2 * 2 * 5  # only by the products, in both models
        stats = handle.stats()
    if streams(provider):
        assert size <= stats.bytes_moved <= 3 * size  # two passes, and the prefetch for a third
        assert stats.weight_bytes < dequantised_size
        assert stats.peak_bytes < dequantised_size


@pytest.mark.parametrize("budget", ["1MiB", 200_000], ids=["resident", "streamed"])
def test_a_wrapper_within_a_budget(provider: Provider, tmp_path: Path, budget: str | int) -> None:
    model = map_inner(quantised_mlp(features=256, layers=5), tmp_path / "model.pt").eval()
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, budget=budget)
    x = provider.randn(2, 256, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert stats.overflow_bytes == 0 and stats.peak_bytes <= handle.budget
    if streams(provider) and budget == "1MiB":
        assert stats.bytes_moved == inner_bytes(model)  # each once


def test_a_wrapper_that_requires_gradients(provider: Provider, tmp_path: Path) -> None:
    """A wrapper that requires gradients is streamed without a graph.

    transformers leaves the masters of a quantised checkpoint like this.
    """
    model = map_inner(quantised_mlp(features=256, layers=5), tmp_path / "model.pt").eval()
    model.requires_grad_()
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, budget=200_000)
    x = provider.randn(2, 256, dtype=torch.float32)
    for no_graph in (torch.no_grad, torch.inference_mode):
        handle.reset_stats()
        with no_graph():
            for _ in range(2):
                testing.assert_bit_equal(model(x), moved(x))
            assert isinstance(model[0].weight, ScaledInt8)
        stats = handle.stats()
        assert stats.overflow_bytes == 0 and stats.peak_bytes <= handle.budget
        if streams(provider):
            assert stats.weight_bytes >= inner_bytes(model) and stats.bytes_moved > inner_bytes(model)
    y, z = (x.clone().requires_grad_() for _ in range(2))
    out, expected = model(y), moved(z)
    testing.assert_bit_equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    testing.assert_bit_equal(y.grad, z.grad)
    for (name, p), (_, q) in zip(model.named_parameters(), moved.named_parameters(), strict=True):
        testing.assert_bit_equal(p.grad, None if q.grad is None else q.grad.to(p.device), name)


def test_a_wrapper_in_place_is_the_master(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model)
    assert (model[0].weight is model[0]._parameters["weight"]) == (provider.device.type == "cpu")


def test_a_wrapper_is_cast_without_being_dequantised(provider: Provider) -> None:
    model: Any = quantised_mlp()
    moved = testing.moved(model, provider.device, torch.float64)
    ScaledInt8.dequantised = 0
    handle = provider.install(model, dtype=torch.float64)
    weight = model[0].weight
    assert isinstance(weight, ScaledInt8) and weight.dtype == torch.float64 and weight.tag == "mine"
    assert weight.payload.dtype == torch.int8
    assert ScaledInt8.dequantised == 0
    del weight
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved <= 2 * inner_bytes(model)


def test_gradients_pass_through_a_wrapper(provider: Provider, tmp_path: Path) -> None:
    model = map_inner(quantised_mlp(features=64, layers=4), tmp_path / "model.pt")
    moved = testing.moved(model, provider.device)
    provider.install(model)
    x, y = (provider.randn(2, 64, dtype=torch.float32).requires_grad_() for _ in range(2))
    model(x).sum().backward()
    moved(y).sum().backward()
    testing.assert_bit_equal(x.grad, y.grad)
    for module, other in zip(model, moved, strict=True):
        testing.assert_bit_equal(module._parameters["bias"].grad, other.bias.grad.cpu())


def test_state_and_uninstall_of_a_wrapper(provider: Provider) -> None:
    model: Any = quantised_mlp()
    before, masters = trace(model), list(model.parameters())
    inner = [(id(p.payload), id(p.scale)) for p in masters if isinstance(p, ScaledInt8)]
    provider.install(model)
    model(provider.randn(2, 16, dtype=torch.float32))
    state = model.state_dict(keep_vars=True)
    assert all(kept is master for kept, master in zip(state.values(), masters, strict=True))
    assert isinstance(model.state_dict()["0.weight"], ScaledInt8)
    copied: Any = copy.deepcopy(model)
    assert isinstance(copied[0].weight, ScaledInt8) and copied[0].weight.tag == "mine"
    dynswap_ext.uninstall(model)
    assert trace(model) == before
    assert [(id(p.payload), id(p.scale)) for p in masters if isinstance(p, ScaledInt8)] == inner


def test_a_wrapper_written_in_place_is_seen(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model)
    x = provider.randn(2, 16, dtype=torch.float32)
    model(x)
    with torch.no_grad():
        model[0]._parameters["weight"].copy_(torch.ones(16, 16))
    moved = testing.moved(model, provider.device)
    testing.assert_bit_equal(model(x), moved(x))
    assert model[0].weight.payload.unique().tolist() == [127]


@pytest.fixture
def _swapping() -> Iterator[None]:
    """Let torch move and load tensors by swapping them, its way for subclasses."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_tensors_are_swapped_while_installed(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model)
    x = provider.randn(2, 16, dtype=torch.float32)
    model(x)
    master = model[0]._parameters["weight"]
    other = nn.Parameter(ScaledInt8.quantise(torch.randn(16, 16), "other"), requires_grad=False)
    torch.utils.swap_tensors(master, other)
    assert model[0]._parameters["weight"] is master and master.tag == "other"
    assert model[0].weight.tag == "other"
    moved = testing.moved(model, provider.device)
    testing.assert_bit_equal(model(x), moved(x))


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize("quantised", [False, True], ids=["from floats", "from its own kind"])
def test_load_state_dict_through_module_load(provider: Provider, quantised: bool) -> None:
    model: Any = quantised_mlp()
    source = quantised_mlp() if quantised else nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    provider.install(model)
    x = provider.randn(2, 16, dtype=torch.float32)
    model(x)
    model.load_state_dict(source.state_dict())
    moved = testing.moved(model, provider.device)
    assert isinstance(model[0].weight, ScaledInt8) and isinstance(moved[0].weight, ScaledInt8)
    testing.assert_bit_equal(model(x), moved(x))
    expected = source[0].weight if quantised else ScaledInt8.quantise(source[0].weight)
    testing.assert_bit_equal(model[0].weight.payload.cpu(), expected.payload)


@pytest.mark.usefixtures("_swapping")
def test_a_conversion_swaps_the_masters(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model)
    model.double()
    master = model[0]._parameters["weight"]
    assert isinstance(master, ScaledInt8) and master.dtype == torch.float64 and master.tag == "mine"
    moved = testing.moved(model, provider.device)
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))


# A parameter whose data are bytes.


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "cast"])
def test_bytes_keep_their_class_and_attributes(provider: Provider, dtype: torch.dtype | None) -> None:
    model: Any = bytes_mlp()
    provider.install(model, dtype=dtype)
    weight, master = model[0].weight, model[0]._parameters["weight"]
    assert type(weight) is Params8 and weight.dtype == torch.uint8
    assert weight.quant_state.shape == (16, 16)
    assert weight.device == weight.quant_state.absmax.device == provider.device
    testing.assert_bit_equal(weight.data.cpu(), master.data)
    assert Params8.dequantised == 0


def test_bytes_that_know_their_module_leave_it_where_it_is(provider: Provider) -> None:
    """A weight whose `module` is its layer, as in bitsandbytes, does not move the layer's masters."""
    model: Any = bytes_mlp()
    for layer in model:
        layer.bias = nn.Parameter(torch.zeros(16))
        layer.weight.module = layer
    provider.install(model)
    model(provider.randn(2, 16, dtype=torch.float32))
    assert model[0].weight.quant_state.absmax.device == provider.device
    assert model[0]._parameters["weight"].module is model[0]
    assert {master.device.type for master in model.parameters()} == {"cpu"}
    if provider.native and provider.device.type != "cpu":
        assert model[0].weight.device == provider.device


@pytest.mark.parametrize("budget", [None, "1MiB"], ids=["streamed", "resident"])
def test_bytes_stream_as_bytes(provider: Provider, tmp_path: Path, budget: str | None) -> None:
    model = map_inner(bytes_mlp(features=256, layers=5), tmp_path / "model.pt").eval()
    moved = nn.Sequential(*(Linear8(nn.Linear(256, 256)) for _ in range(5)))
    for module, other in zip(model, moved, strict=True):
        other.weight = module.weight.to(provider.device)
    handle = provider.install(model, budget=budget)
    x = provider.randn(2, 256, dtype=torch.float32)
    size = inner_bytes(model)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    if provider.native and provider.device.type != "cpu":
        assert handle.stats().bytes_moved == size if budget else handle.stats().bytes_moved >= 2 * size
        assert handle.stats().weight_bytes < 2 * size
    assert Params8.dequantised == 2 * 3 * 5


def test_uninstall_of_bytes(provider: Provider) -> None:
    model = bytes_mlp()
    before = trace(model)
    states = [module.weight.quant_state for module in model]
    provider.install(model, dtype=torch.float64)
    model(provider.randn(2, 16))
    dynswap_ext.uninstall(model)
    assert trace(model) == before
    assert all(module.weight.quant_state is state for module, state in zip(model, states, strict=True))


def test_data_of_bytes_are_replaced(provider: Provider) -> None:
    """New data and a new state on a master are handed out, as after loading another checkpoint."""
    model: Any = bytes_mlp()
    provider.install(model)
    x = provider.randn(2, 16, dtype=torch.float32)
    model(x)
    new = Params8.quantise(torch.randn(16, 16))
    master = model[0]._parameters["weight"]
    master.data, master.quant_state = new.data, new.quant_state
    assert model[0].weight.quant_state.absmax.cpu() == new.quant_state.absmax
    testing.assert_bit_equal(model[0].weight.data.cpu(), new.data)


# What is written on what the model was handed out.


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, like.numel()).view(like.shape)


WRITES_ON_WRAPPERS: dict[str, Callable[[Any], object]] = {
    "copy_ of floats": lambda w: w.copy_(_new(w)),
    "copy_ of its own kind": lambda w: w.copy_(ScaledInt8.quantise(_new(w))),
    "detached": lambda w: w.detach().copy_(_new(w)),
    "inner": lambda w: w.payload.add_(1),
    "inner view": lambda w: w.scale[2:4].mul_(0.5),
    "attribute": lambda w: setattr(w, "tag", "other"),
    "inner attribute": lambda w: setattr(w, "scale", w.scale * 2),
    "new attribute": lambda w: setattr(w, "zero_point", torch.zeros(3, device=w.device)),
    "attribute deleted": lambda w: delattr(w, "spare"),
}


def _assert_same_wrapper(master: Any, expected: Any) -> None:
    assert sorted(vars(master)) == sorted(vars(expected))
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            testing.assert_bit_equal(vars(master)[name].cpu(), value.cpu())
            assert vars(master)[name].device.type == "cpu"
        else:
            assert vars(master)[name] == value


@pytest.mark.parametrize("held", [False, True], ids=["passing", "held"])
@pytest.mark.parametrize("budget", ["1GiB", "minimum"])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "cast"])
@pytest.mark.parametrize("write", WRITES_ON_WRAPPERS)
def test_what_is_written_on_a_wrapper_reaches_the_master(
    provider: Provider, write: str, dtype: torch.dtype | None, budget: str, held: bool
) -> None:
    model: Any = quantised_mlp()
    for master in model.parameters():
        master.spare = 1
    plain = copy.deepcopy(model)
    handle = provider.install(model, dtype=dtype, budget=budget)
    x = provider.randn(2, 16, dtype=dtype or torch.float32)
    with torch.no_grad():
        model(x)
        weight = model[0].weight if held else None
        WRITES_ON_WRAPPERS[write](model[0].weight)
        WRITES_ON_WRAPPERS[write](plain[0].weight)
        handle.flush()
    _assert_same_wrapper(model[0]._parameters["weight"], plain[0].weight)
    moved = testing.moved(plain, provider.device, dtype)
    testing.assert_bit_equal(model(x), moved(x))
    del weight
    _assert_same_wrapper(model[0]._parameters["weight"], plain[0].weight)


def test_a_wrapper_is_the_same_while_somebody_has_it(provider: Provider) -> None:
    model: Any = quantised_mlp()
    provider.install(model, dtype=torch.float64)
    weight = model[0].weight
    assert model[0].weight is weight
    weight.scale = weight.scale * 2
    handed_out = model[0].weight
    testing.assert_bit_equal(handed_out.scale, weight.scale)
    gone = weakref.ref(weight)
    del weight, handed_out
    assert gone() is None  # nothing keeps it


def test_attributes_set_on_bytes_reach_the_master(provider: Provider) -> None:
    model: Any = bytes_mlp()
    provider.install(model, dtype=torch.float64)
    model[0].weight.quant_state = None
    assert model[0]._parameters["weight"].quant_state is None


@pytest.mark.parametrize("action", ["uninstall", "install again"])
def test_what_is_set_on_a_wrapper_that_is_held_is_not_late(provider: Provider, action: str) -> None:
    model: Any = quantised_mlp()
    provider.install(model, dtype=torch.float64)
    weight = model[0].weight
    weight.tag = "other"
    if action == "uninstall":
        dynswap_ext.uninstall(model)
    else:
        provider.install(model, dtype=torch.float64)
    assert model[0]._parameters["weight"].tag == "other"
