"""Adapts GGUF files to models of other libraries, which have other names and another order of rows.

`GGUFTensor` holds a quantised weight. `names_for` makes the `rename` of `load`, and `original_rows` the
`transform`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.gguf_tensors.tensor import GGUFTensor
from dynswap_ext.checkpoint.loading.skeleton import make_skeleton
from dynswap_ext.errors import ConfigError

__all__ = ["GGUFTensor", "names_for", "original_rows"]

#: Beginnings of the names of tensors in a file that the model itself computes from its configuration.
_COMPUTED = ("rope_freqs.", "rope_factors_")

#: Architectures for which llama.cpp's converter permutes the rows of query and key projections.
_PERMUTED = (
    "arcee", "deci", "granite", "granitehybrid", "granitemoe", "llada",
    "llama", "minicpm", "mistral3", "olmo", "smollm3", "xverse",
)  # fmt: skip

#: The name of a query or key projection, in GGUF or in a Hugging Face or Meta checkpoint.
_QUERY_OR_KEY = re.compile(r"(?:^|[._])(?:attn_|w)?(q|k)(?:_proj)?\.(?:weight|bias)$")


def names_for(
    path: str | PathLike[str], model: nn.Module | Callable[[], nn.Module] | Iterable[str]
) -> Callable[[str], str | None]:
    """Make a `rename` for `load` that gives the entries of a GGUF file the names that the model has for them.

    Parameters
    ----------
    path
        The GGUF file, whose metadata name the architecture.
    model
        The model, a callable that makes it (it is called on the meta device), or the names of its weights.
        They may be in any naming that llama.cpp's converter knows, such as that of transformers.

    Returns
    -------
    Callable
        For ``load(..., rename=...)``. An entry for which the model has no name keeps its own. An entry that
        the model computes itself (``rope_freqs``) is left out.

    Raises
    ------
    ConfigError
        The file is not GGUF, does not say its number of blocks, or is of an architecture that the `gguf`
        package does not know; or none of the model's names belongs to that architecture.
    SourceError
        The file cannot be read, or the package is not installed.
    """
    metadata = _metadata(path)
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if callable(model) and not isinstance(model, nn.Module):
        model = make_skeleton(model)
    names = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    name = metadata.get("general.architecture", "")
    architecture = {known: arch for arch, known in MODEL_ARCH_NAMES.items()}.get(name)
    if architecture is None:
        raise ConfigError(
            f"{path} is of the architecture {name!r}, which the gguf package does not know; upgrade it "
            "(pip install -U gguf), or give load() a rename of your own"
        )
    table = get_tensor_name_map(architecture, _number(metadata, path, f"{name}.block_count"))
    own: dict[str, str] = {}
    for key in names:
        # A base model, without the head, has these names without "model.".
        found = (table.get_name(tried, (".weight", ".bias")) for tried in (key, f"model.{key}"))
        if (theirs := next(filter(None, found), None)) is not None:
            own.setdefault(theirs, key)
    if not own:
        raise ConfigError(
            f"none of the model's names belongs to {name}, the architecture of {path}; load it into that "
            "model of transformers, or give load() a rename of your own"
        )
    return lambda key: None if key.startswith(_COMPUTED) and key not in own else own.get(key, key)


def original_rows(path: str | PathLike[str]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Make a `transform` for `load` that undoes llama.cpp's permutation of query and key rows.

    For Llama, Mistral, Mixtral and models like them (Granite, OLMo, SmolLM3), llama.cpp's converter reorders
    the rows of ``attn_q`` and ``attn_k``: its rotary embeddings rotate pairs of neighbours, and those of
    transformers rotate the halves of a head. Quantised rows are moved without decoding. The reordered tensors
    are in memory, and no longer mapped. Tensors of other architectures are not changed.

    Parameters
    ----------
    path
        The GGUF file, whose metadata have the architecture and the number of heads.

    Returns
    -------
    Callable
        For ``load(..., transform=...)``. Takes a name, as in the file or as in the model, and its tensor.

    Raises
    ------
    ConfigError
        The file is not GGUF, or does not say its number of heads. The transform raises it if the rows of a
        tensor do not divide into that many heads.
    SourceError
        The file cannot be read, or the package is not installed.

    Notes
    -----
    The inverse of ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """
    metadata = _metadata(path)
    architecture = metadata.get("general.architecture")
    if architecture not in _PERMUTED:
        return lambda name, tensor: tensor
    queries = _number(metadata, path, f"{architecture}.attention.head_count")
    shared = f"{architecture}.attention.head_count_kv"
    keys = _number(metadata, path, shared) if shared in metadata else queries

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = _QUERY_OR_KEY.search(name)
        if found is None:
            return tensor
        heads, count = queries if found[1] == "q" else keys, tensor.shape[0]
        if heads <= 0 or count % (2 * heads):
            raise ConfigError(
                f"{path}: the {count} rows of {name} do not divide into {heads} heads of even size"
            )
        rows = torch.arange(count, device=tensor.device).reshape(heads, -1, 2)
        return tensor.index_select(0, rows.transpose(1, 2).reshape(-1))

    return transform


def _metadata(path: str | PathLike[str]) -> dict[str, str]:
    checkpoint = open_checkpoint(Path(path))
    if checkpoint.format != "gguf":
        raise ConfigError(f"{path} is a {checkpoint.format} file, not GGUF; its names are the model's own")
    return checkpoint.metadata


def _number(metadata: dict[str, str], path: str | PathLike[str], key: str) -> int:
    value = metadata.get(key, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{path} does not say {key} as one number (it has {value!r}); give load() rules of your own"
        )
    return int(value)
