"""Libraries save the masters of a model that computes in another dtype."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Provider, accelerate_knows
from dynswap_ext import testing
from programs import library, llama_config, seeded
from sparse_rows import llama_classifier
from test_trainer import trainer
from ways import masters

transformers = library("transformers")


def llama() -> Any:
    seeded()
    return transformers.LlamaForCausalLM(llama_config()).eval()


def loads_as_it_was(folder: Path, cls: type[Any], expected: dict[str, torch.Tensor]) -> None:
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    again = cls.from_pretrained(folder)
    testing.assert_bit_equal(masters(again), expected, "loaded")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_transformers(provider: Provider, tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama()
    expected = copy.deepcopy(masters(model))
    provider.install(model, dtype=dtype)
    model.save_pretrained(tmp_path)
    loads_as_it_was(tmp_path, transformers.LlamaForCausalLM, expected)
    assert model.dtype == dtype


def test_the_base_of_an_adapter(provider: Provider, tmp_path: Path) -> None:
    peft = library("peft")
    model = llama()
    expected = copy.deepcopy(masters(model))
    provider.install(model, dtype=torch.bfloat16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.unload().save_pretrained(tmp_path / "base")
    loads_as_it_was(tmp_path / "base", transformers.LlamaForCausalLM, expected)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert again.get_base_model().dtype == torch.float32


def test_checkpoints_of_a_trainer(provider: Provider, tmp_path: Path) -> None:
    accelerate_knows(provider)
    seeded()
    model = llama_classifier()
    provider.install(model, dtype=torch.bfloat16)
    made, _ = trainer(provider, model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    loads_as_it_was(tmp_path / "checkpoint-2", type(llama_classifier()), masters(model))


def test_a_pipeline_of_diffusers(provider: Provider, tmp_path: Path) -> None:
    diffusers = library("diffusers")
    from test_diffusers import PIPELINES

    components, pipeline, _ = PIPELINES["StableDiffusion"]
    parts = components()
    expected = {name: copy.deepcopy(masters(part)) for name, part in parts.items()}
    pipe = pipeline(**parts)
    for part in parts.values():
        provider.install(part, dtype=torch.bfloat16)
    pipe.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    for name, state in expected.items():
        testing.assert_bit_equal(masters(getattr(again, name)), state, name)
