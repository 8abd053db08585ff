"""The suite for a lent GPU: its parts start, keep to their time, and what was finished is never lost."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "benchmarks"))

import gpu_suite  # noqa: E402
import suite_parts  # noqa: E402
from suite_parts import Part, Runner  # noqa: E402

pytestmark = pytest.mark.alone

_COMMAND = [sys.executable, str(_ROOT / "benchmarks" / "gpu_suite.py"), "--dry-run"]
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments], env=_ENVIRONMENT, capture_output=True, text=True, check=False
    )


def python(code: str, share: float = 1, **more: Any) -> Part:
    return Part("part", ([sys.executable, "-c", code],), share, **more)


# The suite -------------------------------------------------------------------------------------------


def test_parts_start_and_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = suite("--only", "build,bandwidth", "--folder", str(tmp_path), "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    figures = record["figures"]
    assert set(figures) == {"build", "bandwidth"} and record["complete"]
    assert all(part["state"] == "ok" and part["status"] == 0 for part in figures.values())
    assert figures["bandwidth"]["record"]["bars"] and "CUDA backend" in figures["build"]["output"]
    table = done.stdout[done.stdout.rindex("gpu_suite") :]
    assert all(name in table for name in ("build", "bandwidth", "to the device"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["record.json"]  # nothing is left behind


def test_a_part_that_cannot_run_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = suite("--only", "build,access", "--time-limit", "8", "--output", str(path))
    assert done.returncode in (0, 1)
    figures = json.loads(path.read_text())["figures"]
    assert set(figures) == {"build", "access"}
    assert {part["state"] for part in figures.values()} & {"out of time", "skipped"}
    assert all(part["reason"] for part in figures.values() if part["state"] != "ok")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_suite_leaves_a_whole_record(number: int, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [*_COMMAND, "--only", "bandwidth,checkpoint,load", "--folder", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--output", str(path)], env=_ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("== checkpoint"):
                break
        time.sleep(0.5)
        process.send_signal(number)
        said += process.stdout.read()
        assert process.wait(20) == 128 + number, said
    figures = json.loads(path.read_text())["figures"]
    assert {name: part["state"] for name, part in figures.items()} == {
        "bandwidth": "ok",
        "checkpoint": "stopped",
        "load": "skipped",
    }
    assert "SIGTERM" in said or "SIGINT" in said
    assert said.rindex("load") > said.index("\ngpu_suite\n")  # the table stands last
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_on_a_gpu_it_builds_for_it_and_lets_no_test_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    parts = {part.name: part for part in gpu_suite.parts(dry_run=False, folder="/folder")}
    assert list(parts) == [part.name for part in gpu_suite.parts(dry_run=True, folder="/folder")]
    assert parts["build"].environment["DYNSWAP_CUDA"] == "1"
    assert parts["build"].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert "--inplace" in parts["build"].commands[0]
    for name in ("tests", "expandable segments", "contract tests"):
        assert parts[name].environment["DYNSWAP_REQUIRE_CUDA"] == "1"
    for part in parts.values():
        words = part.commands[0]
        script = next((Path(word) for word in words if word.startswith(str(_ROOT / "benchmarks"))), None)
        assert script is None or script.exists() or part.name == "peers"
        assert script is None or "--device cuda" in " ".join(words)
        assert "--tiny" not in words or part.name == "memcheck"
    scripts = ("checkpoint", "load", "peers", "train")
    assert all("--folder /folder" in " ".join(parts[name].commands[0]) for name in scripts)


def test_a_name_that_no_part_has() -> None:
    done = suite("--only", "acess")
    assert done.returncode == 1 and "no part begins with 'acess'; there are build, smoke" in done.stderr


def test_what_is_missing_is_said_before_the_clock_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on a machine that has neither pytest nor safetensors, nor what draws tables."""
    known = importlib.util.find_spec
    gone = {"pytest", "hypothesis", "safetensors", "rich", "xdist"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else known(name))
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--dry-run", "--check"])
    assert gpu_suite.main() == 1
    said = capsys.readouterr().out
    assert re.search(r"^tests +pytest and hypothesis are not installed$", said, re.MULTILINE)
    assert re.search(r"^load +safetensors is not installed$", said, re.MULTILINE)
    assert re.search(r"^stack +ready$", said, re.MULTILINE)


