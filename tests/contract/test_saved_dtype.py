"""`save_pretrained` writes the masters, and their dtype instead of that of the compute."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing


class Saves(nn.Module):
    """A model that reads `dtype` when libraries do: when it saves, and when it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.device, self.dtype))  # type: ignore[no-any-return]

    def save_pretrained(self, sample: torch.Tensor, *, fails: bool = False) -> dict[str, Any]:
        if fails:
            raise OSError("no space left")
        return {
            "dtype": self.dtype,
            "state": {name: t.dtype for name, t in self.state_dict().items()},
            "asked": _asker(self),
            "sample": self(sample.to(self.device)).detach(),
        }


class Derived(Saves):
    def save_pretrained(self, sample: torch.Tensor, **options: Any) -> dict[str, Any]:
        """Call the base's method, and read `dtype` after it."""
        return {**super().save_pretrained(sample, **options), "then": self.dtype}


def _library() -> Any:
    """Return a module that counts as a part of transformers and reads a model's first parameter."""
    module: Any = types.ModuleType("transformers.made_up")
    code = "def first(m):\n    return next(m.parameters()).device, next(m.parameters()).dtype"
    exec(compile(code, "made_up.py", "exec"), module.__dict__)
    return module


_asker = _library().first


@pytest.mark.parametrize("cls", [Saves, Derived], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_dtype_that_is_saved_is_the_masters(
    provider: Provider, cls: type[Saves], dtype: torch.dtype
) -> None:
    model = cls()
    moved, handle = provider.pair(model, dtype)
    x = provider.randn(2, 4, dtype=torch.float32)
    for _ in range(2):
        saved = model.save_pretrained(x)
        assert {saved["dtype"], saved.get("then", torch.float32), *saved["state"].values()} == {torch.float32}
        assert saved["asked"] == (provider.device, torch.float32)
        testing.assert_bit_equal(saved["sample"], moved(x).detach(), "what is computed while it is saved")
        assert (model.device, model.dtype) == (provider.device, dtype)
    assert type(model).save_pretrained.__doc__ == cls.save_pretrained.__doc__
    handle.uninstall()
    assert "save_pretrained" not in vars(model) and model.save_pretrained(x)["dtype"] == torch.float32


def test_after_a_save_that_fails(provider: Provider) -> None:
    model = Saves()
    provider.install(model, dtype=torch.float64)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(torch.ones(2, 4), fails=True)
    assert model.dtype == torch.float64


def test_a_part_that_is_saved_by_its_owner(provider: Provider) -> None:
    """A part has the masters' dtype while its owner saves, as in pipelines and sentence_transformers."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Saves()

        def save_pretrained(self) -> torch.dtype:
            return self.part.dtype

    model = Owner()
    provider.install(model, dtype=torch.float64)
    assert model.save_pretrained() == torch.float32
    assert model.part.dtype == torch.float64


def test_a_property_that_keeps_its_answer_from_a_save(provider: Provider) -> None:
    class Keeps(Saves):
        kept: torch.dtype | None = None

        @property
        def dtype(self) -> torch.dtype:
            if self.kept is None:
                self.kept = next(self.parameters()).dtype
            return self.kept

    model = Keeps()
    provider.install(model, dtype=torch.float64)
    x = torch.ones(2, 4)
    for _ in range(2):
        assert model.save_pretrained(x)["dtype"] == torch.float32
        assert model.dtype == torch.float64
    dynswap_ext.uninstall(model)
    assert model.dtype == torch.float32
