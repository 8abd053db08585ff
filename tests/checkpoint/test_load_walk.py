"""checkpoint.load calls the same hooks and methods as load_state_dict, in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynswap_ext import checkpoint, testing
from dynswap_ext.checkpoint.loading.walk import load_state
from sample_models import ConvNet, mlp


class Versioned(nn.Linear):
    _version = 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Any] = []
        self.state: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        self.seen.append((prefix, local.get("version"), local.get("assign_to_params_buffers"), sorted(state)))
        super()._load_from_state_dict(state, prefix, local, *rest)

    def get_extra_state(self) -> Any:
        return {"of": self.in_features}

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.own = nn.Parameter(torch.randn(2))
        self.none: nn.Parameter | None
        self.register_parameter("none", None)
        self.nested = nn.ModuleDict({"a": Versioned(2, 3), "norm": nn.BatchNorm1d(3), "empty": nn.ReLU()})
        self.nested.register_load_state_dict_pre_hook(
            lambda m, state, prefix, local, strict, missing, unexpected, errors: self.log.append(
                ("before", prefix, sorted(state), strict)
            )
        )
        self.register_load_state_dict_post_hook(
            lambda m, keys: self.log.append(
                ("after", sorted(keys.missing_keys), sorted(keys.unexpected_keys))
            )
        )
        self.again = self.nested["a"]
        nn.utils.parametrizations.orthogonal(self.nested["a"])


def state_of(net: nn.Module, change: str) -> Any:
    state = net.state_dict()
    if change == "keys":
        del state["own"], state["nested.norm.weight"]
        state.update({"more": torch.ones(1), "nested.x.y": torch.ones(1), "nested.norm.z": torch.ones(1)})
    elif change == "shape":
        state["nested.norm.weight"] = torch.ones(7)
    elif change == "scalar":
        state["nested.norm.num_batches_tracked"] = torch.ones(1, dtype=torch.int64)
    elif change == "no metadata":
        return dict(state)
    elif change == "None":
        state["none"] = torch.ones(1)
    elif change == "no tensor":
        state["own"] = 3
    return state


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("change", ["nothing", "keys", "shape", "scalar", "no metadata", "None", "no tensor"])
def test_as_torch_does(change: str, assign: bool) -> None:
    source, ours, theirs = Net(), Net(), Net()
    theirs.load_state_dict(ours.state_dict())
    for net in (ours, theirs):
        net.log.clear()
        net.nested["a"].seen.clear()
    try:
        said = theirs.load_state_dict(state_of(source, change), strict=False, assign=assign)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as caught:
            load_state(ours, state_of(source, change), assign=assign)
        texts = str(caught.value).split("\n  ")[1:]
        assert texts and all(text in str(error) for text in texts)
    else:
        found = load_state(ours, state_of(source, change), assign=assign)
        assert found == (said.missing_keys, said.unexpected_keys)
    assert ours.log == theirs.log and len(ours.log) == 2
    assert ours.nested["a"].seen == theirs.nested["a"].seen and len(ours.nested["a"].seen) == 2
    assert ours.nested["a"].state == theirs.nested["a"].state
    tensors = [
        {k: v for k, v in n.state_dict().items() if isinstance(v, torch.Tensor)} for n in (ours, theirs)
    ]
    testing.assert_bit_equal(*tensors, "state")


def test_parametrized_and_versioned_modules_through_a_file(tmp_path: Path) -> None:
    source = Net()
    torch.save(source.state_dict(), tmp_path / "w")
    model = checkpoint.load(Net(), tmp_path / "w")
    assert torch.equal(model.nested["a"].weight, source.nested["a"].weight)
    assert model.nested["a"].state == {"of": 2}
    assert model.nested["a"].seen[0][1] == 3


def test_a_model_with_its_own_load_state_dict(tmp_path: Path) -> None:
    class Own(nn.Sequential):
        called = 0

        def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
            Own.called += 1
            return super().load_state_dict({f"0.{k}": v for k, v in state.items()}, *args, **options)

    source = nn.Linear(3, 3)
    torch.save(source.state_dict(), tmp_path / "w")
    for assign in (True, False):
        model = checkpoint.load(Own(nn.Linear(3, 3)), tmp_path / "w", assign=assign)
        testing.assert_bit_equal(model[0].weight.detach(), source.weight.detach())
    assert Own.called == 2


def test_a_counter_that_early_files_lack(tmp_path: Path) -> None:
    source = ConvNet()
    state = {name: value for name, value in source.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "w")
    for options in ({"assign": False}, {"dtype": torch.float64}, {}):
        model = checkpoint.load(ConvNet(), tmp_path / "w", **options)  # type: ignore[arg-type]
        assert model.state_dict().keys() == source.state_dict().keys()


class Key(str):
    """A name that counts how often its beginning is compared."""

    __slots__ = ()
    looks = 0

    def startswith(self, *args: Any) -> bool:
        Key.looks += 1
        return super().startswith(*args)


@pytest.mark.parametrize("assign", [True, False])
def test_names_are_looked_at_once_a_level(assign: bool) -> None:
    source, model = mlp(features=1, layers=300), mlp(features=1, layers=300)
    state = {Key(name): value for name, value in source.state_dict().items()}
    Key.looks = 0
    assert load_state(model, state, assign=assign) == ([], [])
    assert 0 < Key.looks <= 3 * len(state)  # torch: 300 times
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.state_dict()), "state")
