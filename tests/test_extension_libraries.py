"""The extension links only libraries that every machine has: one build runs with and without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dynswap_ext import _provider

#: torch loads the first row before the extension; every Linux has the others.
LIBRARIES = {
    *("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"),
    *("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6"),
    *("libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
}


@pytest.fixture(scope="module")
def extension() -> str:
    module = _provider._extension().module
    if module is None:
        pytest.skip("the extension is not built")
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed (it comes with binutils)")
    return str(module.__file__)


def read(*arguments: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_libraries(extension: str) -> None:
    linked = set(re.findall(r"\(NEEDED\).*\[(.+)\]", read("--dynamic", extension)))
    assert "libtorch_cpu.so" in linked
    assert linked - LIBRARIES == set()


def test_no_symbol_of_cuda_is_left_to_other_libraries(extension: str) -> None:
    """No symbol of CUDA is undefined: it would be found only with a GPU build of torch."""
    symbols = re.findall(r" UND (\w+)", read("--dyn-syms", extension))
    assert any(symbol.startswith("_ZN2at") for symbol in symbols)
    assert [
        symbol for symbol in symbols if re.match(r"cu[A-Z]|cuda|__cuda|nv[A-Z]|_ZNK?3c104cuda", symbol)
    ] == []
