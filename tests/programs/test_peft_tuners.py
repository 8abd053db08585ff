"""The tuners of peft over a base in float32 that computes in bfloat16, before the install and after it.

The other model is cast, and gets its adapters before or after the cast. So adapters that come after the
install are in float32, as peft makes them by default, and those that were there are cast. See Note [What
dtype= casts].

OSF is left out. Its hooks multiply a gradient, which is on the master's device, by a weight, which is on the
compute device and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conftest import PRETEND, Provider
from dynswap_ext import testing
from programs import library, llama, seeded

peft = library("peft")

HALF = torch.bfloat16
TOKENS = torch.arange(4, 9)[None]
LAYERS = {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

#: The configuration of each tuner, with random weights: with their initial ones, many have no effect.
TUNERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, **LAYERS),
    "lora, a module saved": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, modules_to_save=["lm_head"], **LAYERS
    ),
    "lora, tokens": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, trainable_token_indices={"embed_tokens": [5, 6]}, **LAYERS
    ),
    "lora, bias": lambda: peft.LoraConfig(r=4, init_lora_weights=False, lora_bias=True, **LAYERS),
    "rslora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, use_rslora=True, **LAYERS),
    "dora": lambda: peft.LoraConfig(r=4, init_lora_weights=False, use_dora=True, **LAYERS),
    "pissa": lambda: peft.LoraConfig(r=4, init_lora_weights="pissa", **LAYERS),
    "olora": lambda: peft.LoraConfig(r=4, init_lora_weights="olora", **LAYERS),
    "orthogonal": lambda: peft.LoraConfig(r=4, init_lora_weights="orthogonal", **LAYERS),
    "eva": lambda: peft.LoraConfig(r=4, init_lora_weights="eva", **LAYERS),
    "adalora": lambda: peft.AdaLoraConfig(total_step=10, init_r=4, init_lora_weights=False, **LAYERS),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(
        adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"
    ),
    "beft": lambda: peft.BeftConfig(**LAYERS),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, init_weights=False, **LAYERS),
    "c3a": lambda: peft.C3AConfig(block_size=8, init_weights=False, **LAYERS),
    "cartridge": lambda: peft.CartridgeConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "deft": lambda: peft.DeftConfig(r=4, init_weights=False, **LAYERS),
    "delora": lambda: peft.DeloraConfig(r=4, init_weights=False, **LAYERS),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=16, init_weights=False, **LAYERS),
    "frod": lambda: peft.FrodConfig(**LAYERS),
    "glora": lambda: peft.GloraConfig(r=4, init_weights=False, **LAYERS),
    "gralora": lambda: peft.GraloraConfig(r=4, init_weights=False, gralora_k=2, **LAYERS),
    "hira": lambda: peft.HiraConfig(r=4, init_weights=False, **LAYERS),
    "hra": lambda: peft.HRAConfig(r=4, init_weights=False, **LAYERS),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], init_ia3_weights=False, **LAYERS),
    "lily": lambda: peft.LilyConfig(r=4, init_weights=False, **LAYERS),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "loha": lambda: peft.LoHaConfig(r=4, init_weights=False, **LAYERS),
    "lokr": lambda: peft.LoKrConfig(r=4, init_weights=False, **LAYERS),
    "miss": lambda: peft.MissConfig(r=4, init_weights=False, **LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, r=0, init_weights=False, **LAYERS),
    "shira": lambda: peft.ShiraConfig(r=4, init_weights=False, **LAYERS),
    "peanut": lambda: peft.PeanutConfig(r=4, **LAYERS),
    "psoft": lambda: peft.PsoftConfig(r=4, **LAYERS),
    "pvera": lambda: peft.PveraConfig(r=4, init_weights=False, **LAYERS),
    "randlora": lambda: peft.RandLoraConfig(r=4, init_weights=False, **LAYERS),
    "road": lambda: peft.RoadConfig(group_size=4, init_weights=False, **LAYERS),
    "tinylora": lambda: peft.TinyLoraConfig(r=2, **LAYERS),
    "trainable tokens": lambda: peft.TrainableTokensConfig(
        token_indices=[5, 6], target_modules=["embed_tokens"]
    ),
    "unilora": lambda: peft.UniLoraConfig(r=4, init_weights=False, **LAYERS),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=8, topk=2, **LAYERS),
    "vera": lambda: peft.VeraConfig(r=4, init_weights=False, **LAYERS),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=16, init_weights=False, **LAYERS),
    "prompt": lambda: peft.PromptTuningConfig(**PROMPT),
    "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**PROMPT),
    "prefix, projected": lambda: peft.PrefixTuningConfig(
        prefix_projection=True, encoder_hidden_size=8, **PROMPT
    ),
    "multitask prompt": lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, **PROMPT),
}


def adapted(base: Any, name: str) -> Any:
    seeded()
    return peft.get_peft_model(base, TUNERS[name]()).train()


def output(model: Any, name: str) -> torch.Tensor:
    options = {"task_ids": torch.tensor([1])} if name == "multitask prompt" else {}
    device = model.get_input_embeddings().weight.device
    inputs = {key: value.to(device) for key, value in {"input_ids": TOKENS, **options}.items()}
    seeded()  # of dropout
    logits: torch.Tensor = model(**inputs).logits
    assert logits.dtype == HALF and logits.isfinite().all()
    return logits


def step(model: Any, name: str) -> Iterator[Any]:
    """Train a step that rounds to bfloat16, so that masters in float32 get the same bits."""
    logits = output(model, name)
    yield logits
    logits.float().square().mean().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert trained
    yield {n: p.grad.to("cpu", HALF) for n, p in trained.items()}
    with torch.no_grad():
        for parameter in trained.values():
            before, gradient = parameter.to(HALF).float(), parameter.grad.to(HALF).float()
            parameter.copy_((before - 0.5 * gradient).to(HALF))
            parameter.grad = None


def attempted(call: Any) -> str | None:
    """Return the name of the error if the call fails, else None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def program(model: Any, name: str) -> Iterator[Any]:
    yield from step(model, name)
    yield from step(model, name)
    yield output(model, name)
    with model.disable_adapter():
        yield output(model, name)
    if name != "oft":  # OFT changes a weight's dtype for a while: `weight.data = weight.data.float()`
        for change in ("merge_adapter", "unmerge_adapter"):
            yield attempted(getattr(model, change, None))
            yield output(model, name)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", TUNERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, of defaults
