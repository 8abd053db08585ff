"""Installs that come and go in every order, on models in use."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.class_swap import is_swap_class
from dynswap_ext._util.peak_memory import resident_bytes
from sample_models import Recurrent, TinyTransformer, mlp, trace
from threads import in_threads


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    y.square().sum().backward()
    return y.detach()


SETTINGS: list[dict[str, Any]] = [
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "prefetch": 0},
    {"dtype": torch.float64, "budget": "1MiB", "prefetch": 1},
    {},
    {"dtype": torch.float32, "budget": 1.0},
    {"dtype": torch.float64, "prefetch": 5, "strict_budget": True, "budget": "2MiB"},
]


def test_other_settings_while_in_use(provider: Provider) -> None:
    model = mlp()
    before = trace(model)
    handles = []
    for settings in SETTINGS + SETTINGS[::-1]:
        moved = testing.moved(model, provider.device, settings.get("dtype"))
        handles.append(provider.install(model, **settings))
        x = provider.randn(2, 16, dtype=settings.get("dtype", torch.float32))
        with torch.no_grad():
            for _ in range(2):
                testing.assert_bit_equal(model(x), moved(x), f"output with {settings}")
        assert [handle.active for handle in handles] == [False] * (len(handles) - 1) + [True]
    dynswap_ext.uninstall(model)
    assert trace(model) == before


def test_gradients_outlive_a_change_of_settings(provider: Provider) -> None:
    model = mlp()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    step(model, x)
    provider.install(model, dtype=torch.float64, budget="1MiB", prefetch=0)
    step(model, x)
    dynswap_ext.uninstall(model)
    for _ in range(2):
        step(moved, x)
    for master, other in zip(model.parameters(), moved.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(master.grad, other.grad.cpu().float())


@pytest.mark.parametrize("end", ["uninstall", "install", "part"])
def test_a_write_before_the_end_reaches_the_master(provider: Provider, end: str) -> None:
    model = mlp()
    provider.install(model, dtype=torch.float64)
    weight = model[0].weight  # kept: nothing has been written back yet
    with torch.no_grad():
        weight.fill_(3)
    if end == "install":
        provider.install(model, dtype=torch.bfloat16)
    else:
        dynswap_ext.uninstall(model if end == "uninstall" else model[0])
    assert model[0]._parameters["weight"].unique().tolist() == [3]
    assert model[0].weight.unique().tolist() == [3]
    del weight


@pytest.mark.parametrize("end", ["uninstall", "install", "part", "model"])
def test_a_graph_that_outlives_its_install(provider: Provider, end: str) -> None:
    model = mlp()
    moved, _ = provider.pair(model)
    masters, x = list(model.parameters()), provider.randn(2, 16)
    loss, expected = model(x).sum(), moved(x).sum()
    if end == "install":
        provider.install(model, dtype=torch.bfloat16)
    elif end != "model":
        dynswap_ext.uninstall(model if end == "uninstall" else model[2])
    provider.handles.clear()
    if end == "model":
        del model
    gc.collect()
    loss.backward()
    expected.backward()
    for master, other in zip(masters, moved.parameters(), strict=True):
        assert other.grad is not None
        testing.assert_bit_equal(master.grad, other.grad.cpu().float())


def test_a_part_is_taken_out_and_put_back_between_passes(provider: Provider) -> None:
    model = mlp(layers=5)
    moved = testing.moved(model, provider.device, torch.float64)
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 16)
    for index in (2, 0, 8):
        part = model[index]
        dynswap_ext.uninstall(part)
        assert type(part) is nn.Linear and handle.active
        assert part.weight is part._parameters["weight"]
        inner = provider.install(part, dtype=torch.float64)
        assert inner.active and handle.active
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
        assert inner.stats().bytes_moved > 0
    handle.uninstall()
    assert [is_swap_class(type(m)) for m in model] == [i in (0, 2, 8) for i in range(len(model))]
    dynswap_ext.uninstall(model)


def test_a_tie_across_the_edge_of_a_part(provider: Provider) -> None:
    model = TinyTransformer().eval()
    provider.install(model, dtype=torch.float64)
    dynswap_ext.uninstall(model.output)
    master = model.output.weight
    assert master is model.embed._parameters["weight"] and model.embed.weight.dtype == torch.float64
    with torch.no_grad():
        master.fill_(0.5)
        assert model.embed.weight.unique().tolist() == [0.5]
        model.embed.weight.fill_(0.25)
    gc.collect()
    model.state_dict()
    assert master.unique().tolist() == [0.25]


def test_parts_of_both_providers(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("needs the native provider beside pure Python")
    model = mlp(layers=5)
    moved = testing.moved(model, provider.device, torch.float64)
    before = trace(model)
    provider.install(model, dtype=torch.float64)
    inner = dynswap_ext.install(model[4], device=provider.device, dtype=torch.float64, provider="python")
    x = provider.randn(2, 16)
    for _ in range(2):
        testing.assert_bit_equal(step(model, x), step(moved, x))
    assert inner.provider == "python" and inner.stats().bytes_moved > 0
    dynswap_ext.uninstall(model)
    assert trace(model) == before


def test_two_models_share_a_part(provider: Provider) -> None:
    shared = nn.Linear(16, 16)
    first, second = nn.Sequential(nn.Linear(16, 16), shared), nn.Sequential(shared, nn.Linear(16, 16))
    moved_first = testing.moved(first, provider.device, torch.float64)
    moved_second = testing.moved(second, provider.device, torch.float64)
    one = provider.install(first, dtype=torch.float64)
    two = provider.install(second, dtype=torch.float64)
    x = provider.randn(2, 16)
    for _ in range(2):
        testing.assert_bit_equal(first(x), moved_first(x))
        testing.assert_bit_equal(second(x), moved_second(x))
    two.uninstall()
    assert type(shared) is nn.Linear and one.active
    assert first[0].weight.dtype == torch.float64
    one.uninstall()
    assert type(first[0]) is nn.Linear


def test_two_models_share_a_master(provider: Provider) -> None:
    first, second = mlp(layers=1), mlp(layers=1)
    second[0].weight = first[0].weight
    provider.install(first, dtype=torch.float64)
    handle = provider.install(second, dtype=torch.bfloat16)
    first[0].weight.sum().backward()
    second[0].weight.sum().backward()
    master = first[0]._parameters["weight"]
    assert master.grad.unique().tolist() == [2]
    with torch.no_grad():
        second[0].weight.fill_(0.5)
    second.state_dict()
    assert first[0].weight.unique().tolist() == [0.5]
    handle.uninstall()
    assert second[0].weight is master and first[0].weight.dtype == torch.float64


def test_two_models_in_turn_with_budgets(provider: Provider) -> None:
    models = [mlp(features=64, layers=6).eval() for _ in range(2)]
    moved = [testing.moved(model, provider.device, torch.float64) for model in models]
    handles = [provider.install(model, dtype=torch.float64, budget=160_000) for model in models]
    x = provider.randn(2, 64)
    with torch.no_grad():
        for turn in (0, 1, 1, 0, 0, 1):
            testing.assert_bit_equal(models[turn](x), moved[turn](x))
        handles[0].uninstall()
        testing.assert_bit_equal(models[1](x), moved[1](x))
    for handle in handles:
        stats = handle.stats()
        assert stats.bytes_moved > 0 and stats.overflow_bytes == 0 and stats.peak_bytes <= 160_000


def _module_types() -> int:
    # By its own type: `isinstance` would ask deprecated stand-ins in torch for their class.
    return sum(nn.Module in cls.__mro__ for cls in gc.get_objects() if type(cls) is type)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.slow
def test_cycles_of_every_kind_do_not_grow(provider: Provider) -> None:
    x = provider.randn(2, 3, 6)

    def cycle() -> None:
        class Local(nn.Module):  # a class of its own in each cycle: nothing may keep it
            def __init__(self) -> None:
                super().__init__()
                self.inner = Recurrent()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)

        model = Local()
        provider.install(model.inner.lstm, dtype=torch.float64)
        provider.install(model, dtype=torch.float64, budget="1MiB")
        step(model, x)
        provider.install(model, dtype=torch.float64, prefetch=0)
        step(model, x)
        dynswap_ext.uninstall(model.inner)
        dynswap_ext.uninstall(model)
        provider.handles.clear()

    def counts() -> tuple[int, int, int]:
        gc.collect()
        return _module_types(), threading.active_count(), _open_files()

    for _ in range(20):
        cycle()
    before, memory = counts(), resident_bytes()
    for _ in range(100):
        cycle()
    assert counts() == before
    grown = resident_bytes() - memory
    assert grown < 8 << 20, f"{grown} bytes of RAM kept by 100 cycles"


@pytest.mark.parametrize("end", ["a new plan", "uninstall"])
def test_masters_memory_goes_while_the_handle_stays(provider: Provider, end: str) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).share_memory()
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 256)
    model(x)
    memory = StorageWeakRef(model[1].get_parameter("weight").untyped_storage())
    del model[1]
    if end == "uninstall":
        handle.uninstall()
    else:
        model.append(nn.Linear(256, 256))
        for _ in range(2):
            model(x)
    gc.collect()
    assert memory.expired(), "the handle keeps what the model has let go"


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_masters_that_lose_their_data_are_handed_out_as_they_are(
    provider: Provider, budget: str | None
) -> None:
    """A master on the meta device is handed out itself, as when accelerate offloads between calls."""
    model = mlp(layers=2)
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 16)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    testing.assert_bit_equal(model(x), moved(x))
    for module in model:
        for name, p in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(p.detach().to("meta"))
    assert model[0].weight.is_meta and model[0].weight is model[0]._parameters["weight"]
    model.load_state_dict(kept, assign=True)
    testing.assert_bit_equal(model(x), moved(x))


def test_an_overflow_that_the_user_made_an_error(provider: Provider) -> None:
    """After a warning of an overflow was raised as an error, weights that were being copied can be read."""
    if not provider.native:
        pytest.skip("pure Python has nothing on its way")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    moved, _ = provider.pair(model, budget=3 * 2 * 64 * 65 * 8)
    x = provider.randn(2, 64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", dynswap_ext.DynswapWarning)
        with pytest.raises(dynswap_ext.DynswapWarning, match="every slot of the arena"):
            _ = [layer.weight for layer in model]
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(x)), daemon=True)
    thread.start()
    thread.join(60)
    assert outputs, "the pass hangs"
    testing.assert_bit_equal(outputs[0], moved(x))


def test_threads_that_train_infer_and_look(provider: Provider) -> None:
    model = mlp(features=64, layers=4)
    moved, handle = provider.pair(model, budget="1MiB")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = provider.randn(3, 64)
    expected = moved(x).detach()
    other = mlp()

    def work(index: int) -> None:
        for _ in range(25):
            if index == 0:
                testing.assert_bit_equal(step(model, x), expected, "output in training")
            elif index == 1:
                with torch.inference_mode():
                    testing.assert_bit_equal(model(x), expected, "output in inference")
            elif index == 2:
                testing.assert_bit_equal(model.state_dict(), state, "state")
                handle.stats()
                handle.flush()
            else:
                with provider.install(other, dtype=torch.float64):
                    other(x[:, :16])

    in_threads(work)
    testing.assert_nothing_held(handle)
    assert all(p.grad is not None for p in model.parameters())
