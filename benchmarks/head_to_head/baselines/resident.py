"""All weights where they compute: the reference for other baselines."""

from __future__ import annotations

from head_to_head.baselines.base import FILE, RAM, REFERENCE, Baseline, Prepared, Setting, compiled


def _resident(setting: Setting) -> Prepared:
    return Prepared(setting.in_ram().to(setting.device))


def _mapped(setting: Setting) -> Prepared:
    return Prepared(setting.mapped())


_STAYS = "nothing: weights are where they compute"
RESIDENT = Baseline(
    "resident",
    REFERENCE,
    _resident,
    {RAM: _STAYS, "bus": _STAYS, FILE: "nothing: was read into RAM as a whole before the calls"},
)
BASELINES = [
    RESIDENT,
    Baseline(
        "resident, torch.compile", REFERENCE, compiled(_resident), {RAM: _STAYS, "bus": _STAYS}, compiles=True
    ),
    Baseline(
        "mapped, untouched",
        REFERENCE,
        _mapped,
        {FILE: "page faults, with the system's read-ahead; keeps all that it read"},
    ),
]
