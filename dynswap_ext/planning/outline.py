"""Makes the outline of a model from a path: from the headers of a checkpoint, or from a config."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._util.memory import format_bytes
from dynswap_ext.checkpoint import init_empty
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.formats.common import content_of
from dynswap_ext.checkpoint.options import check_dtype
from dynswap_ext.checkpoint.reader import LOSSLESS, Entry
from dynswap_ext.checkpoint.summary import tie_identity
from dynswap_ext.checkpoint.weight_units import library_config, units_of
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.planning.weights import (
    Kind,
    Outline,
    PlannedWeight,
    multiplied,
    outline_of_model,
    planned,
)

#: Usual names of modules whose weight is a table in which rows are looked up: the last word before ".weight".
_TABLES: Final = frozenset(
    (
        *("embed_tokens", "embed_positions", "tok_embeddings", "token_embd", "token_embedding", "shared"),
        *("wte", "wpe", "embedding", "embeddings", "position_embedding", "position_embeddings"),
        *("word_embeddings", "token_type_embeddings", "relative_attention_bias"),
    )
)
#: Dtypes of tensors by which nothing is multiplied, even if they have rows and columns: indices and masks.
_NOT_MULTIPLIED: Final = frozenset((torch.bool, torch.int16, torch.int32, torch.int64))
_DIFFUSION: Final = re.compile(
    r"transformer_blocks\.|double_blocks\.|joint_blocks\.|x_embedder\.|patch_embedding\."
)
_EXPERTS: Final = re.compile(r"(^|\.)(experts|ffn_(gate|up|down)_exps)(\.|$)")
#: Names in configs for the number of experts of a layer.
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts")
#: Names in configs for the number of experts that a row goes through.
_ACTIVE_COUNTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
#: The name under which transformers knows `_causal_attention`.
_OUTLINED: Final = "dynswap_outlined"
#: The most bytes that a config.json may have.
_LARGEST_CONFIG: Final = 16 << 20
#: A folder that has files with these endings is a checkpoint.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".metadata")


def outline(path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False) -> Outline:
    """Return the weights of the model at a path, for planning. Of a checkpoint only headers are read.

    Parameters
    ----------
    path
        A checkpoint, as for `checkpoint.load`; a ``config.json`` of transformers or diffusers; or a folder
        with a ``config.json`` and no checkpoint.
    dtype
        The option of `install`: the dtype of floating weights on the device.
    disk
        Whether copies will read masters from a disk, which moves them as they are stored.

    Raises
    ------
    SourceError
        The path has no checkpoint and no config, is the folder of a pipeline, or cannot be read.
    ConfigError
        The library of the config is not installed, or has no such model.
    """
    where = Path(path)
    try:
        names = os.listdir(where)
    except (OSError, ValueError):
        names = []  # a file, or something that raises an error when it is opened
    if "model_index.json" in names:
        parts = sorted(str(where / name) for name in names if (where / name / "config.json").is_file())
        models = ", ".join(parts) or "there is none in it"
        raise SourceError(f"{where} is the folder of a pipeline; plan for one of its models: {models}")
    if "config.json" in names and not any(name.endswith(_WEIGHTS) for name in names):
        where /= "config.json"
    elif names or where.suffix != ".json" or where.name.endswith("index.json"):
        return outline_of_checkpoint(where, dtype=dtype, disk=disk)
    return outline_of_config(where, dtype=dtype, disk=disk)


# ---- a config ----------------------------------------------------------------------------------------------


def outline_of_config(
    path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False
) -> Outline:
    """Return the weights of the model that a ``config.json`` describes, for planning.

    The model is made on the meta device. The parameters are those of `outline`.

    Raises
    ------
    SourceError
        There is no such file, or it is no config.
    ConfigError
        The library of the config is not installed, or has no such model.
    """
    content = _read(Path(path))
    if "_class_name" in content:
        library, make = "diffusers", _of_diffusers
    elif "model_type" in content or "architectures" in content:
        library, make = "transformers", _of_transformers
    else:
        raise SourceError(
            f"{path} is no config of a model: it has neither model_type or architectures (transformers) nor "
            "_class_name (diffusers); name the config.json in the folder of the model's weights"
        )
    model, config, notes = _described(path, content, library, make)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kept = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    # If the config names no dtype, a checkpoint of the model may have any.
    stored = kept if isinstance(kept, torch.dtype) else dtype
    if stored is None:
        notes.append("The config names no dtype: float32, unless --dtype says otherwise.")
    found = outline_of_model(model, dtype=dtype, stored=stored, disk=disk)
    counts = {name: getattr(text, name, None) for name in (*_EXPERT_COUNTS, *_ACTIVE_COUNTS)}
    weights, routing = _routed(found.weights, counts)
    notes += routing
    title = f"{path}: {library} {found.title}, no weights"
    return Outline(title, weights, found.order, tuple(notes), (), *_rows(weight.name for weight in weights))


def _read(path: Path) -> dict[str, Any]:
    data = content_of(path, _LARGEST_CONFIG, "a config.json")
    try:
        content = json.loads(data)  # also reads Infinity, which some configs have and JSON lacks
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is no config, or a damaged one: {error}; download it again") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} is no config: it has a {type(content).__name__}, expected an object")
    return content


#: A model without weights, its config as an object, if it has one, and notes for the user.
_Described = tuple[nn.Module, Any, list[str]]


def _described(
    path: str | PathLike[str],
    content: dict[str, Any],
    name: str,
    make: Callable[[Any, str, dict[str, Any]], _Described],
) -> _Described:
    """Make the model of a config by its library. Raise ConfigError if the library is missing or fails."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path} is a config of {name}, which cannot be imported ({error}); install it with `pip install "
            f"{name}`, or name the checkpoint instead"
        ) from error
    try:
        return make(library, str(path), content)
    except Exception as error:
        text = " ".join(str(error).split())[:300].rstrip(".:")
        raise ConfigError(
            f"{name} {library.__version__} cannot use {path} ({type(error).__name__}: {text}); install a "
            "version that knows the model, or name the checkpoint"
        ) from error


