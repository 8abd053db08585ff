"""torch.compile of installed models: whole and module by module, before and after the install.

The tests do not check how many bytes are moved, because the graph decides how they get to the device.
Weights that are not the masters show in their dtype.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_same_training_step, total
from torch import nn

import dynswap_ext
from conftest import Provider, needs_inductor
from dynswap_ext import testing
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp

Compile = Callable[..., nn.Module]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """A class of the user's own. torch compiles its own classes in place only as parts of such a class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, **options)  # type: ignore[call-overload,no-any-return]


def in_place(model: nn.Module, **options: object) -> nn.Module:
    model.compile(**options)
    return model


def by_module(model: nn.Module, **options: object) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.compile(**options)
    return model


WAYS: list[Compile] = [whole, in_place, by_module]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
orders = pytest.mark.parametrize("first", ["install", "compile"])


def installed_and_compiled(
    provider: Provider, model: nn.Module, way: Compile, backend: str, first: str
) -> tuple[nn.Module, nn.Module]:
    moved = testing.moved(model, provider.device, torch.float64)
    if first == "compile":
        compiled = way(model, backend=backend, fullgraph=True)
        provider.install(model, dtype=torch.float64)
        return compiled, moved
    provider.install(model, dtype=torch.float64)
    return way(model, backend=backend, fullgraph=True), moved


@ways
@orders
def test_outputs(provider: Provider, way: Compile, first: str) -> None:
    model = Net().eval()
    compiled, moved = installed_and_compiled(provider, model, way, "eager", first)
    x = provider.randn(3, 16)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(compiled(x), moved(x), "output")


@ways
@orders
def test_training(provider: Provider, way: Compile, first: str) -> None:
    model = Net()
    compiled, moved = installed_and_compiled(provider, model, way, "aot_eager", first)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, moved)]
    for step in range(3):
        x = provider.randn(3, 16, seed=step)
        losses = [m(x).square().sum() for m in (compiled, moved)]
        testing.assert_bit_equal(losses[0].detach(), losses[1].detach(), f"loss of step {step}")
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_gradients_as_moved(model, moved)
        for optimizer in optimizers:
            optimizer.step()
        moved.load_state_dict(model.state_dict())  # the masters were rounded


