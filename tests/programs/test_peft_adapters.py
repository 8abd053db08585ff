"""Adapters of peft over an installed base: they are added, merged, swapped, loaded and deleted.

Each program runs on an installed model and on the same model moved, and every step has to give the same
output, to the bit. Adapters come after the install, and before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from programs import library, llama, seeded
from ways import MAPPED, install

peft = library("peft")
transformers = library("transformers")

TOKENS = torch.arange(4, 9)[None]
Steps = Iterator[torch.Tensor]


def config(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    )


def adapted(base: nn.Module, made: Any, **options: Any) -> Any:
    """Return the base with an adapter of seeded weights, the same for a moved and an installed base."""
    seeded()
    return peft.get_peft_model(base, made, autocast_adapter_dtype=False, **options).eval()


def add(model: Any, name: str, made: Any) -> None:
    torch.manual_seed(3)
    model.add_adapter(name, made, autocast_adapter_dtype=False)


def output(model: Any, tokens: torch.Tensor = TOKENS, **options: Any) -> torch.Tensor:
    device = model.device if hasattr(model, "device") else model.tokens.weight.device
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens.to(device), **options).logits
    assert logits.isfinite().all()
    return logits


def merged_and_not(model: Any, **options: Any) -> Steps:
    yield output(model)
    model.merge_adapter(**options)
    yield output(model)
    model.unmerge_adapter()
    yield output(model)


def one(made: Callable[[], Any]) -> Callable[[nn.Module, Path], Steps]:
    """Return a program that merges an adapter, takes it out, and merges it for good."""

    def program(base: nn.Module, folder: Path) -> Steps:
        model = adapted(base, made())
        yield from merged_and_not(model)
        yield from merged_and_not(model, safe_merge=True)
        yield output(model.merge_and_unload())

    return program


def two(**options: Any) -> Callable[[nn.Module, Path], Steps]:
    """Return a program with a second adapter, one at a time and both at once."""

    def program(base: nn.Module, folder: Path) -> Steps:
        model = adapted(base, config(**options))
        add(model, "second", config(**options))
        model.set_adapter("second")
        yield output(model)
        model.base_model.set_adapter(["default", "second"])
        yield from merged_and_not(model)
        yield from merged_and_not(model, safe_merge=True)
        model.delete_adapter("second")
        model.set_adapter("default")
        yield output(model)
        yield output(model.unload())

    return program


def adapters_of_a_batch(base: nn.Module, folder: Path) -> Steps:
    model = adapted(base, config())
    add(model, "second", config())
    yield output(model, TOKENS.repeat(3, 1), adapter_names=["default", "second", "__base__"])


def on_the_meta_device(base: nn.Module, folder: Path) -> Steps:
    model = adapted(base, config(), low_cpu_mem_usage=True)
    state = {name: 0.1 * torch.randn(v.shape) for name, v in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, state, low_cpu_mem_usage=True)
    yield from merged_and_not(model)


def saved_adapter(folder: Path, seed: int, **options: Any) -> str:
    seeded()
    base = llama()
    torch.manual_seed(seed)
    path = folder / f"adapter{seed}"
    peft.get_peft_model(base, config(**options)).save_pretrained(path)
    return str(path)


def loaded(base: nn.Module, folder: Path) -> Steps:
    paths = [saved_adapter(folder, seed) for seed in (1, 2)]
    model = peft.PeftModel.from_pretrained(base, paths[0], autocast_adapter_dtype=False).eval()
    yield output(model)
    for name, options in {"red": {}, "blue": {"low_cpu_mem_usage": True}}.items():
        model.load_adapter(paths[1], name, autocast_adapter_dtype=False, **options)
        model.set_adapter(name)
        yield output(model)
    for way in ("linear", "cat", "svd"):
        model.add_weighted_adapter(["default", "red"], [0.3, 0.4], way, combination_type=way)
        model.set_adapter(way)
        yield output(model)
    model.delete_adapter("red")
    yield from merged_and_not(model)


def hot_swapped(compiled: bool) -> Callable[[nn.Module, Path], Steps]:
    def program(base: nn.Module, folder: Path) -> Steps:
        from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

        paths = [saved_adapter(folder, seed, r=4 * seed if compiled else 4) for seed in (1, 2)]
        model = peft.PeftModel.from_pretrained(base, paths[0], autocast_adapter_dtype=False).eval()
        if compiled:
            prepare_model_for_compiled_hotswap(model, target_rank=8)
        yield output(model)
        for path in (paths[1], paths[0]):
            hotswap_adapter(model, path, "default")
            yield output(model)

    return program


def a_module_is_saved_with_it(base: nn.Module, folder: Path) -> Steps:
    model = adapted(base, config(modules_to_save=["lm_head"]))
    yield output(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    yield output(model)
    yield output(model.merge_and_unload())


class Layers(nn.Module):
    """Layers that peft supports besides `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 4)
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.convolution(self.tokens(input_ids).permute(0, 2, 1)[..., None]))


def layers() -> nn.Module:
    seeded()
    return Layers()


def mixture() -> nn.Module:
    """Return experts in one parameter, which peft computes inside each forward."""
    seeded()
    made = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",  # the pretend device has no grouped product in float32
    )
    return transformers.MixtralForCausalLM(made)


def lora(**options: Any) -> Callable[[nn.Module, Path], Steps]:
    return one(lambda: config(**options))


OTHER_LAYERS = ["tokens", "convolution"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IA3 = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Path], Steps]]] = {
    "lora": (llama, lora()),
    "every linear layer": (llama, lora(target_modules="all-linear", bias="all")),
    "dora": (llama, lora(use_dora=True)),
    "other layers": (layers, lora(target_modules=OTHER_LAYERS)),
    "dora of other layers": (layers, lora(target_modules=OTHER_LAYERS, use_dora=True)),
    "trainable tokens": (llama, lora(trainable_token_indices={"embed_tokens": [2, 3]})),
    "parameters of experts": (mixture, lora(target_modules=["q_proj"], target_parameters=EXPERTS)),
    "ia3": (llama, one(lambda: peft.IA3Config(**IA3, init_ia3_weights=False))),
    "loha": (llama, one(lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False))),
    "two": (llama, two()),
    "two of dora": (llama, two(use_dora=True)),
    "adapters of a batch": (llama, adapters_of_a_batch),
    "on the meta device": (llama, on_the_meta_device),
    "loaded": (llama, loaded),
    "hot-swapped": (llama, hot_swapped(False)),
    "hot-swapped in a compiled model": (llama, hot_swapped(True)),
    "a module is saved with it": (llama, a_module_is_saved_with_it),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft's, of what merging does to other adapters
def test_over_an_installed_base(provider: Provider, name: str, tmp_path: Path) -> None:
    make, program = PROGRAMS[name]
    model = make().eval()
    moved = testing.moved(model, provider.device, None)
    handle = install(provider, MAPPED, tmp_path, model)
    masters = {id(master): master for master in model.parameters()}
    expected = list(program(moved, tmp_path))
    actual = list(program(model, tmp_path))
    testing.assert_bit_equal(actual, expected, "outputs")
    assert masters.keys() & {id(master) for master in model.parameters()}, "the base keeps its masters"
    assert all(master.device.type == "cpu" for master in masters.values())
    if "dora" not in name:  # with DoRA, peft holds a layer's old bytes while it sets others
        # peft reads all experts at once, which no budget has room for.
        whole = max((m.nbytes for m in masters.values() if m.dim() == 3), default=0) if provider.native else 0
        assert handle.stats().overflow_bytes == whole
