"""Pipelines of diffusers with LoRA from a file, loaded before the install or after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from programs import library, seeded
from test_diffusers import (
    PROMPT,
    components_moved_to,
    flux,
    flux_pipeline,
    models_of,
    stable_diffusion,
    stable_diffusion_pipeline,
    stable_diffusion_xl,
    stable_diffusion_xl_pipeline,
)
from ways import WAYS, Way, beside_plain

peft = library("peft")

FILE = "lora.safetensors"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """Return a folder with a file of LoRA for a pipeline's UNet and text encoder."""
    saved(KINDS["StableDiffusion"], tmp_path, "lora")
    return tmp_path


def pipeline() -> Any:
    made = stable_diffusion_pipeline(**stable_diffusion())
    made.set_progress_bar_config(disable=True)
    return made


def image(pipe: Any) -> torch.Tensor:
    seeded()
    made = pipe(PROMPT, height=16, width=16, num_inference_steps=2, output_type="pt").images
    assert made.isfinite().all()
    return made


def images(provider: Provider, pipe: Any) -> Iterator[torch.Tensor]:
    """Yield images with an adapter: at its own scale, at a smaller one, fused, and without it."""
    components_moved_to(provider, pipe)
    yield image(pipe)
    pipe.set_adapters(["red"], adapter_weights=[0.5])
    yield image(pipe)
    pipe.fuse_lora(adapter_names=["red"])
    yield image(pipe)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    yield image(pipe)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_loaded_before_the_install(provider: Provider, way: Way, lora: Path, tmp_path: Path) -> None:
    def make() -> Any:
        made = pipeline()
        made.load_lora_weights(lora, weight_name=FILE, adapter_name="red")
        return made

    seen = beside_plain(
        provider,
        way,
        tmp_path,
        make,
        lambda pipe: list(images(provider, pipe)),
        lambda pipe: pipe.unet,
        moved=True,
    )
    assert not any(a.equal(b) for a, b in itertools.pairwise(seen))


@dataclass(frozen=True)
class Kind:
    """A kind of pipeline, and the layers of it that get LoRA."""

    make: Callable[[], Any]
    #: The part with most weights, and the layers in it that get LoRA. Text encoders get it too.
    denoiser: str
    targets: tuple[str, ...]
    #: The argument that scales adapters for one call.
    scale: str
    options: dict[str, Any]


UNET = ("unet", ("to_q", "to_v"), "cross_attention_kwargs")
KINDS = {
    "StableDiffusion": Kind(pipeline, *UNET, {}),
    "StableDiffusionXL": Kind(lambda: stable_diffusion_xl_pipeline(**stable_diffusion_xl()), *UNET, {}),
    "Flux": Kind(
        lambda: flux_pipeline(**flux()),
        "transformer",
        ("to_q", "to_v", "proj_out"),
        "joint_attention_kwargs",
        {"max_sequence_length": 16},
    ),
}


def installed(provider: Provider, pipe: Any, **options: Any) -> dict[str, dynswap_ext.Handle]:
    """Install each part of a pipeline."""
    return {name: provider.install(part, **options) for name, part in models_of(pipe).items()}


def saved(kind: Kind, folder: Path, name: str, **options: Any) -> None:
    """Save a LoRA of the denoiser and of the first text encoder."""
    seeded()
    pipe = kind.make()
    torch.manual_seed(len(name))
    layers = {}
    for part, targets in {kind.denoiser: kind.targets, "text_encoder": ("q_proj", "v_proj")}.items():
        model = getattr(pipe, part)
        model.add_adapter(
            peft.LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **options)
        )
        layers[f"{part}_lora_layers"] = peft.get_peft_model_state_dict(model)
    pipe.save_lora_weights(folder, weight_name=f"{name}.safetensors", **layers)


