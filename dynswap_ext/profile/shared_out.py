"""`SharedOut`: what ranks that install with `mesh=` save each other."""

from __future__ import annotations

from dataclasses import dataclass

from dynswap_ext._util.memory import format_bytes

#: Bytes a second in a gigabyte a second.
_GB: float = 1e9


@dataclass(frozen=True)
class SharedOut:
    """Copies that the ranks of `mesh=` have shared out, as one of them counts. ``print`` shows a line."""

    #: The number of ranks.
    ranks: int
    #: Outermost calls of the model by any rank, in which all take part.
    passes: int
    #: Of those, calls of other ranks while this one made none.
    for_others: int
    #: Groups of weights that are shared out in each pass now; 0: none.
    order: int
    #: Groups that this rank has used of those that were shared out.
    gathered: int
    #: Groups of which this rank has only brought its part, for other ranks.
    unused: int
    #: Groups that this rank has copied whole, and could have had shared out.
    whole: int
    #: Bytes of masters that other ranks have brought to this one.
    received_bytes: int
    #: Bytes copied of groups with masters that each rank has to itself.
    private_bytes: int
    #: Bytes a second at which groups were copied whole; 0.0 if that was not measured.
    whole_speed: float
    #: Bytes a second at which groups were gathered; 0.0 if that was not measured.
    gather_speed: float
    #: Why no copy is shared out now; empty if some are.
    why_not: str

    def __str__(self) -> str:
        """Return the figures as one line."""
        what = f"no copies now, as {self.why_not}" if self.why_not else f"{self.order} groups in a call"
        text = f"{self.ranks} ranks share out {what}"
        if self.gather_speed and self.whole_speed:
            text += f" (at {self.gather_speed / _GB:.3g} GB/s; whole at {self.whole_speed / _GB:.3g} GB/s)"
        text += (
            f"; {format_bytes(self.received_bytes)} came from other ranks in {self.passes} calls of any rank"
        )
        if self.private_bytes:
            text += (
                f"; {format_bytes(self.private_bytes)} were of weights that each rank has to itself, or "
                "lie behind such"
            )
        return text
