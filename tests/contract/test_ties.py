"""Tied masters are one weight: one tensor, one transfer a pass, one gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

#: The side of a weight, and its bytes in float32. Values are whole numbers, whose sums are exact in any
#: order and dtype.
WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("one", torch.ones(8))
        self.register_buffer("other", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.one) + self.other


def shared(uses: int) -> nn.Sequential:
    """Return modules that share one weight."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(uses)))
    for module in model:
        module.weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(whole(WIDTH, WIDTH))
    return model


def test_both_names_give_one_tensor(provider: Provider) -> None:
    model = Tied()
    provider.pair(model)
    weight = model.first.weight
    assert model.second.weight is weight
    one = model.one
    assert model.other is one


def test_a_tied_weight_is_planned_and_counted_once(provider: Provider) -> None:
    model = Tied().eval()  # in training, small buffers are copied by themselves
    _, handle = provider.pair(model)
    if not provider.native:  # there it counts what lies between them, too
        assert handle.stats().weight_bytes == (8 * 8 + 8) * 8
    kept = [model.first.weight, model.second.weight, model.one, model.other]
    assert handle.stats().bytes_moved == (8 * 8 + 8) * 4
    del kept


def test_a_write_through_one_name_shows_under_the_other(provider: Provider) -> None:
    model = Tied()
    provider.pair(model)
    model.one.mul_(3)
    assert model.other.tolist() == [3] * 8
    assert model.state_dict()["other"].tolist() == [3] * 8


def test_a_tie_broken_while_installed(provider: Provider) -> None:
    model = Tied()
    moved, _ = provider.pair(model)
    new = torch.randn(8, 8)
    model.second.weight = nn.Parameter(new.clone())
    moved.second.weight = nn.Parameter(new.to(provider.device, torch.float64))
    assert model.first.weight is not model.second.weight
    x = provider.randn(4, 8)
    testing.assert_bit_equal(model(x), moved(x))


def test_a_tie_made_of_masters_while_installed(provider: Provider) -> None:
    model = mlp(8, 2)
    provider.pair(model)
    model[0].weight = model.get_parameter("2.weight")
    weight = model[0].weight
    assert model[2].weight is weight
    del weight
    moved = testing.moved(model, provider.device, torch.float64)
    assert moved[0].weight is moved[2].weight
    x = provider.randn(2, 8)
    testing.assert_bit_equal(model(x), moved(x))
    assert len(list(model.parameters())) == 3


def test_empty_masters_are_not_tied_to_each_other(provider: Provider) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.empty(0, 3))
    model.b = nn.Parameter(torch.empty(2, 0))
    provider.pair(model)
    assert model.a.shape == (0, 3)
    assert model.b.shape == (2, 0)
    assert model.a.dtype == torch.float64


