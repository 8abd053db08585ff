"""Invariant 6: a master changed in place or replaced is seen by the next access."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, mlp

NEW = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(NEW)


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(NEW.clone())


def replace_in_the_dict(model: nn.Module) -> None:
    model[0]._parameters["weight"] = nn.Parameter(NEW.clone())


def write_through_data(model: nn.Module) -> None:
    model.get_parameter("0.weight").data.copy_(NEW)


def load(model: nn.Module) -> None:
    model.load_state_dict({**model.state_dict(), "0.weight": NEW})


def load_assigning(model: nn.Module) -> None:
    model.load_state_dict({**model.state_dict(), "0.weight": NEW.clone()}, assign=True)


def initialise_through_the_attribute(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.copy_(NEW)


#: Changes besides those of contract/test_state.py, which write on the master.
CHANGES = [
    replace_parameter,
    replace_in_the_dict,
    load,
    load_assigning,
    initialise_through_the_attribute,
]


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_master_is_seen(
    provider: Provider, change: Callable[[nn.Module], None], budget: str | None
) -> None:
    model = mlp().eval()
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 16)
    with torch.no_grad():
        before = model(x)
        model(x)
        change(model)
        moved = testing.moved(model, provider.device, torch.float64)
        after = model(x)
    testing.assert_bit_equal(moved[0].weight.float().cpu(), NEW, "the master")
    testing.assert_bit_equal(after, moved(x).detach(), "output after the change")
    assert not torch.equal(before, after)
    assert handle.stats().copies > 0


def called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def called_in_part(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[0](x)


def read_from_outside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, model[0].weight)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("read", [called, called_in_part, read_from_outside], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("layers", "first"), [(1, None), (1, "0.weight"), (3, None), (3, "0.weight"), (3, "2.weight")]
)
def test_a_write_that_bumps_no_version_is_seen_wherever_it_is_read(
    provider: Provider,
    layers: int,
    first: str | None,
    read: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    budget: str | None,
) -> None:
    model = mlp(layers=layers).eval()
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 16)
    with torch.no_grad():
        if first is not None:  # the first read of a weight need not be in a call
            path, _, name = first.rpartition(".")
            getattr(model.get_submodule(path), name)
        for _ in range(2):
            read(model, x)
            write_through_data(model)
            moved = testing.moved(model, provider.device, torch.float64)
            testing.assert_bit_equal(read(model, x), read(moved, x).detach(), "after the write")
            model.get_parameter("0.weight").data.neg_()


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_master_changed_while_its_tensor_is_held(provider: Provider, budget: str | None) -> None:
    model = mlp()
    provider.pair(model, budget=budget)
    held = model[0].weight
    fill(model)
    torch.testing.assert_close(model[0].weight, NEW.to(provider.device, torch.float64))
    del held


def test_moving_a_part_to_the_dtype_wanted_hands_the_masters_out(provider: Provider) -> None:
    if provider.device.type != "cpu":
        pytest.skip("being sent where it computes moves nothing: contract/test_sent_where_it_computes.py")
    model = mlp()
    provider.pair(model)
    model[0].to(provider.device, torch.float64)
    assert model[0].weight is model[0]._parameters["weight"]
    assert model[2].weight is not model[2]._parameters["weight"]
    model[0].to("cpu", torch.float32)
    assert model[0].weight.dtype == torch.float64
    assert model[0]._parameters["weight"].dtype == torch.float32
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))


def test_a_master_where_and_what_it_should_be_is_handed_out_itself(provider: Provider) -> None:
    model = mlp().to(provider.device)
    handle = provider.install(model)
    assert all(model[i].weight is model[i]._parameters["weight"] for i in (0, 2, 4))
    model(provider.randn(2, 16, dtype=torch.float32))
    assert handle.stats().bytes_moved == 0


def test_load_state_dict_after_unsaved_writes(provider: Provider) -> None:
    model = ConvNet().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    provider.pair(model)
    loss = model(provider.randn(4, 3, 8, 8)).sum()  # the graph holds the running statistics
    model.load_state_dict(state)
    del loss
    testing.assert_bit_equal(model.state_dict(), state, "state")


def test_a_load_after_a_write_on_a_tensor_that_is_kept(provider: Provider) -> None:
    model = mlp(layers=1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    provider.pair(model)
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the write came first, so there is no conflict
        model.load_state_dict(state)
        del weight
    testing.assert_bit_equal(model.state_dict(), state, "state")


def test_get_parameter_names_a_master(provider: Provider) -> None:
    model = ConvNet()
    provider.pair(model)
    assert model.get_parameter("head.weight") is model.head._parameters["weight"]
    assert model.get_buffer("norm.running_mean") is model.norm._buffers["running_mean"]
    with pytest.raises(AttributeError, match="nothing"):
        model.get_parameter("head.nothing")
    with pytest.raises(AttributeError):
        model.get_buffer("head.weight")


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("width", [4, 300], ids=["small", "large"])
def test_a_master_whose_storage_is_emptied_for_a_while(
    provider: Provider, budget: str | None, width: int
) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(1, width)
    master = model.get_parameter("0.weight")
    values, storage = master.detach().clone(), master.untyped_storage()
    with torch.no_grad():
        model(x)
        held = model[0].weight
        storage.resize_(0)
        assert model[0].weight is master  # as without an install, since there is nothing to move
        held.add_(1)
        del held  # it was written, and its master has no memory for that
        storage.resize_(values.nbytes)
        master.copy_(values)
        provider.assert_as_masters(model, x)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_master_that_lets_go_of_its_bytes(provider: Provider, budget: str | None) -> None:
    """A session keeps a master's memory no longer than its module does, as with offloading between calls."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(1, 64)
    values = [p.detach().clone() for p in model.parameters()]
    watches: list[weakref.ref[object]] = []
    with torch.no_grad():
        for _ in range(3):
            earlier = watches  # a GPU reads their memory until the last copy is over
            owners = [value.numpy().copy() for value in values]
            watches = [weakref.ref(owner) for owner in owners]
            for p, owner in zip(model.parameters(), owners, strict=True):
                p.data = torch.from_numpy(owner)
            del owners, owner
            provider.assert_as_masters(model, x)
            for p in model.parameters():
                p.data = torch.empty(0)
            assert all(layer.weight.numel() == 0 for layer in model)
            gc.collect()
            gone = watches if provider.device.type == "cpu" else earlier
            assert not any(watch() is not None for watch in gone)
