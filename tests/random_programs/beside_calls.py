"""Changes of an installed model while other threads call it. Each call has to give the right result."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from architectures import total
from dynswap_ext import testing
from master_writes import MASTER_WRITES, Dice
from optimizers import trained
from threads import repeated
from twins import say
from twins_written import WrittenTwins

THREADS = 3
#: Values that every install refuses.
WRONG = {"keep": "nothing", "host_budget": "much", "prefetch": -1, "dtype": "int8", "device": "nowhere"}
Options = dict[str, Any]


class Callers:
    """Threads that call the installed model, and the actions that change it meanwhile."""

    def __init__(self, twins: WrittenTwins, seed: int) -> None:
        self.twins, self.seed = twins, seed
        self.may_begin, self.running = threading.Event(), threading.Semaphore(THREADS)
        self.may_begin.set()
        self.calls = 0
        self.expect()

    def expect(self) -> None:
        """Note what each thread calls, with which input, and what a plain model returns for it."""
        model, stand_in = self.twins.model.eval(), self.twins.stand_in().eval()
        linear = [name for name, module in stand_in.named_modules() if isinstance(module, nn.Linear)]
        self.work = []
        for thread in range(THREADS):
            x, of, expected = self.twins.input(self.seed + thread), model, stand_in
            if thread == 2 and linear:  # a part, by itself
                name = linear[self.seed % len(linear)]
                of, expected = model.get_submodule(name), stand_in.get_submodule(name)
                shape = (3, expected.in_features)
                generator = torch.Generator().manual_seed(self.seed)
                x = torch.randn(shape, generator=generator, dtype=torch.float64).to(*self.twins.where)
            # A GPU's recurrent layers have no backward in evaluation.
            backward = thread > 0 and x.is_floating_point() and self.twins.kind.name != "Recurrent"
            self.work.append((of, x, backward, _results(expected, x, backward)))

    def call(self, thread: int) -> None:
        self.may_begin.wait(1)
        with self.running:
            of, x, backward, expected = self.work[thread]
            testing.assert_bit_equal(_results(of, x, backward), expected, f"results of thread {thread}")
        self.calls += 1

    def meanwhile(self, actions: Sequence[tuple[str, Dice, Options]]) -> None:
        """Run actions while the threads call the model. After each action, wait for a call for a while."""
        with repeated(self.call, THREADS):
            for name, dice, options in actions:
                say("beside calls", name, dice, options)
                ACTIONS[name](self, dice, options)
                before, patience = self.calls, time.monotonic() + 0.2
                while self.calls == before and time.monotonic() < patience:
                    time.sleep(0.0005)
        self.remove()

    @contextlib.contextmanager
    def nobody_runs(self) -> Iterator[None]:
        """Keep new calls out while masters change: torch refuses a backward that would use changed ones."""
        self.may_begin.clear()
        with contextlib.ExitStack() as nobody:
            nobody.callback(self.may_begin.set)
            for _ in range(THREADS):
                nobody.enter_context(self.running)
            yield
            self.expect()

    # The actions --------------------------------------------------------------------------------------

    def install(self, options: Options, what: Any = None) -> None:
        """Install the model, a part of it or more. Device and dtype are the same, so results are too."""
        twins = self.twins
        options = {**options, "dtype": twins.cast}
        handle = twins.fitting(options, what)
        if what is None or isinstance(what, list):
            twins.handle, twins.options = handle, options

    def install_a_part(self, dice: Dice, options: Options) -> None:
        parts = list(self.twins.model.children())
        self.install(options, parts[dice.seed % len(parts)])
        self.install(options)

    def install_more(self, dice: Dice, options: Options) -> None:
        parts = list(self.twins.model.children())
        self.install(options, [self.twins.model, nn.Linear(3, 3), parts[dice.seed % len(parts)]])

    def install_keeping(self, dice: Dice, options: Options) -> None:
        names = [name for name, _ in self.twins.plain.named_parameters()]
        self.install({**options, "keep": names[dice.seed % len(names)], "budget": "64MiB"})

    def refused_budget(self, dice: Dice, options: Options) -> None:
        """Install with too small a budget. It is not refused if all weights are handed out as they are."""
        with contextlib.suppress(dynswap_ext.BudgetError):
            options = {**options, "dtype": self.twins.cast, "budget": 1 + dice.seed}
            self.twins.handle = self.twins.installed(options)
            self.twins.options = options

    def refused_option(self, dice: Dice, options: Options) -> None:
        name, value = list(WRONG.items())[dice.seed % len(WRONG)]
        with pytest.raises((dynswap_ext.ConfigError, TypeError)):
            self.twins.installed({**options, "dtype": self.twins.cast, name: value})

    def refused_module(self, dice: Dice, options: Options) -> None:
        """Install a tree of which one module is on the meta device."""
        with pytest.raises(dynswap_ext.ConfigError):
            self.twins.installed(options, nn.ModuleList([self.twins.model, nn.Linear(2, 2, device="meta")]))

    def refused_late(self, dice: Dice, options: Options) -> None:
        """Let a warning about the plan be an error. Pure Python has no such plan, and does not warn."""
        with warnings.catch_warnings(), contextlib.suppress(dynswap_ext.DynswapWarning):
            # Only this one, because all threads have the same filters.
            warnings.filterwarnings("error", "prefetch is 50", dynswap_ext.DynswapWarning)
            self.install({"prefetch": 50, "budget": None})

    def retune(self, dice: Dice, options: Options) -> None:
        with contextlib.suppress(dynswap_ext.ConfigError):
            self.twins.handle.retune(("auto", None, "64MiB")[dice.seed % 3])

    def add_or_remove(self, dice: Dice, options: Options) -> None:
        """Add or remove a module that no call uses, which leads to a new plan."""
        if not self.remove():
            self.twins.model.extra = nn.Linear(self.twins.width, 1 + dice.seed % self.twins.width)

    def remove(self) -> bool:
        there = hasattr(self.twins.model, "extra")
        if there:
            del self.twins.model.extra
        return there

    def look(self, dice: Dice, options: Options) -> None:
        handle = self.twins.handle
        handle.stats(), str(handle.report()), repr(handle), handle.flush()
        state = self.twins.plain.state_dict()
        for name, master in self.twins.model.state_dict().items():
            if not name.startswith("extra."):
                testing.assert_bit_equal(master, state[name], name)

    def write_masters(self, dice: Dice, options: Options) -> None:
        with self.nobody_runs():
            self.twins.write_master(list(MASTER_WRITES)[dice.seed % len(MASTER_WRITES)], dice.seed, dice)

    def step(self, dice: Dice, options: Options) -> None:
        """Make an optimizer's step with gradients of its own."""
        with self.nobody_runs():
            for model in (self.twins.plain, self.twins.model):
                masters = trained(model)
                gradients = [master.grad for master in masters]
                for master in masters:
                    master.grad = torch.full_like(master, 0.25)
                if masters:
                    torch.optim.SGD(masters, lr=0.5).step()
                for master, gradient in zip(masters, gradients, strict=True):
                    master.grad = gradient

    def load(self, dice: Dice, options: Options) -> None:
        with self.nobody_runs():
            self.remove()
            self.twins.load(dice, part=bool(dice.seed % 2), assign=dice.seed % 3 == 0)


ACTIONS: dict[str, Callable[[Callers, Dice, Options], None]] = {
    "install": lambda callers, _, options: callers.install(options),
    **{
        each.__name__: each
        for each in (
            Callers.install_a_part, Callers.install_more, Callers.install_keeping, Callers.refused_budget,
            Callers.refused_option, Callers.refused_module, Callers.refused_late, Callers.retune,
            Callers.add_or_remove, Callers.look, Callers.write_masters, Callers.step, Callers.load,
        )
    },
}  # fmt: skip


def _results(model: nn.Module, x: Tensor, backward: bool) -> list[Tensor]:
    """Return the output, and with `backward` the gradient of the input."""
    with torch.set_grad_enabled(backward):
        x = x.detach().requires_grad_(backward)
        output = model(x)
        return [output.detach(), *(torch.autograd.grad(total(output), x) if backward else ())]
