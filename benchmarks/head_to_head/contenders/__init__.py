"""The contenders, in the order in which tables show them. One file a family."""

from __future__ import annotations

from head_to_head.contenders import (
    hook,
    ours,
    ramtorch_style,
    resident,
    with_accelerate,
    with_compressed_tensors,
    with_diffusers,
    with_mmgp,
)
from head_to_head.contenders.base import OURS, PEER, REFERENCE, Contender, Setting

_FAMILIES = (
    resident,
    ours,
    hook,
    with_accelerate,
    with_diffusers,
    with_compressed_tensors,
    with_mmgp,
    ramtorch_style,
)
CONTENDERS: dict[str, Contender] = {
    contender.name: contender for family in _FAMILIES for contender in family.CONTENDERS
}
RESIDENT = resident.RESIDENT.name
#: What peers are compared with; the first that ran, as there may be no native provider here.
PRIMARY = (
    ours.OURS_IN_RAM.name,
    ours.OURS_STREAMED.name,
    "ours, pure Python",
    "ours, 1/4, pure Python",
)

__all__ = ["CONTENDERS", "OURS", "PEER", "PRIMARY", "REFERENCE", "RESIDENT", "Contender", "Setting"]
