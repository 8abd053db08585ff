"""The workflows call targets that the Makefile has, for the Pythons and torches that the project supports."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "build_backend")]

from dynswap_build import installed_torch  # noqa: E402
from matrix import PAIRS  # noqa: E402


def loaded(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with transformers)")
    content: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return content


def test_targets_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE)) | {"lint", "types"}
    for path in WORKFLOWS:
        content = loaded(path.name)
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        calls = [step["run"].split() for step in steps if step.get("run", "").startswith("make ")]
        assert calls
        for _, *words in calls:
            asked = [word for word in words if "=" not in word and not word.startswith("$")]
            assert [word for word in asked if re.fullmatch(r"[\w-]+", word) and word not in targets] == []
            for setting in (word.partition("=")[0] for word in words if "=" in word and word[0].isupper()):
                assert re.search(rf"^{setting} \?=", makefile, re.MULTILINE), setting


def test_pairs_of_python_and_torch_are_those_of_the_matrix() -> None:
    jobs = loaded("ci.yml")["jobs"]
    pairs = [(one["python"], one["torch"]) for one in jobs["pythons"]["strategy"]["matrix"]["include"]]
    steps = jobs["ci"]["steps"]
    (python,) = (
        s["with"]["python-version"] for s in steps if s.get("uses", "").startswith("actions/setup-python")
    )
    torch = re.search(r"^TORCH \?= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert sorted([*pairs, (python, torch[1])]) == sorted(PAIRS)


def test_wheels_are_for_what_is_supported() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    torches = loaded("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["torch"]
    oldest, newest = map(int, re.findall(r"torch>=2\.(\d+),<2\.(\d+)", installed_torch.REQUIREMENT)[0])
    assert torches == [f"2.{minor}" for minor in range(oldest, newest)]
    first, last = map(int, re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)[0])
    built = re.search(r"^\[tool\.cibuildwheel\]\nbuild = \[(.*)\]", project, re.MULTILINE)
    assert built
    assert re.findall(r'"(cp\d+)-manylinux_\*"', built[1]) == [f"cp3{minor}" for minor in range(first, last)]


def test_every_pair_of_the_matrix_has_a_wheel() -> None:
    wheels = loaded("wheels.yml")["jobs"]["wheels"]
    torches = wheels["strategy"]["matrix"]["torch"]
    left_out = {("3.10", "2.15")}
    (skip,) = (step["env"]["CIBW_SKIP"] for step in wheels["steps"] if "CIBW_SKIP" in step.get("env", {}))
    assert all(
        f"'{torch}'" in skip and f"cp{python.replace('.', '')}-*" in skip for python, torch in left_out
    )
    made = set(product(("3.10", "3.11", "3.12", "3.13"), torches)) - left_out
    assert set(PAIRS) <= made
