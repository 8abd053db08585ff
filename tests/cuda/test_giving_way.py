"""With `budget="auto"`, residents give way inside a call to anything that runs out of memory.

A resident is a weight that stays on the device. The tests set a cap on memory.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import dynswap_ext
import pretend_cuda
from gpu_under_test import CAPPED_LAYER as LAYER
from gpu_under_test import CAPPED_WIDTH as WIDTH
from gpu_under_test import cap, layers, only_pretended_cuda

pytestmark = [only_pretended_cuda, pytest.mark.usefixtures("gives_way")]

DEVICE = "cuda:0"


def expected(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the model's result without an install on the CPU, whose operators the pretend device uses."""
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
        # Only weights that had given way are fetched; the others are still there.
        moved = after.bytes_moved - before.bytes_moved
        assert moved <= (after.given_way + before.groups - before.resident_groups) * LAYER
        assert torch.equal(run(model, small), answers[0])
        assert handle.tuning is not None and handle.tuning.given_way_bytes == after.given_way_bytes
    assert pretend_cuda.violations() == []


def test_blocks_that_the_allocator_joins_are_taken_back() -> None:
    """Groups of several sizes are taken back, though the allocator joins them to one free block meanwhile."""
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
    """Residents give way between forward and backward: autograd keeps only references to them."""
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
        # Residents leave inside a call, or between two, when a plan finds less memory. Timing decides.
        assert handle.stats().resident_groups < most


@pytest.mark.parametrize("seed, how", [(3, "late"), (5, "early")])
def test_inherited_residents_go_back_to_their_stream(seed: int, how: str) -> None:
    """Residents that a new plan inherits belong to the stream on which the old plan was made."""
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
