"""Random programs under a cap on the device's memory: calls, spikes inside them, other tensors.

Each program runs three times. The first run has `budget="minimum"` and no cap, and shows how much memory
that takes. The second has `budget="minimum"` and a cap near that. The third has `budget="auto"` and the same
cap. If the second succeeds, the third has to, with equal results.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dynswap_ext
import pretend_cuda
from memory_models import Subject, subject
from threads import at_once, in_threads

DEVICE = "cuda:0"
#: The bytes of a small segment, the least that the device's allocator takes from its driver, at the scale of
#: the models; 0: to the byte. With segments, an automatic budget cannot match the minimum to the last byte,
#: since it matters where blocks are. So the minimum gets less, by SPARE_SEGMENTS large segments (of 10 small
#: ones). With 3 of them, the weights that stayed left too many holes in one program of some 140.
SEGMENTS = (0, 0, 8 << 10, 16 << 10)
SPARE_SEGMENTS = 4
OUT_OF_MEMORY = (torch.OutOfMemoryError, dynswap_ext.OutOfMemoryError)


@dataclass
class Outcome:
    """The result of one run of a program: whether it ran, its results, its memory, and its error."""

    ran: bool
    results: list[list[Tensor]]
    peak: int
    gave_way: int
    given_way_bytes: int
    error: str = ""


@dataclass
class Verdict:
    """The result of one seed: whether the minimum ran, what gave way, and the failure if there was one."""

    minimum_ran: bool
    gave_way: int
    segment_bytes: int
    failure: str = ""


@dataclass
class Run:
    """One run of the program of a seed, with one budget."""

    seed: int
    budget: str | None
    subjects: list[Subject] = field(default_factory=list)
    handles: list[dynswap_ext.Handle] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)

    def __call__(self) -> None:
        draw = random.Random(self.seed)
        self.subjects = [subject(draw, i) for i in range(draw.choice((1, 1, 2)))]
        together = draw.random() < 0.3
        options = {"budget": self.budget, "prefetch": draw.choice((0, 1, 2, 2, 3))}
        models = [each.model for each in self.subjects]
        #: The bytes of the largest weight, by which the sizes of other tensors are measured.
        self.unit = max(p.nbytes for model in models for p in model.parameters())
        for each in self.subjects:
            self.spike_inside(each, draw)
        if together:
            self.handles.append(dynswap_ext.install(models, device=DEVICE, **options))
        else:
            self.handles += [dynswap_ext.install(model, device=DEVICE, **options) for model in models]
        actions: list[tuple[float, Callable[[random.Random], None]]] = [
            (10, self.call),
            (2, self.keep),
            (2, self.let_go),
            (1, self.empty_cache),
            (1, self.begin_again),
            (1.5, self.allocate_beside),
            (1.5 if len(models) > 1 else 0, self.call_all_at_once),
            (0.5, self.install_again),
        ]
        self.sizes = [1, 1, 2, draw.choice((1, 4, 16)), draw.choice((1, 8, 32))]
        for _ in range(draw.randint(6, 16)):
            draw.choices([do for _, do in actions], [weight for weight, _ in actions])[0](draw)

    def spike_inside(self, of: Subject, draw: random.Random) -> None:
        """Let a module allocate in the middle of a forward, until its own end or that of the call."""
        if draw.random() < 0.5:
            return
        modules = [module for module in of.model.modules() if not list(module.children())]
        module, amount, long = draw.choice(modules), draw.randint(1, 8), draw.random() < 0.5
        often = draw.random()
        holding: list[Tensor] = []

        def spike(*_: object) -> None:
            if of_calls.random() < often:
                holding.append(torch.empty(amount * self.unit // 2, dtype=torch.uint8, device=DEVICE))
                if not long:
                    holding.clear()

        of_calls = random.Random(self.seed)
        module.register_forward_pre_hook(spike)
        of.model.register_forward_hook(lambda *_: holding.clear())

    def call(self, draw: random.Random) -> None:
        self.results.append(draw.choice(self.subjects).step(draw.choice(self.sizes), DEVICE))

    def keep(self, draw: random.Random) -> None:
        amount = draw.choice((1, 1, 3, 8)) * draw.randint(1, self.unit)
        self.kept.append(torch.empty(amount, dtype=torch.uint8, device=DEVICE))

    def let_go(self, draw: random.Random) -> None:
        if self.kept:
            self.kept.pop(draw.randrange(len(self.kept)))

    def empty_cache(self, _: random.Random) -> None:
        torch.cuda.empty_cache()

    def begin_again(self, draw: random.Random) -> None:
        draw.choice(self.subjects).begin_again()

    def install_again(self, draw: random.Random) -> None:
        if len(self.handles) == len(self.subjects):
            i = draw.randrange(len(self.handles))
            self.handles[i].uninstall()
            self.handles[i] = dynswap_ext.install(self.subjects[i].model, device=DEVICE, budget=self.budget)

    def allocate_beside(self, draw: random.Random) -> None:
        """Call a model while another thread allocates and frees."""
        size, seed, each = draw.choice(self.sizes), draw.random(), draw.choice(self.subjects)
        beside = random.Random(seed)

        def allocate() -> None:
            for _ in range(20):
                block = torch.empty(beside.randint(1, self.unit), dtype=torch.uint8, device=DEVICE)
                time.sleep(0.0005)
                del block

        at_once(allocate, lambda: self.results.append(each.step(size, DEVICE)))

    def call_all_at_once(self, draw: random.Random) -> None:
        sizes = [draw.choice(self.sizes) for _ in self.subjects]
        results: dict[int, list[Tensor]] = {}

        def call(i: int) -> None:
            results[i] = self.subjects[i].step(sizes[i], DEVICE)

        in_threads(call, len(sizes))
        self.results += [results[i] for i in range(len(sizes))]


def run(seed: int, budget: str | None, cap: int | None) -> Outcome:
    """Run a seed's program with one budget, and with a cap of `cap` bytes on the device's memory."""
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    if cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((before + cap) / total)
    program, ran, told = Run(seed, budget), True, ""
    try:
        program()
    except OUT_OF_MEMORY as error:
        ran, told = False, str(error)
    peak = torch.cuda.max_memory_reserved() - before
    stats = [handle.stats() for handle in program.handles]
    for handle in program.handles:
        handle.uninstall()
    torch.cuda.set_per_process_memory_fraction(1.0)
    counts = sum(each.given_way for each in stats), sum(each.given_way_bytes for each in stats)
    return Outcome(ran, program.results, peak, *counts, told)


def judge(seed: int) -> Verdict:
    """Run the program of a seed three times, and compare."""
    draw = random.Random(seed)
    pretend_cuda.reset(seed, draw.choice(("late", "early", "mixed")))
    pretend_cuda.faults().segment_bytes = draw.choice(SEGMENTS)
    spare = SPARE_SEGMENTS * 10 * pretend_cuda.faults().segment_bytes
    cap = spare + int(run(seed, None, None).peak * draw.choice((0.8, 0.9, 1.0, 1.0, 1.1, 1.3, 1.7, 2.5)))
    minimum = run(seed, None, cap - spare)
    automatic = run(seed, "auto", cap)
    verdict = Verdict(minimum.ran, automatic.gave_way, pretend_cuda.faults().segment_bytes)
    if broken := pretend_cuda.violations():
        verdict.failure = f"violations: {broken[:3]}"
    elif automatic.peak > cap:
        verdict.failure = f"{automatic.peak} bytes under a cap of {cap}"
    elif minimum.ran and not automatic.ran:
        # Threads meet differently each time, so the minimum may not run every time.
        if all(run(seed, None, cap - spare).ran for _ in range(4)):
            verdict.failure = f"the minimum runs under {cap} bytes; auto: {automatic.error}"
    elif minimum.ran:
        pairs = zip(minimum.results, automatic.results, strict=True)
        if not all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)):
            verdict.failure = "other results"
    return verdict