def _of_diffusers(library: Any, path: str, content: dict[str, Any]) -> _Described:
    cls = getattr(library, str(content["_class_name"]), None)
    if cls is None or not issubclass(cls, nn.Module):
        raise LookupError(f"it has no model of that name: {content['_class_name']}")
    return init_empty(lambda: cls.from_config(content)), None, []


def make_causal_model(path: str | PathLike[str], *, dtype: torch.dtype | None = None) -> nn.Module:
    """Make the causal language model of a ``config.json`` of transformers, or of the folder with one.

    Its weights are as large as those of the model: make it on the meta device, or of fake tensors. Attention
    is torch's own with `is_causal`: transformers would make a mask where tensors are fake, but not else.

    Parameters
    ----------
    path
        The file or its folder.
    dtype
        The dtype of its weights. Default: that of the config, or float32.

    Raises
    ------
    SourceError
        There is no such file, or it is no config of transformers.
    ConfigError
        transformers is not installed, or has no such model.
    """
    where = Path(path)
    where = where / "config.json" if where.is_dir() else where
    content = _read(where)
    if "model_type" not in content:
        raise SourceError(f"{where} is no config of a language model of transformers: it has no model_type")

    def make(library: Any, path: str, content: dict[str, Any]) -> _Described:
        config = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
        config.use_cache = False
        library.AttentionInterface.register(_OUTLINED, _causal_attention)
        library.AttentionMaskInterface.register(_OUTLINED, lambda *_, **__: None)
        kept = getattr(config, "dtype", None)
        wanted = dtype or (kept if isinstance(kept, torch.dtype) else torch.float32)
        options = {"dtype": wanted, "attn_implementation": _OUTLINED}
        return library.AutoModelForCausalLM.from_config(config, **options), config, []

    return _described(where, content, "transformers", make)[0]


def _causal_attention(
    _: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> tuple[torch.Tensor, None]:
    """Return what an attention of transformers does, for tensors of (batch, heads, tokens, width)."""
    grouped = query.shape[1] != key.shape[1]
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=grouped
    )
    return attended.transpose(1, 2).contiguous(), None


def _of_transformers(library: Any, path: str, content: dict[str, Any]) -> _Described:
    config = library.AutoConfig.from_pretrained(path, trust_remote_code=False)
    name = next(iter(content.get("architectures") or ()), "")
    cls = getattr(library, str(name), None)
    if cls is not None:
        return init_empty(lambda: cls(config)), config, []
    # A config that names no architecture, or one that transformers lacks, still gives a model without a head.
    model = init_empty(lambda: library.AutoModel.from_config(config))
    note = "The config names no architecture that transformers has: planned for {}, without a head."
    return model, config, [note.format(type(model).__name__)]


# ---- a checkpoint ------------------------------------------------------------------------------------------


