"""Everything that needs a GPU, with one command: `python benchmarks/gpu_suite.py`.

Parts: what was built, the tests (those that need CUDA may not be skipped), access, install, a stack of layers
at compute:copy 0.2, 1 and 5 and with a cast, the demo, and compute-sanitizer's memcheck and racecheck where
it is installed. Each part is a process of its own with a time limit; the record is written after each, so
that a run that is cut short leaves what it had.

`--dry-run` runs every part on the CPU at tiny sizes, which proves that they start.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common import Record, parser

HERE = Path(__file__).parent
ROOT = HERE.parent
_TAIL = 4000  # characters of a part's output that the record keeps


@dataclass(frozen=True)
class Part:
    """One process. `record` says how its own JSON is asked for."""

    name: str
    command: list[str]
    record: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def parts(dry_run: bool) -> list[Part]:
    python = sys.executable
    device = ["--device", "cpu" if dry_run else "cuda"]
    tiny = ["--tiny"] if dry_run else []

    def script(name: str, *more: str) -> list[str]:
        return [python, str(HERE / f"{name}.py"), *device, *tiny, *more]

    stack = [
        Part(f"stack {ratio}", script("gpu_stack", "--ratio", ratio), "--output")
        for ratio in ("0.2", "1", "5")
    ]
    demo = [python, "-m", "dynswap_ext", "demo", *device]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    small = [python, str(HERE / "gpu_stack.py"), "--device", "cuda", "--tiny", "--cast"]
    checks = [
        Part(f"compute-sanitizer {tool}", [sanitizer, "--tool", tool, "--error-exitcode", "9", *small])
        for tool in ("memcheck", "racecheck")
        if not dry_run and Path(sanitizer).exists()
    ]
    tests = [python, "-m", "pytest", "-q", "tests", *(["--collect-only"] if dry_run else [])]
    return [
        Part("build", [python, "-m", "dynswap_ext", "info"]),
        Part("tests", tests, environment={} if dry_run else {"DYNSWAP_REQUIRE_CUDA": "1"}),
        Part("access", script("access"), "--output"),
        Part("install", script("install"), "--output"),
        *stack,
        Part("stack 1, cast", script("gpu_stack", "--ratio", "1", "--cast"), "--output"),
        Part(
            "demo",
            [*demo, *(["--size", "24MB", "--passes", "1"] if dry_run else ["--size", "8GB"])],
            "--json",
        ),
        *checks,
    ]


def run(part: Part, timeout: float) -> dict[str, Any]:
    """What came of a part: its status, seconds, the end of its output, and its own record."""
    environment = os.environ | part.environment
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "record.json")
        command = [*part.command, *([part.record, str(file)] if part.record else [])]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            partial = error.stdout or b""
            status = 124
            output = partial.decode(errors="replace") if isinstance(partial, bytes) else partial
        return {
            "command": " ".join(part.command),
            "status": status,
            "seconds": round(time.perf_counter() - start, 1),
            "output": output[-_TAIL:],
            "record": json.loads(file.read_text()) if file.exists() else None,
        }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")
    options.add_argument("--only", help="names of parts, comma-separated, by their beginning")
    options.add_argument(
        "--timeout", type=float, default=240, help="seconds for a part (default: %(default)s)"
    )
    given = options.parse_args()
    dry_run: bool = given.dry_run or given.tiny
    if not dry_run and not torch.cuda.is_available():
        print("this torch sees no CUDA device; --dry-run proves the parts on the CPU", file=sys.stderr)
        return 2
    record = Record("gpu_suite", dry_run)
    wanted = given.only.split(",") if given.only else [""]
    failed = []
    for part in parts(dry_run):
        if not any(part.name.startswith(name) for name in wanted):
            continue
        print(f"== {part.name}", flush=True)
        result = run(part, given.timeout)
        print(result["output"], flush=True)
        print(f"== {part.name}: status {result['status']} after {result['seconds']} s", flush=True)
        record.figures[part.name] = result
        record.write(given.output)
        if result["status"] != 0:
            failed.append(part.name)
    if failed:
        print(f"parts with a status other than 0: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
