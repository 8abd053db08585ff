"""Installed models whose masters are coded: they compute, train and are written to as plain ones."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pretend_cuda
from coded_masters import code_masters, coded, is_coded, stored_bytes
from conftest import PRETEND, Provider
from dynswap_ext import testing
from dynswap_ext.lossless.code import BLOCK
from dynswap_ext.lossless.tensor import LosslessTensor

WIDTH, LAYERS = 128, 6
BUDGETS = ["minimum", 0.5, "1GiB"]


class Net(nn.Module):
    """An embedding that is tied to the head, and layers of some blocks of weights each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight
        self.written: Callable[[nn.Module], None] = lambda _: None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.written(self)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def networks(dtype: torch.dtype = torch.bfloat16) -> tuple[Net, Net]:
    """Return a network whose masters are coded, and one of the same plain weights."""
    plain = Net().to(dtype)
    model = code_masters(copy.deepcopy(plain))
    assert isinstance(model, Net) and model.head.weight is model.embed.weight
    return model, plain


def tokens(provider: Provider, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (2, 7), generator=generator).to(provider.device)


def coded_bytes(model: nn.Module) -> int:
    return sum(stored_bytes(p) for p in model.parameters() if is_coded(p))


def assert_as(
    model: nn.Module, plain: nn.Module, provider: Provider, dtype: torch.dtype | None = None
) -> None:
    """Assert that a call returns what the plain model returns on the device."""
    moved = testing.moved(plain, provider.device, dtype)
    with torch.no_grad():
        testing.assert_bit_equal(model(tokens(provider)), moved(tokens(provider)), "output")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_and_bytes(
    provider: Provider, stored: torch.dtype, dtype: torch.dtype | None, budget: Any
) -> None:
    model, plain = networks(stored)
    bytes_of_masters = coded_bytes(model)
    assert bytes_of_masters < 0.9 * sum(p.nbytes for p in plain.parameters())
    handle = provider.install(model.requires_grad_(False), dtype=dtype, budget=budget)
    for _ in range(3):
        assert_as(model, plain, provider, dtype)
    if provider.native:
        # Behind the last call, a part of the next pass may have been moved.
        passes = 1 if budget == "1GiB" else 4
        assert bytes_of_masters <= handle.stats().bytes_moved <= passes * bytes_of_masters
    assert coded_bytes(model) == bytes_of_masters
    handle.uninstall()
    assert all(map(is_coded, model.parameters()))
    with torch.no_grad():
        testing.assert_bit_equal(model(tokens(provider).cpu()), plain(tokens(provider).cpu()))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
def test_they_cross_the_bus_coded(provider: Provider, pin: bool, stored: torch.dtype) -> None:
    """Devices without a kernel of ours decode with torch's operations."""
    if not (provider.native and PRETEND):
        pytest.skip("what crosses a bus is counted on the pretend device")
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(160, 160, dtype=stored) for _ in range(4)]).requires_grad_(False)
    model = code_masters(copy.deepcopy(plain))
    provider.install(model, dtype=torch.float32, host_budget="auto" if pin else "minimum")
    moved = testing.moved(plain, provider.device, torch.float32)
    x = provider.randn(2, 160, dtype=torch.float32)
    passes, layers = 10, len(plain)
    with torch.no_grad():
        model(x)
        before = pretend_cuda.counts()["copied_bytes"]
        for _ in range(passes):
            testing.assert_bit_equal(model(x), moved(x))
        crossed = pretend_cuda.counts()["copied_bytes"] - before
    of_index = 8 * sum(p.numel() // BLOCK + 2 for p in model.parameters())
    # What is fetched for a next pass counts with the pass in which it is fetched.
    most = (passes + 3 / layers) * (coded_bytes(model) + of_index)
    assert (passes - 3 / layers) * coded_bytes(model) <= crossed <= most
    assert crossed < 0.95 * passes * sum(p.nbytes for p in plain.parameters())


def test_a_write_on_what_is_handed_out_frees_the_coded_bytes(provider: Provider) -> None:
    model, _ = networks()
    provider.install(model, dtype=torch.float32)
    master = model.get_parameter("layers.0.weight")
    coded_bytes = weakref.ref(master.untyped_storage())
    with torch.no_grad():
        model.layers[0].weight.zero_()
    assert master.untyped_storage().nbytes() == master.nbytes
    gc.collect()
    assert coded_bytes() is None


@pytest.mark.parametrize("budget", BUDGETS)
def test_adapters_over_a_frozen_base(provider: Provider, budget: Any) -> None:
    def with_adapters(model: Net) -> Net:
        model.requires_grad_(False)
        torch.manual_seed(5)
        for i, layer in enumerate(model.layers):
            layer.register_module("low", nn.Linear(WIDTH, 4, bias=False))
            layer.register_module("high", nn.Linear(4, WIDTH, bias=False))
            model.layers[i] = _Adapted(layer)
        return model

    model, plain = map(with_adapters, networks(torch.float32))
    before = coded_bytes(model)
    moved = testing.moved(plain, provider.device)
    provider.install(model, budget=budget)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, moved)
    ]
    for _ in range(3):
        for each, optimizer in zip((model, moved), optimizers, strict=True):
            optimizer.zero_grad()
            each(tokens(provider)).square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                testing.assert_bit_equal(p.grad, q.grad.to(p.grad.device), name)
                testing.assert_bit_equal(p.detach(), q.detach().to(p.device), name)
    assert coded_bytes(model) == before, "the base stays coded"


