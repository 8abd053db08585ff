"""Pipelines of diffusers with LoRA loaded from a file, before the install and after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Provider
from programs import library, seeded
from test_diffusers import PROMPT, components_moved_to, stable_diffusion, stable_diffusion_pipeline
from ways import MAPPED, WAYS, Way, beside_plain

diffusers = library("diffusers")
peft = library("peft")

FILE = "lora.safetensors"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A folder with a file of LoRA for a pipeline's UNet and text encoder."""
    components = stable_diffusion()
    layers = {}
    for part, targets in {"unet": ["to_q", "to_v"], "text_encoder": ["q_proj", "v_proj"]}.items():
        components[part].add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        layers[f"{part}_lora_layers"] = peft.get_peft_model_state_dict(components[part])
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path, weight_name=FILE, **layers)
    return tmp_path


def pipeline() -> Any:
    made = stable_diffusion_pipeline(**stable_diffusion())
    made.set_progress_bar_config(disable=True)
    return made


def image(pipe: Any) -> torch.Tensor:
    seeded()
    made = pipe(PROMPT, height=16, width=16, num_inference_steps=2, output_type="pt").images
    assert made.isfinite().all()
    return made


def images(provider: Provider, pipe: Any) -> Iterator[torch.Tensor]:
    """Images with an adapter that is loaded: at its own scale, at a smaller one, fused, without."""
    components_moved_to(provider, pipe)
    yield image(pipe)
    pipe.set_adapters(["red"], adapter_weights=[0.5])
    yield image(pipe)
    pipe.fuse_lora(adapter_names=["red"])
    yield image(pipe)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    yield image(pipe)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_loaded_before_the_install(provider: Provider, way: Way, lora: Path, tmp_path: Path) -> None:
    def make() -> Any:
        made = pipeline()
        made.load_lora_weights(lora, weight_name=FILE, adapter_name="red")
        return made

    seen = beside_plain(
        provider,
        way,
        tmp_path,
        make,
        lambda pipe: list(images(provider, pipe)),
        lambda pipe: pipe.unet,
        moved=True,
    )
    assert not any(a.equal(b) for a, b in itertools.pairwise(seen))


def test_loaded_after_the_install(provider: Provider, lora: Path, tmp_path: Path) -> None:
    def program(pipe: Any) -> list[torch.Tensor]:
        for name in ("blue", "red"):
            pipe.load_lora_weights(lora, weight_name=FILE, adapter_name=name)
        return list(images(provider, pipe))

    beside_plain(provider, MAPPED, tmp_path, pipeline, program, lambda pipe: pipe.unet, moved=True)
