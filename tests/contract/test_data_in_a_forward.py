"""A forward that assigns the `.data` of a weight, or writes to it in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import Provider
from dynswap_ext import testing

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
LOST = "pure Python cannot see the assignment, or the write to `.data` of a tensor that is held; it is lost"


class Assigning(nn.Module):
    """Changes the `.data` of its weights in its forward, in one of several ways."""

    def __init__(self, way: Callable[[Assigning, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.other = nn.Parameter(torch.arange(16.0).view(4, 4) / 8)
        self.register_buffer("state", torch.full((4, 4), 2.0))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def in_place(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data -= 1
    m.weight.data *= 2
    m.state.data += 1
    return x * m.weight + m.other + m.state


def by_a_name(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    values = m.weight.data
    values -= 1
    m.weight.data = values
    return x * m.weight


def by_a_name_of_the_weight(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    weight = m.weight
    weight.data -= 1
    return x * weight + m.weight


def assigned(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = m.weight.data / 2
    return x * m.weight


def to_a_kept_tensor(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    kept = m.weight
    kept.data = kept.data * 4
    kept.data = kept.data + 1
    y = x * kept
    kept.data.mul_(0.5)
    return y + (x * m.weight).detach()


def then_written(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    kept = m.weight
    kept.data = kept.data / 2
    with torch.no_grad():
        kept.add_(1)
        m.weight.mul_(2)
    return x * m.weight


def turned(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = m.weight.data.t()
    return x * m.weight


def smaller(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = m.weight.data[:, :4].narrow(0, 0, max(1, m.weight.shape[0] - 1))
    return x * m.weight


def put_back(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    old = m.weight.data
    m.weight.data = (old * 3).round()
    with torch.no_grad():
        y = x * m.weight
    m.weight.data = old
    return y + x * m.weight


def exchanged(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data, m.other.data = m.other.data, m.weight.data
    return x * m.weight + m.other


def shared(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = m.other.data
    m.weight.data += 1
    return x * m.weight + m.other


def of_a_buffer(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.state.data = m.state.data / 2
    m.state.add_(1)
    return x * m.weight + m.state


def on_the_host(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = torch.ones(4, 4, dtype=m.weight.dtype).to(m.weight.device)
    return x * m.weight


def in_a_checkpoint(m: Assigning, x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        m.weight.data = m.other.data * 2
        return x * m.weight

    result: torch.Tensor = checkpoint(part, x, use_reentrant=False)
    return result


WAYS = (
    *(in_place, by_a_name, by_a_name_of_the_weight),
    *(assigned, to_a_kept_tensor, then_written, turned, smaller, put_back, exchanged, shared),
    *(of_a_buffer, on_the_host, in_a_checkpoint),
)


@BUDGETS
@pytest.mark.parametrize("mode", ["training", "evaluation", "no_grad", "inference"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_as_of_a_plain_model(
    provider: Provider,
    way: Callable[[Assigning, torch.Tensor], torch.Tensor],
    mode: str,
    budget: str | None,
) -> None:
    if way is not by_a_name and not provider.native:
        pytest.skip(LOST)
    if way is in_a_checkpoint and mode == "inference":
        pytest.skip("torch checkpoints nothing there")
    model = Assigning(way).train(mode == "training")
    moved, _ = provider.pair(model, budget=budget)
    masters = [model._parameters["weight"], model._parameters["other"], model._buffers["state"]]
    x = provider.randn(4)
    for _ in range(3):
        results = []
        for each in (model, moved):
            if mode == "inference":
                with torch.inference_mode():
                    results.append(each(x).clone())
                continue
            each.zero_grad()
            with torch.set_grad_enabled(mode != "no_grad"):
                output = each(x)
            if output.requires_grad:
                output.square().sum().backward()
            results.append(output.detach())
            del output
        testing.assert_bit_equal(*results, "output")
        for master, name in zip(masters, ("weight", "other", "state"), strict=True):
            assert {**model._parameters, **model._buffers}[name] is master
            value = model.state_dict()[name].detach().double()
            testing.assert_bit_equal(value, moved.state_dict()[name].detach().cpu(), name)
        for name, p in model.named_parameters():
            grad = moved.get_parameter(name).grad
            assert (p.grad is None) == (grad is None)
            if p.grad is not None and grad is not None:
                testing.assert_bit_equal(p.grad, grad.to("cpu", p.grad.dtype), f"gradient of {name}")


@BUDGETS
def test_what_is_put_back_keeps_the_masters_precision(provider: Provider, budget: str | None) -> None:
    if not provider.native:
        pytest.skip(LOST)
    model = Assigning(put_back)
    before = torch.full((4, 4), 1 / 3)
    model.weight.data = before.clone()
    moved, _ = provider.pair(model, dtype=torch.bfloat16, budget=budget)
    x = provider.randn(4, dtype=torch.bfloat16)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")
        testing.assert_bit_equal(model(x), moved(x), "output")
    testing.assert_bit_equal(model.state_dict()["weight"], before, "master")


def test_data_of_another_dtype(provider: Provider) -> None:
    if not provider.native:
        pytest.skip(LOST)

    def narrowed(m: Assigning, x: torch.Tensor) -> torch.Tensor:
        m.weight.data = m.weight.data.half()
        return x * m.weight

    model = Assigning(narrowed).requires_grad_(False)
    moved, _ = provider.pair(model)
    x = provider.randn(4)
    for _ in range(2):
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert model.state_dict()["weight"].dtype == torch.float16


@BUDGETS
@pytest.mark.parametrize("as_view", [False, True], ids=["whole", "view"])
def test_data_given_after_a_graph_has_used_the_weight_is_torchs_error(
    provider: Provider, as_view: bool, budget: str | None
) -> None:
    if not provider.native:
        pytest.skip(LOST)

    def used_before(m: Assigning, x: torch.Tensor) -> torch.Tensor:
        y = x * (m.weight.t() if as_view else m.weight)
        m.weight.data = m.weight.data * 2
        return y

    model = Assigning(used_before)
    provider.pair(model, budget=budget)
    x = provider.randn(4).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()


def test_a_tensor_kept_until_after_the_forward(provider: Provider) -> None:
    if not provider.native:
        pytest.skip(LOST)
    kept = []

    def keeps(m: Assigning, x: torch.Tensor) -> torch.Tensor:
        kept.append(m.weight)
        return x * m.weight

    model = Assigning(keeps)
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(4)
    with torch.no_grad():
        model(x)
        kept[0].data = torch.ones_like(kept[0])
        testing.assert_bit_equal(model(x), x.expand(4, 4), "output")
        kept.clear()
        model(x)
        handle.uninstall()
        values = model.weight.clone()
        with pytest.raises(RuntimeError, match=r"Write in place \(`\.data\.copy_\(t\)`\)"):
            kept[0].data = torch.zeros_like(kept[0])
    testing.assert_bit_equal(model.weight.detach(), values, "master")


def test_a_master_does_not_lie_in_the_place_of_a_copy(provider: Provider, tmp_path: Path) -> None:
    """A master that gets the data of a handed-out tensor does not keep the engine's memory of that tensor."""
    model = Assigning(turned)
    testing.map_from_file(model, tmp_path / "masters.pt")
    handle = provider.install(model)
    x = provider.randn(4, dtype=torch.float32)
    with torch.no_grad():
        if provider.native:
            model(x)
        model.other.data = model.other.data.t()
    assert handle.stats().live_leases == 0
