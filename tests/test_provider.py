"""Which provider is chosen, which warnings it gives, and what happens with an unusable extension."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import dynswap_ext
from dynswap_ext import _provider
from dynswap_ext._sources import bindings_of

ROOT = Path(dynswap_ext.__file__).parent.parent

# Replaces the extension: the import system finds it first, and it does what the test wants.
FINDER = """
import importlib.abc, importlib.util, sys, warnings

class Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None
    def exec_module(self, module):
{body}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dynswap_ext._C":
            return importlib.util.spec_from_loader(name, Loader())
        return None

sys.meta_path.insert(0, Finder())
warnings.simplefilter("always")
import torch, dynswap_ext
from torch import nn
"""

BROKEN = 'raise ImportError("libtorch_cpu.so: undefined symbol: _ZN3c105ErrorE")'
MISSING = 'raise ModuleNotFoundError("No module named dynswap_ext._C", name="dynswap_ext._C")'
STALE = 'import torch; module.build_info = lambda: {"torch": torch.__version__, "bindings": "0"}'
OLD = 'module.build_info = lambda: {"torch": "2.2.1", "cuda": "12.1", "compiler": "gcc 9"}'

TWO_INSTALLS = """
for _ in range(2):
    model = nn.Linear(2, 2)
    with dynswap_ext.install(model, device="cpu", dtype=torch.float64) as handle:
        assert handle.provider == "python", handle
        assert model.weight.dtype == torch.float64
print(dynswap_ext.backend_info())
"""


def run(body: str, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = FINDER.format(body=textwrap.indent(body, " " * 8)) + script
    kept = {key: value for key, value in os.environ.items() if key != "DYNSWAP_PROVIDER"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (BROKEN, "cannot be imported (ImportError: libtorch_cpu.so: undefined symbol: _ZN3c105ErrorE)"),
        (MISSING, "the extension is not built"),
        (STALE, "the compiled extension is older than its sources: run `make build`, or `pip install .`"),
        (OLD, f"the extension was built for torch 2.2.1, and torch {torch.__version__} runs"),
    ],
    ids=["broken", "missing", "stale", "other torch"],
)
def test_an_unusable_extension_means_one_warning_and_pure_python(body: str, why: str) -> None:
    done = run(body, TWO_INSTALLS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DynswapWarning") == 1
    assert why in done.stderr
    assert "<string>:" in done.stderr  # the line of the user's call
    assert "pip install --no-deps --force-reinstall ." in done.stderr
    assert "DYNSWAP_PROVIDER=python" in done.stderr
    assert why in done.stdout


def test_the_extension_carries_a_checksum_of_the_bindings(tmp_path: Path) -> None:
    extension = pytest.importorskip("dynswap_ext._C")
    assert extension.build_info()["bindings"] in (
        "",
        bindings_of(ROOT),
    )  # "": without units (DYNSWAP_UNITY=0)
    assert bindings_of(tmp_path) == ""  # an installed package has no sources that could be newer
    folder = tmp_path / "csrc" / "session"
    folder.mkdir(parents=True)
    (folder / "module.cpp").write_text("1")
    before = bindings_of(tmp_path)
    (folder / "module.cpp").write_text("2")
    assert before and bindings_of(tmp_path) not in ("", before)


@pytest.mark.parametrize("how", ["environment", "argument"])
def test_pure_python_by_choice_is_silent(how: str) -> None:
    if how == "environment":
        done = run(BROKEN, TWO_INSTALLS, DYNSWAP_PROVIDER="python")
    else:
        done = run(BROKEN, TWO_INSTALLS.replace('device="cpu"', 'device="cpu", provider="python"'))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_native_by_choice_raises_where_it_cannot_be_had() -> None:
    script = textwrap.dedent(
        """
        model = nn.Linear(2, 2)
        try:
            dynswap_ext.install(model, device="cpu")
        except dynswap_ext.ConfigError as error:
            print(error)
        assert type(model) is nn.Linear
        """
    )
    done = run(BROKEN, script, DYNSWAP_PROVIDER="native")
    assert done.returncode == 0, done.stderr
    assert "the native provider was asked for, but the extension cannot be imported" in done.stdout
    assert done.stderr == ""


def test_importing_the_package_is_silent_and_does_not_load_the_extension() -> None:
    done = run(BROKEN, "assert 'dynswap_ext._C' not in sys.modules\nassert dynswap_ext.__version__")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_backend_info() -> None:
    info = dynswap_ext.backend_info()
    assert dataclasses.is_dataclass(info)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.provider = "other"  # type: ignore[misc]
    assert info.torch == torch.__version__
    assert info.devices[0] == "cpu"
    assert (info.provider == "native") == (info.reason is None)
    text = str(info)
    assert text.splitlines()[0].split()[:2] == ["provider", info.provider]
    for word in ("extension", "running torch", "built for torch", "CUDA backend", "devices", "cpu"):
        assert word in text


def test_backend_info_is_about_the_accelerator_that_an_install_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def engine(extension: object, device: torch.device, **_: object) -> tuple[str, None]:
        asked.append(device)
        return "", None

    monkeypatch.setattr(_provider, "listed_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    monkeypatch.setattr(_provider, "_engine", engine)
    dynswap_ext.backend_info(ask_driver=False)
    assert asked == [torch.device("cuda", 0)]


def test_the_fallback_never_imports_the_extension() -> None:
    modules = [path for room in ("_python", "_swap") for path in (ROOT / "dynswap_ext" / room).glob("*.py")]
    assert len(modules) > 20
    for path in modules:
        tree = ast.parse(path.read_text())
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imported:
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            assert not any(part in ("_C", "_provider") for name in names for part in name.split(".")), names


def test_every_public_name_is_there() -> None:
    for name in dynswap_ext.__all__:
        assert getattr(dynswap_ext, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = dynswap_ext.nothing_of_the_kind
