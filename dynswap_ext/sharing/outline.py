"""Describes the masters (parameters and buffers) of a rank to other ranks, and compares them."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dynswap_ext._swap.state import named_modules_of, served_of
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.places import address_of, mapping_of, parts_of, storages_of
from dynswap_ext._util.ranks import Ranks
from dynswap_ext.errors import ConfigError

#: Describes a buffer. A parameter is described by its class.
_BUFFER: Final = "a buffer"


class Outline(NamedTuple):
    """A master of a rank, as it is described to the other ranks."""

    name: str
    #: Class, shape, dtype and whether it requires a gradient: the same on all ranks.
    about: tuple[str, tuple[int, ...], str, bool]
    #: Whether the ranks may share its bytes, because none of them writes there.
    shareable: bool
    is_meta: bool
    #: Device, inode and offset, if it is mapped from a file.
    file: tuple[str, int, int] | None
    #: The first master that has the same bytes, often itself.
    tied: str


def compare(ranks: Ranks, outlines: dict[int, list[Outline]]) -> None:
    """Raise ConfigError if the ranks of a host have different models."""
    (first, expected), *others = outlines.items()
    if on_meta := [each.name for each in expected if each.is_meta] if others else []:
        raise ConfigError(
            f"rank {ranks.name(first)}, whose weights the others are to share, has {_named(on_meta)} on the "
            "meta device; expected a loaded model"
        )
    of_first = {each.name: each for each in expected}
    for rank, outline in others:
        names = {each.name for each in outline}
        for missing, on, by in (
            ([name for name in of_first if name not in names], rank, first),
            ([each.name for each in outline if each.name not in of_first], first, rank),
        ):
            if missing:
                raise ConfigError(
                    f"rank {ranks.name(on)} has no {_named(missing)}, which rank {ranks.name(by)} has; "
                    "expected the same model on all ranks of a host"
                )
        for each in outline:
            other = of_first[each.name]
            if each.about != other.about:
                raise ConfigError(
                    f"'{each.name}' is {_described(each)} on rank {ranks.name(rank)} and {_described(other)} "
                    f"on rank {ranks.name(first)}; expected the same model on all ranks of a host"
                )
            if each.is_meta and other.tied != of_first[each.tied].tied:
                raise ConfigError(
                    f"'{each.tied}' and '{each.name}' are one weight on rank {ranks.name(rank)} and two "
                    f"on rank {ranks.name(first)}; expected the same ties on all ranks of a host"
                )


def compare_values(ranks: Ranks, names: list[str], digests: dict[int, list[bytes | None]]) -> None:
    """Raise ConfigError if a weight that is to be shared has other values on another rank of the host."""
    (first, expected), *others = digests.items()
    for rank, found in others:
        differ = [name for name, a, b in zip(names, expected, found, strict=True) if b is not None and a != b]
        if differ:
            raise ConfigError(
                f"{_named(differ)} has other values on rank {ranks.name(rank)} than on rank "
                f"{ranks.name(first)}; expected the same values. Load the same checkpoint on all ranks, or "
                "load it on the first rank and make the model on the meta device on the others"
            )


def _named(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"


def _described(outline: Outline) -> str:
    kind, shape, dtype, trained = outline.about
    return f"{kind} of {dtype} {list(shape)}{' that requires a gradient' if trained else ''}"


@dataclass(frozen=True)
class Place:
    """A master, with the module that holds it and its key there."""

    module: nn.Module
    key: str
    master: torch.Tensor
    outline: Outline

    @property
    def _held(self) -> dict[str, Any]:
        is_parameter = not self.outline.about[0].startswith(_BUFFER)
        return self.module._parameters if is_parameter else self.module._buffers

    def now(self) -> torch.Tensor:
        """Return the master that the module holds under this key now."""
        return cast(torch.Tensor, self._held[self.key])

    def put(self, master: torch.Tensor) -> None:
        """Replace the master that the module holds under this key."""
        self._held[self.key] = master


def places_of(model: nn.Module, buffers: str | Sequence[str]) -> list[Place]:
    """Return the places of a model's masters, sorted by name. A tied master has several places."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__qualname__}; expected a torch.nn.Module. Call share_masters for "
            "each model of a pipeline or a list"
        )
    buffers = (buffers,) if isinstance(buffers, str) else tuple(buffers)
    named = list(named_modules_of(model))
    if served := served_of([module for _, module in named]):
        raise ConfigError(
            f"a {type(served[0]).__qualname__} of the model is installed; expected a model that is not: call "
            "share_masters before install"
        )
    files = FileMappings()
    found: list[Place] = []
    unused = set(buffers)
    for path, module in named:
        for key, master, is_parameter in own_masters(module):
            name = f"{path}.{key}" if path else key
            matching = {pattern for pattern in buffers if not is_parameter and fnmatchcase(name, pattern)}
            unused -= matching
            found.append(
                Place(module, key, master, _outline(name, master, is_parameter, bool(matching), files))
            )
    if unused:
        raise ConfigError(
            f"buffers={sorted(unused)[0]!r} names no buffer of the model; expected "
            "names as in named_buffers(), or globs"
        )
    # A storage that is written through one master is not shared through another.
    found.sort(key=lambda place: place.outline.name)
    own = {storage for place in found if not place.outline.shareable for storage in _storages(place.master)}
    firsts: dict[object, str] = {}
    for index, place in enumerate(found):
        outline = place.outline._replace(
            shareable=place.outline.shareable and own.isdisjoint(_storages(place.master)),
            tied=firsts.setdefault(_bytes_of(place.master), place.outline.name),
        )
        found[index] = replace(place, outline=outline)
    return found


