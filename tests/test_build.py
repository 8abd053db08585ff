"""The build backend: which torch and which CUDA toolkit it uses, and its messages without one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynswap_ext import __version__

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))

from dynswap_build import cuda_toolkit, extension, installed_torch, supported  # noqa: E402

NO_ROCM = None
MINOR = ".".join(torch.__version__.split(".")[:2])

# The package's hooks import setuptools, which a build environment has and this one hides.
LOAD_ALONE = (
    "import types; package = types.ModuleType('dynswap_build'); sys.modules['dynswap_build'] = package; "
    "package.__path__ = ['build_backend/dynswap_build']; from dynswap_build import installed_torch"
)


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """Return a folder that looks like a toolkit."""
    home = tmp_path / "cuda"
    for name in ("bin", "include", "lib64"):
        (home / name).mkdir(parents=True)
    (home / "include/cuda_runtime_api.h").touch()
    (home / "lib64/libcudart_static.a").touch()
    write_nvcc(home, "13.0")
    return home


def write_nvcc(home: Path, release: str) -> None:
    nvcc = home / "bin/nvcc"
    nvcc.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\necho '#$ TOP={home}'\n"
    )
    nvcc.chmod(0o755)


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all toolkits except the one that a test names."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda_toolkit, "DEFAULTS", ())
    monkeypatch.setattr(cuda_toolkit, "INSTALLED_BY_PIP", "nvidia/none-of-them")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_named_by_the_environment(
    toolkit: Path, nothing_else: None, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(toolkit))
    found = cuda_toolkit.find_toolkit()
    assert found.home == toolkit
    assert found.version == (13, 0)
    assert found.static_runtime == toolkit / "lib64/libcudart_static.a"


def test_toolkit_behind_a_script_on_path(
    toolkit: Path, nothing_else: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrapper = tmp_path / "wrappers/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert cuda_toolkit.find_toolkit().home == toolkit


@pytest.mark.parametrize(
    ("spoilt", "rocm", "said"),
    [
        ("bin/nvcc", None, "{home} (CUDA_HOME): no bin/nvcc"),
        ("include/cuda_runtime_api.h", None, "{home} (CUDA_HOME): no include/cuda_runtime_api.h"),
        ("lib64/libcudart_static.a", None, "{home} (CUDA_HOME): no libcudart_static.a"),
        ("11.8", None, "CUDA 11.8 is older than 12.0"),
        # torch would compile the kernels with hipcc, which does not take them.
        ("", "6.4.43482", "for AMD's GPUs (HIP 6.4.43482)"),
    ],
)
def test_a_toolkit_that_cannot_be_used_is_an_error_where_cuda_is_demanded(
    toolkit: Path,
    nothing_else: None,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: str,
    rocm: str | None,
    said: str,
) -> None:
    if "/" in spoilt:
        (toolkit / spoilt).unlink()
    elif spoilt:
        write_nvcc(toolkit, spoilt)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("DYNSWAP_CUDA", "1")
    with pytest.raises(SystemExit, match=re.escape(said.format(home=toolkit))):
        extension.wanted_toolkit(rocm)
    monkeypatch.setenv("DYNSWAP_CUDA", "auto")
    assert extension.wanted_toolkit(rocm) is None


@pytest.mark.parametrize("choice", ["1", "auto"])
def test_a_wrong_cuda_home_is_said(
    toolkit: Path,
    nothing_else: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: str,
) -> None:
    """A wrong CUDA_HOME gives a message, which says whether another toolkit is taken instead."""
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("DYNSWAP_CUDA", choice)
    monkeypatch.setattr(cuda_toolkit, "DEFAULTS", (str(toolkit),))
    found = extension.wanted_toolkit(NO_ROCM)
    assert found is not None and found.home == toolkit
    assert capsys.readouterr().err == (
        f"dynswap_ext._C: /nowhere (CUDA_HOME): no bin/nvcc; {toolkit} is taken instead\n"
    )
    if choice == "auto":
        monkeypatch.setattr(cuda_toolkit, "DEFAULTS", ())
        assert extension.wanted_toolkit(NO_ROCM) is None
        assert "no CUDA toolkit can be used: /nowhere (CUDA_HOME): no bin/nvcc" in capsys.readouterr().err


def test_a_toolkit_that_is_found_without_being_named_is_not_remarked_on(
    toolkit: Path, nothing_else: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_toolkit, "DEFAULTS", ("/nowhere", str(toolkit)))
    assert extension.wanted_toolkit(NO_ROCM, "13.0") is not None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("of_torch", "said"),
    [("12.8", True), ("13.0", False), ("13.2", False), ("14.0", False), (None, False)],
)
def test_a_toolkit_of_a_later_major_version_than_torchs_is_said(
    toolkit: Path,
    nothing_else: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of_torch: str | None,
    said: bool,
) -> None:
    """A toolkit of a later major version than torch's gives a message, as drivers may be too old for it.

    An older toolkit works with any driver that serves torch.
    """
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert extension.wanted_toolkit(NO_ROCM, of_torch) is not None
    text = capsys.readouterr().err
    assert ("CUDA 13.0 is newer than torch's CUDA 12.8" in text) is said
    assert ("Set CUDA_HOME to a toolkit of CUDA 12" in text) is said
    assert bool(text) is said


@pytest.mark.parametrize(
    ("version", "architectures"),
    [
        ((12, 0), "7.0;8.0;9.0+PTX"),
        ((12, 6), "7.0;8.0;9.0+PTX"),
        ((12, 8), "7.0;8.0;9.0+PTX;10.0;12.0"),
        ((13, 0), "7.5;8.0;9.0+PTX;10.0;12.0"),
    ],
)
def test_architectures(version: tuple[int, int], architectures: str) -> None:
    assert extension._architectures(version) == architectures


def test_cuda_demanded_and_nowhere(nothing_else: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNSWAP_CUDA", "1")
    with pytest.raises(SystemExit, match="neither CUDA_HOME nor CUDA_PATH is set") as said:
        extension.wanted_toolkit(NO_ROCM)
    assert "pip install 'cuda-toolkit[nvcc]'" in str(said.value)


def test_cuda_refused(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("DYNSWAP_CUDA", "0")
    assert extension.wanted_toolkit(NO_ROCM) is None


@pytest.fixture
def packages(toolkit: Path, nothing_else: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of NVIDIA's packages, on sys.path, as pip installs them."""
    site = tmp_path / "site"
    (site / "nvidia").mkdir(parents=True)
    home = toolkit.rename(site / "nvidia/cu13")
    (home / "lib64").rename(home / "lib")
    monkeypatch.setattr(cuda_toolkit, "INSTALLED_BY_PIP", "nvidia/cu[0-9]*")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    return home


