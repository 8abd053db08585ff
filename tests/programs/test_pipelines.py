"""Whole pipelines of diffusers, installed by one call with one budget for all models."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import Provider
from dynswap_ext import testing
from programs import bytes_of, inference_dtype, seeded
from test_diffusers import (
    PIPELINES,
    PROMPT,
    diffusers,
    models_of,
    stable_diffusion_xl,
    stable_diffusion_xl_pipeline,
    transformers,
)

STEPS = 4


ALL = {
    **PIPELINES,
    "StableDiffusionXL": (stable_diffusion_xl, stable_diffusion_xl_pipeline, {"guidance_scale": 5.0}),
}


def made(name: str) -> Any:
    components, pipeline, _ = ALL[name]
    pipe = pipeline(**components())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def moved(pipe: Any, provider: Provider) -> Any:
    """Return a copy of the pipeline whose models were moved and cast."""
    moved: Any = copy.deepcopy(pipe)
    for model in models_of(moved).values():
        testing.move(model, provider.device, inference_dtype(provider))
    return moved


def image(pipe: Any, name: str, **options: Any) -> torch.Tensor:
    seeded()
    images: torch.Tensor = pipe(
        PROMPT, height=32, width=32, num_inference_steps=STEPS, output_type="pt", **ALL[name][2], **options
    ).images
    return images


def classes_and_masters(pipe: Any) -> list[Any]:
    """Return what an install changes, or must not.

    Attributes that libraries put into modules are left out.
    """
    modules = [module for model in models_of(pipe).values() for module in model.modules()]
    return [
        (type(module), "_dynswap" in vars(module), [*map(id, module._parameters.values())])
        for module in modules
    ]


def largest(pipe: Any, provider: Provider) -> int:
    """Return the bytes of the largest of the models on the device."""
    scale = 2 if inference_dtype(provider) else 1
    return scale * max(map(bytes_of, models_of(pipe).values()))


@pytest.mark.parametrize("name", ALL)
def test_one_budget_for_all_models(provider: Provider, name: str) -> None:
    pipe = made(name)
    plain = moved(pipe, provider)
    before = classes_and_masters(pipe)
    expected = image(plain, name)
    budget = int(0.6 * largest(pipe, provider))
    handle = provider.install(pipe, dtype=inference_dtype(provider), budget=budget)
    assert dynswap_ext.is_installed(pipe) and pipe._execution_device == provider.device
    rounds = []
    for _ in range(10):
        handle.reset_stats()
        testing.assert_bit_equal(image(pipe, name), expected, "image")
        rounds.append(handle.stats())
        assert rounds[-1].overflow_bytes == 0
        assert rounds[-1].peak_bytes <= budget
    # The order was learned in the first round, and the step from one round to the next in the second. How
    # much is prefetched when a round ends settles after a few more. It is then equal in all rounds, or
    # alternates, as a round begins with what the last one has left in the ring.
    if provider.native:
        assert rounds[-1].misses == 0 and rounds[-1].wasted_prefetches == 0
        assert [each.bytes_moved for each in rounds[-2:]] == [each.bytes_moved for each in rounds[-4:-2]]
    names = {weight for row in handle.report().rows for weight in row.names}
    assert {weight.partition(".")[0] for weight in names} == set(models_of(pipe))
    assert names >= {f"vae.{weight}" for weight, _ in pipe.vae.decoder.named_parameters("decoder")}
    assert dynswap_ext.uninstall(pipe) is pipe
    assert classes_and_masters(pipe) == before
    assert not handle.active and not dynswap_ext.is_installed(pipe)


def test_a_step_of_the_denoiser_moves_what_streams(provider: Provider) -> None:
    """Each step moves the transformer's streamed weights once; those of other models move once a round."""
    pipe = made("Flux")
    budget = int(0.4 * largest(pipe, provider))
    handle = provider.install(pipe, dtype=inference_dtype(provider), budget=budget)
    for _ in range(3):
        image(pipe, "Flux")
    handle.reset_stats()
    image(pipe, "Flux")
    moved_bytes = dict.fromkeys(models_of(pipe), 0)
    streamed = dict.fromkeys(models_of(pipe), 0)
    for row in handle.report().rows:
        model = row.names[0].partition(".")[0]
        moved_bytes[model] += row.bytes_moved
        if not row.resident and row.hits + row.misses:
            streamed[model] += row.bytes
    assert moved_bytes["transformer"] > 0.5 * STEPS * bytes_of(pipe.transformer) * (
        streamed["transformer"] / sum(row.bytes for row in handle.report().rows)
    )
    assert 0 < moved_bytes["text_encoder_2"] < moved_bytes["transformer"]
    assert handle.stats().peak_bytes <= budget


