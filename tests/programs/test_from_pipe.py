"""`from_pipe` of diffusers: a second pipeline over the components of an installed one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from programs import seeded
from test_diffusers import PROMPT, diffusers, models_of
from test_pipelines import image, made


def moved(pipe: Any, provider: Provider) -> Any:
    plain = copy.deepcopy(pipe)
    for model in models_of(plain).values():
        model.to(provider.device)
    return plain


def from_an_image(pipe: Any, provider: Provider) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    start = provider.randn(1, 3, 32, 32, dtype=torch.float32).sigmoid()
    seeded()
    images: torch.Tensor = pipe(PROMPT, image=start, num_inference_steps=4, output_type="pt").images
    return images


def by_class(pipe: Any, **options: Any) -> Any:
    return diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe, **options)


def by_task(pipe: Any, **options: Any) -> Any:
    return diffusers.AutoPipelineForImage2Image.from_pipe(pipe, **options)


@pytest.mark.parametrize("other", [by_class, by_task])
def test_the_same_components(provider: Provider, other: Callable[..., Any]) -> None:
    """A second pipeline takes installed components.

    diffusers compares their classes with the expected ones.
    """
    pipe = made("StableDiffusion")
    plain = moved(pipe, provider)
    handle = provider.install(pipe)
    images = []
    for each in (pipe, plain):
        made_of_it = other(each)
        assert models_of(made_of_it) == models_of(each) and not isinstance(made_of_it, type(each))
        back = diffusers.StableDiffusionPipeline.from_pipe(made_of_it)
        images.append((from_an_image(made_of_it, provider), image(back, "StableDiffusion")))
    testing.assert_bit_equal(*images, "images")
    assert handle.active and dynswap_ext.is_installed(pipe)


@pytest.mark.parametrize(("stored", "asked"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_another_dtype(provider: Provider, stored: torch.dtype, asked: torch.dtype | None) -> None:
    """`from_pipe` casts shared components to the dtype that is given, or else to float32."""
    pipe = made("StableDiffusion").to(stored)
    plain = moved(pipe, provider)
    handle = provider.install(pipe)
    options = {} if asked is None else {"dtype": asked}
    images = [from_an_image(by_class(each, **options), provider) for each in (pipe, plain)]
    testing.assert_bit_equal(*images, "image")
    assert {p.dtype for p in pipe.unet.parameters()} == {asked or torch.float32}
    assert handle.active and dynswap_ext.is_installed(pipe)


@pytest.mark.parametrize("again", [False, True], ids=["moved", "installed"])
def test_one_more_component(provider: Provider, again: bool) -> None:
    """A second pipeline has a ControlNet more, which is moved, or installed with that pipeline."""
    pipe = made("StableDiffusion")
    controlnet = diffusers.ControlNetModel.from_unet(
        pipe.unet, conditioning_embedding_out_channels=(16, 32)
    ).eval()
    for parameter in controlnet.parameters():  # its last layers are zeros
        torch.nn.init.normal_(parameter, std=0.1)
    plain, control = moved(pipe, provider), copy.deepcopy(controlnet).to(provider.device)
    first = provider.install(pipe)
    cls = diffusers.StableDiffusionControlNetPipeline
    expected = from_an_image(cls.from_pipe(plain, controlnet=control), provider)
    other = cls.from_pipe(pipe, controlnet=controlnet)
    if again:
        provider.install(other)
    else:
        controlnet.to(provider.device)
    testing.assert_bit_equal(from_an_image(other, provider), expected, "image")
    assert first.active != again and dynswap_ext.is_installed(pipe)
    assert dynswap_ext.is_installed(controlnet) == again
