"""The command line: ``dynswap``, or ``python -m dynswap_ext``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import dynswap_ext
from dynswap_ext import checkpoint
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext._util.tables import facts_grid, write
from dynswap_ext._util.units import parse_dtype
from dynswap_ext.cli import demo, plan, run, show
from dynswap_ext.errors import ConfigError, DynswapError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return the exit status.

    0: success. 1: outputs differ, a budget is too small, the reader of the output is gone (``| head``), or a
    program under ``dynswap run`` ended with an error of this package. 2: an error, which was explained on
    stderr. 130: interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        given = [run.DASHES if each == "--" else each for each in given]
    options = _parser().parse_args(given)
    try:
        status: int = options.command(options)
        sys.stdout.flush()  # raises BrokenPipeError here, and not at the exit, if a pipe is closed already
    except DynswapError as error:
        print(f"dynswap: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dynswap: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # rich ends in the same way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at the exit works
        return 1
    return status


class _Parser(argparse.ArgumentParser):
    """A parser that suggests a name for a misspelt command or choice, as argparse can from Python 3.14 on."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, [str(choice) for choice in action.choices or ()])
            raise


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dynswap", description="Run PyTorch models that do not fit the device, streaming their weights."
    )
    version = f"dynswap-ext {dynswap_ext.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="show which provider and backends are active, and why")
    info.set_defaults(command=_info)
    demo.add_to(commands)
    show.add_to(commands)
    _add_convert(commands)
    plan.add_to(commands)
    run.add_to(commands)
    return parser


def _info(options: argparse.Namespace) -> int:
    facts = dynswap_ext.backend_info(ask_driver=True).facts()
    write(facts_grid({"dynswap-ext": dynswap_ext.__version__, **facts}.items()))
    return 0


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint as safetensors: cast, sharded, renamed, or coded without loss",
        description="Write a checkpoint of any format as safetensors, in little memory, each block compared "
        "by checksum after it was written. After an interruption the same command continues.",
    )
    convert.set_defaults(command=_convert)
    add = convert.add_argument
    add("source", metavar="SRC", help="a file, an index, or a folder")
    add("destination", metavar="DST", help="a path that ends in .safetensors, or a folder")
    add("--dtype", help="dtype of floating tensors: bf16, fp16, float8_e4m3fn, ... (default: unchanged)")
    add("--shard", metavar="SIZE", help="largest size of a file, such as 5GB")
    add(
        "--rename",
        metavar="PATTERN=REPLACEMENT",
        action="append",
        default=[],
        help="a regular expression for names, and what takes its place; may be given again",
    )
    add("--lossless", action="store_true", help="code floating tensors without loss: bf16 some 30%% smaller")
    add("--overwrite", action="store_true", help="replace an existing checkpoint")


def _convert(options: argparse.Namespace) -> int:
    done = checkpoint.convert(
        options.source,
        options.destination,
        dtype=parse_dtype(options.dtype),
        max_shard_size=options.shard,
        rename=[_rule(text) for text in options.rename] or None,
        lossless=options.lossless,
        overwrite=options.overwrite,
        progress=True,
    )
    resumed = f", {format_bytes(done.resumed_bytes)} of it by an earlier run" if done.resumed_bytes else ""
    files = f" in {len(done.files)} files" if len(done.files) > 1 else ""
    smaller = done.ratios and done.written_bytes < done.source_bytes  # else it was coded before
    ratio = f" ({done.decoded_bytes / done.written_bytes:.2f} times smaller)" if smaller else ""
    print(
        f"{done.path}: {done.tensors} tensors, {format_bytes(done.source_bytes)} -> "
        f"{format_bytes(done.written_bytes)}{ratio}{files}{resumed}, verified, {done.seconds:.1f} s"
    )
    return 0


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(rf"--rename is {text!r}; expected PATTERN=REPLACEMENT, such as '^model\.='")
    return pattern, replacement
