"""All weights where they compute: what the others are measured by."""

from __future__ import annotations

from head_to_head.contenders.base import FILE, RAM, REFERENCE, Contender, Prepared, Setting, compiled


def _resident(setting: Setting) -> Prepared:
    return Prepared(setting.in_ram().to(setting.device))


def _mapped(setting: Setting) -> Prepared:
    return Prepared(setting.mapped())


_STAYS = "nothing: weights are where they compute"
RESIDENT = Contender(
    "resident",
    REFERENCE,
    _resident,
    {RAM: _STAYS, "bus": _STAYS, FILE: "nothing: was read into RAM as a whole before the calls"},
)
CONTENDERS = [
    RESIDENT,
    Contender(
        "resident, torch.compile", REFERENCE, compiled(_resident), {RAM: _STAYS, "bus": _STAYS}, compiles=True
    ),
    Contender(
        "mapped, untouched",
        REFERENCE,
        _mapped,
        {FILE: "page faults, with the system's read-ahead; keeps all that it read"},
    ),
]
