"""Modular pipelines of diffusers, and the manager of their components, installed by one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider, accelerate_knows
from dynswap_ext import testing
from programs import seeded, word_tokenizer
from test_diffusers import PROMPT, diffusers, models_of, stable_diffusion_xl


def made() -> tuple[Any, Any]:
    """Return a manager, and a pipeline over its components."""
    manager = diffusers.ComponentsManager()
    blocks = diffusers.modular_pipelines.StableDiffusionXLAutoBlocks()
    pipe = blocks.init_pipeline(components_manager=manager, collection="xl")
    scheduler = diffusers.EulerDiscreteScheduler()
    tokenizers = {"tokenizer": word_tokenizer(), "tokenizer_2": word_tokenizer()}
    pipe.update_components(**stable_diffusion_xl(), **tokenizers, scheduler=scheduler)
    return manager, pipe


def image(pipe: Any) -> torch.Tensor:
    seeded()
    sizes = {"height": 32, "width": 32, "num_inference_steps": 3}
    images: torch.Tensor = pipe(prompt=PROMPT, **sizes, output="images", output_type="pt")
    return images


def expected(provider: Provider) -> torch.Tensor:
    _, plain = made()
    return image(plain.to(provider.device))


@pytest.mark.parametrize("given", ["manager", "pipeline"])
def test_all_components_within_one_budget(provider: Provider, given: str) -> None:
    plain = expected(provider)
    manager, pipe = made()
    handle = provider.install(manager if given == "manager" else pipe, budget="300KiB")
    for _ in range(2):
        testing.assert_bit_equal(image(pipe), plain, "image")
    assert pipe._execution_device == provider.device
    assert all(map(dynswap_ext.is_installed, models_of(pipe).values()))
    assert handle.stats().overflow_bytes == 0
    dynswap_ext.uninstall(manager)
    assert not handle.active and not any(map(dynswap_ext.is_installed, models_of(pipe).values()))


@pytest.mark.parametrize("first", [True, False], ids=["install first", "offload first"])
def test_beside_the_managers_own_offloading(provider: Provider, first: bool) -> None:
    """Installed components stay where they compute; the manager moves the others, and decides which."""
    accelerate_knows(provider)
    if provider.device.type == "cpu":
        pytest.skip("the manager asks the device for its free memory, and diffusers knows none of the CPU's")
    plain = expected(provider)
    manager, pipe = made()
    seen: list[set[str]] = []

    def all_but_installed(hooks: Any, model_id: str, model: Any, execution_device: Any) -> Any:
        movable = [hook for hook in hooks if not dynswap_ext.is_installed(hook.model)]
        seen.append({hook.model_id.rpartition("_")[0] for hook in movable})
        return movable

    def offload() -> None:
        manager.enable_auto_cpu_offload(device=provider.device, offload_strategy=all_but_installed)

    if not first:
        offload()
    handle = provider.install(pipe.unet)
    if first:
        offload()
    masters = [p.device for p in pipe.unet.parameters()]
    for _ in range(2):
        testing.assert_bit_equal(image(pipe), plain, "image")
    assert seen and all("unet" not in names for names in seen) and any(seen)
    assert [p.device for p in pipe.unet.parameters()] == masters and handle.stats().bytes_moved > 0
    assert next(pipe.vae.parameters()).device == provider.device  # it ran last
    assert {p.device.type for p in pipe.text_encoder.parameters()} == {"cpu"}
    manager.disable_auto_cpu_offload()
    testing.assert_bit_equal(image(pipe.to(provider.device)), plain, "image")
    assert handle.active
