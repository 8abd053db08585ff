"""What a program does to a handed-out tensor, as to a parameter, is done to its master."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])


def linear() -> nn.Linear:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0))
    return model


def installed(provider: Provider, budget: str | None = None) -> nn.Linear:
    model = linear()
    provider.install(model, dtype=torch.float64, budget=budget)
    return model


def output_is_the_masters(provider: Provider, model: nn.Module) -> None:
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x).detach(), moved(x).detach())


@BUDGETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["master's dtype", "handed-out dtype"])
def test_data_assigned(provider: Provider, budget: str | None, dtype: torch.dtype) -> None:
    model = installed(provider, budget)
    master = model._parameters["weight"]
    model.weight.data = torch.full((4, 4), 2.0, dtype=dtype, device=provider.device)
    model.table.data = torch.full((4,), 3.0, dtype=dtype, device=provider.device)
    assert model._parameters["weight"] is master
    for held, value in ((master, 2), (model._buffers["table"], 3)):
        assert (held.device.type, held.dtype) == ("cpu", torch.float32)
        assert held.unique().tolist() == [value]
    assert master.requires_grad and master.is_leaf
    assert model.weight.dtype == torch.float64 and model.weight.device == provider.device
    assert model.weight.unique().tolist() == [2] and model.table.unique().tolist() == [3]
    output_is_the_masters(provider, model)


@BUDGETS
def test_data_assigned_on_a_tensor_that_is_kept(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    weight = model.weight
    weight.data = torch.full((4, 4), 2.0, dtype=torch.float64, device=provider.device)
    assert weight.unique().tolist() == [2]
    assert model.weight.unique().tolist() == [2]
    assert model.state_dict()["weight"].unique().tolist() == [2]
    del weight


@BUDGETS
def test_data_assigned_of_another_shape(provider: Provider, budget: str | None) -> None:
    """`.data` of another shape can be assigned, as tools for pruning and low rank do."""
    model = installed(provider, budget)
    model.weight.data = model.weight.data[:2].clone()
    model.bias.data = torch.zeros(2, device=provider.device, dtype=torch.float64)
    assert model._parameters["weight"].shape == (2, 4)
    assert model.weight.shape == (2, 4)
    output_is_the_masters(provider, model)


@BUDGETS
def test_the_gradient_is_the_masters(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    assert model.weight.grad is None
    model(provider.randn(2, 4)).sum().backward()
    master = model._parameters["weight"]
    assert master.grad is not None
    assert model.weight.grad is master.grad
    model.weight.grad.mul_(2)
    testing.assert_bit_equal(model.weight.grad, master.grad)
    model.weight.grad = None
    assert master.grad is None
    model.weight.grad = torch.ones(4, 4)
    assert master.grad.unique().tolist() == [1]
    model.zero_grad()
    assert model.weight.grad is None


@BUDGETS
def test_a_gradient_that_arrives_while_the_tensor_is_kept(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    weight = model.weight
    (weight * 2).sum().backward()
    assert weight.grad is model._parameters["weight"].grad
    assert weight.grad.unique().tolist() == [2]
    del weight


@pytest.mark.parametrize(
    "change",
    [lambda w, value: w.requires_grad_(value), lambda w, value: setattr(w, "requires_grad", value)],
    ids=["requires_grad_", "requires_grad"],
)
@BUDGETS
def test_requires_grad(
    provider: Provider, change: Callable[[torch.Tensor, bool], object], budget: str | None
) -> None:
    model = installed(provider, budget)
    change(model.weight, False)
    assert not model._parameters["weight"].requires_grad
    assert not model.weight.requires_grad
    model(provider.randn(2, 4)).sum().backward()
    assert model._parameters["weight"].grad is None
    assert model._parameters["bias"].grad is not None
    change(model.weight, True)
    assert model._parameters["weight"].requires_grad
    model(provider.randn(2, 4)).sum().backward()
    assert model._parameters["weight"].grad is not None


def test_requires_grad_returns_the_tensor(provider: Provider) -> None:
    model = installed(provider)
    weight = model.weight
    assert weight.requires_grad_() is weight
    del weight


@BUDGETS
def test_hooks(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    calls: list[str] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        calls.append("gradient")
        return grad * 2

    def accumulated(parameter: torch.Tensor) -> None:
        assert parameter is model._parameters["weight"]
        assert parameter.grad is not None
        calls.append("accumulated")

    hooks = [model.weight.register_hook(double), model.weight.register_post_accumulate_grad_hook(accumulated)]
    x = provider.randn(2, 4)
    model(x).sum().backward()
    assert calls == ["gradient", "accumulated"]
    doubled = model._parameters["weight"].grad.clone()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    model(x).sum().backward()
    assert calls == ["gradient", "accumulated"]
    testing.assert_bit_equal(doubled, model._parameters["weight"].grad * 2)


@BUDGETS
def test_attributes(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    model.weight.tag = 1
    model.table.tag = [2]
    assert model.weight.tag == 1 and model.table.tag == [2]
    assert model._parameters["weight"].tag == 1
    assert model._buffers["table"].tag == [2]
    model._parameters["weight"].sharded = True
    assert model.weight.sharded
    assert hasattr(model.weight, "tag") and not hasattr(model.weight, "nothing")
    assert getattr(model.weight, "nothing", None) is None
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.weight.nothing
    del model.weight.tag
    assert not hasattr(model._parameters["weight"], "tag")


def test_attributes_set_before_the_install(provider: Provider) -> None:
    model = linear()
    model.weight.tag = "before"
    handle = provider.install(model, dtype=torch.float64)
    assert model.weight.tag == "before"
    model.weight.tag = "while"
    handle.uninstall()
    assert model.weight.tag == "while"


def test_what_kind_it_is(provider: Provider) -> None:
    model = linear()
    model.buffer = nn.Buffer(torch.ones(2))
    provider.install(model, dtype=torch.float64)
    assert isinstance(model.weight, nn.Parameter) and isinstance(model.bias, nn.Parameter)
    assert not isinstance(model.table, nn.Parameter)
    assert isinstance(model.buffer, nn.Buffer) and not isinstance(model.weight, nn.Buffer)
    assert not isinstance(model.weight * 1, nn.Parameter)
    assert not isinstance(model.weight.detach(), nn.Parameter)


@BUDGETS
def test_what_is_read_outside_a_forward_is_a_leaf(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    assert model.weight.is_leaf and model.weight.requires_grad and model.table.is_leaf
    assert not (model.weight * 1).is_leaf and model.weight.detach().is_leaf
    for value in (False, True):
        model.weight.requires_grad_(value)
        assert model.weight.is_leaf and model.weight.requires_grad == value
    before = model.weight
    model(provider.randn(2, 4)).sum().backward()
    assert before.is_leaf and before.grad is not None


@BUDGETS
def test_a_master_that_is_no_leaf_is_none(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    del model.weight
    model.register_buffer("weight", torch.ones(4, 4, requires_grad=True) * 2)
    assert not model.weight.is_leaf


@BUDGETS
def test_an_optimizer_of_handed_out_tensors_is_refused(provider: Provider, budget: str | None) -> None:
    model = installed(provider, budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        optimizer.add_param_group({"params": [model.weight]})
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        torch.optim.SGD([model.weight], lr=0.1)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_a_plain_parameter(provider: Provider, copied: Callable[[torch.Tensor], object]) -> None:
    model = installed(provider)
    made = copied(model.weight)
    assert type(made) is nn.Parameter
    assert made.is_leaf and made.requires_grad
    testing.assert_bit_equal(made.detach().double().cpu(), model._parameters["weight"].detach().double())
    with torch.no_grad():
        made.zero_()
    assert model._parameters["weight"].abs().sum() > 0


# ------------------------------------------------------------------------------------ ties by assignment


def assign(a: nn.Module, b: nn.Module) -> None:
    a.weight = b.weight


def register(a: nn.Module, b: nn.Module) -> None:
    a.register_parameter("weight", b.weight)


@pytest.mark.parametrize("tie", [assign, register], ids=["assigned", "registered"])
@BUDGETS
def test_a_tie_made_with_a_handed_out_tensor(
    provider: Provider, tie: Callable[[nn.Module, nn.Module], None], budget: str | None
) -> None:
    model = nn.Sequential(linear(), linear())
    provider.install(model, dtype=torch.float64, budget=budget)
    tie(model[0], model[1])
    master = model[1]._parameters["weight"]
    assert model[0]._parameters["weight"] is master
    assert "weight" not in model[0].__dict__
    weight = model[0].weight
    assert weight is model[1].weight and weight.dtype == torch.float64
    del weight
    assert len(list(model.parameters())) == 3
    output_is_the_masters(provider, model)
    model(provider.randn(2, 4)).sum().backward()
    assert master.grad is not None


@BUDGETS
def test_a_buffer_tie_made_with_a_handed_out_tensor(provider: Provider, budget: str | None) -> None:
    model = nn.Sequential(linear(), linear())
    provider.install(model, dtype=torch.float64, budget=budget)
    model[0].table = model[1].table
    model[0].register_buffer("late", model[1].table)
    master = model[1]._buffers["table"]
    assert model[0]._buffers["table"] is master
    assert model[0]._buffers["late"] is master
    assert model[0].late.dtype == torch.float64
    assert model[0].late.tolist() == [0, 1, 2, 3]


def test_assigning_an_attribute_to_itself_changes_nothing(provider: Provider) -> None:
    model = installed(provider)
    masters = model._parameters["weight"], model._buffers["table"]
    model.weight = model.weight
    model.table = model.table
    assert (model._parameters["weight"], model._buffers["table"]) == masters
    assert model._parameters["weight"] is masters[0]
    assert model._parameters["weight"].dtype == torch.float32
