"""LoRA over quantised bases: trained, merged, loaded and removed, with results equal to the moved model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Provider
from dynswap_ext import testing
from programs import library
from test_quantised import BITSANDBYTES, TORCHAO, folder, linear_weights, loaded

peft = library("peft")
transformers = library("transformers")

__all__ = ["folder"]  # the fixture

TOKENS = torch.arange(4, 9)[None]
#: Formats whose kernels have no backward in the CPU build.
FROZEN = ("torchao int8 activations",)
QUANTISED = {f"torchao {name}": made for name, made in TORCHAO.items()} | {
    f"bitsandbytes {name}": options for name, options in BITSANDBYTES.items()
}


def quantised(folder: Path, name: str) -> Any:
    made = QUANTISED[name]
    if name.startswith("torchao"):
        return loaded(folder, transformers.TorchAoConfig(made()))
    return loaded(folder, transformers.BitsAndBytesConfig(**made))


def program(base: Any, folder: Path, name: str) -> Iterator[Any]:
    """Yield outputs and gradients of what users do with an adapter."""
    tokens = TOKENS.to(base.device)

    def call() -> Any:
        return model(input_ids=tokens, labels=tokens)

    torch.manual_seed(1)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    yield call().logits.detach()
    if name not in FROZEN:
        call().loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        yield [p.grad.cpu() for p in trained]
        torch.optim.SGD(trained, lr=0.1).step()
        yield call().logits.detach()
    model.merge_adapter()
    yield call().logits.detach()
    model.unmerge_adapter()
    yield call().logits.detach()
    model.save_pretrained(folder)
    model.load_adapter(str(folder), "again")
    model.set_adapter("again")
    yield call().logits.detach()
    model.delete_adapter("again")
    model.set_adapter("default")
    yield model.merge_and_unload()(input_ids=tokens).logits.detach()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.filterwarnings("ignore")  # bitsandbytes tells that int8 computes in float16; peft, of rounding
def test_lora_over_a_quantised_base(provider: Provider, folder: Path, name: str, tmp_path: Path) -> None:
    if name.startswith("bitsandbytes") and provider.device.type != "cpu":
        pytest.skip("the CPU build of bitsandbytes has no kernels for a GPU")
    moved, model = quantised(folder, name).to(provider.device), quantised(folder, name)
    for i, weight in enumerate(linear_weights(model)):  # as a checkpoint that is mapped
        if name.startswith("bitsandbytes"):
            torch.save(weight.data, tmp_path / f"{i}.pt")
            weight.data = torch.load(tmp_path / f"{i}.pt", mmap=True)
    handle = provider.install(model)
    expected = list(program(moved, tmp_path / "moved", name))
    actual = list(program(model, tmp_path / "installed", name))
    testing.assert_bit_equal(actual, expected, "results")
    if provider.device.type != "cpu":  # on the CPU, masters in RAM do not move
        assert handle.stats().bytes_moved > sum(p.nbytes for p in model.parameters())
