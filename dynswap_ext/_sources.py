"""A checksum of the sources that the extension was compiled from. The build runs this file alone."""

from __future__ import annotations

import zlib
from pathlib import Path


def bindings_of(checkout: Path) -> str:
    """Return a checksum of the C++ sources of the bindings; empty where there are none, as in a wheel."""
    found = sorted(
        path
        for room in ("python", "session")
        for path in (checkout / "csrc" / room).glob("*")
        if path.suffix in (".cpp", ".h")
    )
    checksum = 0
    for path in found:
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{checksum:08x}" if found else ""