def test_a_suite_whose_last_parts_cannot_run_ends_with_its_table(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    code = f"""
import importlib.util, sys
known = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "pytest" else known(name)
sys.path.insert(0, {str(_ROOT / "benchmarks")!r})
sys.argv = ["gpu_suite.py", "--dry-run", "--only", "build,tests", "--output", {str(path)!r}]
import gpu_suite
sys.exit(gpu_suite.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=_ENVIRONMENT, cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pytest is not installed" in done.stdout[done.stdout.rindex("gpu_suite\n") :]
    assert json.loads(path.read_text())["complete"]


# One part --------------------------------------------------------------------------------------------


def run_to_its_limit(code: str, up: Path, **more: Any) -> tuple[suite_parts.Result, float]:
    """Run a part that goes on for longer than its limit, one in which it has come as far as to write `up`.

    How long that takes depends on what else the machine does.
    """
    for limit in (2.5, 10, 40):
        result = Runner().run(python(code, **more), limit=limit)
        if up.exists() and result.output:  # a busy machine may end it before it has said so
            return result, limit
    pytest.fail(f"in {limit} s the part has not begun: {result}")


def test_a_part_is_ended_at_its_limit_with_all_its_processes(tmp_path: Path) -> None:
    child, up = tmp_path / "child", tmp_path / "up"
    code = f"""
import json, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(process.pid))
json.dump({{"bars": [], "so": "far"}}, open(sys.argv[2], "w"))
print("up to here", flush=True)
try:
    open({str(up)!r}, "w")
    time.sleep(120)
except KeyboardInterrupt:
    time.sleep(120)
"""
    begin = time.perf_counter()
    result, limit = run_to_its_limit(code, up, record="--output")
    assert time.perf_counter() - begin < 100  # and it did not sleep on
    assert (result.state, result.status) == (suite_parts.LATE, 124)
    assert "up to here" in result.output and result.record == {"bars": [], "so": "far"}
    assert f"{limit:g} s" in result.reason
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(child.read_text()), 0)
            if "Z" in Path(f"/proc/{child.read_text()}/stat").read_text().split(")")[1].split()[0]:
                raise ProcessLookupError  # dead, and nobody has asked for its status yet
            time.sleep(0.05)


@pytest.mark.parametrize("ignored", [False, True], ids=["heeded", "ignored"])
def test_a_part_that_is_told_to_stop_may_say_what_it_has(tmp_path: Path, ignored: bool) -> None:
    """Also where the suite is a background job of a script, which ignores SIGINT."""
    up = tmp_path / "up"
    code = f"""
import time
try:
    open({str(up)!r}, "w")
    time.sleep(60)
except KeyboardInterrupt:
    print("3 passed")
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        result, _ = run_to_its_limit(code, up)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.state == suite_parts.LATE and "3 passed" in result.output


_WRITE = "import json, sys; json.dump({}, open(sys.argv[2], 'w')); sys.exit({})"
_MISSED = {"bars": [{"name": "speed", "value": 1, "reached": False}], "complete": True}


@pytest.mark.parametrize(
    ("code", "more", "state", "reason"),
    [
        ("print('fine')", {}, suite_parts.OK, ""),
        ("print('fine')", {"record": "--output"}, suite_parts.FAILED, "it wrote no record"),
        ("raise ValueError('broken')", {}, suite_parts.FAILED, "ValueError: broken"),
        ("import os; os.abort()", {}, suite_parts.FAILED, "status -6"),
        (_WRITE.format(_MISSED, 1), {"record": "--output"}, suite_parts.BARS, "speed"),
        (
            _WRITE.format(_MISSED | {"complete": False}, 1),
            {"record": "--output"},
            suite_parts.FAILED,
            "status 1",
        ),
        ("", {"missing": "it is not here"}, suite_parts.SKIPPED, "it is not here"),
    ],
    ids=["ok", "no record", "exception", "abort", "a bar missed", "a bar missed and then cut off", "missing"],
)
def test_what_came_of_a_part(code: str, more: dict[str, Any], state: str, reason: str) -> None:
    result = Runner().run(python(code, **more), limit=20)
    assert (result.state, result.reason) == (state, reason)


def test_the_first_command_that_fails_ends_a_part() -> None:
    commands = tuple([sys.executable, "-c", code] for code in ("print(1)", "exit(3)", "print(2)"))
    result = Runner().run(Part("part", commands, 1), limit=20)
    assert result.status == 3 and result.output == "1\n"


def test_a_command_that_is_not_there() -> None:
    result = Runner().run(Part("part", (["/nowhere/tool"],), 1), limit=5)
    assert result.state == suite_parts.FAILED and "No such file" in result.reason


def test_a_part_is_told_its_time() -> None:
    result = Runner().run(python("import sys; print(sys.argv[1:])", limit="--time-limit"), limit=100)
    option, seconds = json.loads(result.output.replace("'", '"'))
    assert option == "--time-limit" and 80 < float(seconds) < 100


def test_what_is_left_over_goes_to_later_parts() -> None:
    parts = [python("", share) for share in (30, 10, 10)]
    assert suite_parts.limit_of(parts[0], parts[1:], 100) == pytest.approx(60)
    # The first took 10 of its 60: the others share all of the rest.
    assert suite_parts.limit_of(parts[1], parts[2:], 90) == pytest.approx(45)
    assert suite_parts.limit_of(parts[2], [], 60) == pytest.approx(60)
    # A part that cannot run leaves its share, also the last one, and no time is less than none.
    assert suite_parts.limit_of(python("", 99, missing="gone"), [], 50) == 0
    assert suite_parts.limit_of(parts[0], [python("", 99, missing="gone")], 50) == pytest.approx(50)
    assert suite_parts.limit_of(parts[0], [], -5) == 0
