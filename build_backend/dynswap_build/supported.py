"""The Pythons and torches that the extension is built for.

Run as a script, this prints their pairs, one on each line, as 3.11-2.13. Metadata, workflows, pages and C++
repeat the versions, because they cannot import this file: tests compare them.
"""

from __future__ import annotations

from itertools import product

#: Minor releases of CPython that the bindings are known to work with. csrc/session/cpython.h checks, too.
PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
TORCHES = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
#: Pairs of Python and torch for which torch has no wheels.
WITHOUT_TORCH = {((3, 10), (2, 15))}


def pairs() -> list[str]:
    """Return the pairs of Python and torch that wheels are built for, as "3.11-2.13"."""
    made = (pair for pair in product(PYTHONS, TORCHES) if pair not in WITHOUT_TORCH)
    return ["-".join(f"{major}.{minor}" for major, minor in pair) for pair in made]


if __name__ == "__main__":
    print(*pairs(), sep="\n")
