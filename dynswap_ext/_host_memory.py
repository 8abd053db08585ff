"""Counts the RAM that the weights of all installs take, and keeps it within ``host_budget``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

import torch
from torch import nn

from dynswap_ext import _provider
from dynswap_ext._swap.module_registry import ServedModules, served_by
from dynswap_ext._swap.state import modules_of
from dynswap_ext._util.file_mappings import FileMappings, written_bytes
from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.places import storages_of
from dynswap_ext._util.shared_segment import MappedSegments
from dynswap_ext._util.warn import warn
from dynswap_ext.config import Options
from dynswap_ext.errors import ConfigError
from dynswap_ext.profile.host_memory import HostMemory

#: Bytes of the staging buffers of one install on an accelerator: kStagingBytes * kStagingBuffers
#: (csrc/transfer/staging.h).
_STAGING: Final = 64 << 20

#: The bounds of installs that have named an amount as `host_budget`, from `begin` to `end`.
_named: Final[set[HostBound]] = set()


class HostBound:
    """The bound that one install (`host_budget`) sets on the RAM that the weights of all installs take."""

    def __init__(self, options: Options, provider: _provider.Provider) -> None:
        self._options = options
        self._provider = provider
        #: The provider's limits, which hold as long as this object lives.
        self._kept: object = None

    @property
    def total(self) -> int | None:
        """The amount that was given as `host_budget`, in bytes; None if it was "auto" or "minimum"."""
        return self._options.host_budget.total

    def begin(self, planned: nn.Module, *, in_place_of: Collection[HostBound], refuses: bool) -> None:
        """Set the bound, for all installs and for a model that is about to be installed (`planned`).

        If `refuses`, it raises ConfigError if masters in RAM and buffers take more, and warns if masters take
        more than another install allows. The installs whose bounds are `in_place_of` are replaced, so they
        are not asked.
        """
        self._keep_to(planned, refuses=refuses)
        if others := _named - {self}:
            recount(planned)
            if refuses:
                _warn_if_exceeded(others.difference(in_place_of), planned)
        if self.total is not None:
            _named.add(self)

    def end(self) -> None:
        """Remove the bound."""
        self._kept = None
        _named.discard(self)

    def _keep_to(self, *planned: nn.Module, refuses: bool = False) -> None:
        options, budget, limit = self._options, self._options.host_budget, self._provider.limit_host_memory
        if budget.total is None:
            locks = {"locked": budget.locked, "copies": budget.copies} if budget.page_locks else {"copies": 0}
            self._kept = limit(page_cache=budget.page_cache, **locks)
            return
        masters = _masters([*planned, *_installed()])[0]
        stages = options.device.type != "cpu" and self._provider.name == "native"
        least = masters + (_STAGING if stages else 0)
        if refuses and least > budget.total:
            staging = f", and buffers on the way to '{options.device}' {format_bytes(_STAGING)}"
            raise ConfigError(
                f"host_budget is {format_bytes(budget.total)}, and the weights that are in RAM already, "
                f"those of other installed models among them, take {format_bytes(masters)}"
                f"{staging if stages else ''}: give at least {exact_bytes(least)}, or load the model from "
                "its files, where its weights take none (checkpoint.from_pretrained, checkpoint.load)"
            )
        self._kept = limit(beside_masters=max(0, budget.total - masters), stages=stages)


def recount(*planned: nn.Module) -> None:
    """Compute the bounds of all installs again, after masters came or went.

    Masters of `planned`, which are about to be installed, count too.
    """
    for bound in list(_named):  # other threads may begin and end bounds in the meantime
        bound._keep_to(*planned)
        if bound not in _named:
            bound.end()


def _warn_if_exceeded(bounds: Iterable[HostBound], planned: nn.Module) -> None:
    allowed = min((bound.total or 0 for bound in bounds), default=None)
    if allowed is None or (masters := _masters([planned, *_installed()])[0]) <= allowed:
        return
    warn(
        f"the weights in RAM take {format_bytes(masters)} with these, more than the {format_bytes(allowed)} "
        "that host_budget= of another install allows all of them. Load the model from its files, where its "
        "weights take none (checkpoint.from_pretrained, checkpoint.load), or give the other install at least "
        f"{exact_bytes(masters)}"
    )


def host_memory() -> HostMemory:
    """Return the RAM that the weights of all installs of this process take now."""
    in_ram, every, mapped = _masters(_installed())
    return HostMemory(
        masters=in_ram,
        written=written_bytes(mapped),
        **_provider.host_memory_beside_masters(),
        weights=every,
        limit=min((bound.total or 0 for bound in list(_named)), default=None),
    )


def _installed() -> list[nn.Module]:
    installs: set[ServedModules] = {*list(served_by.values())}
    return [model for install in installs if (model := install.everything()) is not None]


def _masters(models: Iterable[nn.Module]) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the bytes of masters in RAM and of all masters on the host, and the files' mapped ranges.

    Masters in memory that another rank of the host counts (`share_masters`) are not among those in RAM.
    """
    files = FileMappings()
    segments = MappedSegments()
    in_ram: set[tuple[int, int]] = set()
    elsewhere: set[tuple[int, int]] = set()
    ranges: set[tuple[int, int]] = set()
    masters = (
        master for model in models for module in modules_of(model) for _, master, _ in own_masters(module)
    )
    for begin, end in (memory for master in masters for memory in _memory_of(master)):
        found = files.overlapping(begin, end - begin)
        counted = not found and not segments.is_of_others(begin)
        (in_ram if counted else elsewhere).add((begin, end))
        ranges.update((mapping.begin, mapping.end) for mapping in found)
    covered = _covered(in_ram)
    return covered, covered + _covered(elsewhere), list(ranges)


def _memory_of(master: torch.Tensor) -> list[tuple[int, int]]:
    """Return the ranges of the host's memory that hold a master; none if it has no storage to ask."""
    with suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():  # a lazy master refuses every call
        return [
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in storages_of(master)
            if storage.device.type == "cpu" and storage.nbytes()
        ]
    return []


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that the ranges cover together. They may overlap, as storages of NumPy's memory do."""
    covered = reached = 0
    for begin, end in sorted(ranges):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