# --------------------------------------------------------------------------- transfers and gradient sums


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_one_transfer_a_pass_for_uses_in_a_row(provider: Provider, training: bool) -> None:
    """Uses of a tied weight in a row need one transfer: the copy is still there, or on its way."""
    if not provider.native:
        pytest.skip("in pure Python a copy goes with its tensor: a tied weight moves once a use")
    model = nn.Sequential(shared(3), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    moved, handle = provider.pair(model.train(training))
    x = provider.randn(2, WIDTH)
    with torch.set_grad_enabled(training):
        for _ in range(2):
            testing.assert_bit_equal(model(x).detach(), moved(x).detach())
        handle.reset_stats()
        passes = 3
        for _ in range(passes):
            testing.assert_bit_equal(model(x).detach(), moved(x).detach())
    ahead = 3 * WEIGHT
    assert handle.stats().bytes_moved <= passes * 3 * WEIGHT + ahead


@pytest.mark.parametrize("between", [1, 3, 6])
def test_one_transfer_a_pass_for_the_first_and_the_last_use(provider: Provider, between: int) -> None:
    """A weight that is used first and last, like a tied embedding, moves once for both uses.

    The last use is followed by the first one of the next pass.
    """
    if not provider.native:
        pytest.skip("in pure Python a copy goes with its tensor: a tied weight moves once a use")
    model = shared(1)
    model.extend(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(between))
    model.append(shared(1)[0])
    model[-1].weight = model[0].weight
    moved, handle = provider.pair(model.eval())
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved <= (1 + between) * WEIGHT


def test_one_transfer_for_all_passes_where_it_stays(provider: Provider) -> None:
    model = shared(3)
    moved, handle = provider.pair(model, budget="1GiB")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved == WEIGHT
    assert handle.stats().weight_bytes == 2 * WEIGHT


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("uses", [2, 4])
def test_one_gradient_sum(provider: Provider, uses: int, budget: str | None) -> None:
    model = shared(uses)
    moved = testing.moved(model, provider.device, torch.float64)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = whole(2, WIDTH).to(provider.device, torch.float64)
    seen: dict[str, list[torch.Tensor]] = {"installed": [], "moved": []}
    accumulated: dict[str, int] = {"installed": 0, "moved": 0}

    def watch(m: nn.Module, key: str) -> None:
        (p,) = m.parameters()
        p.register_hook(lambda g: seen[key].append(g.detach().clone()))

        def count(_: torch.Tensor) -> None:
            accumulated[key] += 1

        p.register_post_accumulate_grad_hook(count)

    for m, key in ((model, "installed"), (moved, "moved")):
        watch(m, key)
        for _ in range(2):  # the second adds to the first
            (m(x).sum() / 2**20).backward()
    assert accumulated["installed"] == accumulated["moved"] == 2
    master, plain = next(model.parameters()), next(moved.parameters())
    for found, expected in zip(seen["installed"], seen["moved"], strict=True):
        torch.testing.assert_close(found, expected.to(found.device, found.dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(master.grad, plain.grad.to("cpu", torch.float32), rtol=1e-6, atol=0)


def test_tied_across_submodules_that_are_installed_alone(provider: Provider) -> None:
    model = nn.Module()
    model.embed = nn.Embedding(12, 8)
    model.body = mlp(8, 2)
    model.output = nn.Linear(8, 12, bias=False)
    model.output.weight = model.embed.weight
    master = model.embed.weight
    moved = testing.moved(model, provider.device, torch.float64)
    handles = [provider.install(m, dtype=torch.float64) for m in (model.embed, model.output)]
    model.body.to(provider.device, torch.float64)
    tokens = torch.arange(6).to(provider.device)
    outputs = []
    for m in (model, moved):
        y = m.output(m.body(m.embed(tokens)))
        outputs.append(y.detach())
        y.square().sum().backward()
    testing.assert_bit_equal(*outputs)
    assert model.embed._parameters["weight"] is model.output._parameters["weight"] is master
    grad = moved.embed.weight.grad.to("cpu", torch.float32)
    torch.testing.assert_close(master.grad, grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        master.mul_(2)
    assert all(bool((m.weight.cpu() == master.double()).all()) for m in (model.embed, model.output))
    with torch.no_grad():
        model.embed.weight.fill_(3)
    assert model.output.weight.unique().tolist() == [3]
    for handle in handles:
        assert handle.stats().bytes_moved > 0
        handle.uninstall()
    assert model.output.weight is master and master.unique().tolist() == [3]


def test_a_tie_of_which_one_end_is_not_installed(provider: Provider) -> None:
    model = Tied()
    provider.install(model.first, dtype=torch.float64)
    master = model.second.weight
    assert model.first._parameters["weight"] is master
    with torch.no_grad():
        model.first.weight.fill_(2)
    assert model.second.weight.unique().tolist() == [2]
    dynswap_ext.uninstall(model)
    assert model.first.weight is master


def test_a_tie_that_is_made_in_use_and_planned_for(provider: Provider) -> None:
    """Two weights that stayed on the device and have been tied are one weight in the next plan."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(64)))
    handle = provider.install(model, dtype=torch.float64, budget="8MiB")
    x = provider.randn(2, 16)
    with torch.no_grad():
        model(x)
        rows = handle.report().rows
        first_of_group = rows[len(rows) // 2].names[0]
        tied = int(first_of_group.split(".")[0])
        other = tied - 5 if provider.native else 0
        master = model[other].get_parameter("weight")
        master.data = master.data.clone()
        model[tied]._parameters["weight"] = master
        assert torch.equal(model[tied].weight, model[other].weight)
        model[3].register_parameter("extra", nn.Parameter(torch.randn(7)))
        assert model[3].extra is not None
        for _ in range(4):  # by then there is a plan with the new weight
            model(x)
        for layer in model:
            master = layer.get_parameter("weight")
            testing.assert_bit_equal(layer.weight.detach().cpu(), master.detach().double())
