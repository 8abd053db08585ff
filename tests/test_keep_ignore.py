"""`keep` and `ignore`: weights that stay on the device, and weights that are left alone."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import BudgetError, ConfigError, DynswapWarning, testing
from dynswap_ext._util.memory import format_bytes
from sample_models import mlp, trace

WIDTH, LAYERS = 64, 6
#: Device bytes of a layer in float64, and what alignment may add to a group.
LAYER, SLACK = (WIDTH * WIDTH + WIDTH) * 8, 4096


def model_of_layers() -> nn.Sequential:
    return mlp(WIDTH, LAYERS).eval()


def residents(handle: dynswap_ext.Handle) -> set[str]:
    return {name for row in handle.report().rows if row.resident for name in row.names}


@pytest.mark.parametrize("budget", [None, 4 * (LAYER + SLACK)])
def test_kept_weights_move_once(provider: Provider, budget: int | None) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, keep=["4", "8.*"], budget=budget)
    x = provider.randn(3, WIDTH)
    for _ in range(3):
        testing.assert_bit_equal(model(x), moved(x))
    kept = {"4.weight", "4.bias", "8.weight", "8.bias"}
    assert residents(handle) >= kept
    assert budget is not None or residents(handle) == kept
    for row in handle.report().rows:
        if kept & set(row.names):
            assert kept >= set(row.names) and row.copies == 1
    stats = handle.stats()
    assert budget is None or stats.peak_bytes <= budget
    assert stats.resident_bytes >= 2 * LAYER


def test_kept_weights_stay_through_a_new_plan(provider: Provider) -> None:
    model = model_of_layers()
    _, handle = provider.pair(model, keep="2", budget=4 * (LAYER + SLACK))
    x = provider.randn(3, WIDTH)
    for budget in (3 * (LAYER + SLACK), "auto", None):
        handle.retune(budget)
        for _ in range(5):
            model(x)
        assert residents(handle) >= {"2.weight", "2.bias"}


def test_a_tied_weight_is_kept_under_either_name(provider: Provider) -> None:
    model = model_of_layers()
    model[10].weight = model[0].weight
    _, handle = provider.pair(model, keep="10.weight")
    assert residents(handle) == {"0.weight"}


def test_what_is_kept_has_to_fit(provider: Provider) -> None:
    model = model_of_layers()
    before = trace(model)
    with pytest.raises(
        BudgetError, match=r"keep= names \(0\.\w+, .* and 1 more|keep= names \(0.bias"
    ) as caught:
        provider.install(model, dtype=torch.float64, keep=["0", "2", "4"], budget=2 * LAYER)
    assert trace(model) == before
    smallest = caught.value.smallest_bytes
    assert smallest + SLACK >= 4 * LAYER and smallest <= 4 * (LAYER + SLACK)
    handle = provider.install(model, dtype=torch.float64, keep=["0", "2", "4"], budget=smallest)
    model(provider.randn(3, WIDTH))
    assert handle.stats().peak_bytes <= smallest
    with pytest.raises(BudgetError):
        provider.install(model_of_layers(), dtype=torch.float64, keep=["0", "2", "4"], budget=smallest - 4096)


def test_keep_that_leaves_no_room_ahead_is_said(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches nothing ahead")
    options = {"dtype": torch.float64, "keep": ["0", "2"]}
    with pytest.warns(
        DynswapWarning, match=r"weights stay on the device, as keep= asks, and the rest"
    ) as caught:
        handle = provider.install(model_of_layers(), **options, budget=3 * (LAYER + SLACK))
    assert len(caught) == 1 and handle.stats().depth == 0
    message = str(caught[0].message)
    assert message.startswith(f"{format_bytes(handle.stats().resident_bytes)} of weights stay")
    enough = re.search(
        r"A budget of .* \((\d+) bytes\) has room for keep= and for 2 group\(s\) ahead", message
    )
    assert enough and int(enough[1]) <= 5 * (LAYER + SLACK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = provider.install(model_of_layers(), **options, budget=int(enough[1]))
        assert handle.stats().depth == 2
        provider.install(model_of_layers(), **options, budget=3 * (LAYER + SLACK), prefetch=0)
        provider.install(model_of_layers(), **options)


def test_keep_of_weights_that_are_there_takes_no_room(provider: Provider) -> None:
    model = model_of_layers().to(provider.device, torch.float64)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        moved, handle = provider.pair(model, keep="4", budget="1MiB")
    assert not [warning for warning in shown if "keep=" in str(warning.message)]
    x = provider.randn(3, WIDTH)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved == 0


def test_ignored_weights_are_left_alone(provider: Provider) -> None:
    model = model_of_layers()
    moved = testing.moved(model, provider.device, torch.float64)
    head = model[10].to(provider.device, torch.float64)
    model[4].bias = nn.Parameter(model[4].bias.to(provider.device, torch.float64))
    plain, bias = type(head), model[4].bias
    handle = provider.install(model, dtype=torch.float64, ignore=["10", "4.bias"], budget=3 * (LAYER + SLACK))
    assert type(head) is plain and not dynswap_ext.is_installed(head)
    assert model[4].bias is bias and head.weight.dtype == torch.float64
    x = provider.randn(3, WIDTH)
    for _ in range(3):
        testing.assert_bit_equal(model(x), moved(x))
    names = {name for row in handle.report().rows for name in row.names}
    assert "4.weight" in names and not names & {"4.bias", "10.weight", "10.bias"}
    assert {w.name: w.served for w in dynswap_ext.inspect.summary(model).weights}["4.bias"] == "ignored"
    handle.retune(4 * (LAYER + SLACK))
    for _ in range(5):
        testing.assert_bit_equal(model(x), moved(x))
    assert model[4].bias is bias
    handle.uninstall()
    assert model[4].bias is bias and type(head) is plain


def test_ignored_masters_may_be_on_the_meta_device(provider: Provider) -> None:
    model = model_of_layers()
    model[10].to("meta")
    with provider.install(model, dtype=torch.float64, ignore="10"):
        model[:10](provider.randn(3, WIDTH))


def test_models_of_a_list(provider: Provider) -> None:
    a, b = model_of_layers(), model_of_layers()
    handle = provider.install({"a": a, "b": b}, dtype=torch.float64, keep="a.0", ignore="b.*")
    assert residents(handle) == {"a.0.weight", "a.0.bias"}
    assert dynswap_ext.is_installed(a) and not dynswap_ext.is_installed(b)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"keep": "10.wieght"},
            r"keep has '10.wieght', which matches no weight .* Did you mean '10.weight'\?",
        ),
        ({"ignore": ["0", "nothing"]}, "ignore has 'nothing', which matches no weight of the model"),
        ({"keep": "0", "ignore": "*.weight"}, "keep and ignore both name '0.weight'"),
        ({"ignore": "*"}, "ignore names every weight"),
        ({"keep": 3}, "keep is 3; expected a name"),
        ({"ignore": [None]}, r"ignore is \[None\]; expected a name"),
    ],
)
def test_patterns_that_cannot_be_used(provider: Provider, options: dict[str, object], says: str) -> None:
    model = model_of_layers()
    before = trace(model)
    with pytest.raises(ConfigError, match=says):
        provider.install(model, dtype=torch.float64, **options)
    assert trace(model) == before


def test_a_tied_weight_is_kept_or_left_alone(provider: Provider) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model.b.weight = model.a.weight
    with pytest.raises(ConfigError, match=r"both name 'a.weight', which is also 'b.weight'"):
        provider.install(model, keep="a", ignore="b")
    with pytest.raises(ConfigError, match="ignore names every weight"):
        provider.install(model, ignore="b.weight")


class Asks(nn.Module):
    """A model whose forward asks its weights for device and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self) -> list[object]:
        parts = (self.first, self.second)
        return [(next(p.parameters()).device, next(p.parameters()).dtype) for p in parts] + [self.device]


@pytest.mark.parametrize("ignore", ["first.weight", "first", "second.weight"])
def test_a_forward_that_asks_where_an_ignored_weight_is(provider: Provider, ignore: str) -> None:
    """A forward sees an ignored weight's own device and dtype, and those of the compute for the others."""
    model = Asks()
    provider.install(model, dtype=torch.float64, ignore=ignore)
    home, served = (torch.device("cpu"), torch.float32), (provider.device, torch.float64)
    expected = [served, home] if ignore.startswith("second") else [home, served]
    for _ in range(3):
        assert model() == [*expected, expected[0][0]]


def test_a_pattern_that_is_a_part_of_names(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(
        ConfigError, match=r"matches no weight .*whole paths, such as '0\.weight'; '\*' stands"
    ):
        provider.install(model, keep="xyz")
