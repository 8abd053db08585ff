"""`Handle.save_plan` and `install(plan=)`: the first pass is as good as later ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
import sample_experts as experts
from conftest import Provider
from dynswap_ext import ConfigError, testing
from dynswap_ext.integrations.install_options import install_options
from sample_experts import Fused, Mixture

WIDTH, LAYERS = 768, 10
#: Bytes of a layer in float64. Masters are cast to it so that they are streamed on the CPU, too.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
BUDGET = 6 * LAYER + (1 << 16)


class Backwards(nn.Module):
    """Calls its layers in reverse order, and the first one twice."""

    def __init__(self, layers: int = LAYERS, names: str = "layer") -> None:
        super().__init__()
        torch.manual_seed(0)
        for index in range(layers):
            self.add_module(f"{names}{index}", nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.children())
        for layer in (layers[0], *reversed(layers)):
            x = torch.tanh(layer(x))
        return x


@pytest.fixture
def native(provider: Provider) -> Provider:
    if not provider.native:
        pytest.skip("pure Python makes no plans")
    return provider


def install(provider: Provider, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
    return provider.install(model.eval().requires_grad_(False), dtype=torch.float64, **options)


def passes(provider: Provider, model: nn.Module, count: int) -> torch.Tensor:
    x = torch.ones(2, WIDTH, dtype=torch.float64, device=provider.device)
    for _ in range(count):
        y = model(x)
    return y


@pytest.fixture
def plan(native: Provider, tmp_path: Path) -> Path:
    handle = install(native, model := Backwards(), budget=BUDGET)
    passes(native, model, 4)
    handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    return tmp_path / "plan.json"


def misses_of_first_pass(provider: Provider, **options: Any) -> tuple[int, dynswap_ext.Stats]:
    model = Backwards()
    moved = testing.moved(model, provider.device, torch.float64)
    handle = install(provider, model, **options)
    testing.assert_bit_equal(passes(provider, model, 1), passes(provider, moved, 1))
    stats = handle.stats()
    handle.uninstall()
    return stats.misses, stats


def test_the_first_pass_knows_the_order(native: Provider, plan: Path) -> None:
    without, usual = misses_of_first_pass(native, budget=BUDGET)
    with_plan, planned = misses_of_first_pass(native, plan=plan)
    assert with_plan <= 1 < without
    for name in ("groups", "resident_groups", "resident_bytes", "arena_bytes", "depth"):
        assert getattr(planned, name) == getattr(usual, name)
    assert planned.resident_groups > 0
    assert planned.bytes_moved < usual.bytes_moved + 3 * LAYER  # with the prefetch for the next pass


def test_with_the_least_budget_the_order_is_kept_too(native: Provider, tmp_path: Path) -> None:
    handle = install(native, model := Backwards(), budget="minimum")
    passes(native, model, 4)
    handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    without, _ = misses_of_first_pass(native)
    with_plan, stats = misses_of_first_pass(native, plan=tmp_path / "plan.json")
    assert with_plan <= 1 < without and stats.resident_groups == 0


def test_what_was_measured_is_not_measured_again(native: Provider, tmp_path: Path) -> None:
    handle = install(native, model := Backwards(), budget="auto")
    with pytest.raises(ConfigError, match="passes are being measured for a new plan"):
        handle.save_plan(tmp_path / "plan.json")
    passes(native, model, 4)
    tuning, budget = handle.tuning, handle.budget
    assert tuning is not None and tuning.passes == 2
    handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    handle = install(native, model, plan=tmp_path / "plan.json")
    assert (handle.tuning, handle.budget, handle.automatic) == (tuning, budget, True)
    passes(native, model, 5)
    assert handle.tuning == tuning
    handle.retune()
    passes(native, model, 5)
    assert handle.tuning != tuning


def test_several_models_have_one_plan(native: Provider, tmp_path: Path) -> None:
    def run(models: dict[str, nn.Module]) -> None:
        for model in models.values():
            passes(native, model, 2)

    models = {"first": Backwards(4).eval(), "second": Backwards(5).eval()}
    handle = native.install(models, dtype=torch.float64, budget=BUDGET)
    for _ in range(3):
        run(models)
    handle.save_plan(tmp_path / "plan.json")
    expected = handle.stats()
    handle.uninstall()
    handle = native.install(models, dtype=torch.float64, plan=tmp_path / "plan.json")
    run(models)
    assert handle.stats().resident_groups == expected.resident_groups > 0
    handle.uninstall()
    with pytest.raises(ConfigError, match="it was made for other weights"):
        native.install({"another": models["first"]}, dtype=torch.float64, plan=tmp_path / "plan.json")


def edited(plan: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(plan.read_text())
    change(content)
    plan.write_text(json.dumps(content))
    return plan


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            lambda: Backwards(LAYERS + 1),
            r"layer10.weight \(2.25 .*, on the device 4.5 .*\) is in the model",
        ),
        (lambda: Backwards(LAYERS - 1), r"layer9.weight .* is in the plan, and not in the model"),
        (lambda: Backwards(names="other"), r"other0.weight .* is layer0.weight .* in the plan"),
    ],
)
def test_another_model_is_refused(
    native: Provider, plan: Path, model: Callable[[], nn.Module], told: str
) -> None:
    other = model()
    with pytest.raises(ConfigError, match=told):
        install(native, other, plan=plan)
    assert not dynswap_ext.is_installed(other)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda saved: saved["made_for"].update(device="another"), "its device is another, and here it is "),
        (lambda saved: saved["made_for"].update(torch="0"), "its torch is 0, and here it is "),
        (lambda saved: saved["made_for"].update(dynswap_ext="0"), "its dynswap_ext is 0,"),
        (lambda saved: saved["made_for"].pop("backend"), "its backend is None"),
        (lambda saved: saved.update({"dynswap_ext plan": 2}), "another format"),
        (lambda saved: saved.pop("plan"), "is no plan that"),
        (lambda saved: saved.update(budget="9999999"), "its budget is '9999999'"),
        (lambda saved: saved.update(budget=True), "its budget is True"),
        (lambda saved: saved.update(prefetch=-1), "its prefetch is -1"),
        (lambda saved: saved.update(automatic="no"), "its automatic is 'no'"),
        (lambda saved: saved.update(made_for=[]), "its made_for is "),
        (lambda saved: saved.update(tuning={"x": 1}), "what was measured is damaged"),
        (lambda saved: saved.update(tuning={"passes": "x"}), "what was measured is damaged: passes is no"),
        (lambda saved: saved["plan"].pop("order"), "is damaged: "),
        (lambda saved: saved["plan"]["order"].append(99), "is damaged: the order of use"),
        (lambda saved: saved["plan"]["group_of"].reverse(), "is damaged: groups are not numbered"),
        (lambda saved: saved["plan"]["resident"].pop(), "is damaged: "),
        (lambda saved: saved["plan"].update(resident="yes"), "is damaged: "),
    ],
)
def test_what_was_made_for_something_else_is_refused(
    native: Provider, plan: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    model = Backwards()
    with pytest.raises(ConfigError, match=told) as error:
        install(native, model, plan=edited(plan, change))
    assert str(plan) in str(error.value) and "save a new plan" in str(error.value)
    assert not dynswap_ext.is_installed(model)


def test_options_that_a_plan_has_are_refused(native: Provider, plan: Path, tmp_path: Path) -> None:
    for options in ({"budget": "1GiB"}, {"prefetch": 3}):
        with pytest.raises(ConfigError, match="is given with it, which a plan has already"):
            install(native, Backwards(), plan=plan, **options)
    with pytest.raises(ConfigError, match="its dtype is torch"):
        native.install(Backwards(), plan=plan)
    with pytest.raises(ConfigError, match="its keep is nothing, and here it is layer0"):
        install(native, Backwards(), plan=plan, keep="layer0")
    with pytest.raises(ConfigError, match="the plan that is given has a fixed budget"):
        install(native, Backwards(), plan=plan, headroom="1GiB")
    with pytest.raises(ConfigError, match="pure Python makes no plans"):
        dynswap_ext.install(
            Backwards(), device=native.device, dtype=torch.float64, plan=plan, provider="python"
        )
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        install(native, Backwards(), plan=tmp_path / "absent.json")
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="is no plan that"):
        install(native, Backwards(), plan=tmp_path / "text")


def test_what_cannot_be_saved(provider: Provider, tmp_path: Path) -> None:
    handle = install(provider, model := Backwards(), budget=BUDGET)
    if not provider.native:
        with pytest.raises(ConfigError, match="pure Python makes no plans"):
            handle.save_plan(tmp_path / "plan.json")
        return
    with pytest.raises(ConfigError, match="there is no folder"):
        handle.save_plan(tmp_path / "absent" / "plan.json")
    dynswap_ext.uninstall(model)
    with pytest.raises(ConfigError, match="uninstalled"):
        handle.save_plan(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_making_cannot_be_saved(native: Provider, tmp_path: Path) -> None:
    handle = install(native, model := Backwards(), budget=BUDGET)
    passes(native, model, 2)
    handle.release()
    with pytest.raises(ConfigError, match="the device memory was given back"):
        handle.save_plan(tmp_path / "plan.json")
    handle.resume()
    handle.retune()
    with pytest.raises(ConfigError, match="passes are being measured"):
        handle.save_plan(tmp_path / "plan.json")


def test_experts_that_are_read_as_a_whole_cannot_be_saved(native: Provider, tmp_path: Path) -> None:
    model = Mixture(partial(Fused, "all"))
    handle = native.install(model, dtype=torch.float64, budget="256KiB")
    x = native.randn(4, experts.WIDTH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            model(x, torch.zeros(3, 4, 1, dtype=torch.long, device=native.device))
    with pytest.raises(ConfigError, match="cannot be saved: an operation reads all experts"):
        handle.save_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("replaced", [False, True])
def test_an_install_that_had_a_plan_is_put_back(native: Provider, plan: Path, replaced: bool) -> None:
    """An install with a saved plan is put back as it was when a later one is refused halfway.

    Its budget and weights are no longer those of the plan.
    """
    handle = install(native, model := Backwards(), plan=plan)
    handle.retune(4 * LAYER)
    passes(native, model, 5)
    if replaced:
        model.layer3 = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    expected = passes(native, model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dynswap_ext.DynswapWarning, match="prefetch"):
            install(native, model, prefetch=40, budget=4 * LAYER)
    assert dynswap_ext.is_installed(model) and handle.active
    testing.assert_bit_equal(passes(native, model, 1), expected)


def test_a_plan_that_leaves_too_little_headroom_is_made_anew(
    native: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = install(native, model := Backwards(), budget="auto")
    passes(native, model, 5)
    handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    handle = install(native, model, plan=tmp_path / "plan.json", headroom=0)
    assert handle.tuning is not None
    handle.uninstall()
    with pytest.warns(dynswap_ext.DynswapWarning, match="a new plan is measured"):
        handle = install(native, model, plan=tmp_path / "plan.json", headroom="99%")
    assert handle.tuning is None and handle.automatic


def test_a_new_plan_keeps_the_order(native: Provider) -> None:
    handle = install(native, model := Backwards(), budget=BUDGET)
    passes(native, model, 4)
    handle.retune()
    passes(native, model, 3)
    handle.reset_stats()
    passes(native, model, 1)  # begins with the plan
    assert handle.tuning is not None and handle.stats().misses <= 1


def test_an_integration_takes_the_budget_of_the_plan() -> None:
    assert install_options("f", {"prefetch": 1}) == {"prefetch": 1, "budget": "auto"}
    for given in ({"plan": "a.json"}, {"budget": "1GiB"}, {"budget": None}):
        assert install_options("f", given) == given
