"""``dynswap convert``."""

from __future__ import annotations

import argparse
from typing import Any

from dynswap_ext._util.units import parse_dtype
from dynswap_ext.errors import ConfigError


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint as safetensors: cast, sharded or renamed",
        description="Write a checkpoint of any format as safetensors, in little memory, each block compared "
        "by checksum after it was written. After an interruption the same command continues.",
    )
    convert.set_defaults(command=_convert)
    add = convert.add_argument
    add("source", metavar="SRC", help="a file, an index, or a folder")
    add("destination", metavar="DST", help="a path that ends in .safetensors, or a folder")
    add(
        "--dtype", help="dtype of floating tensors: bf16, fp16, fp32, float8_e4m3fn, ... (default: unchanged)"
    )
    add("--shard", metavar="SIZE", help="largest size of a file, such as 5GB")
    add(
        "--rename",
        metavar="PATTERN=REPLACEMENT",
        action="append",
        default=[],
        help="a regular expression for names, and what takes its place; may be given again",
    )
    add("--overwrite", action="store_true", help="replace an existing checkpoint")


def _convert(options: argparse.Namespace) -> int:
    from dynswap_ext import checkpoint
    from dynswap_ext._util.memory import format_bytes

    done = checkpoint.convert(
        options.source,
        options.destination,
        dtype=parse_dtype(options.dtype),
        max_shard_size=options.shard,
        rename=[_rule(text) for text in options.rename] or None,
        overwrite=options.overwrite,
        progress=True,
    )
    resumed = f", {format_bytes(done.resumed_bytes)} of it by an earlier run" if done.resumed_bytes else ""
    files = f" in {len(done.files)} files" if len(done.files) > 1 else ""
    print(
        f"{done.path}: {done.tensors} tensors, {format_bytes(done.source_bytes)} -> "
        f"{format_bytes(done.written_bytes)}{files}{resumed}, verified, {done.seconds:.1f} s"
    )
    return 0


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(rf"--rename is {text!r}; expected PATTERN=REPLACEMENT, such as '^model\.='")
    return pattern, replacement