def test_toolkit_from_pip(packages: Path) -> None:
    found = cuda_toolkit.find_toolkit()
    assert (found.home, found.include) == (packages, packages / "include")
    assert found.static_runtime == packages / "lib/libcudart_static.a"


def test_a_toolkit_of_the_system_comes_before_one_from_pip(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "usr/local/cuda"
    shutil.copytree(packages, system)
    monkeypatch.setattr(cuda_toolkit, "DEFAULTS", (str(system),))
    assert cuda_toolkit.find_toolkit().home == system


def test_what_a_gpu_build_of_torch_brings_is_no_toolkit(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packages / "bin/nvcc").unlink()
    monkeypatch.setenv("DYNSWAP_CUDA", "1")
    with pytest.raises(SystemExit, match=re.escape(f"{packages} (NVIDIA's packages): no bin/nvcc")):
        extension.wanted_toolkit(NO_ROCM)


@pytest.mark.parametrize(
    ("choice", "torch_is_installed", "brought", "required"),
    [
        ("1", True, "13.0.3.0", ["cuda-toolkit[nvcc]==13.0.3.0"]),
        ("1", True, None, ["cuda-toolkit[nvcc]==13.0.*"]),
        ("1", False, None, ["cuda-toolkit[nvcc]>=13.0"]),
        ("auto", True, "13.0.3.0", []),
        ("0", True, "13.0.3.0", []),
    ],
)
def test_pip_brings_a_toolkit_if_cuda_is_demanded(
    nothing_else: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    torch_is_installed: bool,
    brought: str | None,
    required: list[str],
) -> None:
    """pip installs a toolkit in the version that torch requires, so that both run on the same driver."""
    monkeypatch.setenv("DYNSWAP_CUDA", choice)
    if brought:
        metadata = tmp_path / f"cuda_toolkit-{brought}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: cuda-toolkit\nVersion: {brought}\n")
    elif importlib.util.find_spec("nvidia"):
        pytest.skip("NVIDIA's packages are installed")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert extension.toolkit_requirements(torch_is_installed=torch_is_installed) == required


