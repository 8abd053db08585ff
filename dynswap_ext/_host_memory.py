"""The RAM that the weights of all installs take, counted and kept within ``host_budget``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dynswap_ext import _provider
from dynswap_ext._swap.module_registry import ServedModules, served_by
from dynswap_ext._swap.state import modules_of
from dynswap_ext._util.file_mappings import FileMappings, written_bytes
from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.places import storages_of
from dynswap_ext.config import Options
from dynswap_ext.errors import ConfigError
from dynswap_ext.profile.host_memory import HostMemory


def bound(options: Options, planned: nn.Module) -> object:
    """Keep the RAM of all installs within the `host_budget` of one that is about to plan for a model.

    Returns
    -------
    object
        A token: the bound holds as long as this object lives.

    Raises
    ------
    ConfigError
        The masters that are in RAM take more than the bound already.
    """
    budget = options.host_budget
    if budget.total is None:
        limits = {"locked": budget.locked, "copies": budget.copies} if budget.page_locks else {}
        return _provider.limit_host_memory(page_cache=budget.page_cache, **limits)
    masters = _masters([planned, *_installed()])[0]
    if masters > budget.total:
        raise ConfigError(
            f"host_budget is {format_bytes(budget.total)}, and the weights that are in RAM already, those of "
            f"other installed models among them, take more: give at least {exact_bytes(masters)}, or load "
            "the model from its files, where its weights take none (checkpoint.from_pretrained, "
            "checkpoint.load)"
        )
    return _bound_beside(masters, options)


def bound_again(options: Options, *planned: nn.Module) -> object:
    """Return a new bound for an install that has named an amount, after the masters in RAM have changed."""
    return _bound_beside(_masters([*planned, *_installed()])[0], options)


def host_memory(limit: int | None) -> HostMemory:
    """Return the RAM that the weights of all installs take now. `limit` is the bound to show with it."""
    in_ram, every, mapped = _masters(_installed())
    return HostMemory(
        masters=in_ram,
        written=written_bytes(mapped),
        **_provider.host_memory_beside_masters(),
        weights=every,
        limit=limit,
    )


def _bound_beside(masters: int, options: Options) -> object:
    return _provider.limit_host_memory(
        beside_masters=max(0, (options.host_budget.total or 0) - masters),
        stages=options.device.type != "cpu",
    )


def _installed() -> list[nn.Module]:
    installs: set[ServedModules] = {*list(served_by.values())}
    return [model for install in installs if (model := install.everything()) is not None]


def _masters(models: Iterable[nn.Module]) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the bytes of masters in RAM, of all masters on the host, and the ranges of mapped files."""
    files = FileMappings()
    in_ram: dict[int, int] = {}
    mapped: dict[int, int] = {}
    ranges: set[tuple[int, int]] = set()
    for module in (module for model in models for module in modules_of(model)):
        for _, master, _ in own_masters(module):
            for storage in storages_of(master):
                if storage.device.type != "cpu" or not storage.nbytes():
                    continue
                found = files.overlapping(storage.data_ptr(), storage.nbytes())
                (mapped if found else in_ram)[storage.data_ptr()] = storage.nbytes()
                ranges.update((mapping.begin, mapping.end) for mapping in found)
    return sum(in_ram.values()), sum(in_ram.values()) + sum(mapped.values()), sorted(ranges)
