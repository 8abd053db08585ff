"""Uses of a weight share an autograd node: which graphs it is in, and how gradients are added."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from conftest import Provider
from dynswap_ext import testing


class SavedUntil:
    """Keeps a tensor for a graph, and calls a function when the graph drops it."""

    def __init__(self, tensor: Tensor, at_end: Callable[[], object]) -> None:
        self.tensor, self.at_end = tensor, at_end

    def __del__(self) -> None:
        self.at_end()


def test_a_model_is_called_while_an_older_graph_is_taken_apart(provider: Provider) -> None:
    """A model may be called while torch destroys a graph in which nodes of its weights are.

    Here the node of the bias is in torch's queue of nodes to be destroyed.
    """
    model = nn.Linear(8, 8)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 8).requires_grad_()

    def step(of: nn.Module) -> None:
        later: list[Tensor] = []

        def call_again() -> None:
            if not later:
                later.append(of(torch.ones_like(x)))

        def saved(tensor: Tensor) -> SavedUntil:
            return SavedUntil(tensor, call_again)

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda kept: kept.tensor):
            before = x.sin()
        out = of(before)
        del before, out
        assert later
        later[0].sum().backward()

    step(moved)
    step(model)
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.to("cpu", torch.float32))


class Used(nn.Module):
    """Reads its weight once for each number in `uses`, and uses the result that many times."""

    def __init__(self, uses: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for times in self.uses:
            weight: Any = self.weight
            for _ in range(times):
                x = torch.tanh(F.linear(x, weight))
            del weight
        return x


@pytest.mark.parametrize("uses", list(itertools.product((1, 2, 3), repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_gradients_of_all_uses_are_added_as_without_an_install(
    provider: Provider, uses: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not provider.native and max(uses) > 1:
        pytest.skip("in pure Python the gradients of one read are added first")
    model = nn.Sequential(Used(uses), nn.Linear(8, 8))
    moved, _ = provider.pair(model, dtype=dtype)
    x = provider.randn(3, 8, dtype=dtype)
    moved(moved(x)).sum().backward()
    model(model(x)).sum().backward()
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.to("cpu", torch.float32))


def step_with_penalty(model: nn.Sequential, x: Tensor, when: str) -> Tensor:
    """Run a step whose loss also reads weights before or after the forward; return the loss."""

    def penalty() -> Tensor:
        return sum(
            ((layer.weight * 0.3).sum() + (layer.weight * layer.bias).sum() for layer in model),
            x.new_zeros(()),
        )

    before = penalty() if "before" in when else 0
    out = model(x).square().sum()
    loss = before + out + (penalty() if "after" in when else 0)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("when", ["before", "after", "before and after"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_reads_outside_a_forward_are_added_to_those_inside(
    provider: Provider, when: str, dtype: torch.dtype
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    moved, _ = provider.pair(model, dtype=dtype)
    x = provider.randn(3, 8, dtype=dtype)
    for _ in range(2):
        testing.assert_bit_equal(step_with_penalty(model, x, when), step_with_penalty(moved, x, when))
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.to("cpu", torch.float32))


def loss_of_reads(model: Any, x: Tensor) -> Tensor:
    penalty = (model[0].weight * 0.3).sum()
    return penalty + model(x).square().sum() + (model[0].weight * 0.7).sum()


@pytest.mark.parametrize("read", ["before", "after"])
def test_the_gradient_asked_for_by_a_read_is_that_of_all(provider: Provider, read: str) -> None:
    """The gradient of one read includes those of all others, even if only a graph still has their tensors."""
    if not provider.native:
        pytest.skip("in pure Python the gradient of one read is that read's")
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    moved, _ = provider.pair(model, dtype=torch.bfloat16)
    x = provider.randn(3, 8, dtype=torch.bfloat16)

    def gradient(of: Any) -> Tensor:
        weight = of[0].weight if read == "before" else None
        loss = loss_of_reads(of, x)
        return torch.autograd.grad(loss, of[0].weight if weight is None else weight)[0]

    testing.assert_bit_equal(gradient(model), gradient(moved))
    edge = torch.autograd.graph.get_gradient_edge(model[0].weight)  # Python alone has the node
    (found,) = torch.autograd.grad(loss_of_reads(model, x), [edge])
    testing.assert_bit_equal(found, gradient(moved))


def test_a_graph_goes_on_under_another_plan(provider: Provider) -> None:
    """Reads before and after a change of the budget add up to one gradient, rounded once."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    moved, handle = provider.pair(model, dtype=torch.bfloat16, budget="1MiB")
    x = provider.randn(3, 8, dtype=torch.bfloat16)
    penalty, expected = ((of[1].weight * 0.3).sum() for of in (model, moved))
    handle.retune("2MiB")
    (penalty + model(x).square().sum()).backward()
    (expected + moved(x).square().sum()).backward()
    testing.assert_bit_equal(
        model[1].get_parameter("weight").grad, moved[1].weight.grad.to("cpu", torch.float32)
    )


