"""A plugin for axolotl, which streams the weights of the model that a YAML file names.

Note [Loaded, installed, adapted]
---------------------------------
axolotl loads a model, then casts and resizes some of its layers, and then adds the adapters. Weights are
loaded on the host, and stay mapped if nothing casts them. The model is installed before the adapters are
added: peft puts adapters on the device where their base computes, so that the state of their optimizer is
there, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, field_validator, model_validator

from dynswap_ext import config
from dynswap_ext.checkpoint.loading.assembly import MappedFusion
from dynswap_ext.errors import ConfigError
from dynswap_ext.handle import Handle
from dynswap_ext.install import install
from dynswap_ext.integrations.install_options import install_options

__all__ = ["DynswapArgs", "DynswapPlugin"]

LOG: Final = get_logger("axolotl.integrations.dynswap")  # axolotl shows information only from its own loggers

#: Options of `install` that the key ``dynswap`` does not take, and what decides them instead.
_NOT_HERE: Final = {
    "device": "axolotl computes on the first GPU that it sees (CUDA_VISIBLE_DEVICES)",
    "dtype": "axolotl's keys bf16 and fp16 decide the dtype",
}
_MOVES: Final = "moves weights, too"
_QUANTISES: Final = "quantises weights on the device, where they would have to fit"
_PLACES: Final = "places weights, and those that stream stay on the host"
#: Keys of axolotl that cannot be combined with this plugin, and what each of them does.
_OTHERS: Final = {
    "layer_offloading": _MOVES,
    "deepspeed": _MOVES,
    "fsdp": _MOVES,
    "fsdp_config": _MOVES,
    "tensor_parallel_size": "spreads weights over several devices",
    "load_in_8bit": _QUANTISES,
    "load_in_4bit": _QUANTISES,
    "gptq": _QUANTISES,
    "model_quantization_config": _QUANTISES,
    "quantize_moe_experts": _QUANTISES,
    "gpu_memory_limit": _PLACES,
    "max_memory": _PLACES,
    "device_map": _PLACES,
}
#: The values of these keys that can be combined with it.
_HARMLESS: Final = {"tensor_parallel_size": 1, "device_map": "cpu"}
#: Keys that axolotl turns on by itself. These kernels keep every weight of the base from forward to backward.
_KERNELS: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class DynswapArgs(BaseModel):  # type: ignore[misc]
    """The key ``dynswap`` of a YAML file: options of `dynswap_ext.install` except `device` and `dtype`."""

    dynswap: dict[str, Any] | None = None

    @field_validator("dynswap", mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def check_dynswap(cls, options: Any) -> Any:
        """Check the names and the values of the options, before anything is loaded."""
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(
                f"dynswap is {options!r}; write options of install below it, such as budget: 6GiB. To train "
                "without it, remove DynswapPlugin from plugins"
            )
        for name in _NOT_HERE.keys() & (options or {}).keys():
            raise ConfigError(f"dynswap has no {name}: {_NOT_HERE[name]}. Leave it out")
        try:
            chosen = install_options("dynswap", options or {}, without=_NOT_HERE)
        except TypeError as error:
            raise ConfigError(str(error)) from None  # pydantic names the key only for errors of this kind
        config.resolve(**chosen)
        return options

    @model_validator(mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def check_keys_beside_dynswap(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Refuse keys that cannot be combined with streaming, and make axolotl load weights on the host."""
        for key, what in _OTHERS.items():
            if data.get(key) not in (None, False, _HARMLESS.get(key)):
                raise ConfigError(f"{key} {what}: leave {key} out, or remove DynswapPlugin from plugins")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.accelerator.device_count() > 1:
            raise ConfigError(
                "axolotl has several processes or GPUs, and DynswapPlugin streams to one device; set "
                "CUDA_VISIBLE_DEVICES=0"
            )
        data["device_map"] = "cpu"
        return data


class DynswapPlugin(BasePlugin):  # type: ignore[misc]
    """Installs the model that axolotl trains: ``plugins: [dynswap_ext.integrations.axolotl.DynswapPlugin]``.

    The key ``dynswap`` of the YAML file has the options of `dynswap_ext.install`. If neither `budget` nor
    `plan` is given, the budget is ``"auto"``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[tuple[str, Handle]] = []  # of the model, and of a reference model if there is one
        self._fusion = MappedFusion()

    def get_input_args(self) -> str:
        """Return the import path of the class that checks the keys."""
        return f"{__name__}.{DynswapArgs.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """Turn off the fused LoRA kernels that the YAML file does not mention, before axolotl checks it."""
        for name in _KERNELS:
            if cfg.get(name) is None:
                cfg[name] = False

    def pre_model_load(self, cfg: Any) -> None:
        """Let transformers map the weights that it fuses while it loads, instead of copying them."""
        self._fusion.__enter__()

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Stop mapping fused weights, as the model is loaded."""
        self._fusion.__exit__(None, None, None)

    def pre_lora_load(self, cfg: Any, model: Any) -> None:
        """Install the model: Note [Loaded, installed, adapted]."""
        options = install_options("dynswap", cfg.dynswap or {}, without=_NOT_HERE)
        handle = install(model, **options)
        self._handles.append((type(model).__name__, handle))
        LOG.info("dynswap: %s is installed: %r", type(model).__name__, handle)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Log the report and uninstall the model, before axolotl saves it. axolotl calls this twice."""
        while self._handles:
            name, handle = self._handles.pop()
            LOG.info("dynswap: %s:\n%s", name, handle.report())
            handle.uninstall()
