"""The host's RAM that weights take."""

from __future__ import annotations

from dataclasses import dataclass

from dynswap_ext._util.memory import format_bytes


@dataclass(frozen=True)
class HostMemory:
    """The host's RAM that the weights of all installed models of this process take, in bytes."""

    #: The masters (the tensors that the models own) that are in RAM. Those that ranks share (`share_masters`)
    #: are counted by the rank whose weights they were.
    masters: int
    #: Pages of mapped checkpoint files that became the process's own when they were written to.
    written: int
    #: Page-locked copies of masters.
    copies: int
    #: Buffers through which bytes go from a disk, or from pageable memory, to a device.
    staging: int
    #: What the engine's reads of checkpoint files, and its writes to `activations_folder`, have brought into
    #: the page cache. The system takes it back when it needs the memory.
    page_cache: int
    #: Page-locked tensors that were saved for backward (`activations=`).
    activations: int
    #: How much of `masters` is page-locked in place. It is not counted twice.
    locked: int
    #: All masters: those in RAM, those in files and those that another rank counts.
    weights: int
    #: The smallest amount that an install has named as `host_budget`; None if no install has named one.
    limit: int | None = None

    @property
    def total(self) -> int:
        """The sum of masters, written pages, copies, staging buffers, page cache and activations."""
        return self.masters + self.written + self.copies + self.staging + self.page_cache + self.activations

    def __str__(self) -> str:
        """Return the sum and its parts as one line."""
        uses = {
            "masters": self.masters,
            "written pages of files": self.written,
            "page-locked copies": self.copies,
            "staging buffers": self.staging,
            "page cache": self.page_cache,
            "activations": self.activations,
        }
        made_of = ", ".join(f"{format_bytes(size)} of {use}" for use, size in uses.items() if size)
        times = f", {self.total / self.weights:.2f} x the weights" if self.weights else ""
        bound = "" if self.limit is None else f"; at most {format_bytes(self.limit)}"
        return f"{format_bytes(self.total)}{times}{made_of and f' ({made_of})'}{bound}"
