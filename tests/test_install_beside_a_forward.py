"""Installs, plans and statistics change while another thread is in the middle of a forward."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.state import modules_of, named_modules_of
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.compat import DynamicSwapInstaller

#: Budgets that hold some of the layers of `gated`, and all of them.
SOME, ALL = 4 * (64 * 64 + 64) * 8 + 6 * 4096, "1MiB"


class Door:
    """Stops a forward while it is shut. A copy is a new door, and open."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def __deepcopy__(self, _: object) -> Door:
        return Door()

    def shut(self) -> None:
        self.reached.clear()
        self.opened.clear()


class Gate(nn.Module):
    def __init__(self, door: Door) -> None:
        super().__init__()
        self.door = door

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.door.reached.set()
        assert self.door.opened.wait(60)
        return x


class Attending(nn.Module):
    """Reads one weight before and after the gate, under both of its names, and writes a buffer."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.gate = Gate(door)
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.bias = nn.Parameter(torch.randn(64))
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.weight
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        self.calls.add_(1)
        x = self.gate(nn.functional.linear(x, weight))
        self.calls.mul_(3)
        return self.tied(x) + nn.functional.linear(x, self.weight, self.bias) * self.calls.sum()


def gated() -> tuple[nn.Sequential, Door]:
    torch.manual_seed(0)
    door = Door()
    layers = [nn.Linear(64, 64) for _ in range(6)]
    norm = nn.BatchNorm1d(64)
    middle = nn.Sequential(norm, nn.Linear(64, 64), Attending(door), norm)
    return nn.Sequential(*layers[:3], middle, *layers[3:]), door


def without_gate() -> nn.Sequential:
    """Return the model of `gated` without the gate, frozen and in evaluation, so that it writes nothing."""
    model, _ = gated()
    model.eval().requires_grad_(False)
    del model[3][2]
    return model


@contextmanager
def in_the_middle(model: nn.Module, door: Door, x: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    """Run a block while a forward of the model waits at the door.

    Yield a function that returns its output.
    """
    door.shut()
    with ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(model, x)
            while not door.reached.wait(0.05):
                assert not running.done(), running.result()

            def output() -> torch.Tensor:
                door.opened.set()
                result: torch.Tensor = running.result(60)
                return result

            yield output
        finally:
            door.opened.set()


def refused(provider: Provider, model: nn.Module) -> None:
    with pytest.raises(dynswap_ext.BudgetError):
        provider.install(model, dtype=torch.float64, budget=100)


def refused_by_name(provider: Provider, model: nn.Module) -> None:
    with pytest.raises(dynswap_ext.ConfigError):
        provider.install(model, dtype=torch.float64, keep="nothing.of.this.name")


def refused_by_a_warning(provider: Provider, model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", dynswap_ext.DynswapWarning)
        with pytest.raises(dynswap_ext.DynswapWarning, match="TorchScript"):
            provider.install([model, torch.jit.script(nn.Identity())], dtype=torch.float64)


def refused_late(provider: Provider, model: nn.Module) -> None:
    """Install with a warning about the plan as an error, which comes when there is a plan."""
    if not provider.native:
        pytest.skip("it plans nothing that it would warn of")
    with warnings.catch_warnings():
        # Only this one, because all threads have the same filters.
        warnings.filterwarnings("error", "prefetch is 50", dynswap_ext.DynswapWarning)
        with pytest.raises(dynswap_ext.DynswapWarning, match="prefetch is 50"):
            provider.install(model, dtype=torch.float64, prefetch=50)


def streamed(provider: Provider, model: nn.Module) -> None:
    provider.install(model, dtype=torch.float64)


def with_residents(provider: Provider, model: nn.Module) -> None:
    provider.install(model, dtype=torch.float64, budget=SOME, prefetch=1)


def all_resident(provider: Provider, model: nn.Module) -> None:
    provider.install(model, dtype=torch.float64, budget=ALL, host_budget="minimum")


def a_part(provider: Provider, model: nn.Module) -> None:
    provider.install(model[3], dtype=torch.float64, budget=SOME)


def in_a_larger_tree(provider: Provider, model: nn.Module) -> None:
    provider.install([model, nn.Linear(3, 3)], dtype=torch.float64, budget=ALL)


def drop_in(provider: Provider, model: nn.Module) -> None:
    provider.handles.append(
        DynamicSwapInstaller.install_model(
            model, provider.device, dtype=torch.float64, provider=provider.backend
        )
    )


def another_provider(provider: Provider, model: nn.Module) -> None:
    other = "python" if provider.native else "native"
    dynswap_ext.install(model, device=provider.device, dtype=torch.float64, provider=other)
    provider.install(model, dtype=torch.float64)
    provider.handles.append(
        dynswap_ext.install(model, device=provider.device, dtype=torch.float64, provider=other)
    )


def looks(provider: Provider, model: nn.Module) -> None:
    handle = provider.handles[0]
    handle.stats()
    str(handle.report())
    handle.flush()
    handle.retune(SOME)
    model.state_dict()


ACTIONS = [
    refused,
    refused_by_name,
    refused_by_a_warning,
    refused_late,
    streamed,
    with_residents,
    all_resident,
    a_part,
    in_a_larger_tree,
    drop_in,
    another_provider,
    looks,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("budget", ["minimum", ALL], ids=["streamed", "resident"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_a_forward_goes_on(
    provider: Provider, action: Callable[[Provider, nn.Module], None], budget: str
) -> None:
    model, door = gated()
    model.train(action is not another_provider)  # another provider does not take statistics over
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(4, 64)
    expected = [moved(x) for _ in range(3)]
    testing.assert_bit_equal(model(x), expected[0])
    figures = handle.budget, handle.tuning, handle.stats().groups, handle.stats().resident_groups
    with in_the_middle(model, door, x) as output:
        action(provider, model)
        testing.assert_bit_equal(output(), expected[1])
    testing.assert_bit_equal(model(x), expected[2])
    if action.__name__.startswith("refused"):
        now = handle.budget, handle.tuning, handle.stats().groups, handle.stats().resident_groups
        assert handle.active and now == figures
    wanted = moved.state_dict()
    for name, master in model.state_dict().items():  # after each call, masters get rounded statistics
        torch.testing.assert_close(master, wanted[name].to(master), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("budget", ["minimum", ALL], ids=["streamed", "resident"])
def test_masters_that_are_asked_for_again_are_not_written_again(provider: Provider, budget: str) -> None:
    """Statistics in float64 are written to masters in float32 once, though they differ from then on."""
    model, door = gated()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(4, 64)
    for _ in range(2):
        expected = moved(x)
        with in_the_middle(model, door, x) as output:
            model.state_dict()
            before = {name: buffer._version for name, buffer in model.named_buffers()}
            model.state_dict()
            assert {name: buffer._version for name, buffer in model.named_buffers()} == before
            testing.assert_bit_equal(output(), expected)


@contextmanager
def at_every_moment(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` on another thread whenever this one calls a function or returns from one.

    Outside the nightly run, only every thirteenth such moment counts. If `work` needs a lock that this
    thread holds, it is waited for later.
    """
    running: list[Future[None]] = []
    moments = itertools.count()
    every = 1 if os.environ.get("DYNSWAP_TESTS") == "nightly" else 13

    def moment(*_: object) -> None:
        if next(moments) % every:
            return
        if running and not running[-1].done():
            return
        if running:
            running.pop().result()
        running.append(pool.submit(work))
        wait(running, 0.02)

    with ThreadPoolExecutor(1) as pool:
        sys.setprofile(moment)
        try:
            yield
        finally:
            sys.setprofile(None)
        for future in running:
            future.result(60)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_moment_disturbs_a_forward(
    provider: Provider, action: Callable[[Provider, nn.Module], None]
) -> None:
    model = without_gate()
    moved, _ = provider.pair(model, budget=SOME)
    x = provider.randn(2, 64)
    expected = moved(x)
    forwards = 0

    def forward() -> None:
        nonlocal forwards
        testing.assert_bit_equal(model(x), expected)
        forwards += 1

    with at_every_moment(forward):
        action(provider, model)
    assert forwards


