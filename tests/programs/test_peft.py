"""Programs with peft: LoRA over an installed base is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from programs import both, library, llama, same, seeded

peft = library("peft")
library("transformers")


def with_lora(model: nn.Module) -> Any:
    seeded()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def steps(model: Any) -> list[torch.Tensor]:
    """Run some steps of training, as in peft's documentation; return the losses."""
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
