"""The workflows call targets that the Makefile has, for the Pythons and torches that the project supports."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "build_backend")]

from dynswap_build import supported  # noqa: E402
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


def test_the_pairs_of_the_matrix_are_supported() -> None:
    assert {"-".join(pair) for pair in PAIRS} <= set(supported.pairs())


def test_the_workflow_of_wheels_takes_the_list_of_what_is_supported() -> None:
    """The workflow of wheels builds the same pairs as `make wheels`."""
    jobs = loaded("wheels.yml")["jobs"]
    (listing,) = (step["run"] for step in jobs["pairs"]["steps"] if "run" in step)
    assert "python3 build_backend/dynswap_build/supported.py" in listing
    assert jobs["wheel"]["strategy"]["matrix"] == {"pair": "${{ fromJSON(needs.pairs.outputs.pairs) }}"}
    makefile = (ROOT / "Makefile").read_text()
    assert "\nPAIRS ?= $(shell $(PYTHON) build_backend/dynswap_build/supported.py)\n" in makefile
    assert "\nwheel-%:" in makefile and "make wheel-${{ matrix.pair }} " in str(jobs["wheel"]["steps"])
