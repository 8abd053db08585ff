"""Programs with diffusers: StableDiffusion and Flux with installed components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from programs import assert_told_once, both, inference_dtype, library, same, seeded, word_tokenizer

diffusers = library("diffusers")
transformers = library("transformers")

PROMPT = "a photo of a red cat"


def clip_text() -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        projection_dim=32,
    )
    return transformers.CLIPTextModel(config).eval()


def autoencoder(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=32,
        shift_factor=0.0,
        use_quant_conv=channels == 4,
        use_post_quant_conv=channels == 4,
    ).eval()


def unet(text_width: int, **options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text_width,
        attention_head_dim=8,
        norm_num_groups=8,
        **options,
    ).eval()


def stable_diffusion() -> dict[str, Any]:
    seeded()
    denoiser = unet(32)
    return {"text_encoder": clip_text(), "unet": denoiser, "vae": autoencoder(4)}


def stable_diffusion_xl() -> dict[str, Any]:
    seeded()
    denoiser = unet(
        64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )
    second = transformers.CLIPTextModelWithProjection(clip_text().config).eval()
    return {"text_encoder": clip_text(), "text_encoder_2": second, "unet": denoiser, "vae": autoencoder(4)}


def stable_diffusion_xl_pipeline(**components: Any) -> Any:
    return diffusers.StableDiffusionXLPipeline(
        **components,
        tokenizer=word_tokenizer(),
        tokenizer_2=word_tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )


def stable_diffusion_pipeline(**components: Any) -> Any:
    return diffusers.StableDiffusionPipeline(
        **components,
        tokenizer=word_tokenizer(),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def flux() -> dict[str, Any]:
    seeded()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    config = transformers.T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return {
        "text_encoder": clip_text(),
        "text_encoder_2": transformers.T5EncoderModel(config).eval(),
        "transformer": transformer.eval(),
        "vae": autoencoder(4),
    }


def flux_pipeline(**components: Any) -> Any:
    return diffusers.FluxPipeline(
        **components,
        tokenizer=word_tokenizer(),
        tokenizer_2=word_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


PIPELINES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., Any], dict[str, Any]]] = {
    "StableDiffusion": (stable_diffusion, stable_diffusion_pipeline, {"guidance_scale": 5.0}),
    "Flux": (flux, flux_pipeline, {"max_sequence_length": 16}),
}


def models_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def components_moved_to(provider: Provider, pipe: Any) -> Any:
    return pipe.to(provider.device) if provider.device.type != "cpu" else pipe


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline(provider: Provider, name: str, recwarn: pytest.WarningsRecorder) -> None:
    components, pipeline, options = PIPELINES[name]
    made = components()

    def program(models: tuple[nn.Module, ...]) -> torch.Tensor:
        pipe = pipeline(**dict(zip(made, models, strict=True)))
        components_moved_to(provider, pipe)
        assert pipe.device == pipe._execution_device == provider.device
        assert pipe.dtype == (inference_dtype(provider) or torch.float32)
        pipe.set_progress_bar_config(disable=True)
        images = pipe(PROMPT, height=32, width=32, num_inference_steps=3, output_type="pt", **options).images
        assert images.isfinite().all()
        return images

    with both(provider, *made.values(), dtype=inference_dtype(provider)) as (installed, moved):
        same(program, installed, moved)
    assert_told_once(recwarn, 0 if provider.device.type == "cpu" else len(made))


@pytest.mark.parametrize("name", PIPELINES)
def test_only_the_largest_part_is_installed(provider: Provider, name: str) -> None:
    """The largest component is installed, and `pipe.to` moves the others, which fit."""
    components, pipeline, options = PIPELINES[name]
    made = components()
    largest = next(part for part in ("unet", "transformer") if part in made)
    others = {part: model for part, model in made.items() if part != largest}

    def program(model: nn.Module) -> torch.Tensor:
        pipe = pipeline(**others, **{largest: model})
        components_moved_to(provider, pipe)
        assert pipe.device == pipe._execution_device == provider.device
        pipe.set_progress_bar_config(disable=True)
        return pipe(PROMPT, height=32, width=32, num_inference_steps=2, output_type="pt", **options).images

    for other in others.values():
        other.to(inference_dtype(provider))
    with both(provider, made[largest], dtype=inference_dtype(provider)) as (model, moved):
        same(program, model, moved)
        assert all(p.device == provider.device for other in others.values() for p in other.parameters())


def test_helpers_that_ask_parameters(provider: Provider) -> None:
    from diffusers.models.modeling_utils import get_parameter_device, get_parameter_dtype

    with both(provider, stable_diffusion()["unet"], dtype=inference_dtype(provider)) as (unet, moved):
        for part, plain in zip(unet.modules(), moved.modules(), strict=True):
            if any(True for _ in plain.parameters()):
                assert get_parameter_device(part) == get_parameter_device(plain)
                assert get_parameter_dtype(part) == get_parameter_dtype(plain)
        sample = torch.randn(1, 4, 16, 16)
        tokens = torch.randn(1, 7, 32)
        same(
            lambda m: (
                m(sample.to(m.device, m.dtype), 3, encoder_hidden_states=tokens.to(m.device, m.dtype)).sample
            ),
            unet,
            moved,
        )
