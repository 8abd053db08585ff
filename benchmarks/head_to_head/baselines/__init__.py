"""The baselines, in the order of the tables. Each file is a family."""

from __future__ import annotations

from head_to_head.baselines import (
    hook,
    ours,
    ramtorch_style,
    resident,
    with_accelerate,
    with_chains,
    with_compressed_tensors,
    with_diffusers,
    with_mmgp,
    with_other_streamers,
)
from head_to_head.baselines.base import OURS, PEER, REFERENCE, Baseline, Setting

_FAMILIES = (
    resident,
    ours,
    hook,
    with_accelerate,
    with_diffusers,
    with_compressed_tensors,
    with_mmgp,
    ramtorch_style,
    with_chains,
    with_other_streamers,
)
BASELINES: dict[str, Baseline] = {
    baseline.name: baseline for family in _FAMILIES for baseline in family.BASELINES
}
RESIDENT = resident.RESIDENT.name
#: Our baselines that peers are compared with: the first that ran, as the native provider may be missing.
PRIMARY = (
    ours.OURS_IN_RAM.name,
    ours.OURS_STREAMED.name,
    "ours, pure Python",
    "ours, 1/4, pure Python",
)

__all__ = ["BASELINES", "OURS", "PEER", "PRIMARY", "REFERENCE", "RESIDENT", "Baseline", "Setting"]
