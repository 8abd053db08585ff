"""One install of several models: lists, dicts and pipelines share an engine and a budget."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, testing
from dynswap_ext.planning import outline_of_model
from sample_models import mlp, trace

#: Layers of one size, each of which is copied by itself (a group).
WIDTH, LAYERS = 64, 4
LAYER = (WIDTH * WIDTH + WIDTH) * 8


def models(count: int = 2) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [mlp(WIDTH, LAYERS).eval() for _ in range(count)]


def moved(model: nn.Module, provider: Provider) -> nn.Module:
    return testing.moved(model, provider.device, torch.float64)


@pytest.mark.parametrize("call", [list, tuple, lambda two: {"a": two[0], "b": {"c": [two[1], None, 1.5]}}])
def test_containers(provider: Provider, call: Any) -> None:
    two = models()
    given = call(two)
    plain, before = [moved(model, provider) for model in two], [trace(model) for model in two]
    handle = provider.install(given, dtype=torch.float64)
    assert dynswap_ext.is_installed(given) and dynswap_ext.is_installed(two[1])
    x = provider.randn(3, WIDTH)
    for _ in range(3):
        for model, other in zip(two, plain, strict=True):
            testing.assert_bit_equal(model(x), other(x))
    names = {name for row in handle.report().rows for name in row.names}
    assert ("b.c.0.0.weight" if isinstance(given, dict) else "1.0.weight") in names
    assert len(names) == 2 * 2 * LAYERS
    assert dynswap_ext.uninstall(given) is given
    assert [trace(model) for model in two] == before and not handle.active


def test_the_container_may_die(provider: Provider) -> None:
    two = models()
    x = provider.randn(3, WIDTH)
    plain = [moved(model, provider) for model in two]
    handle = provider.install({"first": two[0], "second": two[1]}, dtype=torch.float64, budget="auto")
    gc.collect()
    for _ in range(6):
        for model, other in zip(two, plain, strict=True):
            testing.assert_bit_equal(model(x), other(x))
    assert handle.tuning is not None
    names = {name for row in handle.report().rows for name in row.names}
    assert {name.partition(".")[0] for name in names} == {"first", "second"}
    gone = weakref.ref(two[0])
    del two[0], model, plain
    gc.collect()
    assert gone() is None and handle.active
    two[0](x)
    handle.retune()
    for _ in range(10):  # some calls pass until the other model is no longer expected
        two[0](x)
    assert {name.partition(".")[0] for row in handle.report().rows for name in row.names} == {"second"}
    two.clear()
    gc.collect()
    assert not handle.active


def test_used_alternately_within_one_budget(provider: Provider) -> None:
    two = models()
    plain = [moved(model, provider) for model in two]
    budget = 3 * LAYER  # less than one of the models
    handle = provider.install(two, dtype=torch.float64, budget=budget)
    x = provider.randn(3, WIDTH)
    for _ in range(4):
        handle.reset_stats()
        for model, other in zip(two, plain, strict=True):
            testing.assert_bit_equal(model(x), other(x))
    stats = handle.stats()
    assert stats.peak_bytes <= budget and stats.overflow_bytes == 0
    if provider.native:
        streamed = [row for row in handle.report().rows if not row.resident]
        assert stats.misses == 0
        # Each streamed group moves once a round. Bytes are counted in float32, the masters' dtype.
        per_round = sum(row.bytes_moved for row in streamed)
        assert stats.bytes_moved == per_round
        assert 0 < per_round <= sum(model_bytes(model) for model in two)


def model_bytes(model: nn.Module) -> int:
    return sum(master.nbytes for master in model.parameters())


def test_a_loop_of_one_model_within_a_round(provider: Provider) -> None:
    """After several calls of one model, the next model is prefetched in time."""
    encoder, denoiser, decoder = models(3)
    three = {"e": encoder, "d": denoiser, "v": decoder}
    handle = provider.install(three, dtype=torch.float64, budget=3 * LAYER)
    x = provider.randn(3, WIDTH)
    for steps in (5, 5, 5):
        handle.reset_stats()
        encoder(x)
        for _ in range(steps):
            denoiser(x)
        decoder(x)
    stats = handle.stats()
    if provider.native:
        assert stats.misses == 0 and stats.wasted_prefetches == 0
        by_model = dict.fromkeys("edv", 0)
        for row in handle.report().rows:
            by_model[row.names[0][0]] += row.copies
        streamed = {
            name: sum(not row.resident for row in handle.report().rows if row.names[0][0] == name)
            for name in "edv"
        }
        assert by_model["e"] <= streamed["e"] and by_model["v"] <= streamed["v"]
        assert by_model["d"] >= 4 * (streamed["d"] - 2)


def test_no_group_has_weights_of_two_models(provider: Provider) -> None:
    many = [nn.Linear(8, 8) for _ in range(6)]
    handle = provider.install(many, dtype=torch.float64)
    rows = handle.report().rows
    assert sum(len(row.names) for row in rows) == 2 * len(many)
    for row in rows:
        assert len({name.partition(".")[0] for name in row.names}) == 1


def test_the_same_module_twice_is_one(provider: Provider) -> None:
    model = models(1)[0]
    handle = provider.install([model, model, {"again": model}, model[0]], dtype=torch.float64)
    assert len([name for row in handle.report().rows for name in row.names]) == 2 * LAYERS


def test_a_pipeline_is_known_by_its_components(provider: Provider) -> None:
    a, b = models()
    pipe = SimpleNamespace(
        components={"late": a, "early": b, "tokenizer": object(), "none": None},
        model_cpu_offload_seq="early->late",
    )
    handle = provider.install(pipe, dtype=torch.float64)
    x = provider.randn(3, WIDTH)
    plain = [moved(model, provider) for model in models()]
    for model, other in zip((a, b), plain, strict=True):
        testing.assert_bit_equal(model(x), other(x))
    handle.uninstall()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "the list holds no torch.nn.Module to install: it has nothing"),
        ({"tokenizer": 1, "scheduler": None}, r"it has tokenizer \(int\), scheduler \(NoneType\)"),
        (SimpleNamespace(components={"scheduler": "x"}), r"the SimpleNamespace holds no .* scheduler"),
        (1.5, "model is a float; expected a torch.nn.Module, a pipeline"),
        ("model", r"model is a str; .*loaded first: model = dynswap_ext\.checkpoint\.load\(model, path\)"),
        (nn.Linear, r"model is a type; .*Make the model first: Linear\(\.\.\.\)"),
    ],
)
def test_nothing_to_install(given: Any, says: str) -> None:
    for function in (dynswap_ext.install, dynswap_ext.uninstall, dynswap_ext.is_installed):
        with pytest.raises(ConfigError, match=says):
            function(given)


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ([3], r"number 1 of the models is a int \(3\)"),
        (("unet",), r"number 1 of the models is a str \('unet'\)"),
        ([None], r"number 1 of the models is a NoneType"),
        ([[(torch.ones(1),)]], r"number 1\.0\.0 of the models is a Tensor; .*Pass the module that owns it$"),
    ],
)
def test_a_list_has_models_alone(rest: Any, says: str) -> None:
    model = mlp()
    given = type(rest)([model, *rest])
    for call in (dynswap_ext.install, dynswap_ext.uninstall, dynswap_ext.is_installed):
        with pytest.raises(ConfigError, match=says):
            call(given)
    assert not dynswap_ext.is_installed(model)


def test_a_container_that_holds_itself() -> None:
    given: list[Any] = [nn.Linear(2, 2)]
    given.append(given)
    with dynswap_ext.install(given, device="cpu", dtype=torch.float64) as handle:
        assert handle.active


def test_an_error_leaves_every_model_as_it_was(provider: Provider) -> None:
    a, b = models()
    b[1].weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
    before = trace(a)
    with pytest.raises(ConfigError, match=r"hold no data: 1\.1\.weight"):
        provider.install([a, b])
    assert trace(a) == before and not dynswap_ext.is_installed(a)


def test_a_failed_install_puts_the_one_before_back(provider: Provider) -> None:
    two = models()
    handle = provider.install({"x": two[0], "y": two[1]}, dtype=torch.float64)
    with pytest.raises(dynswap_ext.BudgetError):
        provider.install(two, dtype=torch.float64, budget=16)
    assert handle.active and dynswap_ext.is_installed(two)
    names = {name for row in handle.report().rows for name in row.names}
    assert {name.partition(".")[0] for name in names} == {"x", "y"}


def test_summary_and_outline(provider: Provider) -> None:
    """`summary` and `outline_of_model` take what `install` takes, and name weights as its report does."""
    two = dict(zip("ab", models(), strict=True))
    outline = outline_of_model(two)
    assert outline.nbytes == sum(map(model_bytes, two.values()))
    handle = provider.install(two, dtype=torch.float64)
    summary = dynswap_ext.inspect.summary(two)
    names = {name for row in handle.report().rows for name in row.names}
    assert {weight.name for weight in summary.weights} == names
    assert {weight.name for weight in outline.weights} == names
    assert summary.device == provider.device
    assert {weight.served for weight in summary.weights} == {"streamed"}


def test_a_pipeline_of_transformers_is_told_from_one_of_diffusers() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.model = nn.Linear(8, 8)

    with pytest.raises(ConfigError, match=r"model is a Pipeline; .*Pass its model: install\(x\.model\)"):
        dynswap_ext.install(Pipeline())  # type: ignore[type-var]
