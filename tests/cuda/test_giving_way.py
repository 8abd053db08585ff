"""Residents give way inside a call to whoever runs out of memory (`budget="auto"`), under a cap on memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dynswap_ext
from gpu_under_test import Gpu, cap

pretend_cuda = pytest.importorskip("pretend_cuda")
pytestmark = pytest.mark.skipif(
    not pretend_cuda.active() or pretend_cuda.device_type() != "cuda",
    reason="needs a CUDA device whose memory is capped: the pretend one",
)

DEVICE = "cuda:0"
WIDTH = 256
#: Of one layer: weight and bias, each rounded up as the engine lays them out.
LAYER = WIDTH * WIDTH * 4 + WIDTH * 4
LAYERS = 16


@pytest.fixture(autouse=True)
def _uncapped(gpu: Gpu) -> Iterator[None]:
    if not gpu.native:
        pytest.skip("the pure-Python provider's residents do not give way")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def layers(count: int = LAYERS, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).requires_grad_(False)


def expected(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model gives without an install, on the CPU, whose operators the pretend device uses."""
    with torch.no_grad():
        return model(x)


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x.to(DEVICE)).cpu()


def test_an_activation_spike_takes_the_residents_memory() -> None:
    model, small = layers(), torch.randn(4, WIDTH)
    large = torch.randn(8 * WIDTH, WIDTH)  # 8 layers' worth, thrice at a time
    answers = [expected(model, x) for x in (small, large)]
    cap(30 * LAYER)
    with dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        for _ in range(4):
            assert torch.equal(run(model, small), answers[0])
        before = handle.stats()
        assert before.resident_groups > 8 and before.given_way == 0
        assert torch.equal(run(model, large), answers[1])
        after = handle.stats()
        assert after.given_way_bytes >= 24 * LAYER - (30 * LAYER - before.resident_bytes) > 0
        assert after.given_way_bytes == before.resident_bytes - after.resident_bytes
        # Nothing is fetched but what had given way; the others are there.
        moved = after.bytes_moved - before.bytes_moved
        assert moved <= (after.given_way + before.groups - before.resident_groups) * LAYER
        assert torch.equal(run(model, small), answers[0])
        assert handle.tuning is not None and handle.tuning.given_way_bytes == after.given_way_bytes
    assert pretend_cuda.violations() == []


def test_without_automatic_residents_the_spike_ends_the_call() -> None:
    """What the tests above would be worth nothing without: the cap is one."""
    model = layers()
    cap(30 * LAYER)
    with dynswap_ext.install(model, device=DEVICE, budget=18 * LAYER):
        run(model, torch.randn(4, WIDTH))
        with pytest.raises(torch.OutOfMemoryError):
            run(model, torch.randn(8 * WIDTH, WIDTH))


def test_blocks_that_the_allocator_joins_are_taken_back() -> None:
    """Groups of several sizes, which are one free block while they are on loan."""
    pretend_cuda.faults().segment_bytes = 16 << 10
    torch.manual_seed(0)
    widths = (96, 288, 96, 384, 96, 160, 96, 288, 96)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))).requires_grad_(False)
    x = torch.randn(4, 96)
    answer = expected(model, x)
    cap(16 << 20)
    with dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        for _ in range(5):
            assert torch.equal(run(model, x), answer)
        before = handle.stats()
        assert before.resident_groups == before.groups > 4 and before.given_way == 0
        kept = [torch.empty(count * 200_000, dtype=torch.uint8, device=DEVICE) for count in (1, 3, 5, 7)]
        assert torch.equal(run(model, x), answer)
        after = handle.stats()
        assert after.given_way == 0 and after.bytes_moved == before.bytes_moved
        del kept
    pretend_cuda.faults().segment_bytes = 0


