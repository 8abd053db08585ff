"""`make newest` tells two libraries that refuse each other's version from tests that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import pytest

import benchmark_scripts  # noqa: F401  (the folder that the next ones are in)

import newest  # isort: skip
import newest_verdicts  # isort: skip
import newest_versions  # isort: skip

PACKAGES = {"transformers", "peft", "numpy", "huggingface-hub", "torch"}
#: As transformers 5.24 has it (transformers/utils/peft_utils.py).
OLD_PEFT = "The version of PEFT you are using is not compatible, please use a version >= 0.22.0"
#: As require_version has it (transformers/utils/versions.py).
REQUIRED = "peft>=0.22 is required for a normal functioning of this module, but found peft==0.21.2."

LIBRARY = f'''
def check(message):
    raise ValueError(message)

def require():
    raise ImportError("{REQUIRED}\\nTry: `pip install transformers -U` or another thing")

def lazily():
    try:
        check("{OLD_PEFT}")
    except ValueError as error:
        raise RuntimeError("Failed to import transformers.integrations because of an error") from error

def in_passing():
    try:
        check("{OLD_PEFT}")
    except ValueError:
        raise KeyError("layers.0")

def torchs(call):
    return call()
'''
TESTS = f'''
import subprocess, sys
import pytest
import library, torch

def test_passes(): pass
def test_skips(): pytest.skip("no GPU")
def test_skips_for_a_version(): pytest.skip("needs a newer peft")

def test_refused(): library.check("{OLD_PEFT}")
@pytest.mark.parametrize("number", [1, 2])
def test_refused_twice(number): library.check("{OLD_PEFT}")
@pytest.fixture
def model(): library.check("{OLD_PEFT}")
def test_refused_in_a_fixture(model): pass
@pytest.fixture
def held():
    yield
    raise AssertionError("1 tensor is held")
def test_refused_and_held(held): library.check("{OLD_PEFT}")
def test_held(held): pass
def test_required(): library.require()
def test_refused_behind_an_import(): library.lazily()
def test_refused_in_a_script():
    code = "import library; library.require()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.partition("Traceback")[2]  # its beginning is cut off

def test_about_something_else(): library.check("dropout has to be a number below 1.0, it is 2.5")
def test_our_complaint(): raise ValueError("{OLD_PEFT}")
def test_torchs_complaint(): torch.refuse("{OLD_PEFT}")
def test_failed_after_a_refusal(): library.in_passing()
def test_an_expectation(): assert "{OLD_PEFT}" == "", "{REQUIRED}"
def test_our_complaint_in_a_script():
    code = "raise ImportError('{REQUIRED}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> newest_verdicts.Verdicts:
    """What is read of a run of `TESTS`, in which a library and torch lie in a folder of packages."""
    folder = tmp_path_factory.mktemp("newest")
    packages = folder / "lib" / "site-packages"
    for name, text in {"library": LIBRARY, "torch": "def refuse(message): raise ValueError(message)"}.items():
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(text)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "test_refused_whole.py").write_text("import library\nlibrary.require()\n")
    (folder / "test_broken_whole.py").write_text("from library import nothing\n")
    return run(folder, path=packages)


def run(folder: Path, *, path: Path | str = "") -> newest_verdicts.Verdicts:
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    done = subprocess.run(
        [*command, *newest_verdicts.ARGUMENTS],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "report.xml").exists(), done.stdout + done.stderr
    return newest_verdicts.read(folder / "report.xml", PACKAGES)


def test_what_a_library_says_of_a_version_is_a_refusal(found: newest_verdicts.Verdicts) -> None:
    refused = {key: [name.rpartition("::")[2] for name in names] for key, names in found.refusals.items()}
    assert refused == {
        ("library", OLD_PEFT): [
            "test_refused",
            "test_refused_twice[1]",
            "test_refused_twice[2]",
            "test_refused_in_a_fixture",
            "test_refused_and_held",
            "test_refused_behind_an_import",
        ],
        ("library", REQUIRED): ["test_refused_whole", "test_required", "test_refused_in_a_script"],
    }
    assert found.refused == 9


def test_anything_else_is_a_failure(found: newest_verdicts.Verdicts) -> None:
    failures = {name.rpartition("::")[2]: line for name, line in found.failures.items()}
    assert failures.pop("test_broken_whole").startswith(
        "ImportError: cannot import name 'nothing' from 'library'"
    )
    assert failures == {
        "test_held": "AssertionError: 1 tensor is held",
        "test_about_something_else": "ValueError: dropout has to be a number below 1.0, it is 2.5",
        "test_our_complaint": f"ValueError: {OLD_PEFT}",
        "test_torchs_complaint": f"ValueError: {OLD_PEFT}",
        "test_failed_after_a_refusal": "KeyError: 'layers.0'",
        "test_an_expectation": f"AssertionError: {REQUIRED}",
        "test_our_complaint_in_a_script": f"ImportError: {REQUIRED}",
    }
    assert found.passed == 1


def test_a_skip_for_a_version_is_seen(found: newest_verdicts.Verdicts) -> None:
    assert found.skipped == 2
    assert found.skips == {"needs a newer peft": 1}


def test_transformers_own_refusals(tmp_path: Path) -> None:
    """Raised by the library itself, so that its words are those of the version that is installed."""
    pytest.importorskip("peft", reason="peft is not installed (pip install -e '.[programs]')")
    pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[programs]')")
    (tmp_path / "test_it.py").write_text(
        "from transformers.utils.peft_utils import check_peft_version\n"
        "from transformers.utils.versions import require_version\n"
        "def test_checked(): check_peft_version(min_version='99.0')\n"
        "def test_required(): require_version('peft>=99.0')\n"
        "def test_no_requirement(): require_version('peft is here')\n"
    )
    verdicts = run(tmp_path)
    assert {by for by, _ in verdicts.refusals} == {"transformers"} and verdicts.refused == 2
    assert [name.rpartition("::")[2] for name in verdicts.failures] == ["test_no_requirement"]


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("peft", OLD_PEFT),
        ("peft", "The version of PEFT is not compatible, please use a version that is greater than 0.22"),
        ("peft", REQUIRED),
        (
            "huggingface-hub",
            "Using the `Trainer` requires `huggingface_hub>=2.5.0`: Please run `pip install`",
        ),
        ("peft", "This needs peft 0.22 or newer"),
        ("numpy", "Please install a newer version of numpy"),
        ("transformers", "Your transformers version 5.23.0 is not supported, please upgrade"),
        (None, "PEFT is not installed. Please install it with `pip install peft`"),
        (None, "PEFT backend is required for this method."),
        (None, "dropout<1.0 is required"),
        (None, "numpy array expected, found a tensor of shape 1.0"),
        (None, "Unrecognized model: it should have a `model_type` key in its config.json"),
        (None, "size mismatch, got input (4), mat (4x3), vec (5)"),
        (None, "the file is of version 2.0, which is not supported"),
    ],
)
def test_complaints(package: str | None, message: str) -> None:
    assert newest_verdicts.complaint(message, PACKAGES) == package


#: Of uv: what a new release wants of a library, what a library wants of a new one, both, and neither.
PROOFS = {
    "transformers": """
        Because transformers==5.24.0 depends on tokenizers>=0.24,<0.25 and you require transformers==5.24.0,
        we can conclude that you require tokenizers>=0.24,<0.25.
        And because you require tokenizers==0.23.3, we can conclude that your requirements are
        unsatisfiable.""",
    "huggingface_hub": """
        Because diffusers>=0.42.0 depends on huggingface-hub>=1.32.0 and you require diffusers>=0.42, we can
        conclude that you require huggingface-hub>=1.32.0.
        And because you require huggingface-hub==0.36.0, we can conclude that your requirements are
        unsatisfiable.""",
    "tokenizers": """
        Because tokenizers==0.15.0 depends on huggingface-hub<1.0 and diffusers>=0.42.0 depends on
        huggingface-hub>=1.32.0,<3.0, we can conclude that diffusers>=0.42.0 and tokenizers==0.15.0 are
        incompatible.
        And because you require diffusers>=0.42 and tokenizers==0.15.0, we can conclude that your
        requirements are unsatisfiable.""",
    "peft": """
        Because you require peft==0.21.2 and peft>=0.22, we can conclude that your requirements are
        unsatisfiable.""",
}
SHORTENED = {
    "transformers": "transformers==5.24.0 depends on tokenizers>=0.24,<0.25 "
    "and you require tokenizers==0.23.3",
    "huggingface_hub": "diffusers>=0.42.0 depends on huggingface-hub>=1.32.0 "
    "and you require huggingface-hub==0.36.0",
    "tokenizers": "tokenizers==0.15.0 depends on huggingface-hub<1.0 "
    "and diffusers>=0.42.0 depends on huggingface-hub>=1.32.0,<3.0",
    "peft": "you require peft==0.21.2 and peft>=0.22",
}


@pytest.mark.parametrize("library", PROOFS)
def test_the_resolvers_proof_is_shortened(library: str) -> None:
    message = f"error: No solution found when resolving dependencies\n  cause: {PROOFS[library].strip()}\n"
    assert newest_versions.shortened(message, library) == SHORTENED[library]


#: A uv that answers with each exact version it was asked for, and the rest of what it was asked to keep.
PRETEND_UV = """\
#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = --output-file ] && found=$2; shift; done
cp "$found" "$1.kept"
{ grep -h "==" "$1"; echo nvidia-cublas==13.1; } > "$found.new"
while read line; do
  grep -q "^${line%%==*}==" "$found.new" || echo "$line"
