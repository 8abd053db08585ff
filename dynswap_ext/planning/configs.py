"""A config of transformers or diffusers, made into a model on the meta device."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext.checkpoint import init_empty
from dynswap_ext.checkpoint.formats.common import opened, pread
from dynswap_ext.errors import ConfigError, SourceError

__all__ = ["ConfigModel", "config_in", "model_of_config"]

_NAME: Final = "config.json"
_LARGEST: Final = 16 << 20
#: Files by which a folder is a checkpoint's.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".metadata")
#: How configs call the number of experts, and how many of them see a row.
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts")
_ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class ConfigModel:
    """A model without weights, and what else its config says."""

    model: nn.Module
    title: str
    #: Of floating weights in its checkpoints; None if the config does not say.
    stored: torch.dtype | None = None
    #: The part of a pass's rows that a weight sees, by the weight's name.
    share: Callable[[str], float] = lambda name: 1.0
    notes: tuple[str, ...] = ()


def config_in(path: Path) -> Path | None:
    """Return the config that a path means; None if it means a checkpoint.

    Raises
    ------
    SourceError
        It is a folder of a pipeline, whose models are in folders of their own.
    """
    if not path.is_dir():
        return path if path.suffix == ".json" and not path.name.endswith("index.json") else None
    try:
        names = os.listdir(path)
    except OSError:
        return None  # opening it as a checkpoint says what is wrong
    if "model_index.json" in names:
        parts = sorted(str(path / name) for name in names if (path / name / _NAME).is_file())
        models = ", ".join(parts) or "there is none in it"
        raise SourceError(f"{path} is the folder of a pipeline; plan for one of its models: {models}")
    return path / _NAME if _NAME in names and not any(n.endswith(_WEIGHTS) for n in names) else None


def model_of_config(path: Path) -> ConfigModel:
    """Make the model that a config describes, without memory for weights.

    Raises
    ------
    SourceError
        There is no such file, or it is no config.
    ConfigError
        The config's library is not installed, or has no such model.
    """
    content = _read(path)
    if "_class_name" in content:
        return _of_diffusers(path, content)
    if "model_type" in content or "architectures" in content:
        return _of_transformers(path, content)
    raise SourceError(
        f"{path} is no config of a model: it has neither model_type or architectures (transformers) nor "
        "_class_name (diffusers); name the config.json in the folder of the model's weights"
    )


def _read(path: Path) -> dict[str, Any]:
    with opened(path) as (descriptor, size):
        if size > _LARGEST:
            raise SourceError(
                f"{path} has {size:,} bytes, a config at most {_LARGEST:,}; name the config.json"
            )
        data = pread(descriptor, size, 0)
    try:
        content = json.loads(data)  # some configs have an Infinity, which JSON does not
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is no config, or a damaged one: {error}; download it again") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} is no config: it has a {type(content).__name__}, expected an object")
    return content


def _of_diffusers(path: Path, content: dict[str, Any]) -> ConfigModel:
    diffusers = _library(path, "diffusers")
    cls: Any = getattr(diffusers, str(content["_class_name"]), None)
    if cls is None or not issubclass(cls, nn.Module):
        raise ConfigError(
            f"{path} describes a {content['_class_name']}, and diffusers {diffusers.__version__} has no "
            "model of that name; install the version that the config names (_diffusers_version), or name the "
            "checkpoint"
        )
    model = _make(path, lambda: cls.from_config(content))
    return ConfigModel(model, f"{path}: diffusers {cls.__name__}, no weights")


def _of_transformers(path: Path, content: dict[str, Any]) -> ConfigModel:
    transformers = _library(path, "transformers")
    try:
        config: Any = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # each version has its own for a config that it does not like
        raise ConfigError(
            f"transformers {transformers.__version__} cannot use {path}: {_in_short(error)}; install a "
            "version that knows the model, or name the checkpoint"
        ) from error
    architectures = content.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    cls: Any = getattr(transformers, name, None) if name else None
    # A config without architectures, or with one that transformers lacks, still has a body.
    model = _make(path, lambda: transformers.AutoModel.from_config(config) if cls is None else cls(config))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    part, notes = _active(text)
    if cls is None:
        notes.append(
            f"The config names no architecture that transformers has: planned for {type(model).__name__}, "
            "without a head."
        )
    return ConfigModel(
        model,
        f"{path}: transformers {type(model).__name__}, no weights",
        stored if isinstance(stored, torch.dtype) else None,
        lambda weight: part if ".experts." in f".{weight}." else 1.0,
        tuple(notes),
    )


def _active(config: Any) -> tuple[float, list[str]]:
    """Return the share of the experts that see a row, and notes about it."""
    experts, active = (
        next((found for name in names if (found := getattr(config, name, None))), None)
        for names in (_EXPERTS, _ACTIVE)
    )
    if not isinstance(experts, int) or not isinstance(active, int) or not 0 < active < experts:
        return 1.0, []
    return active / experts, [
        f"A row goes through {active} of {experts} experts: so is compute counted. Copies are counted as if "
        "a pass used every expert, which one of many rows does."
    ]


def _library(path: Path, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path} is a config of {name}, which cannot be imported ({error}); install it with `pip install "
            f"{name}`, or name the checkpoint instead"
        ) from error


def _make(path: Path, factory: Callable[[], nn.Module]) -> nn.Module:
    try:
        return init_empty(factory)
    except ConfigError:
        raise
    except Exception as error:  # whatever a library's constructor raises over a config that it does not like
        raise ConfigError(
            f"the model that {path} describes cannot be made ({type(error).__name__}: {_in_short(error)}); "
            "name its checkpoint instead"
        ) from error


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".:") or type(error).__name__
