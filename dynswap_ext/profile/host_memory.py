"""What weights take of the host's RAM."""

from __future__ import annotations

from dataclasses import dataclass

from dynswap_ext._util.memory import format_bytes


@dataclass(frozen=True)
class HostMemory:
    """What the weights of all installed models of this process take of the host's RAM, in bytes."""

    #: The masters that are in RAM. `locked` of them are page-locked where they lie.
    masters: int
    #: Pages of mapped checkpoint files that were written to, and are the process's own since.
    written: int
    #: Page-locked copies of masters.
    copies: int
    #: Buffers through which bytes go from a disk, or from pageable memory, to a device.
    staging: int
    #: What reads have brought of checkpoint files into the page cache. The system takes it back when it needs
    #: the memory.
    page_cache: int
    locked: int
    #: All masters, those in RAM and those in files.
    weights: int
    #: The bound that was given as `host_budget`; None: no amount was named.
    limit: int | None = None

    @property
    def total(self) -> int:
        """All of it."""
        return self.masters + self.written + self.copies + self.staging + self.page_cache

    def __str__(self) -> str:
        """Write it in one line, with what it is made of."""
        uses = {
            "masters": self.masters,
            "written pages of files": self.written,
            "page-locked copies": self.copies,
            "staging buffers": self.staging,
            "page cache": self.page_cache,
        }
        made_of = ", ".join(f"{format_bytes(size)} of {use}" for use, size in uses.items() if size)
        times = f", {self.total / self.weights:.2f} x the weights" if self.weights else ""
        bound = "" if self.limit is None else f"; at most {format_bytes(self.limit)}"
        return f"{format_bytes(self.total)}{times}{made_of and f' ({made_of})'}{bound}"
