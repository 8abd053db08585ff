"""Masters in float32 that compute in half precision, as with the library's `from_pretrained(dtype=...)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from programs import bytes_of, library, same, seeded
from test_diffusers import PIPELINES, PROMPT
from test_transformers import VOCABULARY, inputs_for, llama, t5, whisper

diffusers = library("diffusers")
transformers = library("transformers")

HALF = torch.bfloat16


def as_loaded(provider: Provider, folder: Path, model: Any, dtype: torch.dtype = HALF) -> Any:
    """Save the model, and load it with its library in this dtype."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval().to(provider.device)


def compare(
    provider: Provider, folder: Path, model: Any, program: Callable[[Any], Any], dtype: torch.dtype = HALF
) -> Any:
    loaded = as_loaded(provider, folder, model, dtype)
    masters = [(p, p.dtype, p.device) for p in model.parameters()]
    handle = provider.install(model, dtype=dtype)
    result = same(program, model, loaded)
    assert model.dtype == loaded.dtype == dtype
    for name, value in (*loaded.named_parameters(), *loaded.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        assert getattr(model.get_submodule(owner), leaf).dtype == value.dtype, name
    # Masters are the same tensors, which an optimizer would be given.
    for parameter, (master, was, where) in zip(model.parameters(), masters, strict=True):
        assert parameter is master and (master.dtype, master.device) == (was, where)
    assert handle.stats().bytes_moved > 0.4 * bytes_of(model)
    return result


def test_whisper(provider: Provider, tmp_path: Path) -> None:
    """Programs that cast features by hand, ``input_features.to(model.dtype)``, work with Whisper."""
    compare(
        provider,
        tmp_path,
        whisper(),
        lambda m: m.generate(**inputs_for(m), max_new_tokens=6, do_sample=False),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_far_from_the_first(provider: Provider, tmp_path: Path, dtype: torch.dtype) -> None:
    """Positions far from the first are right, as their frequencies, in no checkpoint, stay in float32."""
    model = llama(max_position_embeddings=4096)
    positions = torch.arange(3000, 3005, device=provider.device)[None]

    def program(m: Any) -> Any:
        return m(input_ids=inputs_for(m)["input_ids"][:1], position_ids=positions).logits

    compare(provider, tmp_path, model, program, dtype)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_t5(provider: Provider, tmp_path: Path, dtype: torch.dtype) -> None:
    """T5's `wo` stays in float32 in float16, and is cast in bfloat16."""
    model = t5()
    compare(
        provider,
        tmp_path,
        model,
        lambda m: m.generate(**inputs_for(m), max_new_tokens=6, do_sample=False),
        dtype,
    )
    assert (model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32) == (
        dtype == torch.float16
    )


def ernie() -> Any:
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
        moe_num_shared_experts=1,
        pad_token_id=0,
        output_router_logits=False,
    )
    seeded()
    return transformers.Ernie4_5_MoeForCausalLM(config).eval()


def test_the_router_of_experts(provider: Provider, tmp_path: Path) -> None:
    """Weights that transformers keeps strictly stay in float32 in bfloat16, too."""
    model = ernie()
    tokens = torch.randint(4, VOCABULARY, (2, 5))
    loaded = as_loaded(provider, tmp_path, model)
    for each in (model, loaded):
        each.set_experts_implementation("eager")  # the other needs a histogram that the CPU does not have
    provider.install(model, dtype=HALF)
    same(lambda m: m(tokens.to(m.device)).logits, model, loaded)
    gate = model.model.layers[1].mlp.gate
    assert gate.weight.dtype == torch.float32 and model.lm_head.weight.dtype == HALF


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(provider: Provider, tmp_path: Path, name: str) -> None:
    components, pipeline, options = PIPELINES[name]
    made = components()
    loaded = {part: as_loaded(provider, tmp_path / part, model) for part, model in made.items()}
    handles = [provider.install(model, dtype=HALF) for model in made.values()]

    def program(parts: dict[str, nn.Module]) -> torch.Tensor:
        pipe = pipeline(**parts)
        assert pipe.dtype == HALF
        pipe.set_progress_bar_config(disable=True)
        images = pipe(PROMPT, height=32, width=32, num_inference_steps=3, output_type="pt", **options).images
        assert images.isfinite().all()
        return images

    same(program, made, loaded)
    for handle, model in zip(handles, made.values(), strict=True):
        assert handle.stats().bytes_moved > 0.4 * bytes_of(model)


def wan() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a Wan transformer.

    Its forward takes the dtype of a layer's input from
    ``next(iter(self.time_embedder.parameters())).dtype``.
    """
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16)}
    return model, {**inputs, "timestep": torch.tensor([3])}


def unet_3d() -> tuple[Any, dict[str, torch.Tensor]]:
    model = diffusers.UNet3DConditionModel(
        block_out_channels=(4, 8),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=2,
        layers_per_block=1,
        sample_size=8,
    )
    inputs = {"sample": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 3, 8)}
    return model, {**inputs, "timestep": torch.tensor([3])}


def aura_flow() -> tuple[Any, dict[str, torch.Tensor]]:
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=64,
    )
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16)}
    return model, {**inputs, "timestep": torch.tensor([3.0])}


def prior() -> tuple[Any, dict[str, torch.Tensor]]:
    model = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8, num_embeddings=7
    )
    inputs = {"hidden_states": torch.randn(2, 8), "proj_embedding": torch.randn(2, 8)}
    return model, {**inputs, "encoder_hidden_states": torch.randn(2, 7, 8), "timestep": torch.tensor(3)}


def omnigen_rope() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model whose forward assigns a float32 buffer and reads it. The new buffer is not cast."""
    from diffusers.models.transformers.transformer_omnigen import OmniGenSuScaledRotaryEmbedding

    class Rope(diffusers.ModelMixin, diffusers.configuration_utils.ConfigMixin):
        config_name = "config.json"

        @diffusers.configuration_utils.register_to_config
        def __init__(self) -> None:
            super().__init__()
            scaling = {"short_factor": [1.1] * 4, "long_factor": [1.7] * 4}
            self.rope = OmniGenSuScaledRotaryEmbedding(
                8, max_position_embeddings=64, original_max_position_embeddings=32, rope_scaling=scaling
            )
            self.proj = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            cos, sin = self.rope(x, position_ids)
            return self.proj(x) * cos.to(x.dtype) + sin.to(x.dtype)

    return Rope(), {"x": torch.randn(5, 8), "position_ids": torch.arange(5)[None]}


@pytest.mark.parametrize(
    "make", [wan, unet_3d, aura_flow, prior, omnigen_rope], ids=lambda make: make.__name__
)
def test_models_of_diffusers(
    provider: Provider, tmp_path: Path, make: Callable[[], tuple[Any, dict[str, torch.Tensor]]]
) -> None:
    seeded()
    model, inputs = make()

    def program(m: Any) -> Any:
        moved = {k: v.to(m.device, m.dtype if v.is_floating_point() else None) for k, v in inputs.items()}
        with torch.no_grad():
            return [m(**moved)[0] for _ in range(8)]  # Python replaces the bytecode of code that runs often

    compare(provider, tmp_path, model.eval(), program)
