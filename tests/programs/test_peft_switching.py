"""Adapters of peft over an installed base take turns: only the active one is trained, as on a plain model.

The tuners are those that keep what they train in an `nn.ParameterDict`, and LoRA of linear layers, which has
modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Provider
from dynswap_ext import testing
from programs import assert_trained_alike, library, llama, seeded
from test_peft import steps
from test_peft_tuners import TOKENS
from test_peft_tuners import TUNERS as OF_LAYERS
from ways import MAPPED, install

peft = library("peft")

NAMES = ("lora", "dora", "adalora", "ia3", "loha", "lokr", "vera", "shira", "oft")
TUNERS = {name: OF_LAYERS[name] for name in NAMES} | {
    "lora of an embedding": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, target_modules=["embed_tokens"]
    )
}


def trainable(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def trained(model: Any) -> Iterator[Any]:
    """Yield the trainable names, the output, the gradients, and which masters have one."""
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


def skip_sparse(provider: Provider, tuner: str) -> None:
    if tuner == "shira" and provider.device.type != "cpu":
        pytest.skip("SHiRA makes sparse tensors, and the pretend device has none")


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, of second adapters
def test_adapters_that_take_turns(provider: Provider, tuner: str) -> None:
    skip_sparse(provider, tuner)
    seeded()
    config = TUNERS[tuner]()
    model = peft.get_peft_model(llama(), config)
    second = TUNERS[tuner]()
    second.inference_mode = tuner == "adalora"  # AdaLoRA allows one trained adapter
    model.add_adapter("second", second)
    moved, handle = provider.pair(model)
    testing.assert_bit_equal(list(switched(model)), list(switched(moved)), "results")
    assert handle.stats().bytes_moved > 0


def merged_and_disabled(model: Any) -> Iterator[torch.Tensor]:
    """Yield outputs of merged layers. A forward with disabled adapters takes them out again."""

    def output() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=TOKENS.to(model.device)).logits
        return logits

    def merged(undo: bool = False) -> torch.Tensor:
        with torch.no_grad():  # else a graph of OFT, which is a cycle, stays alive
            model.unmerge_adapter() if undo else model.merge_adapter()
        return output()

    yield output()
    for _ in range(2):
        yield merged()
        with model.disable_adapter():
            yield output()
        yield output()
    yield merged()
    yield merged(undo=True)
    yield from (p.detach().cpu() for p in model.parameters())


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_merged_and_disabled(provider: Provider, tuner: str, tmp_path: Path) -> None:
    skip_sparse(provider, tuner)
    if not provider.native and provider.device.type != "cpu":
        pytest.skip("a forward writes or assigns `.data`, which is lost in pure Python")
    seeded()
    model = peft.get_peft_model(llama(), TUNERS[tuner]()).eval()
    moved = testing.moved(model, provider.device, None)
    install(provider, MAPPED, tmp_path, model)
    testing.assert_bit_equal(list(merged_and_disabled(model)), list(merged_and_disabled(moved)), "results")


def test_prompts_that_each_forward_projects(provider: Provider, tmp_path: Path) -> None:
    """CPT, which assigns `.data` of its trained prompts in each forward, works."""
    if not provider.native:
        pytest.skip("a forward assigns `.data`, which is lost in pure Python")
    config = peft.CPTConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=4,
        cpt_token_ids=[1, 2, 3, 4],
        cpt_mask=[1, 1, 1, 1],
        cpt_tokens_type_mask=[1, 2, 3, 4],
    )
    models = []
    for _ in range(2):
        base = llama()
        seeded()
        models.append(peft.get_peft_model(base, config))
    model, plain = models
    install(provider, MAPPED, tmp_path, model)
    model.prompt_encoder["default"].set_updated_tokens()  # its hook was on the parameter before the move
    testing.move(plain, provider.device, None)
    assert_trained_alike(provider, steps(model), steps(plain), "losses")
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_trained_alike(provider, p.detach().cpu(), other.detach().cpu(), name)
