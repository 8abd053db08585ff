"""checkpoint.init_empty: a skeleton without weights, which `load` completes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynswap_ext import checkpoint
from dynswap_ext.checkpoint.loading import skeleton
from dynswap_ext.errors import ConfigError


class Rotary(nn.Module):
    """A model with buffers that no checkpoint holds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)
        self.register_buffer("real", torch.arange(3, device="cpu"), persistent=False)
        # Not `linspace`, which transformers replaces while it loads. If torch enters its first device context
        # then, it notes the replacement instead of the real function, which it never redirects afterwards.
        self.table = torch.arange(5) / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.angles + self.table.sum()


def saved(path: Path) -> Path:
    save_file(Rotary().state_dict(), path)
    return path


def test_nothing_is_allocated_and_the_rest_is_as_it_was() -> None:
    model = checkpoint.init_empty(lambda: Rotary(1 << 20))  # 4 TiB
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert model.linear.weight.shape == (1 << 20, 1 << 20)
    assert model.angles.is_meta and model.real.tolist() == [0, 1, 2]
    assert set(vars(model)) == set(vars(Rotary()))


def test_a_skeleton_equals_the_plain_meta_one() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(4, 4), nn.Embedding(5, 4, padding_idx=1),
            nn.MultiheadAttention(8, 2), nn.Transformer(8, 2, 1, 1, 8),
        )  # fmt: skip

    with torch.device("meta"):
        plain = make()
    model = checkpoint.init_empty(make)
    facts = [
        [
            (name, t.shape, t.dtype, t.stride(), t.requires_grad, type(t))
            for name, t in m.state_dict(keep_vars=True).items()
        ]
        for m in (model, plain)
    ]
    assert facts[0] == facts[1] and all(t.is_meta for t in model.state_dict().values())


def test_load_makes_what_no_checkpoint_holds(tmp_path: Path) -> None:
    reference = Rotary()
    save_file(reference.state_dict(), tmp_path / "w")
    model = checkpoint.init_empty(Rotary)
    x = torch.randn(2, 8)
    assert torch.equal(checkpoint.load(model, tmp_path / "w")(x), reference(x))


def test_what_is_remembered_is_not_kept_alive_or_shown(tmp_path: Path) -> None:
    model = checkpoint.init_empty(lambda: Rotary())  # a function that cannot be pickled
    reference = weakref.ref(model)
    assert set(vars(pickle.loads(pickle.dumps(model)))) == set(vars(Rotary()))
    assert skeleton.factory_of(copy.deepcopy(model)) is None
    with pytest.raises(ConfigError, match=r"angles, table.*init_empty"):
        checkpoint.load(copy.deepcopy(model), saved(tmp_path / "w"))
    del model
    gc.collect()
    assert reference() is None and not skeleton._factories


def test_initialisation_of_real_tensors_is_not_left_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.empty(4, device="cpu"))
            nn.init.constant_(self.noise, 3)

    assert checkpoint.init_empty(Net).noise.tolist() == [3] * 4
    assert nn.Linear(2, 2).weight.abs().sum() > 0  # nor is it after that


def test_less_work_than_on_the_meta_device_alone() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))

    with Count() as ours:
        checkpoint.init_empty(make)
    with Count() as torchs, torch.device("meta"):
        make()
    # Two tensors a layer, and nothing that would give them values.
    assert ours.calls <= 20 < torchs.calls


@pytest.mark.parametrize("factory", [3, nn.Linear(2, 2), lambda: 3])
def test_what_makes_no_module_is_refused(factory: object) -> None:
    with pytest.raises(ConfigError, match=r"init_empty|returned a int"):
        checkpoint.init_empty(factory)  # type: ignore[type-var]


def test_an_open_checkpoint_may_be_given(tmp_path: Path) -> None:
    opened = checkpoint.formats.open_checkpoint(saved(tmp_path / "w"))
    model = checkpoint.load(checkpoint.init_empty(Rotary), opened)
    assert model.linear.weight.data_ptr() == opened["linear.weight"].data_ptr()
    with pytest.raises(ConfigError, match="path is 3"):
        checkpoint.load(Rotary, 3)  # type: ignore[arg-type]
