"""A summary says where each weight is, and how an install serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import Provider, skip_or_fail
from dynswap_ext.inspect import summary
from sample_models import mlp
from sample_subclasses import ScaledInt8

Map = Callable[[nn.Module], nn.Module]


def lives(model: nn.Module) -> set[str]:
    return {weight.lives for weight in summary(model).weights}


def test_plain_models(tmp_path: Path, mapped: Map) -> None:
    assert lives(mlp()) == {"RAM"}
    assert lives(mlp().share_memory()) == {"shared RAM"}
    model = mapped(mlp())
    assert lives(model) == {"model.pt"}
    assert {weight.file for weight in summary(model).weights} == {tmp_path / "model.pt"}
    (tmp_path / "model.pt").unlink()
    assert lives(model) == {"file (gone)"}


def test_pinned_and_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    model = mlp()
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    assert lives(model) == {"pinned RAM"}
    assert lives(mlp().cuda()) == {f"cuda:{torch.cuda.current_device()}"}


def test_streamed_resident_and_in_place(provider: Provider, mapped: Map) -> None:
    model = mapped(mlp())
    handle = provider.install(model, dtype=torch.float64)
    assert lives(model) == {"model.pt, streamed"}
    handle.uninstall()
    handle = provider.install(model, dtype=torch.float64, budget="1MiB")
    assert lives(model) == {"model.pt, resident"}
    handle.uninstall()
    assert lives(model) == {"model.pt"}


def test_masters_that_are_where_they_are_wanted(provider: Provider) -> None:
    model = mlp().to(provider.device)
    provider.install(model)
    assert {weight.served for weight in summary(model).weights} == {"in place"}


def test_some_are_resident(provider: Provider) -> None:
    model = mlp(64, layers=8)
    handle = provider.install(model, dtype=torch.float64, budget="160KiB")
    assert 0 < handle.stats().resident_groups < handle.stats().groups
    served = {weight.served for weight in summary(model).weights}
    assert served == {"resident", "streamed"}


@pytest.mark.parametrize("budget", ["minimum", "1GiB"])
def test_those_that_do_not_lie_as_a_copy_does_are_streamed(provider: Provider, budget: str) -> None:
    """Weights with gaps or a lazy sign are streamed with any budget and `keep`, and are in no plan."""
    if provider.device.type != "cpu":
        pytest.skip("of a module without a forward of torch's own")
    model = nn.Module()
    model.rows = nn.Parameter(torch.ones(8, 12)[:, :8])
    model.negative = nn.Parameter(torch.complex(torch.ones(8), torch.ones(8)).conj().imag)
    model.dense = nn.Parameter(torch.ones(64, 64))
    model.empty = nn.Parameter(torch.ones(0, 8))
    handle = provider.install(model, dtype=torch.float64, budget=budget, keep=["dense", "rows"])
    for _ in range(3):
        served = {weight.name: weight.served for weight in summary(model).weights}
        assert served == {
            "rows": "streamed",
            "negative": "streamed",
            "dense": "resident",
            "empty": "converted",
        }
        handle.reset_stats()
        with torch.no_grad():
            assert model.rows.sum() == 64 and model.negative.sum() == -8 and model.dense.sum() == 64 * 64
        model.empty.sum()
    assert handle.stats().bytes_moved == 4 * (64 + 8)
    assert handle.stats().weight_bytes == 8 * 64 * 64


def test_wrappers_are_streamed(provider: Provider) -> None:
    model = nn.Linear(8, 4, bias=False)
    model.weight = nn.Parameter(ScaledInt8.quantise(model.weight.detach()), requires_grad=False)
    provider.install(model, dtype=torch.float64)
    (weight,) = summary(model).weights
    assert weight.served == "streamed"


def test_a_part_of_a_model_is_installed(provider: Provider) -> None:
    model = mlp()
    provider.install(model[0], dtype=torch.float64)
    served = {weight.name: weight.served for weight in summary(model).weights}
    assert served["0.weight"] == "streamed" and served["2.weight"] is None


def test_quantised_weights_count_as_they_are_stored() -> None:
    model = nn.Linear(8, 4, bias=False)
    quantised = ScaledInt8.quantise(model.weight.detach())
    model.weight = nn.Parameter(quantised, requires_grad=False)
    (weight,) = summary(model).weights
    assert weight.shape == (4, 8) and weight.elements == 32
    assert weight.nbytes == quantised.inner_bytes()


def test_nothing_is_fetched(provider: Provider, mapped: Map) -> None:
    model = mapped(mlp())
    handle = provider.install(model, dtype=torch.float64, budget="1MiB")
    before = handle.stats()
    assert str(summary(model))
    assert handle.stats() == before


@pytest.mark.parametrize("names", [1, 3])
def test_more_places_than_a_row_names(names: int, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(names)))
    for index, part in enumerate(model):
        torch.save(part.state_dict(), tmp_path / f"{index}.pt")
        part.load_state_dict(torch.load(tmp_path / f"{index}.pt", mmap=True), assign=True)
    row = str(summary(model, depth=0)).splitlines()[2]
    assert row.endswith("0.pt (24 bytes); 1.pt (24 bytes); 1 more" if names == 3 else "0.pt")


def test_a_row_of_several_places_has_the_bytes_of_each(provider: Provider) -> None:
    model = mlp(64, 3).eval()
    provider.install(model, dtype=torch.float64, budget="minimum", keep="0.bias")
    row = str(summary(model, depth=0)).splitlines()[2]
    assert row.endswith("RAM, streamed (48.5 KiB); RAM, resident (256 bytes)")
    row = next(line for line in str(summary(model)).splitlines() if line.strip().startswith("2: Linear"))
    assert row.endswith("RAM, streamed")
