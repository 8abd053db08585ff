"""Includes point one way, and C++ imports nothing of the Python package but its errors."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
#: The folders that each folder may include, besides itself.
BELOW = {
    "platform": set(),
    "core": {"platform"},
    "io": {"platform", "core", "lossless"},
    "lossless": {"platform", "core"},
    "mesh": {"platform", "core"},
    "sim": {"platform", "core", "mesh"},
    "host": {"platform", "core", "io"},
    "transfer": {"platform", "core", "io"},
    "cuda": {"platform", "core", "io", "lossless", "transfer"},
    "accelerator": {"platform", "core", "io", "lossless", "host", "transfer", "cuda"},
    "tensor": {"platform", "core", "io", "lossless", "mesh", "transfer", "accelerator"},
    "session": {"platform", "core", "io", "lossless", "sim", "mesh", "accelerator", "tensor"},
    "python": {
        *("platform", "core", "io", "lossless", "sim", "host", "transfer", "accelerator", "tensor", "session")
    },
}
#: Headers that only csrc/platform includes.
OF_A_SYSTEM = re.compile(
    r"#include <((?:unistd|fcntl|dlfcn|pthread|signal|sched|windows|psapi)\.h|(?:sys|linux)/[^>]*)>"
)
#: Types for which a forked child may wait in vain: Note [A forked child has one thread].
BARE = re.compile(
    r"std::(?:(?:recursive_|shared_|timed_|recursive_timed_|shared_timed_)?mutex|condition_variable(?:_any)?"
    r"|j?thread(?!::id)|async|future|promise|latch|barrier|call_once|once_flag|(?:counting|binary)_semaphore)\b"
)
#: The files that wrap these types, and the one that starts a std::thread.
WRAPS = {"platform/fork_safe.h": BARE, "platform/process_linux.cpp": re.compile("std::thread")}
WRAPS["platform/process_windows.cpp"] = WRAPS["platform/process_linux.cpp"]
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def wrong_includes(folder: str, text: str) -> list[str]:
    """Return the includes of a file that its folder must not have."""
    own = re.findall(r'#include "([^"]+)"', text)
    found = [name for name in own if name.split("/")[0] not in {folder, *BELOW[folder]}]
    foreign = re.findall(r"#include <((?:torch|ATen|c10|pybind11|cuda|Python)[^>]*)>", text)
    allowed = {
        "python": r"torch|pybind11|Python|ATen|c10",
        "session": r"torch|pybind11|Python|ATen|c10",
        "tensor": r"torch/(?!csrc/(utils/pybind|autograd/python))|ATen|c10",
        "accelerator": r"ATen|c10",
        "cuda": r"cuda",
    }.get(folder, r"(?!)")
    return found + [name for name in foreign if not re.match(allowed, name)]


def bare(path: str, text: str) -> list[str]:
    """Return the types in a file that do not know about forks."""
    code = re.sub(r"//.*", "", text)
    allowed = WRAPS.get(path)
    return [name for name in BARE.findall(code) if not (allowed and allowed.fullmatch(name))]


def wrong_imports(text: str) -> list[str]:
    """Return the modules of the package that a file imports and must not."""
    found = re.findall(r'(?:import|PyImport_ImportModule)\("(dynswap_ext[\w.]*)"\)', text)
    return [name for name in found if name != "dynswap_ext.errors"]


def test_every_folder_is_known() -> None:
    assert {path.relative_to(CSRC).parts[0] for path in SOURCES} == set(BELOW)


def test_includes_point_down() -> None:
    wrong = {
        str(path.relative_to(CSRC)): found
        for path in SOURCES
        if (found := wrong_includes(path.relative_to(CSRC).parts[0], path.read_text()))
    }
    assert wrong == {}


def test_the_architecture_page_shows_what_each_folder_may_include() -> None:
    page = (CSRC.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\.\./csrc/\1\) \| ([^|]*) \|", page, re.MULTILINE)
    assert {folder: set(re.findall(r"\w+", depends)) & set(BELOW) for folder, depends in rows} == BELOW


def layers() -> str:
    """Return the layers as the page has to show them, from what is enforced, the highest first."""
    height: dict[str, int] = {}
    while len(height) < len(BELOW):
        for folder, below in BELOW.items():
            if below <= height.keys():
                height.setdefault(folder, 1 + max((height[name] for name in below), default=-1))
    rows = range(max(height.values()), -1, -1)
    cpp = ["  ".join(folder for folder in BELOW if height[folder] == row) for row in rows]
    enforced = (CSRC.parent / "pyproject.toml").read_text()
    listed = re.findall(
        '"(.*)",', enforced[enforced.index("layers = [") : enforced.index("]", enforced.index("layers = ["))]
    )
    python = [row.replace(" : ", "  ") for row in listed]
    cpp = [""] * (len(python) - len(cpp)) + cpp
    both = zip(["csrc/", "", *cpp], ["dynswap_ext/", "", *python], strict=True)
    return "\n".join(f" {left:24}{right}".rstrip() for left, right in both)


def test_the_architecture_page_shows_the_layers_that_are_enforced() -> None:
    page = (CSRC.parent / "docs" / "architecture.md").read_text()
    assert f"```\n{layers()}\n```\n" in page, f"the diagram has to be\n{layers()}"


def test_only_platform_includes_headers_of_an_operating_system() -> None:
    wrong = {
        str(path.relative_to(CSRC)): found
        for path in SOURCES
        if path.parent.name != "platform" and (found := OF_A_SYSTEM.findall(path.read_text()))
    }
    assert wrong == {}


def test_every_operating_system_has_all_of_platform() -> None:
    # The linker reports it too, but only on the other system.
    folder = CSRC / "platform"
    text = {
        system: "".join(path.read_text() for path in folder.glob(f"*_{system}.cpp"))
        for system in ("linux", "windows")
    }
    portable = "".join(path.read_text() for path in folder.glob("*.cpp") if "_" not in path.stem)
    declared = r"^[\w:<>*]+(?: [\w:<>*]+)* \*?(\w+)\(.*;$"
    names = [
        name for path in folder.glob("*.h") for name in re.findall(declared, path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 10
    for system, source in text.items():
        assert [name for name in names if f"{name}(" not in source + portable] == [], system


def test_what_threads_share_knows_about_forks() -> None:
    wrong = {
        path.relative_to(CSRC).as_posix(): found
        for path in SOURCES
        if (found := bare(path.relative_to(CSRC).as_posix(), path.read_text()))
    }
    assert wrong == {}


def test_only_errors_are_imported() -> None:
    assert {path.name: found for path in SOURCES if (found := wrong_imports(path.read_text()))} == {}
