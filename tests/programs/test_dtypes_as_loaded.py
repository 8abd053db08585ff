"""The plain models that installs are compared with have the dtypes that `from_pretrained` gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import testing
from programs import library, seeded
from test_compute_dtype import aura_flow, ernie, omnigen_rope, prior, unet_3d, wan
from test_diffusers import PIPELINES
from test_mixtures_of_experts import deepseek, gpt_oss, llama4, mixtral, qwen3
from test_transformers import gpt2, llama, t5, whisper

transformers = library("transformers")


def test_a_library_that_cannot_be_asked_is_said() -> None:
    """A model whose constructor takes more than a config gives a warning.

    Its library could not load it either.
    """

    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    model = Own(llama().config, 1)
    with pytest.warns(dynswap_ext.DynswapWarning, match="with a Own cannot be asked"):
        moved = testing.moved(model, dtype=torch.bfloat16)
    assert moved.lm_head.weight.dtype == torch.bfloat16


def test_layers_that_peft_keeps_whole_are_as_the_one_they_replace() -> None:
    peft = library("peft")
    model = peft.get_peft_model(t5(), peft.LoraConfig(target_modules=["q"], modules_to_save=["wo"]))
    moved = testing.moved(model, dtype=torch.float16)
    dtypes = {name: p.dtype for name, p in moved.named_parameters() if ".wo." in name}
    assert len(dtypes) > 2 and set(dtypes.values()) == {torch.float32}


def gemma3() -> Any:
    """Return a Gemma3, which makes some unsaved buffers in the asked dtype, and others in float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=64, **sizes, **heads))


def deberta() -> Any:
    """Return a Deberta, which makes two biases in float32 in any case."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.DebertaModel(transformers.DebertaConfig(vocab_size=64, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    **{
        make.__name__: make
        for make in (
            deberta,
            deepseek,
            ernie,
            gemma3,
            gpt2,
            gpt_oss,
            llama,
            llama4,
            mixtral,
            qwen3,
            t5,
            whisper,
        )
    },
    **{make.__name__: lambda make=make: make()[0] for make in (aura_flow, omnigen_rope, prior, unet_3d, wan)},
    "flux": lambda: PIPELINES["Flux"][0]()["transformer"],
}


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: weight.dtype for name, weight in named}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_the_library(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    seeded()
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    drawn = torch.random.get_rng_state()
    moved = testing.moved(model, "cpu", dtype)
    assert dtypes(moved) == dtypes(loaded)
    testing.assert_bit_equal(dict(moved.state_dict()), dict(loaded.state_dict()), "state")
    assert torch.equal(torch.random.get_rng_state(), drawn)  # no random numbers were drawn
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the model was not changed


def test_parts_of_a_tree_are_as_they_were_loaded() -> None:
    """A library's model in a tree has its own dtypes, also with weights that other modules share."""
    model = t5()
    tree = nn.ModuleDict({"model": model, "plain": nn.Linear(4, 4), "wo": nn.Linear(4, 4)})
    tree["head"] = nn.Linear(4, 4, bias=False)
    tree["head"].weight = model.shared.weight
    moved: Any = testing.moved(tree, "cpu", torch.float16)
    assert moved["model"].encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert moved["wo"].weight.dtype == moved["plain"].weight.dtype == torch.float16
    assert moved["head"].weight is moved["model"].shared.weight