def comes_and_goes(kind: Kind, folder: Path, pipe: Any) -> Iterator[torch.Tensor]:
    """Load, combine, fuse and remove adapters by diffusers' own calls; yield the images."""

    def painted(**options: Any) -> torch.Tensor:
        seeded()
        made: torch.Tensor = pipe(
            PROMPT, height=16, width=16, num_inference_steps=2, output_type="pt", **options, **kind.options
        ).images.cpu()
        assert made.isfinite().all()
        return made

    def load(name: str) -> None:
        pipe.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)

    pipe.set_progress_bar_config(disable=True)
    load("red")
    yield painted()
    yield painted(**{kind.scale: {"scale": 0.3}})
    load("yellow")
    pipe.set_adapters(["red", "yellow"], adapter_weights=[0.5, 0.7])
    yield painted()
    pipe.fuse_lora(adapter_names=["red", "yellow"])
    yield painted()
    pipe.unfuse_lora()
    pipe.disable_lora()
    yield painted()
    pipe.enable_lora()
    pipe.delete_adapters("red")
    yield painted()
    pipe.fuse_lora()
    pipe.unload_lora_weights()  # what is fused stays
    yield painted()
    load("red")
    yield painted()
    pipe.unload_lora_weights()
    yield painted()


CASES = {
    "StableDiffusion": ("StableDiffusion", {}, None),
    "in bfloat16": ("StableDiffusion", {}, torch.bfloat16),
    "dora": ("StableDiffusion", {"use_dora": True}, None),
    "StableDiffusionXL": ("StableDiffusionXL", {}, None),
    "Flux": ("Flux", {}, None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_adapters_come_and_go(provider: Provider, case: str, tmp_path: Path) -> None:
    """Images equal the moved pipeline's to the bit, within the smallest budget, without a second base."""
    name, options, dtype = CASES[case]
    kind = KINDS[name]
    for adapter in ("red", "yellow"):
        saved(kind, tmp_path, adapter, **options)
    seeded()
    plain = kind.make()
    for part in models_of(plain).values():
        testing.move(part, provider.device, dtype)
    seeded()
    pipe = kind.make()
    base = getattr(pipe, kind.denoiser)
    if provider.device.type == "cpu":
        for part, model in models_of(pipe).items():
            testing.map_from_file(model, tmp_path / f"{part}.pt")
    masters = {name: master for name, master in base.named_parameters() if "lora" not in name}
    handle = installed(provider, pipe, dtype=dtype)[kind.denoiser]
    expected, actual = comes_and_goes(kind, tmp_path, plain), comes_and_goes(kind, tmp_path, pipe)
    peaks = []
    for step, (image, seen) in enumerate(zip(expected, actual, strict=True)):
        testing.assert_bit_equal(seen, image, f"image {step}")
        peaks.append(handle.stats().peak_bytes)
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert dict(base.named_parameters()).keys() == masters.keys()
    assert all(base.get_parameter(name) is master for name, master in masters.items())
    if provider.native:
        whole = sum(m.numel() * (dtype or m.dtype).itemsize for m in masters.values())
        assert max(peaks) < 0.5 * whole, "the weights in use and those fetched ahead"
        passes = 2 * len(peaks)  # two steps an image
        on_the_bus = sum(m.nbytes if dtype is None else m.numel() * 4 for m in masters.values())
        # DoRA reads a layer's weight twice, and a merge reads it again.
        assert 0.2 * whole < stats.bytes_moved < 4 * passes * on_the_bus
    for model in models_of(pipe).values():
        dynswap_ext.uninstall(model)
    assert not any("lora" in name for name, _ in base.named_parameters())


@pytest.mark.slow
def test_many_adapters_leave_nothing(provider: Provider, lora: Path) -> None:
    """Adapters that came and went leave no weights in the plan, and no memory on the device."""
    if not provider.native:
        pytest.skip("pure Python plans when masters come, not when they go")
    pipe = pipeline()
    handle = installed(provider, pipe, budget="1GiB")["unet"]
    image(pipe)
    before = handle.stats()
    for count in range(8):
        pipe.load_lora_weights(lora, weight_name=FILE, adapter_name=f"number{count}")
        image(pipe)
        assert handle.stats().weight_bytes >= before.weight_bytes
        pipe.delete_adapters(f"number{count}")
        image(pipe)
        after = handle.stats()
        assert (after.weight_bytes, after.resident_bytes, after.groups, after.live_leases) == (
            before.weight_bytes,
            before.resident_bytes,
            before.groups,
            before.live_leases,
        )