def stable_diffusion_with_long_prompts() -> Any:
    """Return a pipeline whose text encoder, which is called once an image, is as large as its denoiser."""
    parts = ALL["StableDiffusion"][0]()
    config = parts["text_encoder"].config
    config.num_hidden_layers, config.intermediate_size = 16, 1024
    wider = {**parts["unet"].config, "block_out_channels": (32, 64)}
    parts["unet"] = diffusers.UNet2DConditionModel.from_config(wider).eval()
    parts["text_encoder"] = transformers.CLIPTextModel(config).eval()
    pipe = ALL["StableDiffusion"][1](**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def by_model(pipe: Any, handle: dynswap_ext.Handle) -> dict[str, tuple[int, int]]:
    """Return each model's resident bytes on the device, and the bytes that were moved for it."""
    found = dict.fromkeys(models_of(pipe), (0, 0))
    for row in handle.report().rows:
        resident, moved_bytes = found[model := row.names[0].partition(".")[0]]
        found[model] = resident + row.bytes * row.resident, moved_bytes + row.bytes_moved
    return found


def test_residents_move_to_the_denoiser(provider: Provider) -> None:
    """The denoiser's weights, which each step uses, stay rather than those that an image uses once."""
    if not provider.native or not pretend_cuda.active():
        pytest.skip("copies take a known time on the pretend device alone, and pure Python spreads evenly")
    pipe = stable_diffusion_with_long_prompts()
    plain = moved(pipe, provider)
    expected = image(plain, "StableDiffusion")
    sizes = {name: bytes_of(model) for name, model in models_of(pipe).items()}
    assert sizes["text_encoder"] > sizes["unet"]
    scale = 2 if inference_dtype(provider) else 1
    budget = int(0.75 * scale * sizes["unet"])
    handle = provider.install(pipe, dtype=inference_dtype(provider), budget=budget)
    evenly = by_model(pipe, handle)
    with pretend_cuda.virtual_clock(bytes_per_second=1e8):
        for _ in range(2):
            testing.assert_bit_equal(image(pipe, "StableDiffusion"), expected)
        before = by_model(pipe, handle)
        testing.assert_bit_equal(image(pipe, "StableDiffusion"), expected)
        spread = {name: moved - before[name][1] for name, (_, moved) in by_model(pipe, handle).items()}
        handle.retune()
        testing.assert_bit_equal(image(pipe, "StableDiffusion"), expected)
        assert handle.tuning is not None and handle.tuning.passes == 2  # two steps of the first image
        first = by_model(pipe, handle)
        assert first["unet"][0] > evenly["unet"][0]
        assert first["unet"][0] >= 0.9 * sum(resident for resident, _ in first.values())
        handle.reset_stats()
        for _ in range(3):
            testing.assert_bit_equal(image(pipe, "StableDiffusion"), expected)
        before = by_model(pipe, handle)
        testing.assert_bit_equal(image(pipe, "StableDiffusion"), expected)
        after = by_model(pipe, handle)
    fewer = {name: moved - before[name][1] for name, (_, moved) in after.items()}
    assert handle.tuning.passes == 2 and handle.stats().peak_bytes <= budget
    assert after["unet"][0] >= 0.9 * sum(resident for resident, _ in after.values())
    assert fewer["unet"] < 0.9 * spread["unet"]
    assert sum(fewer.values()) < sum(spread.values())


def test_given_embeddings_leave_the_text_encoder_alone(provider: Provider) -> None:
    pipe = made("StableDiffusion")
    plain = moved(pipe, provider)
    budget = int(0.6 * largest(pipe, provider))
    handle = provider.install(pipe, dtype=inference_dtype(provider), budget=budget)
    dtype = inference_dtype(provider) or torch.float32
    embeddings = {
        key: provider.randn(1, 16, 32, dtype=dtype, seed=seed)
        for seed, key in enumerate(("prompt_embeds", "negative_prompt_embeds"))
    }

    def run(pipe: Any) -> torch.Tensor:
        seeded()
        result: torch.Tensor = pipe(
            **embeddings, height=32, width=32, num_inference_steps=STEPS, output_type="pt"
        ).images
        return result

    expected = run(plain)
    for _ in range(3):
        testing.assert_bit_equal(run(pipe), expected, "image")
    assert all(
        row.hits + row.misses == 0 or row.names[0].partition(".")[0] != "text_encoder"
        for row in handle.report().rows
    )


def test_two_pipelines_share_a_text_encoder(provider: Provider) -> None:
    first = made("StableDiffusion")
    second = made("StableDiffusion")
    second.register_modules(text_encoder=first.text_encoder)
    plain = moved(first, provider), moved(second, provider)
    handle = provider.install([first, second], dtype=inference_dtype(provider))
    names = [name for row in handle.report().rows for name in row.names]
    assert len(names) == len(set(names))
    assert any(name.startswith("0.text_encoder.") for name in names)
    assert not any(name.startswith("1.text_encoder.") for name in names)
    for _ in range(2):
        for pipe, other in zip((first, second), plain, strict=True):
            testing.assert_bit_equal(image(pipe, "StableDiffusion"), image(other, "StableDiffusion"), "image")
    # An install of one pipeline takes its parts over, also the shared one.
    own = provider.install(first, dtype=inference_dtype(provider))
    assert handle.active and own.active
    for pipe, other in zip((first, second), plain, strict=True):
        testing.assert_bit_equal(image(pipe, "StableDiffusion"), image(other, "StableDiffusion"), "image")
    dynswap_ext.uninstall([first, second])
    assert not handle.active and not own.active


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_pipeline_that_is_cast_after_the_install(provider: Provider, dtype: torch.dtype) -> None:
    """After `pipe.to(dtype)`, as in the libraries' guides, the cast masters are streamed."""
    pipe = made("StableDiffusion")
    plain = copy.deepcopy(pipe).to(dtype)
    for model in models_of(plain).values():
        model.to(provider.device)
    handle = provider.install(pipe)
    before = bytes_moved_by(pipe, handle)
    assert pipe.to(dtype) is pipe
    for model in models_of(pipe).values():
        assert dynswap_ext.is_installed(model) and {p.dtype for p in model.parameters()} == {dtype}
    testing.assert_bit_equal(image(pipe, "StableDiffusion"), image(plain, "StableDiffusion"), "image")
    after = bytes_moved_by(pipe, handle)
    assert handle.stats().overflow_bytes == 0
    if provider.device.type != "cpu":  # on the CPU, masters in RAM do not move
        assert 0.45 * before < after < 0.55 * before
    handle.uninstall()
    assert {p.dtype for model in models_of(pipe).values() for p in model.parameters()} == {dtype}


def bytes_moved_by(pipe: Any, handle: dynswap_ext.Handle) -> int:
    """Return the bytes that an image moves when the order of use is known."""
    image(pipe, "StableDiffusion")
    handle.reset_stats()
    image(pipe, "StableDiffusion")
    return handle.stats().bytes_moved


def test_the_pipeline_may_die_before_its_models(provider: Provider) -> None:
    pipe = made("StableDiffusion")
    unet, vae = pipe.unet, pipe.vae
    handle = provider.install(pipe, dtype=inference_dtype(provider))
    del pipe
    gc.collect()
    assert handle.active and dynswap_ext.is_installed([unet, vae])
    handle.uninstall()
    assert not dynswap_ext.is_installed(unet) and not dynswap_ext.is_installed(vae)


def test_a_component_that_is_replaced(provider: Provider) -> None:
    """An install serves modules: a replaced component is still served, and the new one is plain."""
    pipe = made("StableDiffusion")
    old, new = pipe.unet, made("StableDiffusion").unet
    handle = provider.install(pipe, dtype=inference_dtype(provider))
    pipe.unet = new
    assert dynswap_ext.is_installed(old) and not dynswap_ext.is_installed(pipe)
    again = provider.install(pipe, dtype=inference_dtype(provider))
    assert dynswap_ext.is_installed(pipe) and handle.active  # it serves the old one
    plain = moved_after(pipe, provider)
    testing.assert_bit_equal(image(pipe, "StableDiffusion"), plain, "image")
    handle.uninstall()
    again.uninstall()
    assert not any(map(dynswap_ext.is_installed, (old, *models_of(pipe).values())))


def moved_after(pipe: Any, provider: Provider) -> torch.Tensor:
    """Return the image of the same pipeline, moved; the models are installed when it is called."""
    copies = {name: copy.deepcopy(model) for name, model in models_of(pipe).items()}
    plain = ALL["StableDiffusion"][1](**copies)
    plain.set_progress_bar_config(disable=True)
    for model in models_of(plain).values():
        testing.move(model, provider.device, inference_dtype(provider))
    return image(plain, "StableDiffusion")