def outline_of_checkpoint(
    path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False
) -> Outline:
    """Return the weights of a checkpoint of any format, for planning. Only headers are read.

    The parameters are those of `outline`.

    Notes
    -----
    Weights with the same name up to the last dot are taken for those of one module. The order of use is that
    of the file. If the file is sorted by name, which says nothing about use, weights are sorted by name with
    numbers in numeric order.

    Raises
    ------
    SourceError
        The checkpoint cannot be read, or has no tensors.
    """
    check_dtype(dtype)
    checkpoint = open_checkpoint(Path(path))
    once: dict[object, tuple[str, Entry]] = {}
    for name, entry in checkpoint.entries.items():
        if torch.Size(entry.shape).numel():
            once.setdefault(tie_identity(name, entry), (name, entry))
    # In a file, small weights that are not coded come before all coded ones, whatever the order of use.
    entries = dict(sorted(once.values(), key=lambda named: named[1].encoding != LOSSLESS))
    if not entries:
        raise SourceError(
            f"{path} has no tensors, so there is nothing to plan for; name the file with the weights"
        )
    by_name = _sorted_as_text(entries)
    config = library_config(checkpoint.files)
    units = units_of(entries, fuses=bool(config))
    if by_name:
        units.sort(key=lambda unit: min(_natural(weight.name) for weight in unit.weights))
    weights = []
    for number, unit in enumerate(units):
        norm = all(len(weight.entry.shape) < 2 for weight in unit.weights)
        for weight in unit.weights:
            kind, by_use = _kind(weight.name, weight.entry, norm=norm), float(unit.by_use)
            options: dict[str, Any] = {"dtype": dtype, "disk": disk, "at_once": unit.at_once}
            weights.append(planned(weight, number, kind=kind, by_use=by_use, **options))
    text = config.get("text_config")
    routed, notes = _routed(weights, text if isinstance(text, dict) else config)
    stored = sum(entry.nbytes for entry in entries.values())
    title = f"{Path(path)}: {checkpoint.format}, {len(entries)} weights, {format_bytes(stored)} in the file"
    order = "by name, with numbers in numeric order" if by_name else "as in the file"
    return Outline(title, routed, order, tuple(notes), checkpoint.files, *_rows(entries))


def _routed(
    weights: Sequence[PlannedWeight], config: Mapping[str, Any]
) -> tuple[tuple[PlannedWeight, ...], list[str]]:
    """Return the weights, experts with the share of rows that the config tells, and notes for the user."""
    if not any(weight.by_use or _EXPERTS.search(weight.name) for weight in weights):
        return tuple(weights), []
    experts, active = (
        next((count for name in names if (count := config.get(name)) is not None), None)
        for names in (_EXPERT_COUNTS, _ACTIVE_COUNTS)
    )
    if not (isinstance(experts, int) and isinstance(active, int) and 0 < active < experts):
        return tuple(weights), [
            "The names are those of a mixture of experts: compute and copies are counted as if every row "
            "went through every expert. The model's config.json, in the same folder, has their number."
        ]
    share = active / experts
    routed = (
        dataclasses.replace(weight, share=share, by_use=weight.by_use and share)
        if weight.by_use or _EXPERTS.search(weight.name)
        else weight
        for weight in weights
    )
    return tuple(routed), [
        f"Each row goes through {active} of {experts} experts, all equally likely. Where some are used "
        "more than others, those stay on the device, and less is moved than predicted. Experts stay by use: "
        "none is counted as resident."
    ]


def _rows(names: Iterable[str]) -> tuple[int, str]:
    """Return the default number of rows of a pass, and what such a pass is, in words.

    It is an image if the names are those of a diffusion model, else a token.
    """
    if any(_DIFFUSION.search(name) for name in names):
        return 4096, "an image of 1024 x 1024"
    return 1, "one token, as in decoding"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key under which "layers.2" is before "layers.10"."""
    words = re.split(r"(\d+)", name)
    return tuple((int(word), "") if word.isdecimal() else (-1, word) for word in words)


def _sorted_as_text(entries: Mapping[str, Entry]) -> bool:
    """Return whether the entries of each dtype are sorted by name as text, in each file.

    Each dtype is compared alone, because safetensors sorts by the width of the dtype first. So are coded
    tensors, which come after others in a file.
    """
    parts: dict[object, list[str]] = {}
    for name, entry in entries.items():
        parts.setdefault((entry.file, entry.dtype, entry.encoding), []).append(name)
    return all(part == sorted(part) for part in parts.values())


def _kind(name: str, entry: Entry, *, norm: bool) -> Kind:
    if entry.dtype in _NOT_MULTIPLIED:
        return "lookup"
    if len(entry.shape) < 2:
        return "norm" if norm else "vector"
    module = name.rpartition(".")[0].rpartition(".")[2]
    return "lookup" if module in _TABLES else multiplied(name)
