"""The command line: ``dynswap``, or ``python -m dynswap_ext``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dynswap_ext._version import __version__
from dynswap_ext.cli import convert, demo, plan, show
from dynswap_ext.errors import DynswapError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status.

    0 well, 1 outputs that differ, a budget that is too small, or an output that nothing reads (``| head``),
    2 an error explained, 130 interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()  # a pipe may be closed already
    except DynswapError as error:
        print(f"dynswap: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dynswap: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # rich ends in the same way
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynswap", description="Run PyTorch models that do not fit the device, streaming their weights."
    )
    parser.add_argument("--version", action="version", version=f"dynswap-ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="show which provider and backends are active, and why")
    info.set_defaults(command=_info)
    demo.add_to(commands)
    show.add_to(commands)
    convert.add_to(commands)
    plan.add_to(commands)
    return parser


def _info(options: argparse.Namespace) -> int:
    import dynswap_ext

    print(f"dynswap-ext      {__version__}")
    print(dynswap_ext.backend_info())
    return 0
