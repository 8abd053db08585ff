"""Makes the arguments of setup(): the extension dynswap_ext._C, and how it is compiled.

Environment:

====================  ==================================================================================
DYNSWAP_BUILD         ``python``: no extension, pure Python. ``native``: the extension. Default: the
                      extension on Linux, and pure Python elsewhere.
DYNSWAP_CUDA          ``1``: with the CUDA backend, or fail; ``0``: without; ``auto`` (default): with it
                      where a toolkit is found. With ``1`` and no toolkit, an isolated build (pip's default)
                      takes one from NVIDIA's packages.
DYNSWAP_WERROR        ``1``: warnings are errors.
DYNSWAP_UNITY         ``0``: one translation unit for each file. Default: one for several folders, because
                      the headers that they share take longer to compile than their own code.
TORCH_CUDA_ARCH_LIST  as for every torch extension. Default: ``7.0;8.0;9.0+PTX;10.0;12.0``, but no 10.0 and
                      12.0 before CUDA 12.8, and 7.5 in place of 7.0 from CUDA 13 on.
MAX_JOBS              compilers at a time. Default: as many as cores and memory allow.
DYNSWAP_WHEEL_INDEX   address of the index that a wheel is built for. The wheel's version then names the
                      torch (``0.2.0+torch2.13``), and its metadata has the address.
====================  ==================================================================================
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from dynswap_build.cuda_toolkit import (
    PACKAGE,
    Toolkit,
    ToolkitNotFound,
    find_toolkit,
    package_requirement,
)
from dynswap_build.installed_torch import REQUIREMENT, exact_requirement, minor_version
from dynswap_build.supported import PYTHONS

ROOT = Path(__file__).resolve().parents[2]
#: Groups of folders whose files are compiled as one unit. Compilers are started in this order, so the unit
#: that takes longest comes first. It alone includes torch's headers, which take as long as all of the second.
#: The third has no protections, so the pretend devices use its object as it is.
UNITS = (
    ("python", "session", "tensor", "accelerator"),
    ("core", "transfer"),
    ("io", "lossless", "mesh", "platform", "host", "sim"),
)
#: What the package needs besides torch.
REQUIREMENTS = ("rich>=13",)
BYTES_PER_COMPILER = 3 << 29  # torch's headers take 1.2 GB


def wants_extension() -> bool:
    """Return whether this build has the extension. Raises SystemExit for an unknown DYNSWAP_BUILD."""
    build = os.environ.get("DYNSWAP_BUILD", "").strip().lower()
    if build not in ("", "native", "python"):
        raise SystemExit(f"DYNSWAP_BUILD={build!r} is not known; use 'python', 'native', or leave it unset")
    if build == "" and not sys.platform.startswith("linux"):
        return False
    return build != "python"


def _cuda_choice() -> str:
    choice = os.environ.get("DYNSWAP_CUDA", "").strip().lower() or "auto"
    if choice not in ("0", "1", "auto"):
        raise SystemExit(f"DYNSWAP_CUDA={choice!r} is not known; use 0, 1 or auto")
    return choice


def wanted_toolkit(rocm: str | None, torch_cuda: str | None = None) -> Toolkit | None:
    """Return the CUDA toolkit to build with, or None. Raises SystemExit if DYNSWAP_CUDA=1 and there is none.

    `rocm` and `torch_cuda` are the versions of HIP and of CUDA that torch was built with. No toolkit is used
    with a torch for HIP, which would compile .cu files with hipcc. A choice that may surprise is printed.
    """
    choice = _cuda_choice()
    if choice == "0":
        return None
    if rocm:
        if choice == "1":
            raise SystemExit(
                f"DYNSWAP_CUDA=1, but this torch is for AMD's GPUs (HIP {rocm}), which the CUDA backend "
                "cannot serve. Build with DYNSWAP_CUDA=0: weights are copied through torch's own streams."
            )
        return None
    try:
        toolkit = find_toolkit()
    except ToolkitNotFound as error:
        if choice == "1":
            raise SystemExit(
                f"DYNSWAP_CUDA=1, but no CUDA toolkit can be used. {error}. Set CUDA_HOME to the folder that "
                f"holds bin/nvcc and include/, run `pip install '{PACKAGE}[nvcc]'`, or build with "
                "DYNSWAP_CUDA=0."
            ) from None
        _say(f"no CUDA toolkit can be used: {error}")
        return None
    for rejected in toolkit.instead_of:
        _say(f"{rejected}; {toolkit.home} is taken instead")
    major = int(torch_cuda.split(".")[0]) if torch_cuda else toolkit.version[0]
    if toolkit.version[0] > major:
        _say(
            f"CUDA {toolkit.version[0]}.{toolkit.version[1]} is newer than torch's CUDA {torch_cuda}: the "
            f"CUDA backend needs a driver for CUDA {toolkit.version[0]} (nvidia-smi shows the driver's), and "
            "with an older one weights are copied through torch's own streams. Set CUDA_HOME to a toolkit "
            f"of CUDA {major}, or update the driver."
        )
    return toolkit


def _say(text: str) -> None:
    print(f"dynswap_ext._C: {text}", file=sys.stderr)


def toolkit_requirements(*, torch_is_installed: bool) -> list[str]:
    """Return the requirements that have pip install a toolkit, if DYNSWAP_CUDA=1 and none is found."""
    if _cuda_choice() != "1":
        return []
    try:
        find_toolkit()
    except ToolkitNotFound:
        return [package_requirement(torch_is_installed=torch_is_installed)]
    return []


def refusal(implementation: str, version: tuple[int, int], *, gil: bool) -> str:
    """Return the reason why the extension cannot be built for an interpreter; empty if it can."""
    oldest, newest = (".".join(map(str, known)) for known in (PYTHONS[0], PYTHONS[-1]))
    found = f"{implementation} {version[0]}.{version[1]}{'' if gil else ' without the GIL'}"
    if implementation == "CPython" and gil and version in PYTHONS:
        return ""
    return (
        f"dynswap_ext._C is for CPython {oldest} to {newest} with the GIL, and this is {found}: it relies on "
        "what no release promises the next (csrc/session/cpython.h says on what). Use one of those, or set "
        "DYNSWAP_BUILD=python for the pure-Python provider."
    )


def setup_arguments() -> dict[str, Any]:
    """Return the arguments of setup() that pyproject.toml cannot hold."""
    if not wants_extension() or "sdist" in sys.argv:
        return {"version": _version(), "install_requires": [REQUIREMENT, *REQUIREMENTS]}
    metadata = {**_named_after_torch(), "install_requires": [exact_requirement(), *REQUIREMENTS]}
    if not _compiles():
        return metadata
    gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    if refused := refusal(platform.python_implementation(), sys.version_info[:2], gil=gil):
        raise SystemExit(refused)
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"Building dynswap_ext._C takes torch, and it cannot be imported ({error}). Install "
            f"'{REQUIREMENT}' first, or set DYNSWAP_BUILD=python for the pure-Python provider."
        ) from None
    toolkit = wanted_toolkit(torch.version.hip, torch.version.cuda)
    cuda = f"CUDA {toolkit.version[0]}.{toolkit.version[1]} in {toolkit.home}" if toolkit else "no CUDA"
    _say(f"torch {torch.__version__}, {cuda}")
    os.environ.setdefault("MAX_JOBS", str(_jobs()))
    if toolkit:
        _point_torch_to(toolkit, cpp_extension)
    return {
        **metadata,
        "ext_modules": [_extension(toolkit, torch.__version__, cpp_extension)],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
    }


def _version() -> str:
    version: str = runpy.run_path(str(ROOT / "dynswap_ext" / "_version.py"))["__version__"]
    return version


def _named_after_torch() -> dict[str, Any]:
    """Return the version for setup(). With DYNSWAP_WHEEL_INDEX it names torch, and the index is added.

    Wheels of one version for several torches have to differ in their names. Other builds keep the plain
    version, because pip refuses a source archive that builds into another version than its own.
    """
    index = os.environ.get("DYNSWAP_WHEEL_INDEX", "").strip()
    torch = minor_version()
    if not index or not torch:
        return {"version": _version()}
    return {"version": f"{_version()}+torch{torch}", "project_urls": {"Wheels": index}}


def _compiles() -> bool:
    """Return whether this run of setup.py builds. One that only writes metadata needs no torch."""
    return not {"egg_info", "dist_info", "clean", "--version", "--name"} & set(sys.argv[1:])


def _extension(toolkit: Toolkit | None, torch_version: str, cpp_extension: Any) -> Any:
    sources = _sources(*UNITS, *(() if toolkit is None else (("cuda",),)))
    # Included as headers of the system, so that their warnings are not shown.
    foreign = cpp_extension.include_paths() + ([str(toolkit.include)] if toolkit else [])
    strict = os.environ.get("DYNSWAP_WERROR") == "1"
    cxx, nvcc, link = (_msvc_flags if sys.platform == "win32" else _gcc_flags)(foreign, strict=strict)
    macros: list[tuple[str, str | None]] = [
        # Without this macro, torch's headers declare all operators where they need one.
        ("AT_PER_OPERATOR_HEADERS", None),
        # No source reads this macro. An update of torch changes it in the commands, so ninja runs them again.
        ("DYNSWAP_BUILT_FOR_TORCH", torch_version),
    ]
    if toolkit:
        sources += sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
        # static: the module imports where there is no libcudart, and does not clash with torch's
        link.append(str(toolkit.static_runtime))
        if sys.platform != "win32":
            link += ["-ldl", "-lrt", "-lpthread"]
    extension = cpp_extension.CppExtension(
        "dynswap_ext._C",
        [str(path.relative_to(ROOT)) for path in sources],
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=link,
    )
    extension.include_dirs = [str(ROOT / "csrc")]
    # A changed header means that the extension has to be built again. ninja then finds the sources concerned.
    extension.depends = [str(path) for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    return extension


def _gcc_flags(foreign: list[str], *, strict: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the flags for the C++ compiler, for nvcc and for the linker."""
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
    nvcc = ["-std=c++20", "-O3", "-Xcompiler=-Wall,-Wextra,-fvisibility=hidden"]
    if strict:
        cxx.append("-Werror")
        nvcc.append("-Werror=all-warnings")
    cxx += [f"-isystem{path}" for path in foreign]
    return cxx, nvcc, ["-Wl,--strip-debug", "-Wl,--exclude-libs,ALL"]