def _outline(
    name: str, master: torch.Tensor, is_parameter: bool, given: bool, files: FileMappings
) -> Outline:
    strided = master.layout is torch.strided
    kind = f"a {type(master).__name__}" if is_parameter else _BUFFER
    kind = kind if strided else f"{kind} ({str(master.layout).removeprefix('torch.')})"
    if master.device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"'{name}' is on {master.device}; expected a model on the CPU: share_masters comes first"
        )
    if is_lazy(master):
        raise ConfigError(f"'{name}' has no shape yet; expected a model that has run once")
    if any(part.is_conj() or part.is_neg() for part in parts_of(master)):
        raise ConfigError(
            f"'{name}' is conjugated or negated when it is read; expected its resolve_conj().resolve_neg()"
        )
    if master.is_meta and not (strided and type(master) in (nn.Parameter, torch.Tensor, nn.Buffer)):
        raise ConfigError(f"'{name}' is a {type(master).__name__} on the meta device; expected it on the CPU")
    sharded = type(getattr(master, "data", master)).__name__ == "DTensor"
    about = (kind, tuple(master.shape), str(master.dtype), master.requires_grad)
    shareable = not master.requires_grad and not sharded and (is_parameter or given)
    shareable = shareable and strided and (master.is_meta or all(map(_has_bytes, parts_of(master))))
    mapping = mapping_of(master, files)
    file = None
    if mapping is not None:
        file = mapping.device, mapping.inode, mapping.offset_of(next(parts_of(master)).data_ptr())
    return Outline(name, about, shareable, master.is_meta, file, name)


def _has_bytes(part: torch.Tensor) -> bool:
    """Return whether a part shows where its bytes are, which a wrapper of an unknown kind does not."""
    return part.numel() == 0 or address_of(part) != 0


def _storages(master: torch.Tensor) -> set[int]:
    return {storage._cdata for storage in storages_of(master)}


def _bytes_of(master: torch.Tensor) -> object:
    """Return what two masters have in common if they are the same bytes."""
    if master.layout is not torch.strided:
        return id(master)
    return tuple(
        (storage._cdata, part.storage_offset(), part.shape, part.stride(), part.dtype)
        for part in parts_of(master)
        for storage in storages_of(part)
    ) or id(master)


def digests_of(masters: Sequence[torch.Tensor | None], ranks: int) -> list[bytes | None]:
    """Return a hash of the bytes of each master, None for those that are None."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_digest, masters))


def _digest(master: torch.Tensor | None) -> bytes | None:
    if master is None:
        return None
    digest = hashlib.sha256()
    for part in parts_of(master):
        bytes_of = part.detach().contiguous()
        digest.update((ctypes.c_char * bytes_of.nbytes).from_address(bytes_of.data_ptr()))
    return digest.digest()
