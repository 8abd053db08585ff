"""Install, uninstall, and what each leaves behind."""

from __future__ import annotations

import gc
import re
import threading
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, testing
from dynswap_ext._swap.class_swap import is_swap_class
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp, trace


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def swapped(model: nn.Module) -> list[bool]:
    return [is_swap_class(type(module)) for module in model.modules()]


@pytest.mark.parametrize("make", [mlp, ConvNet, Recurrent, TinyTransformer])
def test_uninstall_leaves_no_trace(provider: Provider, make: Any) -> None:
    model = make()
    before, state = trace(model), {k: v.clone() for k, v in model.state_dict().items()}
    threads = threading.active_count()
    handle = provider.install(model, dtype=torch.float64)
    assert all(swapped(model))
    assert dynswap_ext.uninstall(model) is model
    assert trace(model) == before
    testing.assert_bit_equal(model.state_dict(), state, "state")
    assert threading.active_count() == threads
    assert not handle.active


def test_is_installed(provider: Provider) -> None:
    model = mlp()
    assert not dynswap_ext.is_installed(model)
    with provider.install(model) as handle:
        assert dynswap_ext.is_installed(model) and dynswap_ext.is_installed(model[0])
        assert handle.active
    assert not dynswap_ext.is_installed(model) and not dynswap_ext.is_installed(model[0])


def test_uninstall_of_a_plain_model_does_nothing() -> None:
    model = mlp()
    before = trace(model)
    assert dynswap_ext.uninstall(model) is model
    assert trace(model) == before


def test_the_handle(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64, budget="1MiB")
    assert handle.device == provider.device
    assert handle.dtype is torch.float64
    assert handle.budget == 1 << 20
    assert handle.provider == provider.backend
    assert handle.backend == provider.expected_backend
    where = f"{provider.backend}/{provider.expected_backend} on {provider.device}"
    assert repr(handle) == f"<dynswap_ext.Handle active: {where}, dtype float64, budget 1 MiB>"
    model(provider.randn(2, 16))
    assert handle.stats().misses + handle.stats().hits > 0
    handle.reset_stats()
    assert handle.stats().bytes_moved == 0
    assert handle.stats().weight_bytes >= 3 * (16 * 16 + 16) * 8
    model(provider.randn(2, 16))
    counted = handle.stats()
    handle.uninstall()
    handle.uninstall()
    assert handle.stats().copies == counted.copies
    assert repr(handle).startswith("<dynswap_ext.Handle inactive: ")


@pytest.mark.parametrize(
    ("budget", "shown"), [("minimum", r"budget minimum"), ("auto", r"budget auto \([0-9.]+ [KMGT]iB\)")]
)
def test_the_handle_and_the_report_show_the_budget(provider: Provider, budget: str, shown: str) -> None:
    handle = provider.install(mlp(), budget=budget)
    assert re.search(rf"dtype of the masters, {shown}>$", repr(handle))
    assert re.search(shown, handle.report().text())


