"""Models that transformers quantises while loading, by torchao and bitsandbytes, with default options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import checkpoint
from programs import library, llama_config, same
from ways import smallest_budget

transformers = library("transformers")
library("torchao")
library("bitsandbytes")
library("accelerate")

from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

VOCABULARY, TOKENS = 64, 6

#: The formats whose kernels are in the CPU build of the libraries.
TORCHAO: dict[str, Any] = {
    "int8": Int8WeightOnlyConfig,
    "int8 activations": Int8DynamicActivationInt8WeightConfig,
    "float8": Float8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4),
}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bfloat16 that is not quantised."""
    config = llama_config(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def loaded(folder: Path, quantization: Any = None) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu"
    ).eval()


def generate(model: Any) -> Any:
    tokens = torch.randint(4, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3))
    return model.generate(tokens.to(model.device), max_new_tokens=TOKENS, do_sample=False)


def check_generation(provider: Provider, installed: Any, moved: Any, **options: Any) -> int:
    """Generate twice, and compare tokens with the moved model's.

    Return the bytes that the second time moved.
    """
    moved.to(provider.device)
    with provider.install(installed, prefetch=2, **options) as handle:
        same(generate, installed, moved)
        before = handle.stats().bytes_moved
        same(generate, installed, moved)
        return handle.stats().bytes_moved - before


def linear_weights(model: Any) -> list[Any]:
    return [m.weight for m in model.model.layers.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(provider: Provider, folder: Path, name: str) -> None:
    quantization = transformers.TorchAoConfig(TORCHAO[name]())
    installed, moved = loaded(folder, quantization), loaded(folder, quantization)
    classes = {type(weight) for weight in linear_weights(installed)}
    assert nn.Parameter not in classes
    quantised_bytes = check_generation(provider, installed, moved)
    assert {type(weight) for weight in linear_weights(installed)} == classes
    if provider.device.type != "cpu":  # on the CPU, masters in RAM do not move
        # Embeddings are not quantised. Linear weights move as they are stored, not dequantised.
        assert quantised_bytes < 0.75 * check_generation(provider, loaded(folder), loaded(folder))


def test_torchao_within_the_smallest_budget(provider: Provider, folder: Path) -> None:
    quantization = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    installed, moved = loaded(folder, quantization), loaded(folder, quantization)
    check_generation(provider, installed, moved, budget=smallest_budget(provider, installed))


def test_torchao_quantises_an_installed_model(provider: Provider, folder: Path) -> None:
    installed, moved = loaded(folder), loaded(folder)
    with provider.install(installed):
        same(generate, installed, moved.to(provider.device))
        quantize_(installed, Int8WeightOnlyConfig())
        quantize_(moved, Int8WeightOnlyConfig())
        same(generate, installed, moved)


@pytest.mark.parametrize(
    ("library_of_kernels", "name"),
    [*(("torchao", name) for name in TORCHAO), *(("bitsandbytes", name) for name in BITSANDBYTES)],
)
@pytest.mark.filterwarnings("ignore")  # bitsandbytes tells that int8 computes in float16
def test_a_quantised_checkpoint_opens(
    provider: Provider, folder: Path, library_of_kernels: str, name: str, tmp_path: Path
) -> None:
    if library_of_kernels == "torchao":
        quantization = transformers.TorchAoConfig(TORCHAO[name]())
    elif provider.device.type != "cpu":
        pytest.skip("the CPU build of bitsandbytes has no kernels for a GPU")
    else:
        quantization = transformers.BitsAndBytesConfig(**BITSANDBYTES[name])
    loaded(folder, quantization).save_pretrained(tmp_path)
    installed = checkpoint.from_pretrained(transformers.AutoModelForCausalLM, tmp_path).eval()
    moved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    classes = [type(weight) for weight in linear_weights(moved)]
    assert [type(weight) for weight in linear_weights(installed)] == classes and nn.Parameter not in classes
    moved_bytes = check_generation(provider, installed, moved)
    if provider.native and library_of_kernels == "torchao":  # from the file, or from RAM to the device
        assert moved_bytes > sum(inner_bytes(weight) for weight in linear_weights(installed))


def inner_bytes(weight: Any) -> int:
    return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])


@pytest.mark.parametrize("name", BITSANDBYTES)
@pytest.mark.filterwarnings("ignore")  # bitsandbytes tells that int8 computes in float16
def test_bitsandbytes(provider: Provider, folder: Path, name: str, tmp_path: Path) -> None:
    if provider.device.type != "cpu":
        pytest.skip("the CPU build of bitsandbytes has no kernels for a GPU")
    quantization = transformers.BitsAndBytesConfig(**BITSANDBYTES[name])
    installed, moved = loaded(folder, quantization), loaded(folder, quantization)
    for i, weight in enumerate(linear_weights(installed)):  # as a checkpoint that is mapped
        torch.save(weight.data, tmp_path / f"{i}.pt")
        weight.data = torch.load(tmp_path / f"{i}.pt", mmap=True)
    check_generation(provider, installed, moved)
