"""Random actions on a model while other threads run it: a plain model says what each of their calls gives.

The tests run a short, fixed set; `make programs SECONDS=600` runs new ones until the time is over. A failure
names its seed: `DYNSWAP_SEED_OF_ACTIONS=7` runs that one alone, though threads meet differently each time.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import PROVIDERS, Provider
from dynswap_ext import testing

SECONDS = float(os.environ.get("DYNSWAP_PROGRAMS_SECONDS", "0"))
ONE = os.environ.get("DYNSWAP_SEED_OF_ACTIONS")
THREADS, ACTIONS = 3, 24
FEATURES = 48
#: Bytes of a block's weights in float64, by which budgets are drawn.
BLOCK = 2 * (FEATURES * FEATURES + FEATURES) * 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.scale = nn.Parameter(torch.rand(FEATURES))
        self.register_buffer("shift", torch.rand(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)) * self.scale
        return self.norm(self.down(hidden)) + self.shift * self.scale


class Program:
    """Actions on one thread, and forwards on others, of a model and of a plain one beside it."""

    def __init__(self, provider: Provider, seed: int) -> None:
        self.provider, self.draw = provider, random.Random(seed)
        torch.manual_seed(seed)
        self.model = nn.ModuleList(Block() for _ in range(4)).eval().requires_grad_(self.draw.random() < 0.3)
        self.model.append(nn.Sequential(nn.Embedding(9, FEATURES), nn.LSTM(FEATURES, 8)))
        if self.draw.random() < 0.5:
            self.model[1].up.weight = self.model[0].up.weight
        self.plain = testing.moved(self.model, provider.device, torch.float64)
        self.handle = self.install()
        #: What an optimizer's step changes is changed while nobody runs.
        self.running = threading.Semaphore(THREADS)
        self.over, self.may_begin = threading.Event(), threading.Event()
        self.may_begin.set()
        self.failures: list[BaseException] = []
        self.calls = 0
        self.said: list[str] = []

    # The forwards -------------------------------------------------------------------------------------

    def run(self, seed: int) -> None:
        draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
        try:
            while not self.over.is_set():
                self.may_begin.wait(1)
                with self.running:
                    self.call(draw, torch_draw)
        except BaseException as error:
            self.failures.append(error)
            self.over.set()

    def call(self, draw: random.Random, torch_draw: torch.Generator) -> None:
        number = draw.randrange(5)
        if number == 4:
            x: torch.Tensor = torch.randint(9, (5,), generator=torch_draw).to(self.provider.device)
        else:
            x = torch.randn(3, FEATURES, generator=torch_draw, dtype=torch.float64).to(self.provider.device)
        backward = draw.random() < 0.2 and number != 4
        with torch.set_grad_enabled(backward):
            x.requires_grad_(backward)
            got, wanted = self.model[number](x), self.plain[number](x)
            got, wanted = (each[0] if isinstance(each, tuple) else each for each in (got, wanted))
            testing.assert_bit_equal(got, wanted, f"the output of module {number}")
            if backward:
                got, wanted = (torch.autograd.grad(each.sum(), x)[0] for each in (got, wanted))
                testing.assert_bit_equal(got, wanted, f"the gradient through module {number}")
        self.calls += 1

    # The actions --------------------------------------------------------------------------------------

    def options(self) -> dict[str, object]:
        draw = self.draw
        return {
            "prefetch": draw.randrange(4),
            "budget": draw.choice((None, "auto", 2 * BLOCK + 65536, 4 * BLOCK + 65536, "64MiB")),
            "pin": draw.choice(("auto", True, False, 100_000)),
            "strict_budget": False,
        }

    def install(self, part: object = None, **options: object) -> dynswap_ext.Handle:
        given = {"dtype": torch.float64, **self.options(), **options}
        return self.provider.install(self.model if part is None else part, **given)

    def install_again(self) -> None:
        self.handle = self.install()

    def install_keeping(self) -> None:
        self.handle = self.install(keep="*.norm*", budget="64MiB")

    def install_a_part(self) -> None:
        self.install(self.model[self.draw.randrange(5)])
        self.handle = self.install()

    def install_more(self) -> None:
        self.handle = self.install([self.model, nn.Linear(3, 3), self.model[0]])

    def refused_budget(self) -> None:
        with pytest.raises(dynswap_ext.BudgetError):
            self.install(budget=self.draw.choice((1, 100, 2000)))

    def refused_option(self) -> None:
        bad: dict[str, object] = self.draw.choice(
            ({"keep": "nothing"}, {"pin": "much"}, {"prefetch": -1}, {"dtype": "int8"})
        )
        with pytest.raises((dynswap_ext.ConfigError, TypeError)):
            self.install(**bad)

    def refused_device(self) -> None:
        with pytest.raises(dynswap_ext.ConfigError):
            dynswap_ext.install(self.model, device="nowhere")

    def refused_module(self) -> None:
        """One of the tree is on the meta device."""
        with pytest.raises(dynswap_ext.ConfigError):
            self.install(nn.ModuleList([self.model, nn.Linear(2, 2, device="meta")]))

    def refused_late(self) -> None:
        with warnings.catch_warnings():
            # That one alone: the filters are those of all threads.
            warnings.filterwarnings("error", "prefetch is 50", dynswap_ext.DynswapWarning)
            with contextlib.suppress(dynswap_ext.DynswapWarning):
                self.handle = self.install(prefetch=50, budget=None)  # pure Python plans nothing to warn of

    def retune(self) -> None:
        with contextlib.suppress(dynswap_ext.ConfigError):
            self.handle.retune(self.draw.choice((None, "auto", 3 * BLOCK + 65536, "64MiB")))

    def add_and_remove(self) -> None:
        """A module that no call uses comes and goes, so that plans are made again."""
        self.model.append(nn.Linear(FEATURES, self.draw.randrange(1, FEATURES)))
        time.sleep(0.002)
        if self.draw.random() < 0.7:
            self.model.pop(-1)
        while len(self.model) > 8:
            self.model.pop(-1)

    def look(self) -> None:
        self.handle.stats()
        str(self.handle.report())
        repr(self.handle)
        self.handle.flush()

    def state(self) -> None:
        for name, tensor in self.plain.state_dict().items():
            master = self.model.state_dict()[name]
            testing.assert_bit_equal(master.to(tensor), tensor, name)

    @contextlib.contextmanager
    def nobody_runs(self) -> Iterator[None]:
        """Keep new calls out: torch refuses a backward after a write to the masters that its forward used."""
        self.may_begin.clear()
        with contextlib.ExitStack() as nobody:
            nobody.callback(self.may_begin.set)
            for _ in range(THREADS):
                nobody.enter_context(self.running)
            yield

    def step(self) -> None:
        """An optimizer's step while nobody is in a forward."""
        with self.nobody_runs():
            number = self.draw.randrange(4)
            for module in (self.model[number], self.plain[number]):
                masters = list(module.parameters())
                for master in masters:
                    master.grad = torch.full_like(master, 0.25)
                # Halves and quarters: exact in float32, too.
                for master in masters:
                    with torch.no_grad():
                        master.copy_((master * 4).round() / 4)
                torch.optim.SGD(masters, lr=0.5).step()
                for master in masters:
                    master.grad = None

    def load(self) -> None:
        with self.nobody_runs():
            self.model.load_state_dict({k: v.clone() for k, v in self.model.state_dict().items()})

    def judge(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (5, self.install_again),
            (2, self.install_keeping),
            (3, self.install_a_part),
            (2, self.install_more),
            (4, self.refused_budget),
            (1, self.refused_option),
            (1, self.refused_device),
            (2, self.refused_module),
            (2, self.refused_late),
            (3, self.retune),
            (3, self.add_and_remove),
            (2, self.look),
            (1, self.state),
            (2, self.step),
            (1, self.load),
        ]
        weights = [weight for weight, _ in actions]
        seeds = [self.draw.randrange(1 << 30) for _ in range(THREADS)]
        threads = [threading.Thread(target=self.run, args=(seed,)) for seed in seeds]
        with beside(threads, self.over):
            for _ in range(ACTIONS):
                action = self.draw.choices(actions, weights)[0][1]
                self.said.append(action.__name__)
                action()
                before, patience = self.calls, time.monotonic() + 0.2
                while self.calls == before and time.monotonic() < patience and not self.over.is_set():
                    time.sleep(0.0005)
                if self.over.is_set():
                    break
        if self.failures:
            raise self.failures[0]
        self.state()
        assert self.handle.active
        dynswap_ext.uninstall(self.model)
        assert not any(dynswap_ext.is_installed(module) for module in self.model.modules())


@contextlib.contextmanager
def beside(threads: list[threading.Thread], over: threading.Event) -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
        assert not any(thread.is_alive() for thread in threads)


def test_calls_of_other_threads_are_as_if_nothing_was_done(provider: Provider) -> None:
    end = time.monotonic() + SECONDS / len(PROVIDERS)
    seed = int(ONE) if ONE else time.time_ns() // 1_000_000 if SECONDS else 0
    calls, programs = 0, 4 if provider.device.type == "cpu" else 1
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = Program(provider, seed)
            try:
                program.judge()
            except BaseException as error:
                error.add_note(f"seed {seed}, after {', '.join(program.said)}")
                raise
        calls += program.calls
        seed += 1
        if ONE or (not SECONDS and seed == programs) or (SECONDS and time.monotonic() > end):
            break
    assert calls > THREADS * 4
