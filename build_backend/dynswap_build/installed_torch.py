"""Finds the torch of the interpreter from within a build that pip isolates."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dynswap_build.supported import TORCHES

#: The versions that the extension can be built against, and that pure Python runs with.
REQUIREMENT = f"torch>={TORCHES[0][0]}.{TORCHES[0][1]},<{TORCHES[-1][0]}.{TORCHES[-1][1] + 1}"

_PROBE = """
import importlib.metadata, json, sys
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    version = None
json.dump({"version": version, "path": sys.path}, sys.stdout)
"""


def supported(version: str) -> bool:
    """Return whether a torch of this version satisfies `REQUIREMENT`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) in TORCHES


def minor_version() -> str:
    """Return the minor version of the installed torch ("2.13"), or "" if there is none yet."""
    try:
        return ".".join(importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def exact_requirement() -> str:
    """Return the torch that an extension built now requires: the minor version of the installed torch.

    The extension cannot be loaded with another minor version. If no torch is installed yet, the requirement
    is `REQUIREMENT`.
    """
    minor = minor_version()
    return f"torch=={minor}.*" if minor else REQUIREMENT


def reveal_torch() -> bool:
    """Make the interpreter's own torch importable in this process. Return False if it has none.

    pip isolates a build through ``PYTHONPATH`` and ``PYTHONNOUSERSITE``. So the same interpreter is asked
    without them for its path, which may include a user site or the system's packages. That path is appended,
    so that everything installed for the build still comes first.

    Raises
    ------
    RuntimeError
        The interpreter has a torch that is not supported. pip would replace it without a word.
    """
    if importlib.util.find_spec("torch") is not None:
        return True
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, cwd=Path(sys.executable).parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode != 0:
        return False
    found = json.loads(probe.stdout)
    if found["version"] is None:
        return False
    if not supported(found["version"]):
        raise RuntimeError(
            f"torch {found['version']} is installed, and this extension needs {REQUIREMENT}. It would be "
            f"replaced: install such a torch first (pip install '{REQUIREMENT}'), or use a new environment"
        )
    # The entry "" is the folder in which the probe ran.
    sys.path.extend(entry for entry in found["path"] if entry and entry not in sys.path)
    importlib.invalidate_caches()
    return True
