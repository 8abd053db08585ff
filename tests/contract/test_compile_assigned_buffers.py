"""Buffers that a graph of torch.compile assigns: the graph reads the new value, and the master gets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Net(nn.Module):
    """Applies a rule to its weight and buffers, whose values are exact in both dtypes."""

    def __init__(self, rule: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule
        self.weight = nn.Parameter(torch.arange(3.0) + 1)
        self.register_buffer("a", torch.arange(3.0))
        self.register_buffer("b", torch.arange(3.0) * 2 + 5)
        self.register_buffer("cache", torch.zeros(4, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def assigned(m: Net, x: Tensor) -> Tensor:
    m.a = m.a + 1
    return x * m.weight + m.a


def negated(m: Net, x: Tensor) -> Tensor:
    """Make an element 0.0, and then -0.0."""
    m.a = m.a * 2
    m.a.neg_()
    return x * m.weight + m.a


def put_back(m: Net, x: Tensor) -> Tensor:
    old, m.a = m.a, x.detach()
    y = m.a * 2
    m.a = old
    return y * m.weight + m.a


def swapped(m: Net, x: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    m.b.add_(1)
    return x * m.weight + m.a - 2 * m.b


def written_after(m: Net, x: Tensor) -> Tensor:
    m.a = m.a * 2
    m.a.add_(1)
    m.a[0:1].mul_(3)
    return x * m.weight + m.a


def written_under_another_name(m: Net, x: Tensor) -> Tensor:
    old, new = m.a, m.a * 2
    m.a = new
    old.add_(1)
    new.add_(x.detach())
    return x * m.weight + m.a + old


def tied(m: Net, x: Tensor) -> Tensor:
    m.a = m.b
    m.a.add_(1)
    return x * m.weight + m.a + m.b


def another_dtype(m: Net, x: Tensor) -> Tensor:
    m.a = m.a.half()
    return x * m.weight + m.a + m.a.element_size()


def another_shape(m: Net, x: Tensor) -> Tensor:
    m.a = torch.cat([m.a, x.detach()])
    return x * m.weight + m.a.sum() + m.a.numel()


def nothing(m: Net, x: Tensor) -> Tensor:
    m.a = m.a + 1
    y = m.a
    m.a = None  # type: ignore[assignment]
    was_none = m.a is None
    m.a = y + 1
    return x * m.weight + m.a if was_none else x


RULES = [
    assigned,
    negated,
    put_back,
    swapped,
    written_after,
    written_under_another_name,
    tied,
    another_dtype,
    another_shape,
    nothing,
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


def assert_same_masters(model: nn.Module, moved: nn.Module, what: str) -> None:
    expected = masters_of(moved)
    for name, master in masters_of(model).items():
        assert master.device.type == "cpu", name
        wanted = expected[name].detach().to(master.device, master.dtype)
        testing.assert_bit_equal(master.detach(), wanted, f"{name} {what}")


@rules
@backends
def test_as_a_moved_model(provider: Provider, rule: Callable[[Net, Tensor], Tensor], backend: str) -> None:
    model = Net(rule)
    moved, handle = provider.pair(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(5):
        x = torch.arange(3.0, dtype=torch.float64).to(provider.device) + step
        with torch.set_grad_enabled(step % 2 == 1):
            testing.assert_bit_equal(compiled(x), moved(x), f"output of step {step}")
        if step == 2:  # until then nothing but the next graph looks at the buffers
            testing.assert_bit_equal(model.a.double(), moved.a.double(), "a, read outside")
        if step > 2:
            assert_same_masters(model, moved, f"after step {step}")
    # A forward without a graph assigns a copy; after None, it assigns the computed tensor itself.
    if rule not in (written_under_another_name, tied, nothing):
        testing.assert_bit_equal(model(x), moved(x), "output of an eager call")
        compiled(x), moved(x)
    handle.uninstall()
    assert "a" not in vars(model)
    assert_same_masters(model, moved, "after the uninstall")
    testing.assert_nothing_held(handle)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="before torch 2.13 a graph that assigns a buffer is compiled again with each call",
)
def test_a_graph_is_made_once(provider: Provider) -> None:
    made = torch._dynamo.testing.CompileCounter()
    model = Net(written_after)
    provider.install(model, dtype=torch.float64)
    compiled = torch.compile(model, backend=made, fullgraph=True)
    x = provider.randn(3)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    assert made.frame_count == 1


def test_code_outside_assigns_what_a_graph_has_assigned(provider: Provider) -> None:
    model = Net(written_after)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = provider.randn(3).round()
    with torch.no_grad():
        compiled(x), moved(x)
        model.a, moved.a = torch.ones(3), torch.ones(3, dtype=torch.float64, device=provider.device)
        testing.assert_bit_equal(compiled(x), moved(x), "output")
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        moved.load_state_dict({name: value + 1 for name, value in moved.state_dict().items()})
        testing.assert_bit_equal(compiled(x), moved(x), "output")
    assert_same_masters(model, moved, "afterwards")


def test_elements_that_are_put_back_keep_the_masters_precision(provider: Provider) -> None:
    model = Net(put_back)
    model.a.add_(1e-6)
    before = model.a.clone()
    provider.install(model, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(3, device=provider.device, dtype=torch.bfloat16))
    testing.assert_bit_equal(model.state_dict()["a"], before, "a")


def kind(m: Net, x: Tensor) -> Tensor:
    if isinstance(m.weight, nn.Parameter) and not isinstance(m.a, nn.Parameter):
        x = x + 1
    if m.weight.requires_grad and not m.a.requires_grad:
        x = x + 2
    return x * m.weight


@backends
@pytest.mark.parametrize("grad", [False, True])
def test_code_that_asks_what_a_weight_is(provider: Provider, backend: str, grad: bool) -> None:
    model = Net(kind)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = provider.randn(3)
    with torch.set_grad_enabled(grad):
        found, expected = compiled(x), moved(x)
    testing.assert_bit_equal(found, expected, "output")
    assert found.requires_grad == grad
    if grad:
        for y in (found, expected):
            y.sum().backward()
        wanted = moved.weight.grad
        assert wanted is not None
        testing.assert_bit_equal(
            model.get_parameter("weight").grad, wanted.to("cpu", torch.float32), "gradient"
        )


def test_uninstalled_after_a_graph(provider: Provider) -> None:
    model = Net(written_after)
    moved, _ = provider.pair(model)
    x = provider.randn(3).round()
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(x), moved(x)
    dynswap_ext.uninstall(model)
    assert_same_masters(model, moved, "after the uninstall")
