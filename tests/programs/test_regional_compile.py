"""`compile_repeated_blocks` of diffusers: one graph for the blocks of a class, also with streamed weights."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider, needs_inductor
from dynswap_ext import testing
from programs import bytes_of, library, seeded

diffusers = library("diffusers")
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def transformer() -> Any:
    seeded()
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def output(model: Any, provider: Provider) -> torch.Tensor:
    tensors = {
        "hidden_states": (1, 8, 16),
        "encoder_hidden_states": (1, 4, 32),
        "pooled_projections": (1, 32),
    }
    inputs = {
        name: provider.randn(*shape, dtype=torch.float64, seed=seed)
        for seed, (name, shape) in enumerate(tensors.items())
    }
    ids = {"img_ids": torch.zeros(8, 3), "txt_ids": torch.zeros(4, 3)}
    inputs |= {name: tensor.to(provider.device) for name, tensor in ids.items()}
    timestep = torch.tensor([0.5], dtype=torch.float64, device=provider.device)
    with torch.no_grad():
        return model(**inputs, timestep=timestep, return_dict=False)[0]  # type: ignore[no-any-return]


def assert_graphs_are_the_plain_models(provider: Provider, first: str, backend: str) -> None:
    model = transformer()
    plain = testing.moved(model, provider.device, torch.float64)
    plain.compile_repeated_blocks(fullgraph=True, backend=backend)
    expected, graphs = output(plain, provider), compiled_graphs()
    assert graphs > 0
    torch._dynamo.reset()
    if first == "compile":
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
    size = 2 * bytes_of(model)  # in float64
    handle = provider.install(model, dtype=torch.float64, budget=size // 2)
    if first == "install":
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
    testing.assert_bit_equal(output(model, provider), expected, "output")
    assert compiled_graphs() == 2 * graphs
    for budget in (None, size // 3, int(0.8 * size), 2 * size):
        handle.retune(budget)
        for _ in range(3):
            testing.assert_bit_equal(output(model, provider), expected, "output")
    assert compiled_graphs() == 2 * graphs and dynswap_ext.is_installed(model)


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("first", ["install", "compile"])
def test_one_graph_for_all_blocks(provider: Provider, first: str) -> None:
    torch._dynamo.utils.counters.clear()
    assert_graphs_are_the_plain_models(provider, first, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor(provider: Provider) -> None:
    needs_inductor(provider)
    torch._dynamo.utils.counters.clear()
    assert_graphs_are_the_plain_models(provider, "install", "inductor")