def test_pip_brings_no_toolkit_where_there_is_one(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("DYNSWAP_CUDA", "1")
    assert extension.toolkit_requirements(torch_is_installed=True) == []


def test_unknown_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNSWAP_CUDA", "perhaps")
    with pytest.raises(SystemExit, match="DYNSWAP_CUDA='perhaps' is not known"):
        extension.wanted_toolkit(NO_ROCM)
    monkeypatch.setenv("DYNSWAP_BUILD", "perhaps")
    with pytest.raises(SystemExit, match="DYNSWAP_BUILD='perhaps' is not known"):
        extension.wants_extension()


@pytest.mark.parametrize(
    ("platform", "dash", "suffix"), [("linux", "-", "_linux"), ("win32", "/", "_windows")]
)
def test_flags_and_files_are_of_the_system(
    monkeypatch: pytest.MonkeyPatch, platform: str, dash: str, suffix: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("DYNSWAP_UNITY", "0")
    monkeypatch.setattr(extension.shutil, "rmtree", lambda *_, **__: None)  # keep this checkout's files
    made = extension._extension(None, torch.__version__, _Recorded)
    assert {flag[0] for flag in made.flags["cxx"]} == {dash}
    names = [Path(name).stem for name in made.sources if "csrc/platform/" in name]
    of_a_system = {name for name in names if name.endswith(("_linux", "_windows"))}
    assert of_a_system and all(name.endswith(suffix) for name in of_a_system)


class _Recorded:
    """Replaces torch.utils.cpp_extension and the extension that it makes, and records the arguments."""

    def __init__(
        self, _: str, sources: list[str], *, extra_compile_args: dict[str, list[str]], **__: object
    ) -> None:
        self.sources, self.flags = sources, extra_compile_args

    @classmethod
    def CppExtension(cls, name: str, sources: list[str], **arguments: Any) -> _Recorded:
        return cls(name, sources, **arguments)

    @staticmethod
    def include_paths() -> list[str]:
        return ["torch/include"]


def test_pure_python_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNSWAP_BUILD", "python")
    assert not extension.wants_extension()
    assert extension.setup_arguments() == {
        "version": __version__,
        "install_requires": [installed_torch.REQUIREMENT, "rich>=13"],
    }


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.13.1+cu130", True),
        ("2.15.1", True),
        ("2.16.0", False),
        ("3.0", False),
    ],
)
def test_supported_torch(version: str, supported: bool) -> None:
    assert installed_torch.supported(version) is supported


@pytest.mark.parametrize(
    ("command", "required"),
    [
        ("dist_info", f"torch=={MINOR}.*"),
        ("sdist", installed_torch.REQUIREMENT),
    ],
)
def test_a_wheel_requires_the_torch_that_it_is_built_for(
    monkeypatch: pytest.MonkeyPatch, command: str, required: str
) -> None:
    """A wheel requires its minor version of torch, as its extension loads with no other; sources do not."""
    monkeypatch.delenv("DYNSWAP_BUILD", raising=False)
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    monkeypatch.delenv("DYNSWAP_WHEEL_INDEX", raising=False)
    assert extension.setup_arguments() == {"version": __version__, "install_requires": [required, "rich>=13"]}


