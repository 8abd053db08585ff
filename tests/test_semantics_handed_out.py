"""A handed-out tensor behaves like its parameter."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.parameter_proxy import ParameterProxy, master_of, plain_tensor_of
from sample_models import mlp


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def test_what_it_is(provider: Provider) -> None:
    model = linear()
    model.register_buffer("table", torch.ones(2))
    provider.pair(model)
    weight, table = model.weight, model.table
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(table, nn.Parameter)
    assert weight.device == table.device == provider.device
    assert weight.dtype == table.dtype == torch.float64
    assert weight.requires_grad and not table.requires_grad
    assert weight.grad_fn is not None and table.is_leaf


def test_the_same_object_while_alive(provider: Provider) -> None:
    model = linear()
    _, handle = provider.pair(model)
    weight = model.weight
    copies = handle.stats().copies
    assert all(model.weight is weight for _ in range(5))
    with torch.no_grad():
        assert model.weight is weight
    with torch.inference_mode():
        assert model.weight is weight
    assert handle.stats().copies == copies


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_proxy_is_an_alias_of_the_plain_tensor(provider: Provider, budget: str | None) -> None:
    if not provider.native:
        pytest.skip("pure Python has no plain tensor behind a proxy")
    model = linear()
    model.register_buffer("table", torch.ones(2))
    provider.install(model, dtype=torch.float64, budget=budget)
    for name in ("weight", "table"):
        proxy = getattr(model, name)
        plain, master = plain_tensor_of(proxy), master_of(proxy)
        assert type(proxy) is ParameterProxy and type(plain) is torch.Tensor
        assert master is (model._parameters | model._buffers)[name]
        assert proxy.data_ptr() == plain.data_ptr()
        assert isinstance(proxy, nn.Parameter) == isinstance(master, nn.Parameter)
        with torch.no_grad():
            proxy.add_(1)
        assert plain._version == proxy._version  # one counter


def test_it_holds_its_place_no_longer_than_it_lives(provider: Provider) -> None:
    model = linear()
    _, handle = provider.pair(model)
    weight = model.weight
    assert handle.stats().live_leases > 0
    watch = weakref.ref(weight)
    del weight
    gc.collect()
    assert watch() is None
    testing.assert_nothing_held(handle)


def test_a_view_keeps_the_values(provider: Provider) -> None:
    model = mlp(layers=4)
    provider.pair(model)
    expected = model.get_parameter("0.weight")[1].double()
    views = [model[0].weight[1], model[0].weight.detach()[1], model[0].weight.data[1]]
    with torch.no_grad():
        for _ in range(3):
            model(provider.randn(2, 16))
    for view in views:
        testing.assert_bit_equal(view.detach().cpu(), expected.detach())


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_in_place_writes_reach_the_master(provider: Provider, budget: str | None, training: bool) -> None:
    model = linear().train(training)
    provider.pair(model, budget=budget)
    with torch.no_grad():
        model.weight.fill_(2)
        nn.init.constant_(model.bias, 3)
    state = model.state_dict() if budget else model._parameters  # a resident's tensor may live on
    assert state["weight"].unique().tolist() == [2]
    assert state["bias"].unique().tolist() == [3]
    testing.assert_bit_equal(
        model.bias.detach(), torch.full((4,), 3.0, dtype=torch.float64, device=provider.device)
    )


def test_writes_on_a_tensor_that_is_kept_arrive_with_a_flush(provider: Provider) -> None:
    model = linear()
    _, handle = provider.pair(model)
    weight = model.weight
    with torch.no_grad():
        weight.fill_(2)
        assert model.state_dict()["weight"].unique().tolist() == [2]
        weight.fill_(3)
        assert next(model.parameters()).unique().tolist() == [3]
        weight.fill_(4)
        handle.flush()
        assert model._parameters["weight"].unique().tolist() == [4]
        weight.fill_(5)
        assert model.weight.unique().tolist() == [5]
        assert copy.deepcopy(model).weight.unique().tolist() == [5]
    del weight


@pytest.mark.parametrize("again", [False, True], ids=["written before", "and after"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_writes_on_a_tensor_that_is_kept_while_its_master_is_frozen(
    provider: Provider, budget: str | None, again: bool
) -> None:
    """A write on a kept tensor is kept if its master is frozen then.

    The next access hands out another tensor, and backward after an uninstall has the master's values.
    """
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    provider.install(model, dtype=torch.float64, budget=budget)
    master = model[2]._parameters["weight"]
    assert master is not None
    values = torch.randn(4, 4)
    kept = model[2].weight
    with torch.no_grad():
        kept.copy_(values)
    master.requires_grad_(False)
    x = torch.randn(3, 4, dtype=torch.float64, device=provider.device)
    if again:
        model(x)
        values = torch.randn(4, 4)
        with torch.no_grad():
            kept.copy_(values)
    output = model(x)
    dynswap_ext.uninstall(model)
    assert torch.equal(master, values)
    output.sum().backward()
    plain = copy.deepcopy(model).to(provider.device, torch.float64)
    plain.zero_grad()
    plain(x).sum().backward()
    testing.assert_bit_equal(output, plain(x))
    bias, expected = model[0].bias, plain[0].bias
    testing.assert_bit_equal(bias.grad, expected.grad.to("cpu", torch.float32))
    del kept
    assert torch.equal(master, values)


@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
def test_writes_through_views_of_several_reads(provider: Provider, numpy: bool) -> None:
    """Writes through views of two reads arrive, though each view outlives the tensor that it was made of."""
    if numpy and provider.device.type != "cpu":
        pytest.skip("NumPy's arrays are in RAM")
    model = linear().requires_grad_(False)
    provider.install(model, dtype=torch.float64)
    first, second = (
        view.numpy() if numpy else view for view in [model.weight.detach().view(-1) for _ in range(2)]
    )
    first[0] = 1.0
    assert model.weight[0, 0] == 1.0
    del first
    second[0] = 2.0
    assert model.weight[0, 0] == 2.0
    del second
    gc.collect()
    assert model.state_dict()["weight"][0, 0] == 2.0


def test_initialisers_that_write_through_data(provider: Provider) -> None:
    model = nn.Sequential(linear(), linear())
    moved, _ = provider.pair(model)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.25)
            module.bias.data.zero_()

    x = provider.randn(2, 4)
    for m in (model, moved):
        m.apply(initialise)
    testing.assert_bit_equal(model(x), moved(x))
    state = model.state_dict()
    assert all(state[name].unique().tolist() == [0.25] for name in ("0.weight", "1.weight"))
    assert all(state[name].unique().tolist() == [0] for name in ("0.bias", "1.bias"))


def test_only_written_elements_lose_precision(provider: Provider) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.full((4,), 1 / 3))
    provider.install(model, dtype=torch.bfloat16)
    model.table[1] = 2.0
    testing.assert_bit_equal(model.state_dict()["table"], torch.tensor([1 / 3, 2.0, 1 / 3, 1 / 3]))


def test_a_write_that_a_later_change_of_the_master_overtakes(provider: Provider) -> None:
    model = linear()
    provider.pair(model)
    weight = model.weight
    with torch.no_grad():
        weight.fill_(2)
        model._parameters["weight"].fill_(3)
    assert model.weight.unique().tolist() == [3]
    del weight
    gc.collect()
    assert model._parameters["weight"].unique().tolist() == [3]


def test_nan_payloads_and_signed_zeros_survive(provider: Provider) -> None:
    values = torch.tensor([0.0, -0.0, float("nan"), float("-inf"), 1e-45])
    model = nn.Module()
    model.register_buffer("table", values.clone())
    model.train()
    provider.pair(model)
    testing.assert_bit_equal(model.table, values.to(provider.device, torch.float64))
    testing.assert_bit_equal(model.state_dict()["table"], values)


def test_it_outlives_the_uninstall(provider: Provider) -> None:
    model = linear()
    handle = provider.install(model, dtype=torch.float64)
    weight = model.weight
    expected = model._parameters["weight"].double()
    handle.uninstall()
    testing.assert_bit_equal(weight.detach().cpu(), expected.detach())
    del weight


def test_it_outlives_the_model(provider: Provider) -> None:
    model = linear()
    provider.install(model, dtype=torch.float64)
    weight = model.weight
    expected = model._parameters["weight"].detach().double().clone()
    del model
    gc.collect()
    testing.assert_bit_equal(weight.detach().cpu(), expected)
    weight.sum().backward()
    del weight


def replan(model: nn.Sequential, handle: dynswap_ext.Handle, x: torch.Tensor, how: str) -> None:
    """Cause a new plan in one of the ways that users have."""
    if how == "retune":
        handle.retune()
    else:
        model[1] = nn.Linear(4, 4)
        model(x)


@pytest.mark.parametrize("how", ["retune", "another module"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_it_outlives_a_plan(provider: Provider, budget: str | None, inside: bool, how: str) -> None:
    """A write on a tensor of an earlier plan is a write of the weight, for later reads and the master."""
    model = nn.Sequential(linear(), linear())
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, *_: object) -> None:
        if not kept:
            kept.append(module.weight)

    if inside:
        model[0].register_forward_pre_hook(keep)
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 4)
    with torch.no_grad():
        model(x)
        keep(model[0])
        replan(model, handle, x, how)
        for number in range(2):
            kept[0].fill_(number)
            testing.assert_bit_equal(model[0].weight.detach(), kept[0].detach())
            plain = copy.deepcopy(model).to(provider.device, torch.float64)
            testing.assert_bit_equal(model(x), plain(x))
            assert model.state_dict()["0.weight"].eq(number).all()
        model[0].get_parameter("weight").fill_(3)
        testing.assert_bit_equal(model[0].weight.detach(), torch.full_like(kept[0], 3))
        kept[0].add_(1)  # masters are the truth
        kept.clear()
        assert model.state_dict()["0.weight"].eq(3).all()


@pytest.mark.parametrize("size", [64, 256], ids=["hashed", "watched"])
@pytest.mark.parametrize(
    "between", ["nothing", "another read", "a call", "a new master", "a write in a call"]
)
def test_bytes_that_are_read_again_and_again_are_watched_each_time(
    provider: Provider, between: str, size: int
) -> None:
    """A write arrives when its tensor dies, even if a later tensor of the weight goes on with its watch."""
    if provider.device.type != "cpu":
        pytest.skip("NumPy knows no device")
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(4)))
    provider.install(model, dtype=torch.bfloat16, budget=int(2.5 * size * size * 2))
    master = model[0].get_parameter("weight")
    written: list[float] = []

    def write_in_a_call(layer: nn.Module, _: object) -> None:
        for value in written:
            layer.weight.fill_(value)

    model[0].register_forward_pre_hook(write_in_a_call)
    x = provider.randn(2, size).to(torch.bfloat16)
    with torch.no_grad():
        for value in range(1, 9):
            for _ in range(3):
                model[0].weight.sum()
            if between == "another read":
                model[2].weight.sum()
            elif between == "a call":
                model(x)
            elif between == "a new master":
                master.fill_(-value)
            elif between == "a write in a call":
                written.append(float(-value))
                model(x)
                assert master.eq(-value).all()
                written.clear()
            before = master.clone()
            weight = model[0].weight
            weight.view(torch.int16).numpy()[value, 5] = 0x4000 + value
            del weight
            before[value, 5] = torch.tensor(0x4000 + value, dtype=torch.int16).view(torch.bfloat16)
            testing.assert_bit_equal(master.detach(), before)
            testing.assert_bit_equal(model[0].weight.float(), master.detach().bfloat16().float())


@pytest.mark.parametrize("write", ["data", "fused step", "version"])
@pytest.mark.parametrize("taken", ["nothing", "data"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_what_died_after_the_uninstall_leaves_the_master_alone(
    provider: Provider, budget: str | None, write: str, taken: str
) -> None:
    """A tensor that was not written, and dies after the uninstall, does not undo writes to its master.

    The master is written in ways that may bump no version.
    """
    model = nn.Sequential(linear(), linear())
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    held = model[0].weight
    alias = held.data if taken == "data" else None
    y = model(provider.randn(2, 4)).sum()
    handle.uninstall()
    master = model[0].weight
    if write == "fused step":
        y.backward()
        torch.optim.Adagrad(model.parameters(), 0.1, fused=True).step()
    else:
        (master.data if write == "data" else master.detach()).mul_(2)
    expected = master.detach().clone()
    del held, alias, y
    gc.collect()
    testing.assert_bit_equal(master.detach(), expected)
