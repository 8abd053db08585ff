"""Finds a CUDA toolkit to compile with. No GPU, driver or CUDA build of torch is needed for that."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

#: The first nvcc that compiles C++20.
OLDEST = (12, 0)

_VARIABLES = ("CUDA_HOME", "CUDA_PATH")

#: Where toolkits are installed, in the order in which they are tried, the newest of a pattern first.
DEFAULTS = ("/usr/local/cuda", "/usr/local/cuda-*")

#: NVIDIA's package of the toolkit.
PACKAGE = "cuda-toolkit"
#: The folder, in one of `sys.path`, to which pip installs it.
INSTALLED_BY_PIP = "nvidia/cu[0-9]*"
#: The first version that has nvcc.
_OLDEST_PACKAGE = "13.0"


class ToolkitNotFound(Exception):
    """There is no usable toolkit. The message lists the folders that were tried, and what each lacks."""


@dataclass(frozen=True)
class Toolkit:
    """A folder with nvcc, the headers and the static runtime library."""

    home: Path
    include: Path
    static_runtime: Path
    version: tuple[int, int]
    #: Folders that the environment named first, and what is missing in each.
    instead_of: tuple[str, ...] = ()


def find_toolkit() -> Toolkit:
    """Return the first usable toolkit, or raise ToolkitNotFound."""
    seen: dict[Path, None] = {}
    rejected, named = [], []
    for origin, home in _candidates():
        if home in seen:
            continue
        seen[home] = None
        found = _inspect(home)
        if isinstance(found, Toolkit):
            return replace(found, instead_of=tuple(named))
        rejected.append(f"{home} ({origin}): {found}")
        if origin in _VARIABLES:
            named.append(rejected[-1])
    raise ToolkitNotFound(
        "; ".join(rejected)
        or "neither CUDA_HOME nor CUDA_PATH is set, there is no /usr/local/cuda*, and no nvcc on PATH or "
        "from pip"
    )


def package_requirement(*, torch_is_installed: bool) -> str:
    """Return the requirement that has pip install a toolkit, of the CUDA that torch runs with if it is known.

    The extension then works with any driver that torch works with. A GPU build of torch from PyPI requires
    the same package in one version, but without the extra that has nvcc.
    """
    package = f"{PACKAGE}[nvcc]"
    if not torch_is_installed:  # torch is installed for this build too, and chooses
        return f"{package}>={_OLDEST_PACKAGE}"
    try:
        return f"{package}=={importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}=={_OLDEST_PACKAGE}.*"


def _candidates() -> Iterator[tuple[str, Path]]:
    for variable in _VARIABLES:
        if os.environ.get(variable):
            yield variable, Path(os.environ[variable]).resolve()
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield "nvcc on PATH", Path(nvcc).resolve().parent.parent
        # nvcc on PATH may be a script that starts the real nvcc, which prints its own folder
        top = re.search(r"^#\$ TOP=(.+)$", _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.M)
        if top:
            yield "what nvcc on PATH starts", Path(top[1].strip()).resolve()
    for pattern in map(Path, DEFAULTS):
        for home in sorted(pattern.parent.glob(pattern.name), key=_version_in_name, reverse=True):
            yield "default", home.resolve()
    for folder in map(Path, sys.path):
        for home in sorted(folder.glob(INSTALLED_BY_PIP), key=_version_in_name, reverse=True):
            yield "NVIDIA's packages", home.resolve()


def _version_in_name(home: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", home.name)]


def _inspect(home: Path) -> Toolkit | str:
    """Return the toolkit in the folder `home`, or the reason why it cannot be used."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        return "no bin/nvcc"
    roots = [home, *sorted((home / "targets").glob(f"{os.uname().machine}*"))]
    include = next((r / "include" for r in roots if (r / "include/cuda_runtime_api.h").is_file()), None)
    if include is None:
        return "no include/cuda_runtime_api.h"
    libraries = [r / sub / "libcudart_static.a" for r in roots for sub in ("lib64", "lib")]
    library = next((path for path in libraries if path.is_file()), None)
    if library is None:
        return "no libcudart_static.a"
    release = re.search(r"release (\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    if release is None:
        return "bin/nvcc does not run"
    version = (int(release[1]), int(release[2]))
    if version < OLDEST:
        return f"CUDA {version[0]}.{version[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    return Toolkit(home, include, library, version)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout
