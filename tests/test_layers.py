"""Includes point one way, and C++ imports nothing of the package but its errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
#: What each folder may include, besides itself.
BELOW = {
    "core": set(),
    "io": {"core"},
    "sim": {"core"},
    "host": {"core", "io"},
    "transfer": {"core", "io"},
    "cuda": {"core", "io", "transfer"},
    "accelerator": {"core", "io", "transfer"},
    "bindings": {"core", "io", "sim", "host", "transfer", "cuda", "accelerator"},
}
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu"))


def wrong_includes(folder: str, text: str) -> list[str]:
    """What a file in a folder includes and must not."""
    own = re.findall(r'#include "([^"]+)"', text)
    found = [name for name in own if name.split("/")[0] not in {folder, *BELOW[folder]}]
    foreign = re.findall(r"#include <((?:torch|ATen|c10|pybind11|cuda|Python)[^>]*)>", text)
    allowed = {
        "bindings": r"torch|ATen|c10|pybind11|Python",
        "accelerator": r"ATen|c10",
        "cuda": r"cuda",
    }.get(folder, r"(?!)")
    return found + [name for name in foreign if not re.match(allowed, name)]


def wrong_imports(text: str) -> list[str]:
    """Which modules of the package a file imports and must not."""
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


def test_only_errors_are_imported() -> None:
    assert {path.name: found for path in SOURCES if (found := wrong_imports(path.read_text()))} == {}


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("core", '#include "io/file.h"'),
        ("core", "#include <c10/core/Stream.h>"),
        ("host", "#include <cuda_runtime.h>"),
        ("accelerator", "#include <cuda_runtime_api.h>"),
        ("accelerator", "#include <Python.h>"),
        ("transfer", '#include "cuda/cuda_check.h"'),
        ("sim", '#include "bindings/glue.h"'),
    ],
)
def test_a_wrong_include_is_found(folder: str, text: str) -> None:
    assert wrong_includes(folder, text)


def test_a_wrong_import_is_found() -> None:
    assert wrong_imports('py::module_::import("dynswap_ext.install").attr("replan")')
