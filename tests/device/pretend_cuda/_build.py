"""Builds the pretend devices, and for each a version of the extension, from the extension's own objects.

If asked, it also builds one with DYNSWAP_MUTANTS, from which protections (csrc/core/protection.h) can be
taken away.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent
ROOT = SOURCES.parent.parent
TARGET = ROOT / "build" / f"pretend-{sys.implementation.cache_tag}"
MUTANTS = TARGET / "_C_mutants.so"
#: The folders of csrc that are compiled again for mutants: those with protections, and those that share an
#: object of the extension with them. The folders of a row make one unit, but csrc/cuda one for each file.
MUTATED = (("core",), ("transfer",), ("cuda",), ("accelerator", "tensor"), ("session", "python"))


@dataclass(frozen=True)
class Kind:
    """A kind of pretend device: its type, its own sources, and whether it has a CUDA toolkit."""

    #: As torch's C++ calls its type.
    type: str
    #: The sources that devices of other kinds do not have.
    own: tuple[str, ...]
    #: Whether the extension has its CUDA backend there, which needs a toolkit.
    toolkit: bool

    @property
    def folder(self) -> Path:
        return TARGET / self.name

    @property
    def name(self) -> str:
        return next(name for name, kind in KINDS.items() if kind is self)

    @property
    def device(self) -> Path:
        return self.folder / "_pretend.so"

    @property
    def extension(self) -> Path:
        return self.folder / "_C.so"

    @property
    def sources(self) -> list[Path]:
        others = {name for kind in KINDS.values() for name in kind.own} - set(self.own)
        return [path for path in sorted(SOURCES.glob("*.cpp")) if path.name not in others]


_TORCH_CUDA = ("torch_cuda_hooks.cpp", "torch_cuda_module.cpp", "runtime_of_torch.cpp")
#: By their names in DYNSWAP_TEST_DEVICE.
KINDS = {
    "pretend": Kind("CUDA", (*_TORCH_CUDA, "runtime.cpp", "kernels.cpp"), toolkit=True),
    "no-toolkit": Kind("CUDA", _TORCH_CUDA, toolkit=False),
    "privateuse1": Kind(
        "PrivateUse1", ("torch_privateuse1_autocast.cpp", "torch_privateuse1_hooks.cpp"), toolkit=False
    ),
}


class Unavailable(Exception):
    """The pretend device cannot be built or used on this machine; the message says why."""


def torch_folder() -> Path:
    """Return the folder in which torch is installed, without an import of torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("torch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def cuda_headers() -> Path | None:
    """Return the folder of cuda_runtime_api.h; None if there is no toolkit."""
    sys.path.insert(0, str(ROOT / "build_backend"))
    try:
        from dynswap_build.cuda_toolkit import ToolkitNotFound, find_toolkit

        return find_toolkit().include
    except ToolkitNotFound:
        return None
    finally:
        sys.path.pop(0)


def wanted() -> Kind:
    """Return the kind of device that DYNSWAP_TEST_DEVICE asks for."""
    return KINDS[os.environ.get("DYNSWAP_TEST_DEVICE") or "pretend"]


def build(kind: Kind, mutants: bool = False) -> None:
    """Compile what is out of date; with `mutants`, also that extension.

    Several processes may call it at once.
    """
    import fcntl

    torch = torch_folder()
    if any((torch / "lib").glob("libtorch_cuda.so")):
        raise Unavailable(
            "torch is a CUDA build, and the pretend device needs a CPU build: install torch from "
            "https://download.pytorch.org/whl/cpu"
        )
    headers = cuda_headers()
    if headers is None and kind.toolkit:
        raise Unavailable("there is no CUDA toolkit to take the headers from: install one, or set CUDA_HOME")
    TARGET.mkdir(parents=True, exist_ok=True)
    with (TARGET / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run_ninja(torch, headers, kind, [kind.device, kind.extension, *([MUTANTS] if mutants else [])])


def _run_ninja(torch: Path, headers: Path | None, kind: Kind, wanted: list[Path]) -> None:
    launcher = "ccache " if _on_path("ccache") else ""
    include = [ROOT / "csrc"]
    system = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        *([headers] if headers else []),
        sysconfig.get_paths()["include"],
    ]
    flags = [
        "-std=c++20 -O2 $debug -fPIC -fvisibility=hidden -Wall -Wextra -DAT_PER_OPERATOR_HEADERS $more",
        *(f"-I{path}" for path in include),
        *(f"-isystem {path}" for path in system),
    ]
    link = f"-shared -Wl,-rpath,{torch}/lib -L{torch}/lib -ltorch_python -ltorch_cpu -lc10"
    # The extension's own objects, as setup.py left them: the pretend runtime takes the place of libcudart.
    tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = ROOT / "build" / f"temp.{tag}"
    units = [  # none with DYNSWAP_UNITY=0
        path
        for path in sorted((built / "build/unity").glob("*.o"))
        if (ROOT / "build/unity" / f"{path.stem}.cpp").exists()
    ]
    whole = {folder for path in units for folder in path.stem.split("_")}
    files = [
        path
        for path in sorted((built / "csrc").rglob("*.o"))
        if _has_source(path, "cu" if path.parent.name in whole else "c[pu]*")  # a source may have moved
    ]
    extension = [*units, *files]
    if not extension:
        raise Unavailable("the extension was not built here (make build)")
    cuda = [path for path in extension if "cuda" in (path.parent.name, path.stem)]
    if kind.toolkit and not cuda:
        raise Unavailable("the extension was built without CUDA (DYNSWAP_CUDA=1 make build)")
    _refuse_incomplete(extension)
    rules = [
        "ninja_required_version = 1.3",
        f"cxx = {launcher}{os.environ.get('CXX', 'g++')}",
        "rule compile",
        # Under another name until it is whole: the build may be killed.
        f"  command = $cxx {' '.join(flags)} -MMD -MF $out.d -MT $out -c $in -o $out.part"
        " && mv $out.part $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = $cxx $more $in -o $out.part {link} && mv $out.part $out",
    ]
    made: set[Path] = set()
    for each in KINDS.values():
        if each.toolkit and not (headers and cuda):
            continue
        objects = {TARGET / each.type / f"{source.stem}.o": source for source in each.sources}
        for_type = f"-DTORCH_EXTENSION_NAME=_pretend -DPRETEND_TYPE={each.type}"
        rules += _compile({path: objects[path] for path in objects if path not in made}, "-g1", for_type)
        made |= set(objects)
        linked = [path for path in extension if each.toolkit or path not in cuda]
        # Also where no symbol of the device is needed: some are looked for by name.
        runtime = f"-Wl,--no-as-needed -Wl,-rpath,{each.folder}"
        rules += _link(each.device, objects, f"-Wl,-soname,{each.device.name}")
        rules += _link(each.extension, [*linked, each.device], runtime)
        if each.toolkit:
            mutants = {TARGET / f"mutant_{source.stem}.o": source for source in _mutants()}
            same = [path for path in linked if not _is_mutated(path)]
            flags_of_mutants = f"-DTORCH_EXTENSION_NAME=_C -DDYNSWAP_MUTANTS -I{ROOT / 'tests'}"
            rules += _compile(mutants, "-O0 -g0", flags_of_mutants)
            rules += _link(MUTANTS, [*same, *mutants, each.device], runtime)
    file = TARGET / "build.ninja"
    text = "\n".join([*rules, ""])
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    ninja = Path(sys.executable).parent / "ninja"
    command = [str(ninja) if ninja.exists() else "ninja", "-C", str(TARGET), "-j", str(_jobs())]
    command += map(str, wanted)
    if not all(path.exists() for path in wanted):
        print("compiling the pretend device, once; this takes minutes", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"the pretend device does not compile:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        )


def _refuse_incomplete(objects: list[Path]) -> None:
    """Raise if objects are newer than the extension that is linked from them: a build may be under way."""
    linked = ROOT / "dynswap_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    made = int(linked.stat().st_mtime) if linked.exists() else 0
    # In whole seconds: setuptools gives its copy of the linked extension no others.
    newer = [path.name for path in objects if int(path.stat().st_mtime) > made]
    if newer:
        raise RuntimeError(
            f"the objects of the extension are newer than the extension ({', '.join(newer[:3])}): its build "
            "is under way, or was interrupted. Run DYNSWAP_CUDA=1 make build; if that finds nothing to do, "
            f"remove {objects[0].parent} first"
        )


def _mutants() -> list[Path]:
    """Return the sources of the mutants: the folders with protections, as few units, and the switch."""
    sources = [SOURCES / "mutants" / "switch.cpp"]
    for folders in MUTATED:
        files = [path for folder in folders for path in sorted((ROOT / "csrc" / folder).glob("*.cpp"))]
        if folders == ("cuda",):
            sources += files
            continue
        unit = TARGET / "mutants" / f"{'_'.join(folders)}.cpp"
        text = "".join(f'#include "{path.parent.name}/{path.name}"\n' for path in files)
        unit.parent.mkdir(exist_ok=True)
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        sources.append(unit)
    return sources


def _has_source(built: Path, suffix: str) -> bool:
    return any((ROOT / "csrc" / built.parent.name).glob(f"{built.stem}.{suffix}"))


def _is_mutated(built: Path) -> bool:
    """Return whether the mutants have their own version of an object of the extension. Kernels have none."""
    mutated = {folder for folders in MUTATED for folder in folders}
    if built.parent.name == "unity":
        return built.stem.split("_")[0] in mutated
    folder = built.parent.name
    return folder in mutated and (ROOT / "csrc" / folder / f"{built.stem}.cpp").exists()


def _compile(objects: dict[Path, Path], debug: str, more: str) -> Iterator[str]:
    for target, source in objects.items():
        yield from (f"build {target}: compile {source}", f"  debug = {debug}", f"  more = {more}")


def _link(target: Path, objects: Iterable[Path], flags: str) -> Iterator[str]:
    yield f"build {target}: link {' '.join(map(str, objects))}"
    yield f"  more = {flags}"


def _on_path(name: str) -> bool:
    import shutil

    return shutil.which(name) is not None


def _jobs() -> int:
    return len(os.sched_getaffinity(0))
