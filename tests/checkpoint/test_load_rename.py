"""checkpoint.load(rename=...), and errors that name the rule that would help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sample_loads import SharedWeight
from torch import nn

from dynswap_ext import checkpoint, testing
from dynswap_ext.errors import ConfigError
from sample_models import mlp


def given_rule(text: str) -> dict[str, str]:
    """Return the rule that an error's text suggests."""
    match = re.search(r"rename=(\{.*\})", text)
    assert match is not None, text
    rule = eval(match[1])
    assert isinstance(rule, dict)
    return rule


@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"model.{name}",
        lambda name: f"model.diffusion_model.{name}",
        lambda name: re.sub(r"^(\d+)\.", r"\1._orig_mod.", name),
    ],
    ids=["module", "_orig_mod", "model", "deep", "inner"],
)
@pytest.mark.parametrize("missing", [0, 1])
def test_a_wrappers_prefix_is_noticed_and_the_rule_given_works(change, missing: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = mlp(layers=4)
    state = {change(name): value for name, value in source.state_dict().items()}
    if missing:
        del state[change("2.bias")]
        state["unrelated"] = torch.ones(1)
    save_file(state, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"The keys of the file (begin with|have) '") as caught:
        checkpoint.load(lambda: mlp(layers=4), tmp_path / "w")
    rule = given_rule(str(caught.value))
    if missing:
        with pytest.raises(ConfigError) as caught:
            checkpoint.load(lambda: mlp(layers=4), tmp_path / "w", rename=rule)
        assert "missing (in the model, not in the file): 1\n    2.bias" in str(caught.value)
        return
    model = checkpoint.load(lambda: mlp(layers=4), tmp_path / "w", rename=rule)
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.state_dict()), "state")


def test_a_prefix_that_the_model_has(tmp_path: Path) -> None:
    source = mlp()
    save_file(source.state_dict(), tmp_path / "w")

    def wrapped() -> nn.Module:
        return nn.ModuleDict({"backbone": mlp()})

    with pytest.raises(ConfigError, match=r"keys of the model begin with 'backbone\.'.*submodule") as caught:
        checkpoint.load(wrapped, tmp_path / "w")
    model = checkpoint.load(wrapped, tmp_path / "w", rename=given_rule(str(caught.value)))
    testing.assert_bit_equal(dict(model["backbone"].state_dict()), dict(source.state_dict()), "state")


def test_a_function_may_leave_entries_out(tmp_path: Path) -> None:
    source = mlp()
    ema = {f"ema.{name}": torch.zeros_like(value) for name, value in source.state_dict().items()}
    save_file(
        {**ema, **{f"net.{name}": value for name, value in source.state_dict().items()}}, tmp_path / "w"
    )
    model = checkpoint.load(
        mlp, tmp_path / "w", rename=lambda name: name[4:] if name.startswith("net.") else None
    )
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.state_dict()), "state")


def test_errors_have_both_names(tmp_path: Path) -> None:
    state = {"blocks.0.w": torch.ones(4, 5), "blocks.0.b": torch.ones(4), "blocks.1.wieght": torch.ones(4, 4)}
    save_file(state, tmp_path / "w")
    rules = [(r"^blocks\.", ""), (r"w$", "weight"), (r"b$", "bias")]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))

    with pytest.raises(ConfigError) as caught:
        checkpoint.load(make, tmp_path / "w", rename=rules)
    text = str(caught.value)
    assert "0.weight (blocks.0.w in the file): the model has [4, 4], the file [4, 5]" in text
    assert "1.weight  (the file has 1.wieght (blocks.1.wieght in the file))" in text
    assert "    1.wieght (blocks.1.wieght in the file)" in text


def test_two_entries_for_one_name_leave_the_model(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}, tmp_path / "w")
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(ConfigError, match=r"'weight', to two entries, 'a\.weight' and 'b\.weight'"):
        checkpoint.load(model, tmp_path / "w", rename={r"^[ab]\.": ""})


def test_a_tie_that_only_the_file_has(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    tied = Net()
    tied.b.weight = tied.a.weight
    torch.save(tied.state_dict(), tmp_path / "w")
    model = checkpoint.load(Net, tmp_path / "w")
    assert model.a.weight is not model.b.weight and model.a.weight.data_ptr() == model.b.weight.data_ptr()


def test_entries_that_a_rename_ties_and_that_differ(tmp_path: Path) -> None:
    save_file({"x.weight": torch.zeros(3, 3), "b.weight": torch.ones(3, 3)}, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"a\.weight and b\.weight.*two different ones.*rename="):
        checkpoint.load(SharedWeight, tmp_path / "w", rename={"^x": "a"})
    model = checkpoint.load(
        SharedWeight, tmp_path / "w", rename=lambda name: name if name[0] == "b" else None
    )
    assert model.a.weight is model.b.weight and model.a.weight.sum() == 9
