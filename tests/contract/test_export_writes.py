"""A forward that is exported with strict=False: its program reads and writes the model's masters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_compile_assigned_buffers import Net, put_back, swapped, written_after
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing


def in_place(m: Net, x: Tensor) -> Tensor:
    m.a.copy_(m.a + x)
    m.a[1:].add_(2)
    m.b.lerp_(x, 0.5)
    return x * m.weight + m.a - m.b


def augmented(m: Net, x: Tensor) -> Tensor:
    m.a += 1
    return x * m.weight + m.a


def through_a_view(m: Net, x: Tensor) -> Tensor:
    row = m.cache[1]
    y = m.cache.sum(0)
    row.add_(x)
    m.cache[2] = x + 1
    return y + m.cache.sum(0)


def the_same_one(m: Net, x: Tensor) -> Tensor:
    return x * m.weight + (m.a if m.a is m.a else m.b)


def parameter(m: Net, x: Tensor) -> Tensor:
    y = x * m.weight
    with torch.no_grad():
        m.weight.mul_(2)
        m.weight.add_(1)
    return y + m.weight


def exported(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (x,), strict=False).module()


def assert_same(model: nn.Module, moved: nn.Module, what: str) -> None:
    """Assert that both have the same values; buffers that a call has assigned may be on the device."""
    expected = {**dict(moved.named_parameters()), **dict(moved.named_buffers())}
    for name, master in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        wanted = expected[name].detach().to(master.device, master.dtype)
        testing.assert_bit_equal(master.detach(), wanted, f"{name} {what}")


#: What torch exports of a plain model. It refuses `put_back` and `swapped`.
RULES = [in_place, augmented, through_a_view, written_after, the_same_one, parameter]
dtypes = pytest.mark.parametrize("dtype", [torch.float64, None], ids=["cast", "as they are"])


@dtypes
@pytest.mark.parametrize("rule", [*RULES, put_back, swapped], ids=lambda f: f.__name__)
def test_as_a_moved_model(
    provider: Provider, rule: Callable[[Net, Tensor], Tensor], dtype: torch.dtype | None
) -> None:
    if rule not in RULES and dtype is None and provider.device.type == "cpu":
        pytest.skip("masters that are handed out themselves are what torch does not export")
    model = Net(rule)
    moved = testing.moved(model, provider.device, dtype)
    handle = provider.install(model, dtype=dtype)
    x = torch.arange(3.0).to(provider.device, dtype or torch.float32)
    program = exported(model, x)
    assert_same(model, moved, "after the export")
    expected = exported(moved, x) if rule in RULES else moved
    for step in range(3):
        testing.assert_bit_equal(program(x + step), expected(x + step), f"output of step {step}")
        assert_same(model, moved, f"after step {step}")
    testing.assert_bit_equal(model(x), moved(x), "output of the model, after its program")
    handle.uninstall()
    assert_same(model, moved, "after the uninstall")


@pytest.mark.parametrize("rule", [in_place, written_after, parameter], ids=lambda f: f.__name__)
def test_exported_in_inference_mode(provider: Provider, rule: Callable[[Net, Tensor], Tensor]) -> None:
    model = Net(rule)
    moved, _ = provider.pair(model)
    x = torch.arange(3.0, dtype=torch.float64).to(provider.device)
    with torch.inference_mode():
        program, expected = exported(model, x), exported(moved, x)
    with torch.no_grad():
        for step in range(2):
            testing.assert_bit_equal(program(x + step), expected(x + step), f"output of step {step}")
            assert_same(model, moved, f"after step {step}")


class Outer(nn.Module):
    """A plain module that writes buffers of an installed module in it."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner.a.add_(x)
        y = self.inner(x)
        self.inner.b.mul_(2)
        return y + self.inner.a + self.inner.b


def test_a_plain_module_around_it_writes(provider: Provider) -> None:
    model = Outer(Net(in_place))
    moved = testing.moved(model, provider.device, torch.float64)
    provider.install(model.inner, dtype=torch.float64)
    x = torch.arange(3.0, dtype=torch.float64).to(provider.device)
    program, expected = exported(model, x), exported(moved, x)
    for step in range(3):
        testing.assert_bit_equal(program(x + step), expected(x + step), f"output of step {step}")
        assert_same(model, moved, f"after step {step}")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Net(in_place)
        self.other = self.one
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.other(self.one(x)))  # type: ignore[no-any-return]


def test_a_module_of_two_names(provider: Provider) -> None:
    model = Twice()
    moved, _ = provider.pair(model)
    x = torch.arange(3.0, dtype=torch.float64).to(provider.device)
    program, expected = exported(model, x), exported(moved, x)
    for step in range(2):
        testing.assert_bit_equal(program(x + step), expected(x + step), f"output of step {step}")
        assert_same(model, moved, f"after step {step}")


def test_elements_that_are_not_written_keep_the_masters_precision(provider: Provider) -> None:
    model = Net(lambda m, x: m.a[1:].add_(x[1:]) + m.a[:2])
    model.a.add_(1e-6)
    before = model.a.clone()
    handle = dynswap_ext.install(
        model, device=provider.device, provider=provider.backend, dtype=torch.bfloat16
    )
    x = torch.ones(3, dtype=torch.bfloat16).to(provider.device)
    exported(model, x)(x)
    handle.uninstall()
    assert model.a[0] == before[0] != before[0].bfloat16()
    testing.assert_bit_equal(model.a[1:], before[1:].bfloat16().add(1).float(), "what was written")


def test_a_zero_that_gets_another_sign(provider: Provider) -> None:
    model = Net(lambda m, x: m.a.neg_() + x)
    handle = provider.install(model, dtype=torch.bfloat16)
    x = torch.ones(3, dtype=torch.bfloat16).to(provider.device)
    exported(model, x)(x)
    handle.uninstall()
    testing.assert_bit_equal(model.a, -torch.arange(3.0), "what was written")


def test_an_export_changes_nothing_of_the_install(provider: Provider) -> None:
    """A forward that gives a buffer another dtype does not do so if it is only exported."""

    def halved(m: Net, x: Tensor) -> Tensor:
        m.a = m.a.half()
        return x + m.a

    model = Net(halved)
    provider.install(model, dtype=torch.float64)
    exported(model, torch.ones(3, dtype=torch.float64).to(provider.device))
    assert model.a.dtype == torch.float64


def test_a_parameter_requires_gradients_where_none_are_recorded(provider: Provider) -> None:
    def asking(m: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.weight.mul_(2)
        y = x * m.weight + (1 if m.weight.requires_grad else 2)
        return y + (10 if m.frozen.requires_grad else 20) + (100 if m.a.requires_grad else 200) * m.frozen

    model = Net(asking)
    model.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
    moved, _ = provider.pair(model)
    x = torch.arange(3.0, dtype=torch.float64).to(provider.device)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            program, expected = exported(model, x), exported(moved, x)
            for step in range(2):
                what = f"step {step} in {mode.__name__}"
                testing.assert_bit_equal(program(x + step), expected(x + step), f"output of {what}")
                assert_same(model, moved, f"after {what}")
