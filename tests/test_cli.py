"""The command line."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dynswap_ext
from dynswap_ext import cli

_ROOT = Path(__file__).resolve().parent.parent


def test_info_says_what_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert dynswap_ext.__version__ in printed
    assert str(dynswap_ext.backend_info()) in printed


def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynswap_ext", "--version"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == dynswap_ext.__version__


@pytest.mark.parametrize("options", ["--all", "--json"])
@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(options: str, tmp_path: Path) -> None:
    """A reader may close the pipe, as in `dynswap show w.pt | head -1`."""
    torch.save({f"{i}.w": torch.zeros(i) for i in range(4000)}, tmp_path / "w.pt")
    command = [sys.executable, "-m", "dynswap_ext", "show", str(tmp_path / "w.pt"), options]
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_no_command_and_unknown_command_are_usage_errors() -> None:
    for arguments in ([], ["dome"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


@pytest.mark.parametrize(("given", "meant"), [("shwo", "show"), ("covnert", "convert"), ("Plan", "plan")])
def test_a_misspelt_command_is_suggested(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([given])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert f"invalid choice: {given!r}" in printed and printed.endswith(f". Did you mean {meant!r}?\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "many"], "'many' is not a size; write one as 1.5GB"),
        (["--share", "0/4"], "'0/4' is not a share of the model"),
        (["--budget", "1/4"], "a share of the model is --share"),
        (["--budget", "1GiB", "--share", "1/4"], "leave out one of them"),
        (["--budget", "a lot"], "'a lot' is not a size"),
        (["--budget", "minimum", "--share", "1/4"], "leave out one of them"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--device", "toaster"], "toaster"),
        (["--device", "meta"], "device is 'meta'"),
        (["--passes", "0"], "passes is at least 1"),
        (["--prefetch", "-1"], "prefetch at least 0"),
        (["--tokens", "0"], "tokens is at least 1"),
        (["--size", "900TB"], "choose a smaller size"),
    ],
)
def test_bad_options_are_explained_without_a_traceback(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--folder", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("dynswap: ") and said in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--size", "1MB", "--folder", "{bad}"],
        ["plan", "{bad}"],
        ["plan", "{model}", "--plot", "{bad}/plan.png"],
        ["show", "{bad}"],
        ["convert", "{bad}", "{folder}/new.safetensors"],
        ["convert", "{model}", "{bad}"],
        ["convert", "{model}", "{bad}/new.safetensors"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("bad", ["/proc/nope", "{model}/inside", "{folder}/" + 300 * "long"])
def test_paths_that_cannot_be_used_are_explained(
    arguments: list[str], bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"model": str(tmp_path / "model.safetensors"), "folder": str(tmp_path)}
    save_file({"layer.weight": torch.ones(4, 4)}, places["model"])
    bad = bad.format(**places)
    given = [argument.format(bad=bad, **places) for argument in arguments]
    assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("dynswap: ") and bad in said


@pytest.mark.slow
def test_demo_prints_the_table(tmp_path: Path) -> None:
    options = ["--size", "24MB", "--share", "1/2", "--passes", "2", "--tokens", "8", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "dynswap_ext", "demo", *options, "--folder", str(tmp_path / "cache")],
        cwd=_ROOT,
        env=os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for row in (
        "time a pass",
        "of the limit",
        "peak memory",
        "moved a pass",
        "stalls a pass",
        "limit",
    ):
        assert row in done.stdout
    assert re.search(r"outputs +reference +bit-equal +bit-equal", done.stdout)
    assert list((tmp_path / "cache").iterdir()) == []  # the checkpoint is gone


def test_only_the_command_line_imports_the_demo_and_nothing_imports_the_command_line() -> None:
    package = _ROOT / "dynswap_ext"
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("dynswap_ext.demo") or room in ("demo", "cli"), path
                assert not name.startswith("dynswap_ext.cli") or room in ("cli", "__main__.py"), path


def test_a_program_runs_as_it_is_without_an_accelerator(tmp_path: Path) -> None:
    """`dynswap run` runs a script with arguments, or a module. A program that does not exist is named."""
    (tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(_ROOT)}
        command = [sys.executable, "-m", "dynswap_ext", "run", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    for program in (["program.py"], ["-m", "program"], ["--", "program.py"]):
        done = run("--budget", "1GiB", *program, "--budget", "own", "--", "x")
        assert done.returncode == 0, done.stderr
        name = str(tmp_path / "program.py") if "-m" in program else "program.py"
        assert done.stdout == f"__main__ {[name, '--budget', 'own', '--', 'x']} {tmp_path}\n"
        if not torch.accelerator.is_available():
            assert done.stderr.startswith("dynswap: this torch finds no accelerator, so nothing is installed")
    done = run("program")
    assert done.returncode == 2 and "there is no file 'program'; a module is run by -m program" in done.stderr
