"""Tell how to install the package again, for the torch that runs."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

import torch

#: Elsewhere than on Linux it is not built unless that is asked for.
_ELSEWHERE = "" if sys.platform.startswith("linux") else "DYNSWAP_BUILD=native "
FROM_SOURCE = f"`{_ELSEWHERE}pip install --no-deps --force-reinstall .` in a checkout"


@functools.cache
def for_this_torch() -> str:
    """Return the command: pip's, with the index of wheels that this package came from, or for a checkout."""
    return _command(Path(__file__).parents[2], torch.__version__)


def _command(folder: Path, torch_version: str) -> str:
    """Return the command for a package that is installed in the folder.

    The command names the torch that runs. Without that, pip would install the wheel for the newest torch, and
    replace the torch that is there.
    """
    minor = ".".join(torch_version.split(".")[:2])
    index = _index_of_wheels(folder)
    return f"`pip install dynswap-ext 'torch=={minor}.*' --extra-index-url {index}`" if index else FROM_SOURCE


def _index_of_wheels(folder: Path) -> str:
    """Return the index that the wheel installed in the folder was built for; empty if there is none."""
    for installed in importlib.metadata.distributions(name="dynswap-ext", path=[str(folder)]):
        for named in installed.metadata.get_all("Project-URL") or ():
            label, _, address = named.partition(", ")
            if label == "Wheels":
                return str(address)
    return ""
