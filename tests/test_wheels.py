"""pip takes the wheel that fits the installed torch, with the command that the warning names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dynswap_ext._util import reinstall

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))

import wheel_index  # noqa: E402

TORCHES = ("2.12", "2.13", "2.14")


def write_wheel(folder: Path, name: str, version: str, *more: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.10,<3.99", *more]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def indexes(tmp_path: Path) -> tuple[str, str]:
    """Return the addresses of an index of torch alone, like PyPI, and of ours with a wheel for each torch."""
    addresses = []
    for name in ("pypi", "ours"):
        folder = tmp_path / name
        addresses.append((folder / "simple").as_uri())
        for torch in TORCHES:
            if name == "pypi":
                write_wheel(folder, "torch", f"{torch}.0")
                write_wheel(folder, "torch", f"{torch}.1")  # newer, and not asked for
            else:
                needs = f"Requires-Dist: torch=={torch}.*"
                write_wheel(
                    folder,
                    "dynswap_ext",
                    f"0.2.0+torch{torch}",
                    needs,
                    f"Project-URL: Wheels, {addresses[-1]}",
                )
        assert wheel_index.main([str(folder)]) == 0
    return addresses[0], addresses[1]


@pytest.mark.slow
def test_an_index_that_is_asked_for_a_torch_gives_its_wheel(tmp_path: Path, indexes: tuple[str, str]) -> None:
    """The command installs the wheel for the torch that it names, and leaves that torch alone.

    It does so at first, and after torch was replaced by a newer and by an older one.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pypi, ours = indexes
    of_this_run = ("PIP_", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(of_this_run)}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": pypi, "PIP_NO_CACHE_DIR": "1"}

    said = f"`pip install dynswap-ext 'torch==2.13.*' --extra-index-url {ours}`"
    for torch in ("2.13", "2.14", "2.12"):
        for old in site.glob("torch-*"):
            shutil.rmtree(old)
        with zipfile.ZipFile(tmp_path / f"pypi/torch-{torch}.0-py3-none-any.whl") as wheel:
            wheel.extractall(site)
        if torch != "2.13":  # with 2.13, nothing is installed yet
            said = reinstall._command(site, f"{torch}.0+cpu")
        pip, *command = shlex.split(said.strip("`"))
        assert pip == "pip"
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv"), *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        installed = {path.name for path in site.glob("*.dist-info")}
        assert installed == {f"torch-{torch}.0.dist-info", f"dynswap_ext-0.2.0+torch{torch}.dist-info"}


def test_a_package_from_a_checkout_is_built_again_there() -> None:
    assert reinstall._command(ROOT, "2.13.0") == reinstall.FROM_SOURCE


def test_published_wheels_are_linked_where_they_are(tmp_path: Path) -> None:
    write_wheel(tmp_path / "v0.2.0", "dynswap_ext", "0.2.0+torch2.13")
    assert wheel_index.main([str(tmp_path), "--files", "https://host/releases/"]) == 0
    page = (tmp_path / "simple/dynswap-ext/index.html").read_text()
    name = "dynswap_ext-0.2.0%2Btorch2.13-py3-none-any.whl"
    assert re.search(rf'href="https://host/releases/v0\.2\.0/{re.escape(name)}#sha256=\w{{64}}"', page)
    assert 'data-requires-python="&gt;=3.10,&lt;3.99"' in page
    (metadata,) = tmp_path.glob("v0.2.0/*.whl.metadata")
    assert "Version: 0.2.0+torch2.13" in metadata.read_text()


def test_an_empty_folder_has_no_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wheel_index.main([str(tmp_path)])
    assert f"there is no wheel in {tmp_path}" in capsys.readouterr().err