class _Adapted(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer.high(self.layer.low(x))  # type: ignore[no-any-return, operator]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
def test_training(provider: Provider, name: str, budget: Any) -> None:
    model, plain = networks(torch.float32)
    dtype = torch.float64
    provider.install(model, dtype=dtype, budget=budget)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (model, plain)]
    for step in range(3):
        moved = testing.moved(plain, provider.device, dtype)
        for each in (model, moved):
            each(tokens(provider, step)).square().mean().backward()
        for (key, p), r, q in zip(
            model.named_parameters(), moved.parameters(), plain.parameters(), strict=True
        ):
            assert r.grad is not None
            q.grad = r.grad.to("cpu", torch.float32)
            testing.assert_bit_equal(p.grad, q.grad, f"step {step}, {key}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not any(map(is_coded, model.parameters()))
        for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            testing.assert_bit_equal(p.detach(), q.detach(), f"step {step}, {key}")
    assert_as(model, plain, provider, dtype)


def test_state_dicts(provider: Provider) -> None:
    model, plain = networks()
    masters = dict(model.named_parameters())
    provider.install(model, dtype=torch.float32)
    assert_as(model, plain, provider, torch.float32)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()) and all(map(is_coded, state.values()))
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    for name, value in torch.load(saved).items():
        testing.assert_bit_equal(value.decoded(), plain.state_dict()[name], name)
    with torch.no_grad():
        for q in plain.parameters():
            q.mul_(2)
    model.load_state_dict(plain.state_dict())
    assert all(p is masters[name] and not is_coded(p) for name, p in model.named_parameters())
    assert_as(model, plain, provider, torch.float32)
    assert not any(map(is_coded, state.values())), "it has the masters' memory"
    saved.seek(0)
    model.load_state_dict(torch.load(saved))
    assert_as(model, networks()[1], provider, torch.float32)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: m.weight.mul_(2),
    "an element": lambda m: m.weight[3, 5:9].fill_(7),
    "by .data": lambda m: m.weight.data.mul_(0.5),  # exact: what is held keeps what was written unrounded
    "a part, by .data": lambda m: m.weight.data[2:4].zero_(),
    ".data =": lambda m: setattr(m.weight, "data", m.weight.data * 3),
    "to the master": lambda m: m.get_parameter("weight").mul_(2),
    "to the master's data": lambda m: m.get_parameter("weight").data[1].zero_(),
    "the master's .data =": lambda m: setattr(
        m.get_parameter("weight"), "data", m.get_parameter("weight") * 3
    ),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_writes(provider: Provider, how: str, inside: bool, budget: Any, dtype: torch.dtype | None) -> None:
    if not provider.native and ".data" in how:
        pytest.skip("pure Python does not see all writes by `.data` (docs/contract.md)")
    model, plain = networks()
    provider.install(model, dtype=dtype, budget=budget)
    assert_as(model, plain, provider, dtype)
    with torch.no_grad():
        WRITES[how](plain.layers[2])
        if inside:
            model.written = lambda m: WRITES[how](m.layers[2])
            model(tokens(provider))
            model.written = lambda _: None
        else:
            WRITES[how](model.layers[2])
        for _ in range(2):
            assert_as(model, plain, provider, dtype)
        testing.assert_bit_equal(
            model.get_parameter("layers.2.weight").detach() + 0, plain.layers[2].weight.detach() + 0
        )
    assert is_coded(model.get_parameter("layers.3.weight"))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_tensor_that_was_given_data(provider: Provider, inside: bool, dtype: torch.dtype | None) -> None:
    if not provider.native:
        pytest.skip("pure Python loses it in a forward (docs/limits.md)")
    model, _ = networks()
    provider.install(model, dtype=dtype)

    def give(module: nn.Module) -> None:
        weight: Any = module.weight
        weight.data = torch.full_like(weight, 3)
        testing.assert_bit_equal(weight.detach() * 2, torch.full_like(weight, 6))
        with torch.no_grad():
            weight[0] = 5  # reaches the master, as before

    if inside:
        model.written = lambda m: give(m.layers[2])
        model(tokens(provider))
    else:
        give(model.layers[2])
    master = model.get_parameter("layers.2.weight").detach() + 0
    assert (master[0] == 5).all() and (master[1:] == 3).all()


