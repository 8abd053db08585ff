"""The caches of diffusers that look a block's class up, before an install and after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing

diffusers = pytest.importorskip("diffusers")


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
        for step in (0.5, 0.5, 0.1):  # the second is the first again: the blocks after it are skipped
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


def test_enabled_before_the_install(provider: Provider) -> None:
    installed, plain = model(), model()
    plain.load_state_dict(installed.state_dict())
    testing.move(plain, provider.device, torch.bfloat16)
    for each in (installed, plain):
        each.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    provider.install(installed, dtype=torch.bfloat16, budget="minimum")
    testing.assert_bit_equal(steps(installed, provider), steps(plain, provider), "outputs")


def test_enabled_after_the_install(provider: Provider) -> None:
    """As docs/libraries.md says. If this passes some day, it has to say so."""
    installed = model()
    provider.install(installed)
    with pytest.raises(ValueError, match="not registered"):
        installed.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
