"""Programs with transformers: generation and pipelines, on default options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from programs import both, inference_dtype, library, llama_config, same, seeded, word_tokenizer

transformers = library("transformers")

VOCABULARY = 16  # as `word_tokenizer` has


def llama(**options: Any) -> Any:
    config = llama_config(**options)
    seeded()
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    seeded()
    return transformers.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=2,
    )
    seeded()
    return transformers.T5ForConditionalGeneration(config).eval()


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    seeded()
    return transformers.WhisperForConditionalGeneration(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "whisper": whisper}

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 1.3},
    "beams": {"num_beams": 3},
    # On a GPU, the steps would be compiled, which is not tested here.
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs on the device that the model names, as programs make them."""
    generator = torch.Generator().manual_seed(3)
    if model.config.model_type == "whisper":
        features = torch.randn(2, 8, 40, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
    tokens = torch.randint(4, VOCABULARY, (2, 5), generator=generator).to(model.device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_generate(provider: Provider, name: str, way: str) -> None:
    with both(provider, MODELS[name](), dtype=inference_dtype(provider)) as (model, moved):
        tokens = same(
            lambda m: m.generate(**inputs_for(m), max_new_tokens=6, min_new_tokens=6, **WAYS[way]),
            model,
            moved,
        )
        assert tokens.device == provider.device
        assert tokens.shape[-1] >= 6


def test_generate_with_an_assistant(provider: Provider) -> None:
    models = llama(), llama(tie_word_embeddings=True)
    with both(provider, *models, dtype=inference_dtype(provider)) as (installed, moved):
        same(
            lambda m: m[0].generate(
                inputs_for(m[0])["input_ids"][:1], max_new_tokens=6, assistant_model=m[1]
            ),
            installed,
            moved,
        )


def test_where_and_in_what_it_computes(provider: Provider) -> None:
    with both(provider, t5(), dtype=inference_dtype(provider)) as (model, moved):
        for part, plain in zip(model.modules(), moved.modules(), strict=True):
            if isinstance(part, transformers.PreTrainedModel):
                assert (part.device, part.dtype) == (plain.device, plain.dtype)
        assert model.get_parameter("shared.weight").dtype == torch.float32
        model(**inputs_for(model), decoder_input_ids=inputs_for(model)["input_ids"])


@pytest.mark.parametrize("task", ["text-generation", "feature-extraction", "text-classification"])
def test_pipeline(provider: Provider, task: str) -> None:
    seeded()
    if task == "text-generation":
        made = llama()
    elif task == "feature-extraction":
        made = llama().model
    else:
        made = transformers.LlamaForSequenceClassification(llama().config).eval()
    options = {"max_new_tokens": 4} if task == "text-generation" else {}
    with both(provider, made, dtype=inference_dtype(provider)) as (model, moved):

        def program(m: nn.Module) -> Any:
            pipe = transformers.pipeline(task, model=m, tokenizer=word_tokenizer(), device=provider.device)
            assert pipe.device == provider.device
            return pipe(["the cat sat on the mat", "a red dog ran"], batch_size=2, **options)

        same(program, model, moved)
