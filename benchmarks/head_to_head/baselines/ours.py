"""dynswap_ext, at several budgets and prefetch depths, and with each provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dynswap_ext
from dynswap_ext._util.memory import format_bytes
from dynswap_ext.errors import BudgetError
from head_to_head.baselines.base import FILE, OURS, RAM, Baseline, Prepared, Setting, compiled


def _installed(
    share: float | None, *, prefetch: int = 2, provider: str = "native"
) -> Callable[[Setting], Prepared]:
    def prepare(setting: Setting) -> Prepared:
        model = setting.mapped() if setting.placement == FILE else setting.in_ram()
        options: dict[str, Any] = {"device": setting.device, "prefetch": prefetch, "provider": provider}
        if setting.placement == FILE:
            # If a model does not fit the memory, its file does not fit the page cache either.
            options["host_budget"] = "minimum"
        if share is None:
            return Prepared(model, dynswap_ext.install(model, **options))
        budget, note = int(share * setting.weight_bytes), ""
        try:
            handle = dynswap_ext.install(model, budget=budget, **options)
        except BudgetError as error:
            if not error.smallest_bytes:
                raise
            smallest, given = format_bytes(error.smallest_bytes), format_bytes(budget)
            note = f"budget {smallest}, the smallest, as {given} is less"
            handle = dynswap_ext.install(model, budget=error.smallest_bytes, **options)
        return Prepared(model, handle, note)

    return prepare


_AS_IT_IS = "nothing moves: masters are handed out as they are"
_STREAMS = {
    "bus": "streams from pinned memory what the budget has no room for",
    FILE: "reads ahead what the budget has no room for",
}
#: The share of the weights' bytes that holds all of them, with the padding of small groups.
_ALL = 1.25


def _at(name: str, share: float, *, prefetch: int = 2, provider: str = "native") -> Baseline:
    does = dict(_STREAMS)
    if share >= 1:
        does = {"bus": "nothing: all is resident", FILE: "nothing after the first call: all is resident"}
    elif prefetch == 0 or provider == "python":
        does = {
            "bus": "copies at each read what the budget has no room for",
            FILE: "page faults of the mapping, as it hands it out; keeps all that it read"
            if provider == "python"
            else "reads at each read what the budget has no room for",
        }
    return Baseline(name, OURS, _installed(share, prefetch=prefetch, provider=provider), does)


#: Our main baseline. On the CPU, masters in RAM are handed out as they are with any budget.
OURS_IN_RAM = Baseline("ours", OURS, _installed(None), {RAM: _AS_IT_IS})
OURS_STREAMED = _at("ours, 1/4", 0.25)
BASELINES = [
    OURS_IN_RAM,
    Baseline("ours, prefetch 0", OURS, _installed(None, prefetch=0), {RAM: _AS_IT_IS}),
    Baseline("ours, pure Python", OURS, _installed(None, provider="python"), {RAM: _AS_IT_IS}),
    Baseline("ours, torch.compile", OURS, compiled(_installed(None)), {RAM: _AS_IT_IS}, compiles=True),
    OURS_STREAMED,
    _at("ours, 1/4, prefetch 0", 0.25, prefetch=0),
    _at("ours, 1/4, prefetch 4", 0.25, prefetch=4),
    _at("ours, 1/2", 0.5),
    _at("ours, all resident", _ALL),
    _at("ours, 1/4, pure Python", 0.25, provider="python"),
    Baseline(
        "ours, all resident, torch.compile",
        OURS,
        compiled(_installed(_ALL)),
        {"bus": "nothing: all is resident"},
        compiles=True,
    ),
]