@pytest.mark.slow
def test_over_a_base_that_is_cast(provider: Provider, name: str, after: bool) -> None:
    if name in ("frod", "shira") and PRETEND:
        pytest.skip("the pretend device has no sparse tensors")
    if name in ("unilora", "vblora") and not after and not provider.native:
        pytest.skip("pure Python adds the gradients of a weight that layers share in its master's dtype")
    plain, model = llama(), llama()
    if after and name == "glora":
        provider.install(model, dtype=HALF)
        with pytest.raises(ValueError, match=r"not a plain torch\.nn\.Linear"):  # the class itself
            adapted(model, name)
        return
    if after:
        plain = adapted(testing.move(plain, provider.device, HALF), name)
        handle = provider.install(model, dtype=HALF)
        model = adapted(model, name)
    else:
        plain = testing.move(adapted(plain, name), provider.device, HALF)
        model = adapted(model, name)
        handle = provider.install(model, dtype=HALF)
    expected = list(program(plain, name))
    actual = list(program(model, name))
    testing.assert_bit_equal(actual, expected, "results")
    for path, value in plain.named_parameters():
        owner, _, leaf = path.rpartition(".")
        assert getattr(model.get_submodule(owner), leaf).dtype == value.dtype, path
    assert handle.stats().bytes_moved > 0
