"""The command that installs this package again, for the torch that runs."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

import torch

#: On systems other than Linux the extension is built only if this variable is set.
_ELSEWHERE = "" if sys.platform.startswith("linux") else "DYNSWAP_BUILD=native "
FROM_SOURCE = f"`{_ELSEWHERE}pip install --no-deps --force-reinstall .` in a checkout"


@functools.cache
def for_this_torch() -> str:
    """Return the command that installs this package for the torch that runs.

    It installs a wheel from the index that this package came from, or else builds a checkout.
    """
    return _command(Path(__file__).parents[2], torch.__version__)


def _command(folder: Path, torch_version: str) -> str:
    """Return the command that installs the package in a folder again.

    It names the present version of torch. Without that, pip would install the wheel for the newest torch, and
    replace the present one.
    """
    minor = ".".join(torch_version.split(".")[:2])
    index = _index_of_wheels(folder)
    return f"`pip install dynswap-ext 'torch=={minor}.*' --extra-index-url {index}`" if index else FROM_SOURCE


def _index_of_wheels(folder: Path) -> str:
    """Return the address of the index that the wheel installed in a folder was built for, or ""."""
    for installed in importlib.metadata.distributions(name="dynswap-ext", path=[str(folder)]):
        for named in installed.metadata.get_all("Project-URL") or ():
            label, _, address = named.partition(", ")
            if label == "Wheels":
                return str(address)
    return ""
