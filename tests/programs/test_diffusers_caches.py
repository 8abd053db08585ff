"""Features of diffusers that look a block's class up work before an install and after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing

diffusers = pytest.importorskip("diffusers")
hooks = pytest.importorskip("diffusers.hooks")


def model() -> nn.Module:
    made: nn.Module = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return made.eval()


def steps(of: nn.Module, provider: Provider) -> list[torch.Tensor]:
    def drawn(*shape: int) -> torch.Tensor:
        return provider.randn(*shape, dtype=torch.bfloat16)

    made = []
    with torch.no_grad(), of.cache_context("one"):
        for step in (0.5, 0.3, 0.1):
            output = of(
                hidden_states=drawn(1, 16, 4),
                encoder_hidden_states=drawn(1, 8, 32),
                pooled_projections=drawn(1, 32),
                timestep=torch.tensor([step], device=provider.device),
                img_ids=torch.zeros(16, 3, device=provider.device),
                txt_ids=torch.zeros(8, 3, device=provider.device),
            )
            made.append(output.sample)
    return made


CACHES = {
    "FirstBlockCache": lambda: diffusers.FirstBlockCacheConfig(threshold=100.0),
    "MagCache": lambda: diffusers.MagCacheConfig(
        mag_ratios=torch.ones(3), num_inference_steps=3, retention_ratio=0.1
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("cache", CACHES)
def test_enabled_around_the_install(provider: Provider, cache: str, when: str) -> None:
    installed, plain = model(), model()
    plain.load_state_dict(installed.state_dict())
    testing.move(plain, provider.device, torch.bfloat16)
    plain.enable_cache(CACHES[cache]())
    if when == "before":
        installed.enable_cache(CACHES[cache]())
    provider.install(installed, dtype=torch.bfloat16, budget="minimum")
    if when == "after":
        installed.enable_cache(CACHES[cache]())
    expected = steps(plain, provider)
    testing.assert_bit_equal(steps(installed, provider), expected, "outputs")
    plain.disable_cache()
    assert not torch.equal(steps(plain, provider)[1], expected[1])  # the cache had an effect


def test_layers_that_are_skipped(provider: Provider) -> None:
    installed, plain = model(), model()
    plain.load_state_dict(installed.state_dict())
    testing.move(plain, provider.device, torch.bfloat16)
    provider.install(installed, dtype=torch.bfloat16, budget="minimum")
    whole = steps(plain, provider)
    for each in (installed, plain):
        hooks.apply_layer_skip(each, hooks.LayerSkipConfig(indices=[1], fqn="transformer_blocks"))
    expected = steps(plain, provider)
    testing.assert_bit_equal(steps(installed, provider), expected, "outputs")
    assert not torch.equal(whole[0], expected[0])
