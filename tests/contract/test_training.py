"""Training within the budget: backward fetches weights again, and usual training loops work."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from oracle import master_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp
from sample_subclasses import ScaledInt8

FEATURES, LAYERS = 64, 12
#: Device bytes of one layer in float64.
LAYER = (FEATURES * FEATURES + FEATURES) * 8
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def layer_by_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=True)


def not_reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False)


FORWARDS: dict[str, Forward] = {f.__name__: f for f in (whole, layer_by_layer, reentrant, not_reentrant)}


class Frozen(nn.Module):
    """A frozen layer whose result is added to that of a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.down = nn.Linear(FEATURES, 2, bias=False)
        self.up = nn.Linear(2, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def step(model: nn.Module, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    forward(model, x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("budget", [4 * LAYER, 8 * LAYER], ids=["streamed", "some resident"])
def test_a_step_stays_within_the_budget(provider: Provider, forward: Forward, budget: int) -> None:
    model = mlp(FEATURES, LAYERS)
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(4, FEATURES)
    for _ in range(3):
        testing.assert_bit_equal(step(model, forward, x), step(moved, forward, x), "gradient of the input")
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        assert p.grad is not None and p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad.float().cpu(), rtol=1e-6, atol=1e-6, msg=name)
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes <= budget
    # At each step what is not resident goes to the device for the forward pass, and again for backward.
    least = 3 * 2 * (LAYERS * LAYER - budget) // 2
    assert stats.bytes_moved > least


def test_backward_fetches_in_its_own_order_ahead(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches nothing ahead")
    model = mlp(FEATURES, LAYERS)
    _, handle = provider.pair(model, budget=4 * LAYER)
    x = provider.randn(4, FEATURES)
    for _ in range(3):
        step(model, whole, x)
    handle.reset_stats()
    for _ in range(2):
        step(model, whole, x)
    stats = handle.stats()
    assert stats.misses == 0
    # Backward begins with weights that forward has left on the device, and the next forward likewise.
    assert stats.bytes_moved <= 2 * 2 * (LAYERS - 1) * LAYER // 2


def test_a_frozen_base_gets_no_gradients(provider: Provider) -> None:
    model = nn.Sequential(*(Frozen() for _ in range(LAYERS)))
    budget = 5 * LAYER
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(4, FEATURES)
    for _ in range(2):
        testing.assert_bit_equal(step(model, whole, x), step(moved, whole, x), "gradient of the input")
    for name, p in model.named_parameters():
        assert (p.grad is None) == ("base" in name), name
    assert handle.stats().overflow_bytes == 0
    assert handle.stats().peak_bytes <= budget


def test_an_adapter_over_quantised_weights(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python moves a subclass as a whole, by its own .to()")
    model = nn.Sequential(*(Frozen() for _ in range(LAYERS)))
    for layer in model:
        layer.base.weight = nn.Parameter(ScaledInt8.quantise(layer.base.weight), requires_grad=False)
    plain = testing.moved(model, provider.device)
    model = testing.moved(model)
    budget = 24 * FEATURES * FEATURES
    # Every master is on the CPU in its dtype; a file makes them stream there.
    for layer in model:
        weight = layer.base.weight
        weight.payload = weight.payload.clone()
    handle = provider.install(model, dtype=torch.float32, budget=budget)
    x = provider.randn(4, FEATURES, dtype=torch.float32)
    testing.assert_bit_equal(step(model, whole, x), step(plain, whole, x), "gradient of the input")
    assert handle.stats().overflow_bytes == 0


def test_a_master_written_between_forward_and_backward_is_refused(provider: Provider) -> None:
    model = mlp(FEATURES, 3)
    provider.pair(model)
    loss = model(provider.randn(4, FEATURES)).sum()
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    model(provider.randn(4, FEATURES)).sum().backward()


def test_an_activation_written_between_forward_and_backward_is_refused(provider: Provider) -> None:
    model = mlp(FEATURES, 2)
    provider.pair(model)
    x = provider.randn(4, FEATURES).requires_grad_()
    y = model[0](x)
    z = model[2](torch.sigmoid(y))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_an_output_is_no_part_of_a_cycle(provider: Provider) -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Sigmoid())  # which saves its output
    provider.pair(model)
    gc.collect()
    gc.disable()
    try:
        y = model(provider.randn(4, FEATURES))
        watch = weakref.ref(y)
        del y
        assert watch() is None
    finally:
        gc.enable()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def test_a_loop_with_clipping_and_accumulation(
    provider: Provider,
    mapped: Callable[[nn.Module], nn.Module],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    set_to_none: bool,
) -> None:
    model = mapped(mlp(FEATURES, 4))
    plain = testing.moved(model)
    budget = 2 * LAYER
    handle = provider.install(model, budget=budget)
    optimizers = [make(m) for m in (model, plain)]
    for at in range(4):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            device = provider.device if m is model else "cpu"
            for part in range(2):
                x = provider.randn(4, FEATURES, dtype=torch.float32, seed=10 * at + part)
                m(x.to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if provider.device.type == "cpu":
            testing.assert_bit_equal(p.detach(), q.detach(), name)
        else:
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    if provider.native:
        assert handle.stats().overflow_bytes == 0
        assert handle.stats().bytes_moved >= 4 * master_bytes(model)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("spike", [False, True], ids=["finite", "one step overflows"])
def test_a_scaler(provider: Provider, fused: bool, spike: bool) -> None:
    model = mlp(FEATURES, 2)
    moved, _ = provider.pair(model)
    steps, scales = [], []
    for m in (model, moved):
        scaler = torch.amp.GradScaler(provider.device.type, init_scale=8.0, growth_interval=2)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, fused=fused or None)
        for step in range(4):
            loss = m(provider.randn(4, FEATURES, seed=step)).square().mean()
            scaler.scale(loss * float("inf") if spike and step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps.append([p.detach().float().cpu() for p in m.parameters()])
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for p, q in zip(*steps, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_a_scaler_that_is_switched_off(provider: Provider) -> None:
    model = mlp(FEATURES, 2)
    provider.pair(model)
    scaler = torch.amp.GradScaler(provider.device.type, enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(provider.randn(4, FEATURES)).square().mean()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_scaler_of_gradients_here_and_there(provider: Provider) -> None:
    """A gradient scaler works with an optimizer of an installed model and of a head on the device.

    The scaler has been used for the head before.
    """
    model, head = mlp(FEATURES, 2), nn.Linear(FEATURES, 3, dtype=torch.float64).to(provider.device)
    scaler = torch.amp.GradScaler(provider.device.type, init_scale=8.0)
    scaler.scale(head(provider.randn(2, FEATURES)).sum()).backward()
    head.zero_grad()
    start = copy.deepcopy(head)
    moved, _ = provider.pair(model)
    steps = []
    for m, h in ((model, head), (moved, start)):
        optimizer = torch.optim.SGD([*m.parameters(), *h.parameters()], lr=0.1)
        for step in range(3):
            scaler.scale(h(m(provider.randn(4, FEATURES, seed=step))).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps.append([p.detach().float().cpu() for p in (*m.parameters(), *h.parameters())])
    for p, q in zip(*steps, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_an_optimizer_that_steps_in_backward(provider: Provider) -> None:
    model = mlp(FEATURES, 4)
    moved, handle = provider.pair(model, budget=4 * LAYER)
    for m in (model, moved):
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def apply(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(apply)
    x = provider.randn(4, FEATURES)
    for _ in range(3):
        for m in (model, moved):
            m(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p, q.float().cpu(), rtol=1e-5, atol=1e-6, msg=name)
    assert handle.stats().overflow_bytes == 0
