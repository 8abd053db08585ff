"""Experts, fused in one parameter or one module each: only chosen ones move, and the most used stay."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import assert_gradients_as_moved
from torch import nn

from conftest import PRETEND, Provider
from dynswap_ext import BudgetError, DynswapWarning, testing
from sample_experts import BY_CHOICE, EXPERTS, HIDDEN, READS, WIDTH, Fused, Mixture, OneByOne, choices
from threads import in_threads

#: On the CPU, weights only move if they are cast. Bytes are counted in the masters' dtype.
DTYPE = None if PRETEND else torch.float64
#: One fused expert, in elements.
EXPERT = 2 * WIDTH * HIDDEN + HIDDEN

KINDS: dict[str, Callable[[], nn.Module]] = {
    **{read: partial(Fused, read) for read in READS},
    "modules": OneByOne,
}


@pytest.fixture
def budget(provider: Provider) -> int:
    """Return a quarter of the model's bytes on the device."""
    return bytes_on_device(Mixture(), provider) // 4


def bytes_on_device(model: nn.Module, provider: Provider) -> int:
    size = 8 if DTYPE is torch.float64 else 4
    return sum(parameter.numel() for parameter in model.parameters()) * size


def inputs(provider: Provider, tokens: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and the experts that each layer chooses for them."""
    x = provider.randn(tokens, WIDTH, dtype=DTYPE or torch.float32, seed=seed)
    return x, choices(tokens=tokens, seed=seed, device=provider.device)


def only_native(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches fused experts whole, and other experts in their order")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_outputs_are_those_of_the_model_moved(
    provider: Provider, kind: str, tokens: int, budget: int
) -> None:
    model = Mixture(KINDS[kind])
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(
        model, dtype=DTYPE, budget=max(budget, 4 * bytes_on_device(KINDS[kind](), provider) // 3)
    )
    for step in range(4):
        x, chosen = inputs(provider, tokens, step)
        with torch.no_grad():
            testing.assert_bit_equal(model(x, chosen), moved(x, chosen), f"step {step}")


@pytest.mark.parametrize("kind", [*BY_CHOICE, "modules"])
def test_only_chosen_experts_move(provider: Provider, kind: str, budget: int) -> None:
    """With random routing and a budget of a quarter, a step moves at most the bytes of the active experts."""
    only_native(provider)
    model = Mixture(KINDS[kind])
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    for step in range(20):
        if step == 4:
            handle.reset_stats()
        with torch.no_grad():
            model(*inputs(provider, seed=step))
    stats = handle.stats()
    active = 3 * 2 * EXPERT * 4
    assert 0 < stats.bytes_moved / 16 <= active
    assert stats.peak_bytes <= budget
    assert stats.overflow_bytes == 0
    assert stats.resident_bytes > 0  # the dense weights: they are used for each token


@pytest.mark.parametrize("kind", [*BY_CHOICE, "modules"])
def test_experts_that_are_used_most_stay(provider: Provider, kind: str, budget: int) -> None:
    only_native(provider)
    model = Mixture(KINDS[kind])
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    for step in range(8):
        if step == 2:
            handle.reset_stats()
        x = provider.randn(1, WIDTH, dtype=DTYPE or torch.float32, seed=step)
        with torch.no_grad():
            model(x, torch.tensor([[[3, 5]]] * 3, device=provider.device))
    assert handle.stats().bytes_moved == 0


def test_the_smallest_budget_is_far_less_than_a_fused_parameter(provider: Provider) -> None:
    only_native(provider)
    model = Mixture()
    moved = testing.moved(model, provider.device, DTYPE)
    handle = provider.install(model, dtype=DTYPE)
    x, chosen = inputs(provider, 5)
    with torch.no_grad():
        testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes < bytes_on_device(model.mixtures[0], provider) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_model_moved(provider: Provider, kind: str, budget: int) -> None:
    model = Mixture(KINDS[kind])
    options = {} if kind in ("all", "listed") else {"budget": budget}
    moved = testing.moved(model, provider.device, DTYPE)
    handle = provider.install(model, dtype=DTYPE, **options)
    x, chosen = inputs(provider, 6)
    for each in (model, moved):
        each(x, chosen).square().mean().backward()
    assert_gradients_as_moved(model, moved)
    if provider.native and kind in (*BY_CHOICE, "modules"):
        stats = handle.stats()
        assert stats.peak_bytes <= budget
        assert stats.overflow_bytes == 0


def test_a_loop_over_experts_keeps_the_sign_of_a_zero_gradient(provider: Provider, budget: int) -> None:
    model = Mixture(partial(Fused, "each"), layers=1)
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(model, dtype=DTYPE, budget=bytes_on_device(model, provider) // 2)
    x = provider.randn(1, WIDTH, dtype=DTYPE or torch.float32)
    chosen = choices(1, device=provider.device)  # gradients of the others are zeros of both signs
    for each in (model, moved):
        each(x, chosen).square().mean().backward()
    assert_gradients_as_moved(model, moved)


def test_a_frozen_parameter_gets_no_gradient_and_a_thawed_one_does(provider: Provider, budget: int) -> None:
    model = Mixture()
    provider.install(model, dtype=DTYPE, budget=budget)
    x, chosen = inputs(provider, 2)
    down = model.mixtures[0]._parameters["down"]
    down.requires_grad_(False)
    model(x, chosen).sum().backward()
    assert down.grad is None
    down.requires_grad_(True)
    model(x, chosen).sum().backward()
    used = chosen[0].unique().tolist()
    assert sorted(down.grad.flatten(1).any(1).nonzero().flatten().tolist()) == used


def test_a_slice_is_a_tensor_and_the_whole_has_its_shape(provider: Provider, budget: int) -> None:
    seen = []

    class Curious(Fused):
        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            assert self.down is self.down
            assert isinstance(self.down, nn.Parameter)
            seen.append(
                (self.down.shape, self.down.dtype, self.down.device, len(self.down), self.down.stride())
            )
            assert type(self.down[0]) is torch.Tensor
            with pytest.raises(IndexError):
                self.down[EXPERTS]
            return super().forward(x, chosen)

    model = Mixture(Curious)
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    x, chosen = inputs(provider)
    with torch.no_grad():
        model(x, chosen)
    expected = ((EXPERTS, WIDTH, HIDDEN), x.dtype, x.device, EXPERTS, (WIDTH * HIDDEN, HIDDEN, 1))
    assert seen == [expected] * 3
    assert not provider.native or handle.stats().overflow_bytes == 0


def test_changes_of_masters_are_seen(provider: Provider, budget: int) -> None:
    model = Mixture()
    provider.install(model, dtype=DTYPE, budget=budget)
    x, chosen = inputs(provider, 3)
    experts = model.mixtures[1]

    def in_place() -> None:
        with torch.no_grad():
            experts._parameters["down"].mul_(2)

    def silently() -> None:
        experts._parameters["up"].data[int(chosen[1, 0, 0])].mul_(3)

    def replaced() -> None:
        experts.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def loaded() -> None:
        state = {name: torch.randn_like(value) / 8 for name, value in experts.state_dict().items()}
        experts.load_state_dict(state)

    def from_outside() -> None:
        with torch.no_grad():
            experts.up.add_(1)

    for change in (lambda: None, in_place, silently, replaced, loaded, from_outside, in_place):
        change()
        with torch.no_grad():
            for _ in range(4):  # a replaced master leads to a new plan
                actual = model(x, chosen)
            moved = testing.moved(model, provider.device, DTYPE)
            testing.assert_bit_equal(actual, moved(x, chosen), getattr(change, "__name__", ""))


def test_what_is_written_on_a_slice_reaches_the_master(provider: Provider, budget: int) -> None:
    class Writing(Fused):
        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.down[3].fill_(2)
            return super().forward(x, chosen)

    model = Mixture(Writing)
    if not provider.native:
        pytest.skip("pure Python hands out the whole, and writes that back as any weight's")
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    with torch.no_grad():
        model(*inputs(provider))
    handle.uninstall()
    for experts in model.mixtures:
        assert bool((experts.down[3] == 2).all())
        assert not bool((experts.down[4] == 2).any())


def test_what_is_read_whole_is_not_sliced_from_the_next_call_on(provider: Provider) -> None:
    only_native(provider)
    model = Mixture(partial(Fused, "all"))
    total = bytes_on_device(model, provider)
    handle = provider.install(model, dtype=DTYPE, budget=3 * total // 4)
    x, chosen = inputs(provider, 2)
    with torch.no_grad():
        model(x, chosen)
        model(x, chosen)
        assert handle.stats().groups < 2 * EXPERTS  # of 48 experts
        for _ in range(2):
            handle.reset_stats()
            model(x, chosen)
    assert handle.stats().bytes_moved < 3 * total // 2


def test_a_whole_read_is_counted_and_said_and_fits_from_the_next_call_on(provider: Provider) -> None:
    only_native(provider)
    model = Mixture(partial(Fused, "all"))
    moved = testing.moved(model, provider.device, DTYPE)
    size = 8 if DTYPE is torch.float64 else 4
    whole = EXPERTS * WIDTH * HIDDEN * size
    budget = whole + 8192  # one fused parameter and the dense weights that are used with it
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    x, chosen = inputs(provider, 2)
    with torch.no_grad():
        with pytest.warns(DynswapWarning, match="reads all experts of mixtures.0.up at once") as said:
            testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
        assert len(said) == 1
        assert handle.stats().overflow_bytes == whole
        assert whole < handle.stats().peak_bytes <= budget + whole
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                handle.reset_stats()
                testing.assert_bit_equal(model(x, chosen), moved(x, chosen), f"step {step}")
                assert handle.stats().peak_bytes <= budget
                assert handle.stats().overflow_bytes == 0


def test_a_whole_read_that_the_budget_does_not_hold_is_said_once(provider: Provider, budget: int) -> None:
    only_native(provider)
    model = Mixture(partial(Fused, "all"))
    moved = testing.moved(model, provider.device, DTYPE)
    size = 8 if DTYPE is torch.float64 else 4
    whole = EXPERTS * WIDTH * HIDDEN * size
    handle = provider.install(model, dtype=DTYPE, budget=whole // 2)
    x, chosen = inputs(provider, 2)
    with torch.no_grad():
        with pytest.warns(DynswapWarning, match="copied outside the budget"):
            model(x, chosen)
        with pytest.warns(DynswapWarning, match="the smallest budget that works is") as said:
            model(x, chosen)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                handle.reset_stats()
                testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
                assert handle.stats().overflow_bytes == whole
        # A larger budget holds them.
        handle.retune(budget=2 * whole)
        for _ in range(4):
            model(x, chosen)
        handle.reset_stats()
        testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
    assert handle.stats().overflow_bytes == 0


def test_a_strict_budget_refuses_a_whole_read_until_it_is_planned(provider: Provider, budget: int) -> None:
    only_native(provider)
    model = Mixture(partial(Fused, "all"))
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(model, dtype=DTYPE, budget=3 * budget, strict_budget=True)
    x, chosen = inputs(provider, 2)
    with torch.no_grad():
        for layer in range(3):  # each call fails at the next parameter that is not yet planned as a whole
            for name in ("up", "up_bias", "down"):
                with pytest.raises(BudgetError, match=f"all experts of mixtures.{layer}.{name} at once"):
                    model(x, chosen)
        testing.assert_bit_equal(model(x, chosen), moved(x, chosen))


@pytest.mark.parametrize("kind", ["modules", "each"])
def test_experts_that_are_all_used_are_fetched_ahead(provider: Provider, kind: str, budget: int) -> None:
    """With a budget of a quarter, each expert is prefetched in time, and as many as fit stay."""
    only_native(provider)
    model = Mixture(KINDS[kind])
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    x = provider.randn(EXPERTS, WIDTH, dtype=DTYPE or torch.float32)
    every = torch.arange(EXPERTS, device=provider.device).view(1, EXPERTS, 1).expand(3, -1, -1)
    passes = 4
    with torch.no_grad():
        for _ in range(4):
            model(x, every)
        handle.reset_stats()
        for _ in range(passes):
            model(x, every)
    stats = handle.stats()
    assert stats.misses == 0
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes <= budget
    everything = sum(p.numel() for p in model.mixtures.parameters()) * 4
    assert stats.bytes_moved / passes < 0.97 * everything  # without read-ahead, all of it moves


@pytest.mark.parametrize("kind", [*BY_CHOICE, "modules"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.slow
def test_retuned(provider: Provider, kind: str, share: float) -> None:
    """`retune` decides by time which experts and dense weights stay, and keeps the budget."""
    model = Mixture(KINDS[kind])
    moved = testing.moved(model, provider.device, DTYPE)
    budget = int(share * bytes_on_device(model, provider))
    if not provider.native:
        budget = max(budget, bytes_on_device(model.mixtures[0], provider))
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    handle.retune()
    for step in range(8):
        x, chosen = inputs(provider, 2, step)
        with torch.no_grad():
            testing.assert_bit_equal(model(x, chosen), moved(x, chosen), f"step {step}")
        assert handle.stats().peak_bytes <= budget
    tuning = handle.tuning
    assert tuning is not None
    assert tuning.passes == 2
    if provider.native:
        assert tuning.seconds_before is not None
        assert tuning.seconds_after is not None
        assert tuning.seconds_after <= tuning.seconds_before


def test_all_fits(provider: Provider) -> None:
    only_native(provider)
    model = Mixture()
    handle = provider.install(model, dtype=DTYPE, budget=2 * bytes_on_device(model, provider))
    assert handle.stats().resident_groups == handle.stats().groups


@pytest.mark.parametrize("kind", [*BY_CHOICE, "modules"])
def test_only_chosen_experts_move_where_the_budget_almost_holds_all(provider: Provider, kind: str) -> None:
    """The budget counts padding between weights, too: nothing moves only if it holds weights and padding."""
    only_native(provider)
    model = Mixture(KINDS[kind])
    of_parameters = bytes_on_device(model, provider)
    with provider.install(model, dtype=DTYPE, budget=2 * of_parameters) as handle:
        all_of_it = handle.stats().weight_bytes
    moved = {}
    for budget in (of_parameters * 95 // 100, of_parameters, all_of_it - 1, all_of_it):
        with provider.install(model, dtype=DTYPE, budget=budget) as handle:
            for step in range(8):
                if step == 4:
                    handle.reset_stats()
                with torch.no_grad():
                    model(*inputs(provider, seed=step))
            stats = handle.stats()
        assert stats.overflow_bytes == 0
        assert stats.peak_bytes <= budget
        moved[budget] = stats.bytes_moved
    almost, *more, nothing = moved.values()
    assert nothing == 0
    assert all(0 < each <= almost for each in more), moved


@pytest.mark.parametrize("kind", [*BY_CHOICE, "modules"])
def test_the_smallest_budget_holds_an_expert(provider: Provider, kind: str) -> None:
    only_native(provider)
    model = Mixture(KINDS[kind])
    smallest = provider.smallest_budget(model, dtype=DTYPE)
    handle = provider.install(model, dtype=DTYPE, budget=smallest, strict_budget=True)
    x = provider.randn(1, WIDTH, dtype=DTYPE or torch.float32)
    with torch.no_grad():
        for step in range(3):
            model(x, choices(tokens=1, seed=step, device=provider.device))
    assert handle.stats().peak_bytes <= smallest


def test_uninstall_leaves_no_trace(provider: Provider, budget: int) -> None:
    kept: list[torch.Tensor] = []

    class Keeping(Fused):
        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            kept.append(self.down)
            return super().forward(x, chosen)

    model = Mixture(Keeping, layers=1)
    before = {name: (id(p), p._version, p.clone()) for name, p in model.named_parameters()}
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    x = provider.randn(1, WIDTH, dtype=DTYPE or torch.float32)
    with torch.no_grad():
        model(x, choices(1, device=provider.device))
        handle.uninstall()
        assert {name: (id(p), p._version) for name, p in model.named_parameters()} == {
            name: entry[:2] for name, entry in before.items()
        }
        # What was handed out goes on answering.
        expected = model.mixtures[0].down[1].to(x)
        testing.assert_bit_equal(kept.pop()[1], expected)
    gc.collect()
    testing.assert_nothing_held(handle)


def test_threads(provider: Provider, budget: int) -> None:
    model = Mixture()
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(model, dtype=DTYPE, budget=budget)

    def run(index: int) -> None:
        for step in range(6):
            seed = 100 * index + step
            x, chosen = inputs(provider, 3, seed)
            with torch.no_grad():
                testing.assert_bit_equal(model(x, chosen), moved(x, chosen), f"seed {seed}")

    in_threads(run, 3)


def test_compiled(provider: Provider, budget: int) -> None:
    model = Mixture(layers=1)
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(model, dtype=DTYPE, budget=budget)
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        x = provider.randn(2, WIDTH, dtype=DTYPE or torch.float32, seed=step)
        chosen = choices(1, tokens=2, seed=step, device=provider.device)
        with torch.no_grad():
            testing.assert_bit_equal(compiled(x, chosen), moved(x, chosen))
    torch._dynamo.reset()


def test_mapped_from_a_file(
    provider: Provider, mapped: Callable[[nn.Module], nn.Module], budget: int
) -> None:
    """Experts that are mapped from a file are read one by one, not as a whole parameter."""
    model = mapped(Mixture())
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, budget=budget)
    for step in range(4):
        x = provider.randn(1, WIDTH, dtype=torch.float32, seed=step)
        chosen = choices(seed=step, device=provider.device)
        with torch.no_grad():
            testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
    if provider.native:
        assert handle.stats().bytes_moved < 4 * bytes_on_device(model, provider) / 3
