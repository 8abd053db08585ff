"""Code that runs while the session releases tensors: callbacks of weak references, and other threads.

The tensor of a resident dies when its master has changed. A callback may then do anything with the model, in
the middle of the access, the flush or the call that noticed the change: see Note [Release after the change]
in weight.h.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from coded_masters import code_masters
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.parameter_proxy import plain_tensor_of
from dynswap_ext.lossless.tensor import LosslessTensor
from threads import at_once, repeated

WIDTH = 24
Action = Callable[["Layers"], None]


class Layers(nn.Module):
    """Calls `in_between` when the tensor of its first weight dies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.in_between: Callable[[], None] | None = None
        self.ran: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.in_between is not None:
            callback, self.in_between = self.in_between, None
            weakref.finalize(self.layers[0].weight, callback)
        result: Tensor = self.layers(x)
        return result

    def first(self) -> nn.Parameter:
        return self.layers[0]._parameters["weight"]


def write(model: Layers) -> None:
    with torch.no_grad():
        model.first().mul_(2)


def write_silently(model: Layers) -> None:
    model.first().data.mul_(2)


def replace(model: Layers) -> None:
    model.layers[0]._parameters["weight"] = nn.Parameter(3 * model.first().detach())


def replace_with_another_dtype(model: Layers) -> None:
    model.layers[0]._parameters["weight"] = nn.Parameter(3 * model.first().detach().double())


def register_many(model: Layers) -> None:
    for index in range(40):
        model.layers[0].register_parameter(f"more_{index}", nn.Parameter(torch.ones(3)))
        model.register_parameter(f"more_{index}", nn.Parameter(torch.ones(3)))


def call(model: Layers) -> None:
    model(torch.ones(1, WIDTH, dtype=torch.float64, device=plain_tensor_of(model.layers[0].weight).device))


def read_the_state(model: Layers) -> None:
    model.state_dict()
    list(model.parameters())


def uninstall(model: Layers) -> None:
    dynswap_ext.uninstall(model)
    gc.collect()


def collect(model: Layers) -> None:
    gc.collect()


def named(changes: list[Action]) -> dict[str, object]:
    return {"argvalues": changes, "ids": [change.__name__ for change in changes]}


@pytest.mark.parametrize(
    "in_between", **named([write, write_silently, replace, replace_with_another_dtype, register_many, call,
                           read_the_state, uninstall, collect])
)  # fmt: skip
@pytest.mark.parametrize("change", **named([write, write_silently, replace, replace_with_another_dtype]))
def test_an_access_survives_whatever_runs_in_its_midst(
    provider: Provider, change: Action, in_between: Action
) -> None:
    model = Layers()
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)

    def callback() -> None:
        model.ran.append(in_between.__name__)
        with torch.no_grad():
            in_between(model)

    with torch.no_grad():
        model(x)
        model.in_between = callback
        # A forward that is uninstalled halfway goes on with the masters, and may fail on their dtype.
        with suppress(RuntimeError) if in_between is uninstall else nullcontext():
            model(x)
        change(model)
        with suppress(RuntimeError) if in_between is uninstall else nullcontext():
            model(x)
        expected = testing.moved(model, provider.device, torch.float64)(x)
        assert model.ran == [in_between.__name__]
        if in_between is uninstall:
            assert not handle.active and type(model) is Layers
            assert all(type(master) is nn.Parameter for master in (layer.weight for layer in model.layers))
        else:
            for _ in range(2):
                testing.assert_bit_equal(model(x), expected, "later calls")
    if handle.active:
        model(x).sum().backward()
        assert model.first().grad is not None, "the gradient goes to the master that the model has"


def write_all(model: Layers) -> None:
    with torch.no_grad():
        for master in model.state_dict().values():
            master.mul_(2)


def write_all_silently(model: Layers) -> None:
    for master in model.state_dict().values():
        master.data.mul_(2)


def replace_all(model: Layers) -> None:
    for layer in model.layers:
        for name, master in list(layer._parameters.items()):
            assert master is not None
            layer._parameters[name] = nn.Parameter(2 * master.detach())


@pytest.mark.parametrize("change", **named([write_all, write_all_silently, replace_all]))
def test_a_call_made_when_a_tensor_dies_sees_the_whole_change(provider: Provider, change: Action) -> None:
    model = Layers().eval()
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)
    seen: list[Tensor] = []
    with torch.no_grad():
        model(x)
        model.in_between = lambda: seen.append(model(x))
        model(x)
        seen.clear()  # pure Python keeps no tensors, so they are dead already
        change(model)
        expected = testing.moved(model, provider.device, torch.float64)(x)
        for _ in range(2):
            testing.assert_bit_equal(model(x), expected, "a call after the change")
    assert seen or not provider.native, "no tensor died: nothing ran in between"
    for output in seen:
        testing.assert_bit_equal(output, expected, "the call in between")


def named_parameters(model: nn.Module) -> object:
    return list(model.named_parameters())