def test_foreign_tensors_between_and_inside_calls() -> None:
    class Hoards(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hoard.append(torch.empty(8 * LAYER, dtype=torch.uint8, device=x.device))
            return x

    hoard: list[torch.Tensor] = []
    model, x = layers(), torch.randn(4, WIDTH)
    answer = expected(model, x)
    cap(24 * LAYER)
    whole = nn.Sequential(*model[:8], Hoards(), *model[8:])
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with dynswap_ext.install(whole, device=DEVICE, budget="auto") as handle:
        for _ in range(2):
            assert torch.equal(run(whole, x), answer)
            hoard.clear()
        between = torch.empty(9 * LAYER, dtype=torch.uint8, device=DEVICE)
        for _ in range(5):
            assert torch.equal(run(whole, x), answer)
            hoard.clear()
        assert handle.stats().given_way > 0
        assert torch.cuda.max_memory_allocated() - held <= 24 * LAYER
        del between


def test_two_automatic_installs_share_a_device() -> None:
    models, x = [layers(seed=1), layers(seed=2)], torch.randn(4, WIDTH)
    answers = [expected(model, x) for model in models]
    cap(20 * LAYER)
    handles = [dynswap_ext.install(model, device=DEVICE, budget="auto") for model in models]
    for _ in range(6):
        for model, answer in zip(models, answers, strict=True):
            assert torch.equal(run(model, x), answer)
    for handle in handles:
        handle.uninstall()
    assert pretend_cuda.violations() == []


def test_training_while_something_grows() -> None:
    """Backward does not hold residents: what it saves of them is a reference, as of streamed weights."""
    plain, model = layers().requires_grad_(True), layers().requires_grad_(True)
    x = torch.randn(4, WIDTH)
    cap(50 * LAYER)  # the gradients of all layers, too
    grown: list[torch.Tensor] = []
    with dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        for step in range(8):
            for each in (plain, model):
                each.zero_grad()
            plain(x).sum().backward()
            model(x.to(DEVICE)).sum().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None and torch.equal(ours.grad.cpu(), theirs.grad)
            if step < 3:
                most = handle.stats().resident_groups
            else:
                grown.append(torch.empty(7 * LAYER, dtype=torch.uint8, device=DEVICE))
        # Inside a call, or between two, by a plan that found less memory: which of them is a matter of time.
        assert handle.stats().resident_groups < most


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.slow
def test_whatever_runs_with_the_minimum_runs_with_an_automatic_budget(seed: int) -> None:
    """Random calls and foreign tensors: where `budget=None` raises no error, neither does "auto"."""
    compare(seed)


def compare(seed: int) -> tuple[bool, int]:
    """Run one program with both; return whether the minimum ran, and the bytes that gave way."""
    outcomes = []
    for budget in (None, "auto"):
        outcomes.append(_program(seed, budget))
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    (minimum_ran, expected_results, _), (ran, results, gave_way) = outcomes
    assert pretend_cuda.violations() == []
    if minimum_ran:
        assert ran, f"seed {seed}: the minimum runs, and the automatic budget runs out of memory"
        assert all(torch.equal(a, b) for a, b in zip(expected_results, results, strict=True))
    return minimum_ran, gave_way


def _program(seed: int, budget: str | None) -> tuple[bool, list[torch.Tensor], int]:
    draw = random.Random(seed)
    count = draw.randint(1, 2)
    models = [layers(draw.randint(6, 14), seed=i) for i in range(count)]
    training = draw.random() < 0.3
    for model in models:
        model.requires_grad_(training)
    cap(draw.randint(16, 64) * LAYER)
    kept: list[torch.Tensor] = []
    results: list[torch.Tensor] = []
    handles: list[dynswap_ext.Handle] = []
    ran = True
    try:
        handles += [dynswap_ext.install(model, device=DEVICE, budget=budget) for model in models]
        for _ in range(draw.randint(4, 12)):
            action = draw.random()
            if action < 0.15:
                kept.append(torch.empty(draw.randint(1, 10) * LAYER, dtype=torch.uint8, device=DEVICE))
            elif action < 0.3 and kept:
                kept.pop(draw.randrange(len(kept)))
            else:
                model = models[draw.randrange(count)]
                rows = draw.choice((4, 4, 4, WIDTH, 3 * WIDTH, 6 * WIDTH, 10 * WIDTH))
                x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
                if training:
                    model.zero_grad()
                    model(x.to(DEVICE)).sum().backward()
                    results += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
                else:
                    results.append(run(model, x))
    except (torch.OutOfMemoryError, dynswap_ext.errors.OutOfMemoryError):
        ran = False
    gave_way = sum(handle.stats().given_way_bytes for handle in handles)
    for handle in handles:
        handle.uninstall()
    return ran, results, gave_way


@pytest.mark.parametrize("seed, how", [(3, "late"), (5, "early")])
def test_inherited_residents_go_back_to_their_stream(seed: int, how: str) -> None:
    """Blocks of inherited residents belong to the stream on which the plan before was made."""
    pretend_cuda.reset(seed, how)
    model, x = layers(), torch.randn(4, WIDTH)
    answer = expected(model, x)
    cap(64 * LAYER)
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        dynswap_ext.install(model, device=DEVICE, budget="auto") as h,
    ):
        for _ in range(6):
            assert torch.equal(run(model, x), answer)
        model[3].register_parameter("extra", nn.Parameter(torch.randn(64, 64), requires_grad=False))
        assert model[3].extra is not None
        for _ in range(3):
            assert torch.equal(run(model, x), answer)
        before = h.stats()
        assert before.resident_groups > 0
        foreign = [torch.empty(count * LAYER, dtype=torch.uint8, device=DEVICE) for count in (1, 3, 5, 7)]
        assert torch.equal(run(model, x), answer)
        assert h.stats().given_way == before.given_way  # there was room for all
        del foreign
    assert not pretend_cuda.violations()