@contextmanager
def at_each_call_of(function: str, work: Callable[[], object]) -> Iterator[None]:
    """Run `work` whenever this thread calls a Python function of that name."""

    def moment(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == function:
            work()

    sys.setprofile(moment)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_a_plan_that_a_refused_install_overtakes(provider: Provider) -> None:
    """A plan is dropped if a refused install has meanwhile given the earlier install another session."""
    if not provider.native:
        pytest.skip("pure Python makes no plans")
    model = without_gate()
    moved, _ = provider.pair(model, budget=SOME)
    x = provider.randn(2, 64)
    expected = moved(x)
    model[0].weight = nn.Parameter(model[0]._parameters["weight"].double(), requires_grad=False)
    assert model[0].weight.shape == (64, 64)  # the next call plans for the new master
    door = Door()
    door.shut()

    def call() -> torch.Tensor:
        with at_each_call_of("plan_again", lambda: (door.reached.set(), door.opened.wait(60))):
            output: torch.Tensor = model(x)
        return output

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        assert door.reached.wait(60)
        moments = itertools.count()

        def let_it_plan() -> None:
            if next(moments) == 1:  # the other install's was the first
                door.opened.set()
                wait([calling], 1)  # not for longer: it may need a lock of this thread

        with at_each_call_of("draft", let_it_plan):
            refused_late(provider, model)
        testing.assert_bit_equal(calling.result(60), expected)
    testing.assert_bit_equal(model(x), expected)


@pytest.mark.parametrize(
    "action", [refused, streamed, all_resident, a_part], ids=lambda action: action.__name__
)
def test_what_was_handed_out_stays_what_it_is(
    provider: Provider, action: Callable[[Provider, nn.Module], None]
) -> None:
    model, _ = gated()
    model.eval().requires_grad_(False)
    provider.pair(model, budget=SOME)
    middle = model[3]
    weight, before = middle[1].weight, middle[1].get_parameter("weight").clone()
    action(provider, model)
    assert middle[1].weight is weight
    weight.mul_(2)
    testing.assert_bit_equal(model.state_dict()["3.1.weight"], 2 * before)
    testing.assert_bit_equal(middle[1].weight.to(before), 2 * before)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("action", [streamed, drop_in, another_provider], ids=lambda action: action.__name__)
@pytest.mark.parametrize("when", ["before", "while it is installed"])
def test_a_parametrised_model_is_installed_again(
    provider: Provider, action: Callable[[Provider, nn.Module], None], when: str
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    moved = testing.moved(model, provider.device, torch.float64)
    parametrize.register_parametrization(moved[0], "weight", Doubled())
    if when == "before":
        parametrize.register_parametrization(model[0], "weight", Doubled())
    provider.install(model, dtype=torch.float64)
    if when != "before":
        parametrize.register_parametrization(model[0], "weight", Doubled())
    x = provider.randn(2, 64)
    for _ in range(2):
        action(provider, model)
        testing.assert_bit_equal(model(x), moved(x))
    dynswap_ext.uninstall(model)
    assert type(model[0]).__bases__ == (nn.Linear,) and type(model[1]) is nn.Linear
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
    testing.assert_bit_equal(model.to(x)(x), moved(x))


def test_an_uninstall_in_the_middle_of_a_forward_ends_it_or_lets_it_be(provider: Provider) -> None:
    """After an uninstall, a forward goes on with masters, and may fail on their device or dtype."""
    model, door = gated()
    moved, handle = provider.pair(model)
    x = provider.randn(4, 64)
    expected = moved(x)
    with in_the_middle(model, door, x) as output:
        handle.uninstall()
        with pytest.raises(RuntimeError, match=r"dtype|device"):
            output()
    model[3][2].calls.zero_()  # it has been written, or not
    provider.install(model, dtype=torch.float64)
    testing.assert_bit_equal(model(x), expected)


def test_a_tree_may_grow_while_it_is_walked() -> None:
    """Modules may be added while a tree is walked, as other threads can run between two modules."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Identity()), nn.Linear(2, 2))
    model.append(model[1])  # under two names
    assert list(named_modules_of(model)) == list(model.named_modules())
    walked = []
    for path, _ in named_modules_of(model):
        walked.append(path)
        model[0].append(nn.Identity())
    assert walked == ["", "0", "0.0", "0.1", "0.2", "0.3", "1"]


def test_a_tree_may_grow_while_a_module_s_children_are_listed() -> None:
    """Another thread may add a module before any instruction of the walk."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))

    def change(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        frame.f_trace_opcodes = True
        if frame.f_code is modules_of.__code__ and event == "opcode":
            model._modules[f"extra{len(model)}"] = nn.Identity()
        return change

    before = sys.gettrace()
    sys.settrace(change)
    try:
        found = modules_of(model)
    finally:
        sys.settrace(before)
    assert [type(each) for each in found][:2] == [nn.Sequential, nn.Linear]


def test_masters_may_come_while_they_are_listed() -> None:
    module = nn.BatchNorm1d(3)

    def add_one(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        if Path(frame.f_code.co_filename).stem != "own_masters":
            return None
        sys.settrace(None)
        module.register_buffer(f"b{len(module._buffers)}", torch.zeros(3))
        module.register_parameter(f"p{len(module._parameters)}", nn.Parameter(torch.zeros(3)))
        sys.settrace(add_one)
        return add_one

    sys.settrace(add_one)
    try:
        found = own_masters(module)
    finally:
        sys.settrace(None)
    assert {"weight", "running_mean"} <= {name for name, _, _ in found}
    assert len(module._buffers) > 3 and len(module._parameters) > 2
