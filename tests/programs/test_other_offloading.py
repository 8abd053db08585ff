"""Hooks of other libraries that move weights, before and after an install: the table of docs/libraries.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider, accelerate_knows
from dynswap_ext import testing
from programs import bytes_of, library, seeded
from sample_models import mlp, trace

accelerate = library("accelerate")
diffusers = library("diffusers")


@pytest.fixture(autouse=True)
def _known(provider: Provider) -> None:
    accelerate_knows(provider)


def unet() -> Any:
    seeded()
    return diffusers.UNet2DModel(
        block_out_channels=(8, 8),
        norm_num_groups=2,
        layers_per_block=1,
        sample_size=8,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()


def linears() -> nn.Module:
    seeded()
    return mlp(layers=3).eval()


@dataclass(frozen=True)
class Combination:
    """A feature of another library, and what happens if it is combined with an install."""

    #: The library's name in its row of docs/libraries.md.
    library: str
    feature: str
    apply: Callable[[Any, torch.device, Path], Any]
    #: How the message says to remove it, and a function that does; None without a way or a need.
    removal: str = ""
    remove: Callable[[Any], None] | None = None
    make: Callable[[], Any] = linears
    refused: bool = True
    #: Whether it loads other masters, to a place of its own, before it adds a hook.
    loads: bool = False


def dispatch(model: nn.Module, device: torch.device, folder: Path) -> None:
    where = {name: device if i % 2 else "disk" for i, name in enumerate(dict(model.named_children()))}
    accelerate.dispatch_model(model, where, main_device=device, offload_dir=folder, force_hooks=True)


def load_and_dispatch(model: nn.Module, device: torch.device, folder: Path) -> None:
    library("safetensors.torch").save_file(model.state_dict(), folder / "m.safetensors", {"format": "pt"})
    file = str(folder / "m.safetensors")
    accelerate.load_checkpoint_and_dispatch(model, file, device_map={"": str(device)}, force_hooks=True)


def group_offload(**options: Any) -> Callable[[Any, torch.device, Path], None]:
    def apply(model: Any, device: torch.device, _: Path) -> None:
        streams = {"use_stream": True} if device.type != "cpu" and options.get("leaf") else {}
        kind = {"offload_type": "leaf_level"} if options.get("leaf") else {"offload_type": "block_level"}
        blocks = {} if options.get("leaf") else {"num_blocks_per_group": 1}
        model.enable_group_offload(
            onload_device=device, offload_device=torch.device("cpu"), **kind, **blocks, **streams
        )

    return apply


def sequential(model: Any, device: torch.device, _: Path) -> None:
    if device.type == "cpu":
        pytest.skip("diffusers offers it with an accelerator alone")
    pipe(model).enable_sequential_cpu_offload(device=device)


def whole_models(model: Any, device: torch.device, _: Path) -> None:
    """Let the pipeline move components one after the other; an installed one stays where it computes."""
    pipe(model).enable_model_cpu_offload(device=device)


def managed(model: Any, device: torch.device, _: Path) -> None:
    """Let the manager of a modular pipeline decide which components it moves."""
    if device.type == "cpu":
        pytest.skip("diffusers offers it with an accelerator alone")
    manager = diffusers.ComponentsManager()
    manager.add("unet", model)
    manager.enable_auto_cpu_offload(device=device)


def pipe(model: Any) -> Any:
    class Pipeline(diffusers.DiffusionPipeline):
        model_cpu_offload_seq = "unet"

        def __init__(self, unet: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet)

    return Pipeline(model)


def remove_group_offload(model: Any) -> None:
    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model)
    for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
        registry.remove_hook(name)
    model.to("cpu")


OFF = "accelerate.hooks.remove_hook_from_submodules(model)"
HOOKS_OFF: dict[str, Any] = {"removal": OFF, "remove": accelerate.hooks.remove_hook_from_submodules}
GROUPS_OFF: dict[str, Any] = {
    "removal": "HookRegistry.check_if_exists_or_initialize(model)",
    "remove": remove_group_offload,
}
AGAIN = "load the model again"

COMBINATIONS = (
    Combination("accelerate", "`cpu_offload`", lambda m, d, _: accelerate.cpu_offload(m, d), **HOOKS_OFF),
    Combination(
        "accelerate", "`disk_offload`", lambda m, d, f: accelerate.disk_offload(m, f, d), **HOOKS_OFF
    ),
    Combination("accelerate", "`dispatch_model`, `device_map`", dispatch, **HOOKS_OFF),
    Combination("accelerate", "`load_checkpoint_and_dispatch`", load_and_dispatch, loads=True, **HOOKS_OFF),
    Combination(
        "accelerate",
        "`cpu_offload_with_hook`",
        lambda m, d, _: accelerate.cpu_offload_with_hook(m, d),
        refused=False,
    ),
    Combination(
        "accelerate",
        "`attach_layerwise_casting_hooks`",
        lambda m, d, _: accelerate.big_modeling.attach_layerwise_casting_hooks(
            m, torch.float16, torch.float32
        ),
        removal=AGAIN,
    ),
    Combination("diffusers", "`enable_sequential_cpu_offload`", sequential, make=unet, **HOOKS_OFF),
    Combination("diffusers", "`enable_model_cpu_offload`", whole_models, make=unet, refused=False),
    Combination("diffusers", "`enable_auto_cpu_offload`", managed, make=unet, refused=False),
    Combination("diffusers", "`enable_group_offload`, blocks", group_offload(), make=unet, **GROUPS_OFF),
    Combination(
        "diffusers", "`enable_group_offload`, leaves", group_offload(leaf=True), make=unet, **GROUPS_OFF
    ),
    Combination(
        "diffusers",
        "`enable_layerwise_casting`",
        lambda m, d, _: m.enable_layerwise_casting(torch.float16, torch.float32),
        removal=AGAIN,
        make=unet,
    ),
)


def run(model: nn.Module, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, diffusers.UNet2DModel):
            x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
            return model(x, 3).sample  # type: ignore[no-any-return]
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).to(device)
        return model(x)  # type: ignore[no-any-return]


def state(model: nn.Module) -> list[Any]:
    """Return a model's masters, where and in which dtype they are, and how often they were written."""
    return [(name, id(p), p.device, p.dtype, p._version) for name, p in model.named_parameters()]


