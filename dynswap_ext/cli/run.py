"""The command ``dynswap run``: runs a program as it is, and installs models that do not fit the device."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from dynswap_ext import config
from dynswap_ext._swap.device_queries import register_library
from dynswap_ext._util.memory import format_bytes
from dynswap_ext.errors import ConfigError, DynswapError

if TYPE_CHECKING:
    from dynswap_ext.integrations.moved_models import Moved

#: Replaces `--` in the program's arguments while options are parsed, because argparse would drop it.
DASHES: Final = "\0--"


def add_to(commands: Any) -> None:
    """Add ``dynswap run`` to the commands of the parser."""
    run = commands.add_parser(
        "run",
        help="run a program, and install each model that it moves to a device on which it does not fit",
        description="Run a Python program as it is. Where it moves a model to the accelerator (.to, .cuda, a "
        "pipeline's .to) and the weights would leave less than a fifth of its memory free, "
        "the model is installed instead. A line on stderr says so, and its report comes at the end.",
        usage="dynswap run [options] script.py [arguments of the program] | -m module [...]",
    )
    run.set_defaults(command=_run)
    add = run.add_argument
    add("--budget", default="auto", help="device memory for weights: 6GiB, 50%%, minimum (default: auto)")
    add("--headroom", help="device memory to leave to others, with --budget auto: 2GiB, 10%% (default: 3%%)")
    add("--dtype", help="cast floating weights on the way: bf16, fp16, ... (default: what the program has)")
    add("--prefetch", type=int, default=2, help="groups of weights to copy ahead (default: %(default)s)")
    add("--always", action="store_true", help="install models that fit, too")
    add("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    add("program", help="the path of a script, or the name of a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the program gets")


def _run(options: argparse.Namespace) -> int:
    from dynswap_ext.integrations.loaded_models import LoadsOnHost
    from dynswap_ext.integrations.moved_models import InstallMoved

    words = ["--" if each == DASHES else each for each in (options.program, *options.arguments)]
    program, *arguments = words[1:] if words[0] == "--" and len(words) > 1 else words
    if not options.module and not Path(program).is_file():
        raise ConfigError(f"there is no file {program!r}; a module is run by -m {program}")
    chosen = {name: getattr(options, name) for name in ("budget", "headroom", "dtype", "prefetch")}
    config.resolve(**chosen)
    if not torch.accelerator.is_available():
        _say("this torch finds no accelerator, so nothing is installed: the program runs as it is")
        return _run_program(program, arguments, module=options.module)
    moved: list[Moved] = []

    def tell(one: Moved) -> None:
        moved.append(one)
        size, free = format_bytes(one.nbytes), format_bytes(one.free)
        what = "installed, and its weights stream" if one.handle else f"moved all the same: {one.error}"
        _say(f"{one.name} has {size} of weights, and {one.device} {free} of free memory: {what}")

    try:
        with InstallMoved(always=options.always, tell=tell, **chosen), LoadsOnHost():
            return _run_program(program, arguments, module=options.module)
    finally:
        for one in moved:
            if one.handle is not None:
                _say(f"the report of {one.name}:\n{one.handle.report()}")


def _run_program(program: str, arguments: list[str], *, module: bool) -> int:
    """Run a program as ``python program arguments...`` does.

    Return 0, or 1 after an error of this package that the program did not catch. Other exceptions pass,
    SystemExit included.
    """
    try:
        _execute(program, arguments, module=module)
    except DynswapError:  # printed as Python does, because `main` would report it as an error of the command
        traceback.print_exc()
        return 1
    return 0


def _execute(program: str, arguments: list[str], *, module: bool) -> None:
    sys.argv = [program, *arguments]
    folder = Path.cwd() if module else Path(program).resolve().parent
    own = {"__main__", *_modules_in(folder), *([program.partition(".")[0]] if module else [])}
    for name in own:
        register_library(name)  # `next(model.parameters()).device` is where the model computes
    sys.path[0] = str(folder)
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)


def _modules_in(folder: Path) -> set[str]:
    """Return the names of the modules and packages in a program's folder, which it can import."""
    return {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}


def _say(message: str) -> None:
    print(f"dynswap: {message}", file=sys.stderr, flush=True)