@pytest.mark.parametrize("kind", ["coded", "buffer"])
def test_a_deep_copy_of_masters_that_share_memory(provider: Provider, kind: str) -> None:
    base = torch.zeros(2, 4, 8)
    model = nn.ModuleList(nn.Module() for _ in range(2))
    for layer, part in zip(model, coded(base) if kind == "coded" else base, strict=True):
        if kind == "coded":
            layer.weight = nn.Parameter(part, requires_grad=False)
        else:
            layer.register_buffer("weight", part)
    provider.install(model, dtype=torch.float64)
    weight: Any = model[1].weight
    weight.view(-1)[:8] = 1
    made: Any = copy.deepcopy(model)
    assert made[1].weight.sum() == 8, "the first module's copy has taken this one's memory along"


def test_what_is_handed_out_and_only_read_leaves_the_master_coded(provider: Provider) -> None:
    model, plain = networks()
    provider.install(model, dtype=torch.float32)
    with torch.no_grad():
        weight = model.layers[0].weight
        testing.assert_bit_equal(weight.cpu(), plain.layers[0].weight.float())
        del weight
        model.layers[1].weight.data.sum()
        assert_as(model, plain, provider, torch.float32)
    assert all(map(is_coded, model.parameters()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(provider: Provider, how: str) -> None:
    model, plain = networks()
    del model.written, plain.written  # a lambda is not pickled
    model.__class__ = plain.__class__ = _Quiet
    provider.install(model, dtype=torch.float32)
    assert_as(model, plain, provider, torch.float32)
    with torch.no_grad():
        model.layers[1].weight.mul_(2)
        plain.layers[1].weight.mul_(2)
    if how == "deepcopy":
        made = copy.deepcopy(model)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    assert type(made) is _Quiet and made.head.weight is made.embed.weight
    assert is_coded(made.layers[0].weight) and not is_coded(made.layers[1].weight)
    with torch.no_grad():
        testing.assert_bit_equal(made(tokens(provider).cpu()), plain(tokens(provider).cpu()))
    assert_as(model, plain, provider, torch.float32)


class _Quiet(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.written = lambda _: None
        try:
            return super().forward(tokens)
        finally:
            del self.written


def test_new_plans_and_breaks(provider: Provider, tmp_path: Path) -> None:
    model, plain = networks()
    model.requires_grad_(False)
    handle = provider.install(model, dtype=torch.float32, budget="minimum")
    assert_as(model, plain, provider, torch.float32)
    for budget in ("1GiB", "minimum", 0.5):
        handle.retune(budget)
        assert_as(model, plain, provider, torch.float32)
    with handle.release():
        pass
    assert_as(model, plain, provider, torch.float32)
    if provider.native:
        for _ in range(5):
            assert_as(model, plain, provider, torch.float32)
        handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    if provider.native:
        provider.install(model, dtype=torch.float32, plan=tmp_path / "plan.json")
        assert_as(model, plain, provider, torch.float32)
    assert all(map(is_coded, model.parameters()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(provider: Provider, reentrant: bool) -> None:
    model, plain = networks(torch.float32)
    moved = testing.moved(plain, provider.device, torch.float64)
    provider.install(model, dtype=torch.float64, budget="minimum")
    for each in (model, moved):
        x = each.embed(tokens(provider))
        for layer in each.layers:
            x = x + checkpoint(layer, x, use_reentrant=reentrant)
        each.head(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        if q.grad is not None:
            testing.assert_bit_equal(p.grad, q.grad.to("cpu", torch.float32), name)
    assert all(map(is_coded, model.parameters()))


@pytest.mark.parametrize("kind", ["whole", "regional", "export"])
def test_compilers(provider: Provider, kind: str, fresh_compiler: None) -> None:
    model, plain = networks(torch.float32)
    moved = testing.moved(plain, provider.device, torch.float64).requires_grad_(False)
    provider.install(model.requires_grad_(False), dtype=torch.float64, budget="minimum")
    x = tokens(provider)
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if kind == "export":
        run = torch.export.export(model, (x,)).module()
    elif kind == "whole":
        run = torch.compile(model, backend="aot_eager")
    else:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(run(x), moved(x), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
def test_every_pattern_of_bits(provider: Provider, dtype: torch.dtype, budget: Any) -> None:
    """NaN payloads, infinities, -0.0 and denormals arrive as they are."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    wide = dtype == torch.float32
    values = (bits * 65537).view(dtype) if wide else bits.to(torch.int16).view(dtype)
    model = nn.Module()
    model.add_module("inner", nn.Linear(1, 1))
    model.inner.weight = nn.Parameter(coded(values.reshape(256, 256)), requires_grad=False)
    provider.install(model, budget=budget)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for _ in range(2):
        found = model.inner.weight
        found = found.decoded() if isinstance(found, LosslessTensor) else found
        assert torch.equal(found.cpu().view(integers).flatten(), values.view(integers))