def _msvc_flags(foreign: list[str], *, strict: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the flags for Microsoft's compiler, nvcc and the linker. They have not been tried yet."""
    cxx = ["/std:c++20", "/O2", "/EHsc", "/permissive-", "/utf-8", "/bigobj", "/DNOMINMAX"]
    cxx += ["/W3", "/external:W0", *(f"/external:I{path}" for path in foreign)]
    nvcc = ["-std=c++20", "-O3", "-Xcompiler=/W3,/EHsc,/permissive-,/utf-8"]
    if strict:
        cxx.append("/WX")
        nvcc.append("-Werror=all-warnings")
    return cxx, nvcc, []


def _sources(*groups: tuple[str, ...]) -> list[Path]:
    """Return the files to compile: one that includes all files of a group of folders, for each group.

    With DYNSWAP_UNITY=0 these are the files of the folders themselves.
    """
    unity = ROOT / "build" / "unity"
    if os.environ.get("DYNSWAP_UNITY") == "0":
        shutil.rmtree(unity, ignore_errors=True)
        return [path for folders in groups for folder in folders for path in _files(folder)]
    units = {unity / f"{'_'.join(folders)}.cpp": folders for folders in groups}
    for path, folders in units.items():
        text = "".join(f'#include "{folder}/{file.name}"\n' for folder in folders for file in _files(folder))
        if "python" in folders:
            text = f'#define DYNSWAP_BINDINGS "{_bindings()}"\n{text}'
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in unity.glob("*.cpp"):
        if path not in units:  # from an earlier build; tests/device links the objects of all files here
            path.unlink()
    return list(units)


def _files(folder: str) -> list[Path]:
    other = "_linux" if sys.platform == "win32" else "_windows"
    return sorted(path for path in (ROOT / "csrc" / folder).glob("*.cpp") if not path.stem.endswith(other))


def _bindings() -> str:
    """Return a checksum of the bindings' sources. At import, Python compares it with that of its checkout."""
    found: str = runpy.run_path(str(ROOT / "dynswap_ext" / "_sources.py"))["bindings_of"](ROOT)
    return found


def _point_torch_to(toolkit: Toolkit, cpp_extension: Any) -> None:
    # It is None in a CPU build of torch, which compiles .cu files all the same.
    cpp_extension.CUDA_HOME = str(toolkit.home)
    # It refuses toolkits of another major version than torch's. But our .cu files include nothing of torch.
    cpp_extension._check_cuda_version = lambda *_: None
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _architectures(toolkit.version))


def _architectures(version: tuple[int, int]) -> str:
    """Return the architectures that a toolkit compiles for by default: one for each generation, and PTX.

    The PTX is for the other architectures. It is that of 9.0, because 11.0 could not run that of 12.0. It
    does not replace 10.0 and 12.0, because a driver does not take PTX from a toolkit newer than itself.
    """
    oldest = "7.5" if version >= (13, 0) else "7.0"
    blackwell = ";10.0;12.0" if version >= (12, 8) else ""
    return f"{oldest};8.0;9.0+PTX{blackwell}"


def _jobs() -> int:
    if sys.platform == "win32":
        return os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_COMPILER))
