"""What this process has mapped from files, as the kernel lists it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Mapping", "mappings"]


class Mapping(NamedTuple):
    """A line of /proc/self/maps (proc_pid_maps(5)) with a name."""

    begin: int
    end: int
    #: Bytes from the start of the file.
    offset: int
    #: Major and minor number, as in "fd:00".
    device: str
    inode: int
    #: The file's path, as it was mapped; or what the kernel calls it, as in "[heap]".
    name: str


def mappings() -> list[Mapping]:
    """All of them, by address. None where there is no such list (not Linux)."""
    try:
        with open("/proc/self/maps", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, _, offset, device, inode, *name = line.split(maxsplit=5)
        if name:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.append(Mapping(begin, end, int(offset, 16), device, int(inode), name[0]))
    return found
