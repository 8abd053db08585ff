"""Masters with gaps between their elements, or with repeated ones: an engine cannot copy them as is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import testing

ROWS, COLUMNS = 6, 4


def gaps_in_rows(values: Tensor) -> Tensor:
    return torch.empty(*values.shape[:-1], values.shape[-1] + 3)[..., : values.shape[-1]].copy_(values)


def gaps_between_all(values: Tensor) -> Tensor:
    spread = torch.zeros([2 * size for size in values.shape])
    view = spread[tuple(slice(None, None, 2) for _ in values.shape)]
    return view.copy_(values)


def transposed_with_gaps(values: Tensor) -> Tensor:
    return gaps_in_rows(values.t().contiguous()).t() if values.dim() == 2 else gaps_in_rows(values)


def imaginary_part_of_conjugate(values: Tensor) -> Tensor:
    """Return a tensor that torch negates when it reads it."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps in rows": gaps_in_rows,
    "gaps between all": gaps_between_all,
    "transposed with gaps": transposed_with_gaps,
    "negated": imaginary_part_of_conjugate,
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.mul_(2),  # exact: a tensor that is held keeps what was written unrounded
    "an element": lambda w: w.__setitem__((0,) * w.dim(), 5.0),
    ".data": lambda w: w.data.mul_(0.5),
    "a view": lambda w: w.reshape(-1) if w.dim() == 0 else w[1:].fill_(2.0),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, ROWS)
        self.norm = nn.BatchNorm1d(ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def laid_out(
    layout: Callable[[Tensor], Tensor], *, later: Callable[[nn.Module], object] | None = None
) -> Model:
    """Return a model whose masters are laid out by `layout`, after `later` has been called with it."""
    torch.manual_seed(0)
    model = Model()
    if later is not None:
        later(model)
    with torch.no_grad():
        for held in (*model.parameters(), *model.buffers()):
            if held.dim() and held.is_floating_point():
                held.data = layout(held.detach())
    return model


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("when", ["before the install", "afterwards"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_on_them_reaches_the_master(
    provider: Provider, layout: str, write: str, when: str, budget: str | None
) -> None:
    def install(model: nn.Module) -> object:
        return provider.install(model, dtype=torch.float64, budget=budget)

    model = laid_out(LAYOUTS[layout], later=install if when == "afterwards" else None)
    if when == "before the install":
        install(model)
    strides = {name: master.stride() for name, master in model.state_dict(keep_vars=True).items()}
    for name in ("linear.weight", "linear.bias", "norm.running_mean"):
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        for held in (True, False):
            expected = model.state_dict()[name].to(torch.float64)
            tensor = getattr(module, attribute)
            with torch.no_grad():
                WRITES[write](tensor)
                WRITES[write](expected)
            expected = expected.to(torch.float32)
            if not held:
                del tensor
            testing.assert_bit_equal(model.state_dict()[name], expected, f"{name}, held: {held}")
            x = provider.randn(3, COLUMNS, dtype=torch.float64)
            moved = testing.moved(model, provider.device, torch.float64).eval()
            testing.assert_bit_equal(model.eval()(x).detach(), moved(x).detach(), "output")
            tensor = None
    assert {n: m.stride() for n, m in model.state_dict(keep_vars=True).items()} == strides


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training(provider: Provider, layout: str) -> None:
    """Three steps give the gradients and statistics of a plain model. Statistics bump no version."""
    model = laid_out(LAYOUTS[layout])
    computed = torch.float64 if provider.device.type == "cpu" else torch.float32
    provider.install(model, dtype=computed)
    for step in range(3):
        x = provider.randn(5, COLUMNS, dtype=computed, seed=step)
        plain = testing.moved(model, provider.device, computed)
        for each in (model, plain):
            each.train()
            each.zero_grad()
            each(x).square().sum().backward()
        for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None, name
            testing.assert_bit_equal(mine.grad, other.grad.to(mine.device, mine.dtype), f"gradient of {name}")
        for (name, kept), (_, other_kept) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            testing.assert_bit_equal(kept, other_kept.to(kept.device, kept.dtype), f"{name} of step {step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_silent_write_to_the_master_is_seen(provider: Provider, layout: str) -> None:
    model = laid_out(LAYOUTS[layout])
    provider.install(model, dtype=torch.float64)
    master = model.linear._parameters["weight"]
    assert master is not None
    for value in (3.0, 4.0):
        held = model.linear.weight
        master.data[1, 2] = value
        assert model.linear.weight[1, 2].item() == value
        del held


def test_repeated_elements(provider: Provider) -> None:
    """A write to the copy of an expanded master does not reach the master, which cannot be written."""
    model = nn.Linear(COLUMNS, ROWS)
    model.register_buffer("scale", torch.tensor([2.0]).expand(ROWS))
    handle = provider.install(model, dtype=torch.float64)
    assert model.scale.tolist() == [2.0] * ROWS
    assert model._buffers["scale"].stride() == (0,)  # type: ignore[union-attr]
    if provider.native:  # pure Python raises torch's error as long as the tensor lives
        held = model.scale
        held.add_(1)
        assert model.state_dict()["scale"].tolist() == [2.0] * ROWS
        handle.uninstall()
        del held


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("when", ["before the install", "afterwards"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_written_between_forward_and_backward_is_refused(
    provider: Provider, layout: str, when: str, budget: str | None
) -> None:
    def install(model: nn.Module) -> object:
        return provider.install(model, dtype=torch.float64, budget=budget)

    model = laid_out(LAYOUTS[layout], later=install if when == "afterwards" else None)
    if when == "before the install":
        install(model)
    x = provider.randn(5, COLUMNS).requires_grad_()

    def loss() -> Tensor:
        total: Tensor = model(x).square().sum()
        return total

    if when == "afterwards" and budget:
        loss()  # in this call the layout is noticed; in the next one the masters are no residents any more
    total = loss()
    with torch.no_grad():
        model.linear.get_parameter("weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    x.grad = None
    model.zero_grad()

    moved = testing.moved(model, provider.device, torch.float64)
    loss().backward()
    mine, x.grad = x.grad, None
    moved(x).square().sum().backward()
    testing.assert_bit_equal(mine, x.grad, "gradient of the input")
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        testing.assert_bit_equal(p.grad, q.grad.to(p.device, p.dtype), name)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("parameter", [True, False], ids=["parameter", "buffer"])
def test_the_graph_has_what_a_forward_wrote_on_a_copy(
    provider: Provider, parameter: bool, training: bool
) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scale = torch.linspace(1, 2, 64).view(8, 8)[:, :4]
            if parameter:
                self.scale = nn.Parameter(scale, requires_grad=False)
            else:
                self.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale
            with torch.no_grad():
                scale.mul_(1.1)  # not a float32 value
            return x * scale

    if not provider.native:
        pytest.skip("pure Python: backward has the master's rounded values, as docs/limits.md says")
    model = Scales().train(training)
    moved, _ = provider.pair(model)
    x = provider.randn(8, 4).requires_grad_()
    expected = x.detach().clone().requires_grad_()
    moved(expected).sum().backward()
    model(x).sum().backward()
    testing.assert_bit_equal(x.grad, expected.grad, "gradient")


def test_what_is_written_on_a_conjugate_reaches_the_master(provider: Provider) -> None:
    values = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2)
    model = nn.Module()
    model.register_buffer("angles", values.clone())
    provider.install(model)
    model.get_buffer("angles").data = values.conj()
    testing.assert_bit_equal(model.angles, values.conj().resolve_conj().to(provider.device), "as it is now")
    model.angles[2] = 3 + 4j
    expected = values.conj().resolve_conj()
    expected[2] = 3 + 4j
    testing.assert_bit_equal(model.state_dict()["angles"].resolve_conj(), expected, "what was written")


def test_a_write_on_a_copy_of_an_expanded_master_ends_with_the_copy(provider: Provider) -> None:
    """A write to one row of an expanded master is lost with the copy, and changes no other weight."""
    model = nn.Module()
    model.register_buffer("repeated", torch.ones(4).expand(3, 4))
    model.register_buffer("other", torch.ones(4))
    provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model.repeated[1] = 5.0
    testing.assert_bit_equal(model.other, torch.ones(4, dtype=torch.float64, device=provider.device), "other")
    ones = torch.ones(3, 4, dtype=torch.float64, device=provider.device)
    testing.assert_bit_equal(model.repeated, ones, "the next access")
