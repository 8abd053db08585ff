"""The rules from which hypothesis makes programs for a plain and an installed model."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import dynswap_ext
import pretend_cuda
from architectures import ARCHITECTURES, NARROW, WIDE
from beside_calls import ACTIONS, Callers
from conftest import Provider
from handed_writes import HANDED_WRITES
from master_writes import MASTER_WRITES, Dice
from optimizers import OPTIMIZERS, SPARSE, trained
from twins import OPTIONS
from twins_written import WrittenTwins

seeds = st.integers(0, 999)
dice = st.builds(Dice, seeds)
numbers = st.integers(0, 30)
options = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()})
optimizers = st.sampled_from(list(OPTIMIZERS))
BETWEEN = ("nothing", "flush", "state_dict", "parameters", "evaluate", "uninstall", "backward")


class Programs(RuleBasedStateMachine):
    """A program that hypothesis makes of the rules. A subclass sets `provider`."""

    provider: Provider

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.warned = warnings.catch_warnings()
        self.warned.__enter__()
        warnings.simplefilter("ignore")
        self.twins: WrittenTwins | None = None
        if pretend_cuda.active():
            pretend_cuda.reset(7, "mixed")

    @initialize(
        name=st.sampled_from(list(ARCHITECTURES)),
        width=st.sampled_from([NARROW, WIDE]),
        source=st.sampled_from(["ram", "torch", "safetensors", "coded"]),
        seed=seeds,
        options=options,
    )
    def begin(self, name: str, width: int, source: str, seed: int, options: dict[str, object]) -> None:
        if pretend_cuda.active() and ARCHITECTURES[name].sparse:
            name = "Rows"  # the pretend device has no sparse tensors
        self.twins = WrittenTwins(self.provider, name, width, source, seed, Path(self.folder.name))
        self.twins.install(**options)

    # The install --------------------------------------------------------------------------------------

    @rule(options=options)
    def install(self, options: dict[str, object]) -> None:
        self.twins.install(**options)

    @rule(seed=seeds)
    def uninstall(self, seed: int) -> None:
        """Uninstall, compare and install again, so that most of a program runs with an install."""
        self.twins.uninstall()
        self.twins.evaluate(seed)
        self.twins.compare_masters(listed=False)
        self.twins.install(**self.twins.options)

    @rule()
    def retune(self) -> None:
        self.twins.handle.retune()

    @rule(how=st.sampled_from(["flush", "state_dict", "parameters"]))
    def flush(self, how: str) -> None:
        self.twins.flush(how)

    # Calls --------------------------------------------------------------------------------------------

    @rule(seed=seeds)
    def evaluate(self, seed: int) -> None:
        self.twins.evaluate(seed)

    @rule(seed=seeds)
    def evaluate_again(self, seed: int) -> None:
        for _ in range(3):
            self.twins.evaluate(seed)

    @rule(seed=seeds)
    def forward_in_training(self, seed: int) -> None:
        self.twins.forward_in_training(seed)

    @rule(seed=seeds)
    def copy(self, seed: int) -> None:
        self.twins.copies(seed)

    @rule(number=numbers, dice=dice)
    def functional_call(self, number: int, dice: Dice) -> None:
        self.twins.functional(number, dice)

    @rule(
        seed=seeds,
        actions=st.lists(st.tuples(st.sampled_from(list(ACTIONS)), dice, options), min_size=1, max_size=8),
    )
    def run_in_threads(self, seed: int, actions: list[tuple[str, Dice, dict[str, object]]]) -> None:
        """Change the model while other threads call it. Each call has to give what a plain model gives."""
        if not self.twins.kind.writes:
            Callers(self.twins, seed).meanwhile(actions)

    # Training -----------------------------------------------------------------------------------------

    @rule(name=optimizers)
    def make_an_optimizer(self, name: str) -> None:
        name = name if not self.twins.kind.sparse or name in SPARSE else "sgd"
        if name == "lbfgs" and self.twins.kind.several:
            name = "sgd"  # its gradients are compared, and made equal, before each step
        if trained(self.twins.plain):
            self.twins.optimize_with(name, lambda m: OPTIMIZERS[name](trained(m)))

    @rule(seed=seeds, between=st.sampled_from(BETWEEN))
    def backward(self, seed: int, between: str) -> None:
        twins = self.twins
        twins.backward(seed, lambda: self.do_between(between, seed))
        if twins.handle is None:
            twins.install(**twins.options)

    def do_between(self, between: str, seed: int) -> None:
        twins = self.twins
        if between == "uninstall":
            twins.uninstall()
        elif between == "evaluate" and not twins.kind.writes:
            twins.evaluate(seed)
        elif between == "backward" and not twins.kind.writes and not twins.kind.norms:
            twins.backward(seed + 1)
        elif between in ("flush", "state_dict", "parameters"):
            twins.flush(between)

    @precondition(lambda self: self.twins.optimizers is not None)
    @rule(seed=seeds, passes=st.integers(1, 2), to_none=st.booleans(), steps=st.integers(1, 3))
    def train(self, seed: int, passes: int, to_none: bool, steps: int) -> None:
        twins = self.twins
        for step in range(steps):
            for each in twins.optimizers:
                each.zero_grad(set_to_none=to_none)
            for i in range(passes):
                twins.backward(seed + step + i)
            twins.step(seed)

    # Writes -------------------------------------------------------------------------------------------

    @rule(
        writes=st.lists(
            st.tuples(st.sampled_from(list(MASTER_WRITES)), numbers, dice), min_size=1, max_size=5
        ),
        looks=st.booleans(),
    )
    def write_masters(self, writes: list[tuple[str, int, Dice]], looks: bool) -> None:
        """Write several times in a row; with `looks`, each call in between has to see the write before it."""
        for name, number, dice in writes:
            if looks:
                self.twins.evaluate(dice.seed)
            self.twins.write_master(name, number, dice)
        self.twins.evaluate(0)

    @rule(name=st.sampled_from(list(HANDED_WRITES)), number=numbers, dice=dice, hold=st.booleans())
    def write_what_is_handed_out(self, name: str, number: int, dice: Dice, hold: bool) -> None:
        self.twins.write_handed(name, number, dice, hold)

    @rule(number=numbers)
    def keep_a_view(self, number: int) -> None:
        self.twins.keep_view(number)

    @rule(number=numbers, dice=dice)
    def write_on_a_view(self, number: int, dice: Dice) -> None:
        self.twins.write_view(number, dice)

    @rule(dice=dice, part=st.booleans(), assign=st.booleans())
    def load(self, dice: Dice, part: bool, assign: bool) -> None:
        self.twins.load(dice, part, assign)

    @rule(number=numbers, dice=dice)
    def write_into_the_state(self, number: int, dice: Dice) -> None:
        self.twins.write_state(number, dice)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    def cast_the_masters(self, dtype: torch.dtype) -> None:
        self.twins.cast_masters(dtype)

    @rule(number=numbers, through=st.sampled_from(["attribute", "master"]))
    def freeze_or_thaw(self, number: int, through: str) -> None:
        self.twins.toggle(number, through)

    @rule(number=numbers)
    def hold(self, number: int) -> None:
        self.twins.hold(number)

    @precondition(lambda self: self.twins.held)
    @rule()
    def let_go(self) -> None:
        self.twins.let_go()

    # Looking ------------------------------------------------------------------------------------------

    @rule(listed=st.booleans())
    def look_at_masters(self, listed: bool) -> None:
        self.twins.compare_masters(listed)

    def teardown(self) -> None:
        try:
            if self.twins is not None:
                self.twins.close()
            if pretend_cuda.active():
                found = pretend_cuda.violations()
                assert not found, found
        finally:
            if self.twins is not None:
                self.twins.held.clear()
                dynswap_ext.uninstall(self.twins.model)
            self.warned.__exit__(None, None, None)
            self.folder.cleanup()
