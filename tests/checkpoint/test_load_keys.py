"""checkpoint.load names all keys and ties that do not fit at once, and leaves the model as it was."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sample_loads import Net, kinds, saved
from torch import nn

from dynswap_ext import checkpoint
from dynswap_ext.checkpoint.loading.keys import KeyReport
from dynswap_ext.errors import ConfigError
from sample_models import Tied


def test_ties_kept_with_one_entry(tmp_path: Path) -> None:
    weight = torch.randn(6, 3)
    for name in ("embedding.weight", "head.weight"):
        save_file({name: weight}, tmp_path / name)
        model = checkpoint.load(Tied, tmp_path / name)
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model.head.weight, weight)


@kinds
def test_ties_kept_with_two_equal_entries(kind: str, tmp_path: Path) -> None:
    tied = Tied()
    if kind == "safetensors":  # it refuses shared tensors, so the file has two copies
        save_file({name: value.clone() for name, value in tied.state_dict().items()}, tmp_path / "w")
    else:
        torch.save(tied.state_dict(), tmp_path / "w")
    model = checkpoint.load(Tied, tmp_path / "w")
    assert model.head.weight is model.embedding.weight


def test_ties_two_different_entries_are_refused(tmp_path: Path) -> None:
    save_file({"embedding.weight": torch.zeros(6, 3), "head.weight": torch.ones(6, 3)}, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"embedding\.weight and head\.weight.*untie"):
        checkpoint.load(Tied, tmp_path / "w")


def test_all_differences_at_once_with_near_matches(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["frist.weight"] = state.pop("first.weight")
    state["second.weight"] = torch.zeros(4, 9)
    state["extra"] = torch.zeros(1)
    save_file(state, tmp_path / "w")
    with pytest.raises(ConfigError) as caught:
        checkpoint.load(Net, tmp_path / "w")
    text = str(caught.value)
    assert "second.weight: the model has [4, 8], the file [4, 9]" in text
    assert "first.weight  (the file has frist.weight)" in text
    assert "extra" in text and str(tmp_path / "w") in text
    assert "make the model with the configuration that the" in text


def test_prefix_is_noticed(tmp_path: Path) -> None:
    save_file({f"model.{name}": value for name, value in Net().state_dict().items()}, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"keys of the file begin with 'model\.'"):
        checkpoint.load(Net, tmp_path / "w")


def test_integers_for_a_floating_weight_are_refused(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["first.weight"] = state["first.weight"].to(torch.int8)
    save_file(state, tmp_path / "w")
    with pytest.raises(
        ConfigError, match=r"first\.weight: the model has torch\.float32, the file torch\.int8"
    ):
        checkpoint.load(Net, tmp_path / "w")


@pytest.mark.parametrize("broken", ["missing", "unexpected", "mismatched"])
def test_error_leaves_a_given_module_as_it_was(broken: str, tmp_path: Path) -> None:
    state = Net().state_dict()
    if broken == "missing":
        del state["second.bias"]
    elif broken == "unexpected":
        state["more"] = torch.zeros(1)
    else:
        state["second.bias"] = torch.zeros(5)
    save_file(state, tmp_path / "w")
    model = Net()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ConfigError):
        checkpoint.load(model, tmp_path / "w")
    for name, value in model.state_dict(keep_vars=True).items():
        assert before[name][0] == id(value) and torch.equal(before[name][1], value)


def test_not_strict_keeps_what_is_missing_and_warns(tmp_path: Path) -> None:
    state = Net().state_dict()
    del state["second.bias"]
    state["more"] = torch.zeros(1)
    save_file(state, tmp_path / "w")
    model = Net()
    bias = model.second.bias
    with pytest.warns(UserWarning, match=r"second\.bias"):
        checkpoint.load(model, tmp_path / "w", strict=False)
    assert model.second.bias is bias
    assert torch.equal(model.first.weight, state["first.weight"])


def test_a_fitting_file_warns_of_nothing(tmp_path: Path) -> None:
    path = saved(Net(), tmp_path / "w")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(Net(), path, strict=False)


def test_missing_entries_without_values_are_named(tmp_path: Path) -> None:
    """Missing entries are named. torch would compute arbitrary numbers with weights on the meta device."""
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    torch.save({name: tensor for name, tensor in state.items() if name != "1.weight"}, tmp_path / "w.pt")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    says = r"1 missing entries are on the meta device and have no values \(1.weight\)"
    with pytest.raises(ConfigError, match="left on the meta device, without values"):
        checkpoint.load(make, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=says):
        assert checkpoint.load(make, tmp_path / "w.pt", strict=False)[1].weight.is_meta
    with pytest.warns(UserWarning) as told:
        checkpoint.load(make(), tmp_path / "w.pt", strict=False)
    assert "meta" not in str(told[0].message)


def test_a_report_of_many_missing_entries_is_quick() -> None:
    """It took 7 s when each name was looked up in a list."""
    with torch.device("meta"):
        own = {f"layers.{number}.weight": torch.empty(1) for number in range(20_000)}
    report = KeyReport.compare(nn.Identity(), own, {}, Path("w"), {})
    begun = time.monotonic()
    assert "20000 missing entries are on the meta device" in report.text(strict=False)
    assert time.monotonic() - begun < 1