@pytest.mark.parametrize("module", ["layers.0", "layers.2"])
@pytest.mark.parametrize("ask", [nn.Module.state_dict, named_parameters], ids=["state_dict", "parameters"])
def test_a_flush_survives_weights_registered_during_it(
    provider: Provider, ask: Callable[[nn.Module], object], module: str
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Layers())
    provider.install(model, dtype=torch.float64, budget="1GiB")
    ran = []

    def callback() -> None:
        ran.append(module)
        target = model[1].get_submodule(module)
        for index in range(60):
            target.register_parameter(f"more_{index}", nn.Parameter(torch.ones(4)))
            getattr(target, f"more_{index}")

    with torch.no_grad():
        model(provider.randn(4, WIDTH))
        statistic, companion = model[0].running_var, model[0].weight
        weakref.finalize(plain_tensor_of(companion), callback)
        del companion
        before = statistic.cpu().clone()
        statistic.add_(1)
        ask(model)
        gc.collect()
        testing.assert_bit_equal(model.state_dict()["0.running_var"].double(), (before + 1).float().double())
    assert ran == [module]


class Counter(nn.Module):
    """A large buffer that a forward reads, and may write."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1 << 18))
        self.add = 0.0
        self.barrier: threading.Barrier | None = None

    def forward(self) -> float:
        if self.barrier is not None:
            self.barrier.wait()
        count = self.count
        if self.add:
            count.add_(self.add)
        return count[0].item()


def test_writes_on_what_two_threads_read_first_reach_the_master(provider: Provider) -> None:
    for _ in range(5):
        model = Counter().eval()
        handle = provider.install(model, dtype=torch.float64, budget="1GiB")
        model.barrier = threading.Barrier(2)
        at_once(model, model)
        model.barrier, model.add = None, 1.0
        with torch.no_grad():
            for _ in range(3):
                model()
            model.add = 0.0
            assert model() == 3
            assert model.state_dict()["count"][0] == 3
        handle.uninstall()


def test_threads_run_while_masters_are_written_and_replaced(provider: Provider) -> None:
    model = Layers()
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)

    def work(_: int) -> None:
        with torch.no_grad():
            model(x)

    with repeated(work, 3):
        for index in range(60 if provider.device.type == "cpu" else 20):
            with torch.no_grad():
                (write_silently if index % 2 else write)(model)
                model.first().data.mul_(0.5)
            replace(model)
            with torch.no_grad():
                model.first().mul_(1 / 3)
            model(x).sum().backward()
            assert model.first().grad is not None, f"change {index}"
    provider.assert_as_masters(model, x)


def test_a_resident_returns_to_its_place_when_its_outdated_tensor_dies(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python keeps no place for a resident")
    model = Layers().eval()
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)
    held: list[Tensor] = []
    with torch.no_grad():
        model.layers[0].register_forward_pre_hook(lambda module, args: held.append(module.weight))
        model(x)
        place = held[0].data_ptr()
        write(model)
        model(x)
        assert held[-1].data_ptr() != place
        held.clear()
        model(x)
    assert held[0].data_ptr() == place
    assert handle.stats().overflow_bytes == 0  # the budget had room for both


class Outer(nn.Module):
    """Calls a model that has an install of its own, and writes its masters between the calls."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.__dict__["inner"] = inner

    def forward(self, x: Tensor) -> list[float]:
        outputs: list[float] = []
        for value in range(1, 4):
            self.inner._parameters["weight"].data.fill_(value)
            outputs.append((self.inner(x) * self.scale).flatten()[0].item())  # waits for the pass
        return outputs


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_model_called_by_another_begins_a_call_of_its_own(provider: Provider, budget: str | None) -> None:
    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    outer = Outer(inner)
    for model in (inner, outer):
        provider.install(model, dtype=torch.float64, budget=budget)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=provider.device)
    with torch.no_grad():
        inner(x)
        assert outer(x) == [WIDTH, 2 * WIDTH, 3 * WIDTH]


class WritesOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once, self.always = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            x = self.once(x)
            self.once.weight.mul_(2)
        result: Tensor = self.always(x)
        return result


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_what_a_call_wrote_on_a_weight_is_in_its_master_after_the_next_call(
    provider: Provider, budget: str | None
) -> None:
    model = WritesOnce().eval()
    master, before = model.once.weight, model.once.weight.detach().clone()
    provider.install(model, dtype=torch.float64, budget=budget)
    with torch.no_grad():
        for _ in range(2):
            model(provider.randn(2, WIDTH))
    testing.assert_bit_equal(master.detach(), 2 * before)


def test_a_call_while_coded_bytes_are_released(provider: Provider) -> None:
    """A call that runs while the session lets go of coded bytes sees what was written to their master."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    model = code_masters(copy.deepcopy(plain))
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 96)
    seen: list[tuple[bool, Tensor]] = []
    written = False
    with torch.no_grad():
        before = model(x)
        master = model[0]._parameters["weight"]
        assert isinstance(master, LosslessTensor)
        assert master.coded is not None
        weakref.finalize(master.coded, lambda: seen.append((written, model(x))))
        for each in (master, plain[0].weight):
            each.mul_(2)
        written = True
        seen.append((written, model(x)))
        gc.collect()
        after = testing.moved(plain, provider.device, torch.float64)(x)
    assert len(seen) == 2
    for of_written, output in seen:  # pure Python keeps no coded bytes, so they go before the write
        testing.assert_bit_equal(output, after if of_written else before)