def test_the_handle_does_not_keep_the_model(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    model(provider.randn(2, 16))
    masters = [weakref.ref(p) for p in model.parameters()]
    watch = weakref.ref(model[0])
    del model
    gc.collect()
    assert watch() is None
    assert [ref() for ref in masters] == [None] * len(masters)
    assert not handle.active
    handle.uninstall()


def test_deleting_an_installed_model_frees_it_without_a_collection(provider: Provider) -> None:
    model = mlp()
    provider.install(model, dtype=torch.float64, budget="1MiB")
    with torch.no_grad():
        model(provider.randn(2, 16))
    watch = weakref.ref(model._modules["0"]._parameters["weight"])
    gc.collect()
    gc.disable()
    try:
        del model
        assert watch() is None
    finally:
        gc.enable()


def test_a_second_install_replaces_the_first(provider: Provider) -> None:
    model = mlp()
    before = trace(model)
    first = provider.install(model, dtype=torch.float64)
    made = classes(model)
    second = provider.install(model, dtype=torch.bfloat16)
    assert classes(model) == made
    assert not first.active and second.active
    assert repr(first).startswith("<dynswap_ext.Handle replaced by a later install: ")
    with pytest.raises(ConfigError, match="was replaced by a later install"):
        first.retune()
    assert model[0].weight.dtype == torch.bfloat16
    first.uninstall()
    assert second.active and model[0].weight.dtype == torch.bfloat16
    second.uninstall()
    assert trace(model) == before


def test_install_of_a_part_of_an_installed_model(provider: Provider) -> None:
    model = mlp()
    before = trace(model)
    outer = provider.install(model, dtype=torch.float64)
    inner = provider.install(model[2], dtype=torch.bfloat16)
    assert outer.active and inner.active
    assert model[0].weight.dtype == torch.float64
    assert model[2].weight.dtype == torch.bfloat16
    dynswap_ext.uninstall(model)
    assert trace(model) == before
    assert not outer.active and not inner.active


def test_install_around_an_installed_part(provider: Provider) -> None:
    model = mlp()
    before = trace(model)
    inner = provider.install(model[2], dtype=torch.bfloat16)
    outer = provider.install(model, dtype=torch.float64)
    assert not inner.active
    assert model[2].weight.dtype == torch.float64
    outer.uninstall()
    assert trace(model) == before


def test_uninstall_of_a_part(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    dynswap_ext.uninstall(model[2])
    assert type(model[2]) is nn.Linear
    assert model[2].weight is model[2]._parameters["weight"]
    assert model[0].weight.dtype == torch.float64
    assert handle.active
    handle.uninstall()
    assert not any(swapped(model))


def test_uninstalling_the_parts_ends_the_install(provider: Provider) -> None:
    model = mlp(layers=1)
    handle = provider.install(model, dtype=torch.float64)
    for module in (model[0], model[1], model):
        assert handle.active
        dynswap_ext.uninstall(module)
    assert not handle.active


@pytest.mark.slow
def test_many_cycles_do_not_grow(provider: Provider) -> None:
    model = mlp()
    x = provider.randn(2, 16)

    def cycle() -> None:
        with torch.no_grad(), provider.install(model, dtype=torch.float64, budget="1MiB"):
            model(x)
        provider.handles.clear()

    tracemalloc.start()
    try:
        for _ in range(20):  # the first cycles fill caches that stay
            cycle()
        threads, grown = threading.active_count(), []
        for _ in range(3):  # a leak grows each time; garbage of other tests and caches do not
            gc.collect()
            kept, objects = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
            for _ in range(100):
                cycle()
            gc.collect()
            grown.append((tracemalloc.get_traced_memory()[0] - kept, len(gc.get_objects()) - objects))
            if grown[-1][0] < 50_000 and grown[-1][1] < 100:
                break
        else:
            pytest.fail(f"kept by each 100 cycles, bytes and objects: {grown}")
        assert threading.active_count() == threads
    finally:
        tracemalloc.stop()


def test_deleted_installs_do_not_grow(provider: Provider) -> None:
    x = provider.randn(2, 16)

    def cycle() -> None:
        model = mlp()
        provider.install(model, dtype=torch.float64)
        with torch.no_grad():
            model(x)
        provider.handles.clear()

    for _ in range(5):
        cycle()
    gc.collect()
    objects, threads = len(gc.get_objects()), threading.active_count()
    for _ in range(30):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert threading.active_count() <= threads


def test_a_container_without_weights(provider: Provider) -> None:
    model = nn.Module()
    model.inner = nn.ModuleDict({"a": nn.ReLU()})
    with provider.install(model, budget="1MiB") as handle:
        assert dynswap_ext.is_installed(model.inner)
        assert handle.stats().weight_bytes == 0
    assert type(model) is nn.Module