done < "$found" >> "$found.new"
mv "$found.new" "$found"
"""


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> newest_versions.Resolver:
    uv = tmp_path / "uv"
    uv.write_text(PRETEND_UV)
    uv.chmod(0o755)
    monkeypatch.setattr(newest_versions, "uv", lambda: str(uv))
    return newest_versions.Resolver("3.11", "2.13.0+cpu", tmp_path / "work")


def test_one_library_is_lifted_from_the_lock(resolver: newest_versions.Resolver) -> None:
    versions = resolver.lifted("transformers", "99.0", ["transformers", "peft"])
    assert versions.pop("transformers") == "99.0"
    assert versions.items() <= resolver.locked.items()
    assert "peft" in versions and not {"torch", "nvidia-cublas"} & versions.keys()
    assert (resolver.folder / "transformers.txt").read_text().splitlines().count("transformers==99.0") == 1
    assert f"peft=={versions['peft']}" in (resolver.folder / "transformers.in.kept").read_text()
    asked = (resolver.folder / "transformers.in").read_text().splitlines()
    assert {"transformers==99.0", "torch==2.13.0", "setuptools<82"} <= set(asked)
    assert not any(line.startswith("transformers<") for line in asked)  # what the lock holds back


def test_all_are_lifted_from_nothing(resolver: newest_versions.Resolver) -> None:
    assert resolver.all_newest(["transformers"]) == {}
    assert (resolver.folder / "all.in.kept").read_text() == ""


def rows() -> list[newest.Row]:
    """Make a row of each kind, in two of which the same tests are refused and the same one fails."""
    refusals = {("transformers", OLD_PEFT): ["a", "b", "c"]}
    failure = {"tests.programs.test_peft::test_merge": "AssertionError: not equal"}
    versions = {"transformers": "5.24.0", "peft": "0.21.2"}
    return [
        newest.Row("peft", "0.21.2", "0.21.2", note="as locked"),
        newest.Row(
            "transformers",
            "5.23.0",
            "5.24.0",
            versions=versions,
            moved={"tokenizers": "0.23.3 -> 0.24.0"},
            verdicts=newest_verdicts.Verdicts(380, 4, failure, refusals, {"needs a newer peft": 1}),
            seconds=301.4,
        ),
        newest.Row(
            "gguf",
            "0.19.0",
            "0.20.0",
            note="unresolvable",
            unresolvable="gguf==0.20.0 depends on numpy<2 and you require numpy>=2",
        ),
        newest.Row("lightning", "2.6.6", "2.7.0", note="BROKEN", broken="`pip install`: no space"),
        newest.Row(
            "all",
            versions=versions,
            moved={"peft": "0.21.1 -> 0.21.2", "a": "1 -> 2", "b": "1 -> 2", "c": "new -> 2"},
            verdicts=newest_verdicts.Verdicts(379, 4, failure | {"x::y": "KeyError: 1"}, refusals),
            seconds=299.6,
        ),
    ]


TABLE = """\
library       locked  newest  moved along         passed  failed  refused  skipped  seconds
peft          0.21.2  0.21.2                                                                 as locked
transformers  5.23.0  5.24.0  tokenizers             380       1        3        4      301
gguf          0.19.0  0.20.0                                                                 unresolvable
lightning     2.6.6   2.7.0                                                                  BROKEN
all                           peft, a and 2 more     379       2        3        4      300
"""


def test_the_table() -> None:
    assert newest.table(rows()) + "\n" == TABLE


def test_what_is_told_beneath() -> None:
    assert "\n".join(newest.report(rows())).split("\n\n") == [
        "\ngguf 0.20.0 was not installed: gguf==0.20.0 depends on numpy<2 and you require numpy>=2.",
        "lightning 2.7.0 BROKEN: `pip install`: no space",
        "all moved peft 0.21.1 -> 0.21.2, a 1 -> 2, b 1 -> 2, c new -> 2.",
        "transformers 5.24.0 refuses peft 0.21.2 (3 tests with transformers 5.24.0, 3 tests with all): "
        + OLD_PEFT,
        "failed with transformers 5.24.0 and with all: 1\n"
        "  tests.programs.test_peft::test_merge\n"
        "    AssertionError: not equal",
        "failed with all: 1\n  x::y\n    KeyError: 1",
        "skipped (1 test with transformers 5.24.0): needs a newer peft",
    ]  # fmt: skip


def test_what_there_is_to_mend() -> None:
    """Tests that failed, and rows that came to none: not what libraries refuse each other."""
    assert {row.library: row.to_mend for row in rows()} == {
        "peft": 0, "transformers": 1, "gguf": 0, "lightning": 1, "all": 2,
    }  # fmt: skip


class Resolved(newest_versions.Resolver):
    """Knows a release of two libraries, one of which goes with nothing."""

    def newest(self, libraries: Iterable[str]) -> dict[str, str]:
        return self.locked | {"peft": "99.0", "gguf": "99.0"}

    def lifted(self, library: str, version: str, libraries: Iterable[str]) -> dict[str, str]:
        if library == "gguf":
            raise newest_versions.Refused("gguf==99.0 depends on numpy<2 and you require numpy>=2")
        return self.locked | {library: version, "tokenizers": "98.0"}

    def all_newest(self, libraries: Iterable[str]) -> dict[str, str]:
        return self.lifted("peft", "99.0", libraries)


class AllPass:
    """An environment in which every test passes."""

    installed: ClassVar[list[str]] = []

    def prepare(self) -> None: ...

    def install(self, found: Path, versions: dict[str, str]) -> None:
        self.installed.append(found.name)

    def test(self, paths: list[str], packages: set[str]) -> newest_verdicts.Verdicts:
        return newest_verdicts.Verdicts(passed=3)


def test_a_row_runs_if_it_has_versions_of_its_own(tmp_path: Path) -> None:
    environment = AllPass()
    libraries = ["numpy", "gguf", "peft"]
    run = newest.Newest(Resolved("3.11", "2.13.0", tmp_path), environment, libraries, [])  # type: ignore[arg-type]
    for library in [*libraries, newest.ALL]:
        run.run(library)
    numpy, gguf, peft, everything = run.rows
    assert numpy.note == "as locked" and numpy.newest == numpy.locked
    assert gguf.note == "unresolvable" and "numpy<2" in gguf.unresolvable
    assert peft.verdicts and peft.moved == {"tokenizers": f"{run.resolver.locked['tokenizers']} -> 98.0"}
    assert everything.note == "the same versions as peft; not the newest: gguf " + run.resolver.locked["gguf"]
    assert environment.installed == ["peft.txt"]