@pytest.mark.parametrize(
    ("command", "version"), [("dist_info", f"{__version__}+torch{MINOR}"), ("sdist", __version__)]
)
def test_a_wheel_for_an_index_is_named_after_its_torch(
    monkeypatch: pytest.MonkeyPatch, command: str, version: str
) -> None:
    """A wheel for an index has the version of torch in its own; the archive of the sources does not."""
    monkeypatch.delenv("DYNSWAP_BUILD", raising=False)
    monkeypatch.setenv("DYNSWAP_WHEEL_INDEX", "https://host/simple")
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    arguments = extension.setup_arguments()
    assert arguments["version"] == version
    assert arguments.get("project_urls") == (
        None if command == "sdist" else {"Wheels": "https://host/simple"}
    )


def test_where_torch_is_not_installed_the_range_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert installed_torch.exact_requirement() == installed_torch.REQUIREMENT


@pytest.mark.parametrize(
    ("implementation", "version", "gil", "said"),
    [
        ("CPython", (3, 10), True, ""),
        ("CPython", (3, 13), True, ""),
        ("CPython", (3, 9), True, "this is CPython 3.9:"),
        ("CPython", (3, 14), True, "this is CPython 3.14:"),
        ("CPython", (3, 13), False, "this is CPython 3.13 without the GIL:"),
        ("PyPy", (3, 11), True, "this is PyPy 3.11:"),
    ],
)
def test_an_unknown_interpreter_is_refused(
    implementation: str, version: tuple[int, int], gil: bool, said: str
) -> None:
    refused = extension.refusal(implementation, version, gil=gil)
    assert said in refused and bool(said) == bool(refused)
    if refused:
        assert "CPython 3.10 to 3.13" in refused and "DYNSWAP_BUILD=python" in refused


def test_the_bindings_check_for_the_same_interpreters() -> None:
    header = (ROOT / "csrc/session/cpython.h").read_text()
    oldest, newest = supported.PYTHONS[0], supported.PYTHONS[-1]
    assert f"PY_VERSION_HEX < 0x03{oldest[1]:02X}0000" in header
    assert f"PY_VERSION_HEX >= 0x03{newest[1] + 1:02X}0000" in header
    declared = f'requires-python = ">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"'
    project = (ROOT / "pyproject.toml").read_text()
    assert declared in project
    listed = re.findall(r"Python :: (3\.\d+)\"", project)
    assert listed == [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)]


def test_an_unsupported_torch_is_named_instead_of_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = subprocess.CompletedProcess([], 0, stdout='{"version": "2.10.1+cu128", "path": []}')
    monkeypatch.setattr(installed_torch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(installed_torch.subprocess, "run", lambda *args, **options: found)
    with pytest.raises(
        RuntimeError, match=r"torch 2\.10\.1\+cu128 is installed, .* needs torch>=2\.11,<2\.16"
    ):
        installed_torch.reveal_torch()


def test_torch_is_found_past_an_isolated_build(tmp_path: Path) -> None:
    """torch is found in an isolated build of pip, which hides the interpreter's own packages."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys, sysconfig\nhidden = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}\n"
        "sys.path[:] = [p for p in sys.path if p not in hidden]\n"
    )
    probe = (
        "import importlib.util, sys; sys.path.insert(0, 'build_backend')\n"
        "assert importlib.util.find_spec('torch') is None, 'not isolated'\n"
        f"{LOAD_ALONE}\n"
        "assert installed_torch.reveal_torch()\n"
        "import torch; print(torch.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        env={"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1", "PATH": "/usr/bin:/bin"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == torch.__version__