def test_gradients_arrive_while_an_earlier_graph_is_kept(provider: Provider) -> None:
    """Gradients arrive before the layers below go backward, even if the loss of the step before is kept.

    A usual loop, which assigns its loss again, keeps it.
    """
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    provider.pair(model)
    order: list[str] = []
    for index, layer in enumerate(model):
        layer.get_parameter("weight").register_post_accumulate_grad_hook(
            lambda _, index=index: order.append(f"gradient {index}")
        )
        layer.register_full_backward_pre_hook(lambda *_, index=index: order.append(f"backward {index}"))
    loss = None
    for _ in range(2):
        order.clear()
        loss = model(provider.randn(3, 8).requires_grad_()).sum()
        loss.backward()
    places = {event: place for place, event in enumerate(order)}
    if provider.device.type == "cpu":
        assert all(places[f"gradient {index}"] < places[f"backward {index - 2}"] for index in (3, 2)), order
    del loss


def test_a_hook_that_refers_to_its_model_does_not_keep_it(provider: Provider) -> None:
    """A cycle of a weight's node, its master and a hook that refers to the model is garbage-collected."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    provider.install(model, dtype=torch.float64)
    for p in model.parameters():
        p.register_hook(lambda gradient, model=model: None)
    ((model[0].weight * 0.3).sum() + model(provider.randn(3, 8)).sum()).backward()
    alive = weakref.ref(model)
    del model, p
    gc.collect()
    assert alive() is None


def test_a_replaced_master_is_freed_by_the_next_call(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    provider.install(model, dtype=torch.float64)
    x = provider.randn(3, 8)
    ((model[1].weight * 0.3).sum() + model(x).sum()).backward()
    memory = StorageWeakRef(model[1].get_parameter("weight").untyped_storage())
    model[1].weight = nn.Parameter(torch.ones(8, 8))
    model(x)
    assert memory.expired()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="before torch 2.13 a node that was read outside a forward stays until the next call",
)
def test_a_graph_that_is_dropped_leaves_the_master_as_it_was(provider: Provider) -> None:
    """A dropped graph leaves no node, which would keep an AccumulateGrad for the master's old shape."""
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8))
    provider.install(model, dtype=torch.float64)
    penalty = (model[0].weight * 2).sum()
    del penalty
    master = model[0].get_parameter("weight")
    master.data = torch.ones(4, 8)
    (master * 3).sum().backward()
    assert master.grad is not None
    assert torch.equal(master.grad, torch.full((4, 8), 3.0))


def test_the_gradient_of_an_attribute_that_was_given_another_shape(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8))
    provider.install(model, dtype=torch.float64)
    model[0].weight.data = torch.ones(4, 8, dtype=torch.float64)
    (model[0].weight * 3).sum().backward()
    grad = model[0].weight.grad
    assert grad is not None
    assert torch.equal(grad, torch.full((4, 8), 3.0))


class Hooked(nn.Module):
    """Registers a hook, which refers to the module, on the weight that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        weight.register_hook(lambda gradient: None if self.training else gradient)
        return F.linear(x, weight)


def test_a_hook_of_a_forward_goes_with_its_graph(provider: Provider) -> None:
    """A hook that a forward registers on a weight is freed with the graph, so it does not keep the module."""
    model = nn.Sequential(Hooked())
    provider.install(model, dtype=torch.float64)
    model(provider.randn(3, 8)).sum().backward()
    alive = weakref.ref(model[0])
    del model
    gc.collect()
    assert alive() is None


class Keeping(nn.Linear):
    """Keeps the weights that its forwards were handed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self).setdefault("given", []).append(self.weight)
        return super().forward(x)


def test_a_master_that_is_frozen_while_its_gradient_is_asked_for(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master may be frozen while its AccumulateGrad is made, as another thread might do.

    Anomaly detection runs Python code at that moment.
    """
    model = Keeping(4, 4)
    master = model.weight
    model.bias.requires_grad_(False)
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 4)
    with torch.autograd.detect_anomaly(check_nan=False), monkeypatch.context() as patched:
        patched.setattr("torch.fx.traceback.format_stack", lambda: [master.requires_grad_(False)][:0])
        model(x)
    assert not master.requires_grad
    assert not model(x).requires_grad
