"""First programs with peft: LoRA over an installed base, and an install over LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from programs import assert_trained_alike, both, inference_dtype, library, same, seeded

peft = library("peft")
transformers = library("transformers")


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    seeded()
    return transformers.LlamaForCausalLM(config)


def with_lora(model: nn.Module) -> Any:
    seeded()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def steps(model: Any) -> list[torch.Tensor]:
    """Some steps of training, as its documentation has them."""
    tokens = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(5)).to(model.device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adapter(model: Any) -> dict[str, torch.Tensor]:
    state = peft.get_peft_model_state_dict(model)
    assert state
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_base_that_is_installed(provider: Provider, gradient_checkpointing: bool) -> None:
    with both(provider, llama()) as (model, moved):
        made = [with_lora(m) for m in (model, moved)]
        assert made[0].device == provider.device
        for each in made:
            if gradient_checkpointing:
                each.gradient_checkpointing_enable()
                each.enable_input_require_grads()
        same(steps, *made)
        testing.assert_bit_equal(adapter(made[0]), adapter(made[1]))
        assert all(p.device.type == "cpu" for n, p in made[0].named_parameters() if "lora" not in n)
        assert all(p.grad is None for n, p in made[0].named_parameters() if "lora" not in n)


def test_an_install_over_lora(provider: Provider) -> None:
    with both(provider, with_lora(llama())) as (model, moved):
        same(steps, model, moved)
        assert_trained_alike(provider, adapter(model), adapter(moved))
        assert all(p.device.type == "cpu" for p in model.parameters())


def test_generation_merged_and_not(provider: Provider) -> None:
    tokens = torch.arange(4, 9)[None]

    def program(model: Any) -> Any:
        inputs = tokens.to(model.device)
        options = {"max_new_tokens": 5, "do_sample": False}
        apart = model.generate(input_ids=inputs, **options)
        with model.disable_adapter():
            base = model.generate(input_ids=inputs, **options)
        model.merge_adapter()
        merged = model.generate(input_ids=inputs, **options)
        model.unmerge_adapter()
        return apart, base, merged

    dtype = inference_dtype(provider)
    with both(provider, llama().eval(), dtype=dtype) as (model, moved):
        same(program, with_lora(model).eval(), with_lora(moved).eval())


def test_an_adapter_is_saved_and_loaded(provider: Provider, tmp_path: Path) -> None:
    tokens = torch.arange(4, 9)[None]
    with_lora(llama()).save_pretrained(tmp_path)

    def program(model: nn.Module) -> torch.Tensor:
        loaded = peft.PeftModel.from_pretrained(model, str(tmp_path)).eval()
        return loaded(input_ids=tokens.to(loaded.device)).logits

    with both(provider, llama().eval(), dtype=inference_dtype(provider)) as (model, moved):
        same(program, model, moved)
