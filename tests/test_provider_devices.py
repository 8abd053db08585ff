"""The devices that the native provider serves, warnings for others, and when the driver is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dynswap_ext
from dynswap_ext import _provider
from dynswap_ext.errors import ConfigError, DynswapWarning

ROOT = Path(dynswap_ext.__file__).parent.parent
CUDA = torch.device("cuda", 0)

#: The libraries of a machine with one GPU: NVML reports it, and the driver notes that it was called.
NVML = "int nvmlInit(void) { return 0; } int nvmlDeviceGetCount_v2(int* n) { *n = 1; return 0; }"
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int woken(void) { fclose(fopen(getenv("DRIVER_WAS_WOKEN"), "w")); return 100; /* no device */ }
int cuInit(unsigned flags) { return woken(); }
int cuDriverGetVersion(int* version) { return woken(); }
int cuGetProcAddress(const char* symbol, void** function) { return woken(); }
int cuGetProcAddress_v2(const char* symbol, void** function) { return woken(); }
"""


@pytest.fixture
def extension() -> _provider._Extension:
    found = _provider._extension()
    if found.module is None:
        pytest.skip(found.reason)
    return found


def warnings_of_a_first_choice(device: torch.device) -> list[str]:
    """Return the warnings of two calls of `select`. Each warning comes once a process."""
    _provider._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            provider = _provider.select("auto", device)
    assert provider.name == "python" and provider.reason in str(caught[0].message)
    assert [warning.category for warning in caught] == [DynswapWarning]
    return [str(warning.message) for warning in caught]


def without_a_driver(extension: _provider._Extension) -> None:
    if extension.build["cuda"] and not _provider.native_unavailable(CUDA):
        pytest.skip("there is a CUDA device")


def test_cuda_without_a_device_is_one_warning_with_the_remedy(extension: _provider._Extension) -> None:
    without_a_driver(extension)
    (said,) = warnings_of_a_first_choice(CUDA)
    assert "pure Python on 'cuda:0' and fetches nothing ahead" in said
    assert "DYNSWAP_PROVIDER=python" in said
    if extension.build["cuda"]:
        assert f"built with CUDA {extension.build['cuda']}" in said
        assert "Update the NVIDIA driver" in said
    else:
        assert "built without CUDA" in said
        assert "DYNSWAP_CUDA=1" in said


def test_cuda_by_choice_raises_without_a_device(extension: _provider._Extension) -> None:
    without_a_driver(extension)
    with pytest.raises(ConfigError, match="the native provider was asked for, but the extension"):
        _provider.select("native", CUDA)


def without_its_cuda_backend(extension: _provider._Extension) -> str:
    """Return why the extension cannot serve a GPU by its CUDA backend; empty if it can."""
    if not extension.build["cuda"]:
        return "the extension was built without CUDA"
    return _provider.native_unavailable(CUDA)


