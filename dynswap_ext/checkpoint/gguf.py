"""GGUF's quantised weights as masters: their tensor, and whose names and rows they have.

From GGUF's names, and from llama.cpp's order of rows, to those of the Hugging Face model.
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
from dynswap_ext.errors import ConfigError

__all__ = ["GGUFTensor", "names_for", "original_rows"]

#: Tensors that a file has and the model computes from its configuration.
_COMPUTED = ("rope_freqs.", "rope_factors_")

#: A query or key projection, by GGUF's name or by that of a Hugging Face or Meta checkpoint.
_QUERY_OR_KEY = re.compile(r"(?:^|[._])(?:attn_|w)?(q|k)(?:_proj)?\.(?:weight|bias)$")


def names_for(
    path: str | PathLike[str], model: nn.Module | Callable[[], nn.Module] | Iterable[str]
) -> Callable[[str], str | None]:
    """Make the `rename` that gives the entries of a GGUF file the names that a model has for them.

    Parameters
    ----------
    path
        The GGUF file: its metadata say the architecture.
    model
        The model, what makes it (called on the meta device), or its names. Any naming that llama.cpp's
        converter knows will do, as that of transformers.

    Returns
    -------
    Callable
        For ``load(..., rename=...)``. What is not in the architecture's table keeps its name; what the model
        computes itself (``rope_freqs``) is left out.

    Raises
    ------
    ConfigError
        The file is not GGUF, or of an architecture that the `gguf` package does not know, or none of the
        model's names belongs to it.
    SourceError
        The file cannot be read, or the package is not installed.
    """
    metadata = _metadata(path)
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if callable(model) and not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
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
        # A model without its head has no prefix.
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
    """Make the `transform` that undoes llama.cpp's permutation of query and key rows.

    Its converter reorders the rows of ``attn_q`` and ``attn_k`` of the architecture "llama" (Llama, Mistral,
    Mixtral) so that rotary embeddings turn neighbours; the model of transformers turns halves. Blocks run
    along rows, so quantised rows are put back as they are. These tensors are then in memory and no longer
    mapped. Of any other architecture nothing is changed.

    Parameters
    ----------
    path
        The GGUF file: its metadata say the architecture and the number of heads.

    Returns
    -------
    Callable
        From a name, GGUF's or the model's, and its tensor to the tensor.

    Raises
    ------
    ConfigError
        The file is not GGUF, does not say its heads, or they do not divide the rows.
    SourceError
        The file cannot be read, or the package is not installed.

    Notes
    -----
    The inverse of ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """
    metadata = _metadata(path)
    if metadata.get("general.architecture") != "llama":
        return lambda name, tensor: tensor
    queries = _number(metadata, path, "llama.attention.head_count")
    shared = "llama.attention.head_count_kv"
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
