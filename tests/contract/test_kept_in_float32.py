"""Weights that a library keeps in float32 stay so in half precision. See Note [Kept in float32]."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Linear(8, 8)
        self.proj = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x).to(self.norm1.weight.dtype)
        return self.norm1(x).to(self.proj.weight.dtype) * self.scale + self.table


class OfDiffusers(nn.Module):
    """A model as in diffusers, where a weight is kept if one part of its dotted name is in the list."""

    _keep_in_fp32_modules: ClassVar[Any] = ["norm1", "table"]
    KEPT: ClassVar[dict[torch.dtype, set[str]]] = {
        torch.bfloat16: {"norm1.weight", "norm1.bias", "table"},
        torch.float16: {"norm1.weight", "norm1.bias", "table"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.proj.weight.dtype))
        return x


class OfTransformers(OfDiffusers):
    """A model as in transformers, which searches names for patterns: one list for float16, one for both."""

    _keep_in_fp32_modules: ClassVar[Any] = {"norm"}
    _keep_in_fp32_modules_strict: ClassVar[Any] = {"layers.*.scale"}
    KEPT: ClassVar[dict[torch.dtype, set[str]]] = {
        torch.bfloat16: {"scale"},
        torch.float16: {"scale", "norm1.weight", "norm1.bias"},
    }


def cast(model: OfDiffusers, device: torch.device, dtype: torch.dtype) -> OfDiffusers:
    """Return the model as `from_pretrained` would load it in `dtype`."""
    moved = testing.moved(model, device, None)
    for layer, own in zip(moved.layers, model.layers, strict=True):
        for name, master in (*own.named_parameters(), *own.named_buffers()):
            if name not in model.KEPT.get(dtype, ()):
                owner, _, leaf = name.rpartition(".")
                value = layer.get_submodule(owner)
                getattr(value, leaf).data = master.detach().to(device, dtype)
    return moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("made", [OfDiffusers, OfTransformers])
def test_it_computes_as_it_was_loaded(
    provider: Provider, made: type[OfDiffusers], dtype: torch.dtype
) -> None:
    model = made().eval()
    loaded = cast(model, provider.device, dtype)
    handle = provider.install(model, dtype=dtype)
    x = provider.randn(3, 8, dtype=dtype)
    for _ in range(2):
        testing.assert_bit_equal(model(x), loaded(x))
    for layer, other in zip(model.layers, loaded.layers, strict=True):
        for (name, master), value in zip(layer.named_parameters(), other.parameters(), strict=True):
            owner, _, leaf = name.rpartition(".")
            assert master.dtype == torch.float32
            assert getattr(layer.get_submodule(owner), leaf).dtype == value.dtype, name
    assert model.dtype == loaded.dtype
    cast_or_moved = [
        m
        for layer in model.layers
        for name, m in (*layer.named_parameters(), *layer.named_buffers())
        if provider.device.type != "cpu" or name not in made.KEPT.get(dtype, ())
    ]
    assert handle.stats().bytes_moved >= sum(m.nbytes for m in cast_or_moved)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("made", [OfDiffusers, OfTransformers])
def test_a_graph_computes_so_too(provider: Provider, made: type[OfDiffusers]) -> None:
    model = made()
    loaded = cast(model, provider.device, torch.bfloat16)
    provider.install(model, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = provider.randn(3, 8, dtype=torch.bfloat16)
    for each in (compiled, loaded):
        each(x).float().pow(2).sum().backward()
    for (name, master), value in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert master.grad is not None and value.grad is not None
        testing.assert_bit_equal(master.grad, value.grad.to("cpu", torch.float32), name)
    testing.assert_bit_equal(compiled(x), loaded(x))


def test_it_stays_so_for_other_masters_and_new_plans(provider: Provider) -> None:
    model = OfDiffusers().eval()
    provider.install(model, dtype=torch.bfloat16)
    x = provider.randn(3, 8, dtype=torch.bfloat16)
    model(x)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    loaded = cast(model, provider.device, torch.bfloat16)
    for _ in range(3):
        testing.assert_bit_equal(model(x), loaded(x))
    model.half()  # a new plan; what is kept is as wide as float32 again
    for _ in range(2):
        model(x)
        assert model.layers[0].norm1.weight.dtype == torch.float32
        assert model.layers[0].proj.weight.dtype == torch.bfloat16


def test_gradients_reach_masters(provider: Provider) -> None:
    model = OfDiffusers()
    loaded = cast(model, provider.device, torch.bfloat16)
    provider.install(model, dtype=torch.bfloat16)
    x = provider.randn(3, 8, dtype=torch.bfloat16)
    for each in (model, loaded):
        each(x).float().pow(2).sum().backward()
    for (name, master), value in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert master.grad is not None and master.grad.dtype == torch.float32
        testing.assert_bit_equal(master.grad, value.grad.to("cpu", torch.float32), name)  # type: ignore[union-attr]


def test_a_list_that_an_instance_gave_is_followed(provider: Provider) -> None:
    model = nn.Sequential(OfDiffusers(), Layer()).eval()
    model[0]._keep_in_fp32_modules = "scale"
    provider.install(model, dtype=torch.bfloat16)
    assert model[0].layers[1].scale.dtype == torch.float32
    assert model[0].layers[1].norm1.weight.dtype == torch.bfloat16
    assert model[1].scale.dtype == torch.bfloat16  # a plain module


class SomeRotaryEmbedding(nn.Module):
    """A rotary embedding as in transformers, known by the name of its class or of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("full_attention_freqs", "inv_freq"):
            self.register_buffer(name, torch.randn(4), persistent=False)
        self.register_buffer("saved", torch.randn(4))


class OtherRotaryEmbedding(SomeRotaryEmbedding):
    """A class of a checkpoint's own code, whose tables are in the dtype that is asked for."""


SomeRotaryEmbedding.__module__ = "transformers.models.some.modeling_some"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_of_rotary_embeddings(provider: Provider, dtype: torch.dtype) -> None:
    """Frequencies stay in float32, since `from_pretrained` does not cast what is in no checkpoint.

    In a plain model they are cast.
    """
    for kind in (OfDiffusers, OfTransformers):
        model = nn.Sequential(kind(), SomeRotaryEmbedding()).eval()
        model[0].rotary = SomeRotaryEmbedding()
        model[0].register_buffer("vision_inv_freq", torch.randn(4), persistent=False)
        model[0].register_buffer("positions", torch.randn(4), persistent=False)
        provider.install(model, dtype=dtype)
        rotary, plain = model[0].rotary, model[1]
        assert rotary.full_attention_freqs.dtype == rotary.inv_freq.dtype == torch.float32
        assert model[0].vision_inv_freq.dtype == torch.float32
        assert model[0].positions.dtype == rotary.saved.dtype == dtype
        assert plain.full_attention_freqs.dtype == plain.inv_freq.dtype == dtype


def test_tables_of_code_in_a_checkpoint_are_cast(provider: Provider) -> None:
    """Tables of a checkpoint's own code are cast, except `inv_freq`, which such code casts itself."""
    model = OfTransformers().eval()
    model.rotary = OtherRotaryEmbedding()
    provider.install(model, dtype=torch.bfloat16)
    assert model.rotary.full_attention_freqs.dtype == torch.bfloat16
    assert model.rotary.inv_freq.dtype == torch.float32
