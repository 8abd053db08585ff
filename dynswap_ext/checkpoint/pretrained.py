"""Opens checkpoints through a library's own `from_pretrained`, with masters that stay mapped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dynswap_ext import config
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.places import mapping_of, stored_bytes
from dynswap_ext._util.units import parse_dtype
from dynswap_ext._util.warn import warn
from dynswap_ext.checkpoint.loading.assembly import MappedFusion
from dynswap_ext.checkpoint.options import check_dtype
from dynswap_ext.errors import ConfigError, SourceError

LoadedT = TypeVar("LoadedT", covariant=True)

#: Up to this share of a model's bytes may be in RAM without a warning: weights that the checkpoint lacks, and
#: small fused ones.
_UNREPORTED = 1 / 16

#: Options of `install`. Transformers would take one that is passed by mistake for a value of the config.
_OF_INSTALL = [name for name in config.OPTION_NAMES if name != "dtype"]


class Loadable(Protocol[LoadedT]):
    """A class of transformers that has `from_pretrained`, such as `AutoModelForCausalLM` or `LlamaModel`."""

    def from_pretrained(self, path: str | PathLike[str], /, *args: Any, **options: Any) -> LoadedT:
        """Load a checkpoint."""
        ...


def from_pretrained(
    cls: Loadable[LoadedT],
    path: str | PathLike[str],
    *args: Any,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> LoadedT:
    """Open a checkpoint as transformers does, with masters that are mapped from its files.

    Calls ``cls.from_pretrained(path, ...)``. So transformers itself handles names, shards, subfolders, ties,
    modules that are kept in float32, the generation config, the report of missing keys and the conversion of
    official files. Tensors that the conversion fuses (the experts of a layer, gate and up projections) are
    mapped range by range. Transformers alone would copy them into memory.

    Parameters
    ----------
    cls
        A class of transformers with a `from_pretrained`, such as ``AutoModelForCausalLM``.
    path
        The folder of the checkpoint, or its name on the hub, which the library resolves.
    *args, **options
        Passed to ``cls.from_pretrained``: ``config``, ``subfolder``, ``revision``, ``attn_implementation``,
        values of the config.
    dtype
        None keeps the dtype that the checkpoint names. Another dtype, or a mapping of dtypes as transformers
        takes it, casts weights into memory. `install(dtype=)` casts them on the way to the device instead,
        and takes no memory for that.

    Returns
    -------
    torch.nn.Module
        The model, or with ``output_loading_info=True`` the tuple, that ``cls.from_pretrained`` returns. The
        masters are private mappings: a write changes this process's copy of a page, and never the file.

    Raises
    ------
    SourceError
        A file is missing, cut short or damaged, or the system refuses to map it.
    ConfigError
        `cls` has no `from_pretrained`, or is of diffusers; `dtype` is not a floating dtype; or the options
        have a `device_map`, or one that belongs to `install`.

    Warns
    -----
    DynswapWarning
        More than a sixteenth of the bytes are in memory, as weights were cast, quantised or rearranged
        (transposed, interleaved, fused along their last dimension). Names the bytes and the weights.
    """
    load = getattr(cls, "from_pretrained", None)
    if load is None:
        raise ConfigError(
            f"cls is {cls!r}; expected a class with from_pretrained, such as "
            "transformers.AutoModelForCausalLM"
        )
    _refuse_options_of_install(options)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype, "dtype")
    if dtype != "auto" and not isinstance(dtype, Mapping):  # a mapping has a dtype for each part of a model
        check_dtype(dtype)
    if getattr(cls, "__module__", "").partition(".")[0] == "diffusers":
        raise ConfigError(
            f"cls is {cls!r}, of diffusers, whose from_pretrained reads weights into memory. "
            "checkpoint.load(lambda: cls.from_config(config), path) maps them (docs/guides/diffusion.md)"
        )
    if dtype is not None or "torch_dtype" not in options:  # the former name of `dtype`
        options["dtype"] = "auto" if dtype is None else dtype
    try:
        with MappedFusion():
            loaded: LoadedT = load(path, *args, **options)
    except SourceError:
        raise
    except (OSError, EOFError) as error:
        raise SourceError(f"{path} cannot be opened: {error}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise SourceError(
            f"{path} cannot be opened: one of its safetensors files is cut short or damaged ({error}); "
            "dynswap_ext.checkpoint.summary() of each says which; download or copy it again"
        ) from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
    if isinstance(model, nn.Module):
        warn_of_copies(model, str(path))
    return loaded


def _refuse_options_of_install(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a `device_map` (masters stay on the CPU) and for options of `install`."""
    if (device_map := options.get("device_map")) is not None:
        raise ConfigError(
            f"device_map is {device_map!r}, and masters stay on the CPU, mapped; leave it out, and give "
            "install() the device"
        )
    if wrong := [name for name in _OF_INSTALL if name in options]:
        raise ConfigError(
            f"{wrong[0]} is an option of install(), not of a load: install(model, "
            f"{wrong[0]}={options[wrong[0]]!r})"
        )


def warn_of_copies(model: nn.Module, path: str) -> None:
    """Warn if more than a sixteenth of a model's bytes are in memory and not mapped."""
    mappings = FileMappings()
    masters = [*model.named_parameters(), *model.named_buffers()]
    in_memory = [
        (name, master) for name, master in masters if master.is_cpu and not mapping_of(master, mappings)
    ]
    every, copied = (sum(stored_bytes(master) for _, master in found) for found in (masters, in_memory))
    if copied <= every * _UNREPORTED:
        return
    kinds: dict[str, int] = {}
    for name, master in in_memory:
        kind = re.sub(r"\.\d+\.", ".*.", name)
        kinds[kind] = kinds.get(kind, 0) + stored_bytes(master)
    largest = sorted(kinds.items(), key=lambda kind: -kind[1])
    names = listed([f"{kind} ({format_bytes(nbytes)})" for kind, nbytes in largest], 3)
    warn(
        f"{format_bytes(copied)} of the {format_bytes(every)} of {path} are in RAM and not mapped: "
        f"{names}. They were cast to another dtype, quantised, or rearranged as mapping cannot do. "
        "If they were cast, leave dtype out here and pass it to install(), which casts weights on the way"
    )
