"""The Pythons and torches that the extension is built for; as a script, their pairs, one a line: 3.11-2.13.

What cannot read them here (metadata, workflows, pages, C++) is compared with them by tests.
"""

from __future__ import annotations

from itertools import product

#: Minor releases of CPython that the bindings are known to hold for: csrc/session/cpython.h checks it, too.
PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
TORCHES = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
#: For these, torch has made no wheels.
WITHOUT_TORCH = {((3, 10), (2, 15))}


def pairs() -> list[str]:
    """Return the pairs for which there is a wheel."""
    made = (pair for pair in product(PYTHONS, TORCHES) if pair not in WITHOUT_TORCH)
    return ["-".join(f"{major}.{minor}" for major, minor in pair) for pair in made]


if __name__ == "__main__":
    print(*pairs(), sep="\n")
