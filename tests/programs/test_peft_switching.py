"""Adapters of peft over an installed base take turns: each is trained, and nothing else, as on a plain model.

The tuners are those that keep what they train in an `nn.ParameterDict`, and LoRA of linear layers, which has
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conftest import Provider
from dynswap_ext import testing
from programs import library, seeded
from test_peft import llama

peft = library("peft")

TOKENS = torch.arange(4, 9)[None]
LAYERS = {"target_modules": ["q_proj", "v_proj"]}

TUNERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, **LAYERS),
    "lora of an embedding": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=["embed_tokens"]
    ),
    "dora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, use_dora=True, **LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(total_step=10, init_r=4, init_lora_weights=False, **LAYERS),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], init_ia3_weights=False, **LAYERS),
    "loha": lambda: peft.LoHaConfig(r=4, init_weights=False, **LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=4, init_weights=False, **LAYERS),
    "vera": lambda: peft.VeraConfig(r=4, init_weights=False, **LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, r=0, init_weights=False, **LAYERS),
}


def trainable(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def trained(model: Any) -> Iterator[Any]:
    """Yield what is trainable, the output, the gradients, and which have one."""
    yield trainable(model)
    seeded()
    logits = model(input_ids=TOKENS.to(model.device)).logits
    yield logits
    if logits.requires_grad:
        logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    yield {name: grad.to("cpu", torch.float32) for name, grad in grads.items()}  # as its master is
    model.zero_grad()


def switched(model: Any) -> Iterator[Any]:
    for name in ("second", "default", "second"):
        model.set_adapter(name)
        yield from trained(model)
    model.set_adapter("default", inference_mode=True)
    yield trainable(model)
    for value in (True, False, True):
        model.set_requires_grad("second", value)
        yield trainable(model)
    yield [model.get_model_status().requires_grad, model.get_model_status().active_adapters]
    model.delete_adapter("default")
    model.set_adapter("second")
    with model.disable_adapter():
        yield from trained(model)
    yield from trained(model)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, of second adapters
def test_adapters_that_take_turns(provider: Provider, tuner: str) -> None:
    seeded()
    config = TUNERS[tuner]()
    model = peft.get_peft_model(llama(), config)
    second = TUNERS[tuner]()
    second.inference_mode = tuner == "adalora"  # it allows one adapter that is trained
    model.add_adapter("second", second)
    moved, handle = provider.pair(model)
    testing.assert_bit_equal(list(switched(model)), list(switched(moved)), "results")
    assert handle.stats().bytes_moved > 0