@pytest.mark.parametrize("first", ["install", "compile"])
def test_members_replaced_by_compiled_ones(provider: Provider, first: str) -> None:
    model = mlp(layers=2).eval()
    moved = testing.moved(model, provider.device, torch.float64)
    if first == "install":
        provider.install(model, dtype=torch.float64)
    for i, layer in enumerate(model):
        model[i] = torch.compile(layer, backend="eager", fullgraph=True)
    if first == "compile":
        provider.install(model, dtype=torch.float64)
    x = provider.randn(3, 16)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x), "output")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Provider], torch.Tensor]]] = {
    "convolutions": (ConvNet, lambda p: p.randn(2, 3, 8, 8)),
    "recurrent": (Recurrent, lambda p: p.randn(3, 5, 6)),
    "transformer": (
        lambda: TinyTransformer(layers=1),
        lambda p: torch.arange(12).reshape(2, 6).to(p.device),
    ),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.slow
def test_models_of_every_kind(provider: Provider, case: str, training: bool) -> None:
    make, inputs = MODELS[case]
    model, x = make().train(training), inputs(provider)
    moved, _ = provider.pair(model)
    # Without fullgraph: torch itself breaks the graph at recurrent modules.
    compiled = torch.compile(model, backend="aot_eager" if training else "eager")
    with torch.set_grad_enabled(training):
        found, expected = compiled(x), moved(x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if training:
        total(found).backward()
        total(expected).backward()
        assert_gradients_as_moved(model, moved, close=True)
    state = moved.state_dict()
    for name, master in model.state_dict().items():
        wanted = state[name].to(master.device, master.dtype)
        torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-6, msg=name)


class Counting(nn.Module):
    """Writes its own buffers, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        for name in ("calls", "mean", "largest"):
            self.register_buffer(name, torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.largest = torch.maximum(self.largest, x.detach().amax(0))
        return x - self.mean


@backends
def test_buffers_that_a_graph_writes_reach_the_masters(provider: Provider, backend: str) -> None:
    model = nn.Sequential(Counting(), Counting())
    moved, handle = provider.pair(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(3):
        x = provider.randn(3, 16, seed=step)
        found, expected = compiled(x), moved(x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        total(found).backward()
        state = moved.state_dict()
        for name, master in model.state_dict().items():
            wanted = state[name].to(master.device, master.dtype)
            torch.testing.assert_close(master, wanted, rtol=1e-6, atol=1e-6, msg=name)
        moved.load_state_dict(model.state_dict())  # the masters were rounded
    testing.assert_nothing_held(handle)


@backends
def test_a_changed_master_is_seen(provider: Provider, backend: str) -> None:
    model = mlp()
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = provider.randn(3, 16)
    new = torch.randn(16, 16)
    with torch.no_grad():
        compiled(x)
        model.get_parameter("0.weight").mul_(2)
        moved[0].weight.mul_(2)
        testing.assert_bit_equal(compiled(x), moved(x), "output after an in-place change")
        model[2].weight = nn.Parameter(new.clone())
        moved[2].weight = nn.Parameter(new.to(provider.device, torch.float64))
        testing.assert_bit_equal(compiled(x), moved(x), "output after a replacement")


@ways
def test_uninstalled_and_installed_again(provider: Provider, way: Compile) -> None:
    model = Net().eval()
    plain, x = testing.moved(model), torch.randn(3, 16)
    moved = testing.moved(model, provider.device, torch.float64)
    compiled = way(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(compiled(x), plain(x), "output while plain")
            provider.install(model, dtype=torch.float64)
            y = x.to(provider.device, torch.float64)
            testing.assert_bit_equal(compiled(y), moved(y), "output while installed")
            dynswap_ext.uninstall(model)


def test_new_shapes_and_grad_modes(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (1, 2, 5):
        x = provider.randn(rows, 16, seed=rows)
        with torch.no_grad():
            testing.assert_bit_equal(compiled(x), moved(x), f"output for {rows} rows")
        with torch.inference_mode():
            testing.assert_bit_equal(compiled(x), moved(x), f"output for {rows} rows in inference mode")
        for m in (model, moved):
            m.zero_grad()
        outputs = [m(x) for m in (compiled, moved)]
        for y in outputs:
            y.square().sum().backward()
        assert_gradients_as_moved(model, moved)


def test_a_function_that_reads_a_weight(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)

    def product(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (x @ m[0].weight.t() + m[2].bias).relu()

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    x = provider.randn(3, 16)
    outputs = [compiled(model, x), product(moved, x)]
    testing.assert_bit_equal(outputs[0], outputs[1], "output")
    for y in outputs:
        y.square().sum().backward()
    assert_gradients_as_moved(model, moved)


def test_frozen_masters_and_a_change_of_mind(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = provider.randn(3, 16)
    for wanted in (True, False, True):
        for m in (model, moved):
            m.zero_grad()
            m[0].requires_grad_(wanted)
        for y in (compiled(x), moved(x)):
            y.square().sum().backward()
        assert_gradients_as_moved(model, moved)


def test_weights_that_are_not_cast(provider: Provider) -> None:
    model = Net().eval()
    provider.install(model, dtype=torch.bfloat16, ignore="head.bias")
    model.late = nn.Parameter(torch.randn(4))

    def read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * model.head.weight[0, 0], model.head.bias * 1, x * model.late

    x = provider.randn(4, dtype=torch.bfloat16)
    with torch.no_grad():
        found, expected = torch.compile(read, backend="eager", fullgraph=True)(x), read(x)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
    for tensor, wanted in zip(found, expected, strict=True):
        testing.assert_bit_equal(tensor.cpu(), wanted.cpu())


def test_two_installs_on_one_class_do_not_share_a_graph(provider: Provider) -> None:
    first, second = mlp(layers=1), mlp(layers=1)
    moved_first, _ = provider.pair(first)
    moved_second, _ = provider.pair(second, torch.bfloat16)
    compiled = [torch.compile(m, backend="eager", fullgraph=True) for m in (first, second)]
    with torch.no_grad():
        for _ in range(2):
            x = provider.randn(3, 16)
            testing.assert_bit_equal(compiled[0](x), moved_first(x), "output of the first")
            x = provider.randn(3, 16, dtype=torch.bfloat16)
            testing.assert_bit_equal(compiled[1](x), moved_second(x), "output of the second")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor(provider: Provider) -> None:
    needs_inductor(provider)
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, fullgraph=True)
    x = provider.randn(3, 16)
    outputs = [compiled(x), moved(x)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
    for y in outputs:
        y.square().sum().backward()
    assert_gradients_as_moved(model, moved, close=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), moved(x), rtol=1e-10, atol=1e-10)


def test_eager_calls_beside_compiled_ones(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = provider.randn(3, 16)
    for m in (compiled, model, compiled):
        found, expected = m(x), moved(x)
        testing.assert_bit_equal(found, expected, "output")
    assert_same_training_step(model, moved, lambda m: m(x))