@pytest.mark.device
def test_cuda_with_a_device_is_native(
    extension: _provider._Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNSWAP_ENGINE_BACKEND", raising=False)
    if reason := without_its_cuda_backend(extension):
        pytest.skip(reason)
    chosen = _provider.select("auto", CUDA)
    assert (chosen.name, chosen.backend, chosen.reason) == ("native", "cuda", "")
    beyond = torch.device("cuda", extension.module.cuda_device_count())  # type: ignore[union-attr]
    assert f"and not '{beyond}'" in _provider.native_unavailable(beyond)


@pytest.mark.device
def test_an_install_on_cuda_is_native_and_says_nothing_of_providers(
    extension: _provider._Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := without_its_cuda_backend(extension):
        pytest.skip(reason)
    monkeypatch.delenv("DYNSWAP_PROVIDER", raising=False)
    monkeypatch.delenv("DYNSWAP_ENGINE_BACKEND", raising=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(pure Python|own streams)")
        handle = dynswap_ext.install(torch.nn.Linear(4, 4), device="cuda")
    with handle:
        assert (handle.provider, handle.backend, handle.report().reason) == ("native", "cuda", "")
    assert dynswap_ext.backend_info().provider == "native"


@pytest.mark.device
def test_torchs_streams_by_choice_say_nothing(
    extension: _provider._Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNSWAP_ENGINE_BACKEND", "torch")
    if reason := _provider.native_unavailable(CUDA):
        pytest.skip(reason)
    monkeypatch.delenv("DYNSWAP_PROVIDER", raising=False)
    _provider._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(pure Python|own streams)")
        handle = dynswap_ext.install(torch.nn.Linear(4, 4), device="cuda")
    with handle:
        assert (handle.provider, handle.backend, handle.stats().backend) == ("native", "torch", "torch")
    info = dynswap_ext.backend_info()
    assert (info.provider, info.backend) == ("native", "torch")
    assert info.offers is not None and set(info.offers) >= {"a stream for copies", "pinned memory"}
    assert f"torch offers     {', '.join(info.offers)}" in str(info)


def test_a_backend_that_is_asked_for_and_cannot_be_had(
    extension: _provider._Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNSWAP_ENGINE_BACKEND", "cuda")
    (said,) = warnings_of_a_first_choice(torch.device("xpu", 0))
    assert "DYNSWAP_ENGINE_BACKEND is 'cuda', and 'xpu:0' is not an NVIDIA GPU" in said
    monkeypatch.setenv("DYNSWAP_ENGINE_BACKEND", "host")
    assert _provider.select("auto", torch.device("cpu")).backend == "host"
    (said,) = warnings_of_a_first_choice(torch.device("xpu", 0))
    assert "DYNSWAP_ENGINE_BACKEND is 'host', and 'xpu:0' is not the CPU" in said
    monkeypatch.setenv("DYNSWAP_ENGINE_BACKEND", "opencl")
    with pytest.raises(ConfigError, match="DYNSWAP_ENGINE_BACKEND is 'opencl'; expected one of auto"):
        _provider.select("auto", torch.device("xpu", 0))


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_another_accelerator_is_one_warning(extension: _provider._Extension, kind: str) -> None:
    (said,) = warnings_of_a_first_choice(torch.device(kind, 0))
    assert f"torch's own streams cannot serve '{kind}:0' (" in said
    assert "fetches nothing ahead" in said
    assert "DYNSWAP_PROVIDER=python" in said


@pytest.mark.parametrize("device", [CUDA, torch.device("xpu", 0)])
def test_pure_python_by_choice_says_nothing(device: torch.device) -> None:
    _provider._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _provider.select("python", device).reason == ""


def test_the_report_says_why_it_is_pure_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, expected in (
        ("auto", bool(_provider.native_unavailable(torch.device("cpu")))),
        ("python", False),
    ):
        monkeypatch.delenv("DYNSWAP_PROVIDER", raising=False)
        with dynswap_ext.install(torch.nn.Linear(2, 2), device="cpu", provider=backend) as handle:
            report = handle.report()
        assert bool(report.reason) is expected
        assert report.as_dict()["reason"] == report.reason
        assert ("pure Python, which fetches nothing ahead" in str(report)) is expected


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine whose NVML and driver library report a GPU."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("takes a C compiler, on Linux")
    for name, source in (("libnvidia-ml.so.1", NVML), ("libcuda.so.1", DRIVER)):
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / name)]
        subprocess.run(command, input=source, text=True, check=True)
    kept = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return {
        **kept,
        "LD_LIBRARY_PATH": os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": str(ROOT),
        "DRIVER_WAS_WOKEN": str(tmp_path / "woken"),
    }


def run(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import torch, dynswap_ext\n{script}"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_driver_sleeps_until_a_cuda_device_is_served(
    extension: _provider._Extension, one_gpu: dict[str, str]
) -> None:
    woken = Path(one_gpu["DRIVER_WAS_WOKEN"])
    script = (
        "dynswap_ext.install(torch.nn.Linear(2, 2), device='cpu')\n"
        "print(' '.join(dynswap_ext.backend_info().devices))"
    )
    devices = run(script, one_gpu).split()
    assert devices == (["cpu"] if torch.version.cuda is None else ["cpu", "cuda:0"])
    assert not woken.exists()
    if not extension.build["cuda"]:
        pytest.skip("the extension was built without CUDA, and asks no driver")
    run(
        "from dynswap_ext import _provider; assert _provider.native_unavailable(torch.device('cuda'))",
        one_gpu,
    )
    assert woken.exists()