each = pytest.mark.parametrize(
    "case", COMBINATIONS, ids=lambda c: f"{c.library} {c.feature}".replace("`", "")
)


@each
def test_before_the_install(provider: Provider, case: Combination, tmp_path: Path) -> None:
    model, device = case.make(), provider.device
    plain = run(testing.moved(model, device, None), device)
    if case.removal == AGAIN:  # it casts, and moves nothing
        model.to(device)
    case.apply(model, device, tmp_path)
    if case.refused:
        hooked = run(model, device)
        before = trace(model)
        with pytest.raises(dynswap_ext.ConfigError) as raised:
            provider.install(model)
        assert "Hook of" in str(raised.value) and case.removal in str(raised.value)
        assert trace(model) == before
        testing.assert_bit_equal(run(model, device), hooked)  # the earlier hooks still work
        if case.remove is None:
            return
        case.remove(model)
    handle = provider.install(model)
    testing.assert_bit_equal(run(model, device), plain)
    if device.type != "cpu" and not case.loads:
        assert handle.stats().bytes_moved > 0.9 * bytes_of(model)


@each
def test_after_the_install(provider: Provider, case: Combination, tmp_path: Path) -> None:
    model, device = case.make(), provider.device
    plain = run(testing.moved(model, device, None), device)
    handle = provider.install(model)
    masters = state(model)
    if case.refused:
        with pytest.raises(dynswap_ext.ConfigError) as raised:
            case.apply(model, device, tmp_path)
        assert "Hook of" in str(raised.value) and case.removal in str(raised.value)
        assert "dynswap_ext.uninstall(model)" in str(raised.value)
    else:
        case.apply(model, device, tmp_path)
    testing.assert_bit_equal(run(model, device), plain)
    assert handle.active
    if not case.loads:
        assert state(model) == masters
        if device.type != "cpu":
            assert handle.stats().bytes_moved > 0.9 * bytes_of(model)
    handle.uninstall()
    testing.assert_bit_equal(run(model.to(device), device), plain)


def test_hooks_that_move_no_weights_are_allowed(provider: Provider) -> None:
    """Hooks that move no weights are allowed: a cache of diffusers, and a hook of the user."""
    calls: list[str] = []

    class Own(accelerate.hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("own")
            return args, kwargs

    class Cache(diffusers.hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("cache")
            return args, kwargs

    for first in (True, False):
        calls.clear()
        model = linears()
        plain = run(testing.moved(model, provider.device, None), provider.device)
        if first:
            provider.install(model)
        accelerate.hooks.add_hook_to_module(model, Own())
        diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model[0]).register_hook(Cache(), "cache")
        if not first:
            provider.install(model)
        testing.assert_bit_equal(run(model, provider.device), plain)
        assert calls == ["own", "cache"]


def test_a_hook_that_comes_to_others_is_refused_too(provider: Provider) -> None:
    """A hook that moves weights is refused also if a registry with another hook is there already."""
    model = unet()
    plain = run(testing.moved(model, provider.device, None), provider.device)
    registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model.conv_in)
    registry.register_hook(diffusers.hooks.ModelHook(), "own")
    provider.install(model)
    with pytest.raises(dynswap_ext.ConfigError, match="GroupOffloadingHook"):
        group_offload(leaf=True)(model, provider.device, Path())
    testing.assert_bit_equal(run(model, provider.device), plain)
