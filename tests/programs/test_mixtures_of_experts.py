"""Mixtures of experts of transformers: outputs and gradients equal the moved model's; chosen experts move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conftest import PRETEND, Provider
from dynswap_ext import testing
from programs import library, seeded

transformers = library("transformers")

EXPERTS, CHOSEN, LAYERS, WIDTH = 16, 2, 2, 32
IMPLEMENTATIONS = "eager", "grouped_mm", "batched_mm"

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def qwen3(**options: Any) -> Any:
    config = transformers.Qwen3MoeConfig(
        num_experts=EXPERTS, moe_intermediate_size=WIDTH, **COMMON, **options
    )
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral(**options: Any) -> Any:
    config = transformers.MixtralConfig(num_local_experts=EXPERTS, **COMMON, **options)
    return transformers.MixtralForCausalLM(config)


def deepseek(**options: Any) -> Any:
    config = transformers.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        n_routed_experts=EXPERTS,
        moe_intermediate_size=WIDTH,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **options,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss(**options: Any) -> Any:
    """Return a GPT-OSS, whose experts are transposed and have biases."""
    config = transformers.GptOssConfig(num_local_experts=EXPERTS, **COMMON, **options)
    return transformers.GptOssForCausalLM(config)


def llama4(**options: Any) -> Any:
    """Return a Llama 4, which computes all experts in one operation."""
    config = transformers.Llama4TextConfig(
        **COMMON,
        num_local_experts=EXPERTS,
        intermediate_size_mlp=WIDTH,
        interleave_moe_layer_step=1,
        **options,
    )
    return transformers.Llama4ForCausalLM(config)


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": qwen3,
    "mixtral": mixtral,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
}
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _histogram(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the pretend device a histogram of integers, which the CPU's kernels do not have."""
    if PRETEND:
        histc = torch.histc
        monkeypatch.setattr(torch, "histc", lambda x, **options: histc(x.float(), **options))
    yield


def built(make: Callable[..., Any], implementation: str | None = None) -> Any:
    seeded()
    options = {} if implementation is None else {"experts_implementation": implementation}
    model = make(**options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # some begin as zeros
            torch.nn.init.normal_(parameter, std=1 if "gate.weight" in name or "router" in name else 0.1)
    return model


def budget_for(provider: Provider, model: torch.nn.Module, part: float) -> int | None:
    """Return that part of the model's bytes; None for pure Python, which needs room for a fused parameter."""
    total = sum(parameter.numel() * DTYPE.itemsize for parameter in model.parameters())
    return int(part * total) if provider.native else None


def tokens(provider: Provider, *shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(provider.device)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_moves_its_experts(provider: Provider, family: str, implementation: str) -> None:
    model = built(FAMILIES[family], implementation)
    moved = testing.moved(model, provider.device, DTYPE)
    budget = budget_for(provider, model, 1 / 3)
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    with torch.no_grad():
        prompt = tokens(provider, 2, 12)
        testing.assert_bit_equal(model(prompt).logits, moved(prompt).logits, "prompt")
        for step in range(8):
            if step == 2:
                handle.reset_stats()
            token = tokens(provider, 1, 1, seed=step)
            testing.assert_bit_equal(model(token).logits, moved(token).logits, f"token {step}")
    if not provider.native:
        return
    stats = handle.stats()
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    active = experts * CHOSEN / EXPERTS
    dense = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    # Dense weights stay if they fit, so that only experts move.
    assert stats.bytes_moved / 6 <= active + (0 if stats.resident_bytes * 1.9 > dense else dense)
    assert budget is not None and stats.peak_bytes <= budget
    assert stats.overflow_bytes == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step(provider: Provider, family: str, implementation: str) -> None:
    model = built(FAMILIES[family], implementation)
    moved = testing.moved(model, provider.device, DTYPE)
    budget = budget_for(provider, model, 1 / 3)
    handle = provider.install(model, dtype=DTYPE, budget=budget)
    batch = tokens(provider, 2, 10)
    for each in (model, moved):
        each(batch, labels=batch, use_cache=False).loss.backward()
    for (name, master), copied in zip(model.named_parameters(), moved.parameters(), strict=True):
        assert (master.grad is None) == (copied.grad is None), name
        if master.grad is not None:
            testing.assert_bit_equal(master.grad, copied.grad.to("cpu", master.dtype), name)
    if provider.native:
        assert budget is not None and handle.stats().peak_bytes <= budget
        assert handle.stats().overflow_bytes == 0


def test_all_experts_at_once(provider: Provider) -> None:
    """Llama 4 reads its experts whole; from the second call on, they are streamed like other weights."""
    model = built(llama4)
    moved = testing.moved(model, provider.device, DTYPE)
    handle = provider.install(model, dtype=DTYPE, budget=budget_for(provider, model, 2 / 3))
    with torch.no_grad():
        for step in range(4):
            handle.reset_stats()
            token = tokens(provider, 1, 3, seed=step)
            testing.assert_bit_equal(model(token).logits, moved(token).logits, f"token {step}")
    if provider.native:
        assert handle.stats().groups < EXPERTS
        assert handle.stats().overflow_bytes == 0


def test_generation(provider: Provider) -> None:
    model = built(qwen3)
    moved = testing.moved(model, provider.device, DTYPE)
    handle = provider.install(model, dtype=DTYPE, budget=budget_for(provider, model, 1 / 4))
    prompt = tokens(provider, 1, 5)
    made = [each.generate(prompt, max_new_tokens=8, do_sample=False) for each in (model, moved)]
    testing.assert_bit_equal(made[0], made[1], "tokens")
    if provider.native:
        assert handle.stats().overflow_bytes == 0
