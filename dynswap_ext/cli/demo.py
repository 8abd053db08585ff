"""The command ``dynswap demo``: runs a model under a budget, and compares it with other ways to run it."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add ``dynswap demo`` to the commands of the parser."""
    demo = commands.add_parser(
        "demo",
        help="run a model under a memory budget and compare",
        description="Write a checkpoint of a decoder transformer, run it resident, streamed under a budget "
        "and under the classic .to() hook; measure each in a process of its own and compare.",
    )
    demo.set_defaults(command=_demo)
    add = demo.add_argument
    add("--size", default="1.5GB", help="size of the checkpoint (default: %(default)s)")
    add("--budget", metavar="SIZE", help="device memory for weights: 384MiB, or minimum")
    add("--share", help="the same as a share of the model (default: 1/4)")
    add("--prefetch", type=int, default=2, help="groups of weights to copy ahead (default: %(default)s)")
    add("--device", help="cpu, cuda, xpu, ... (default: the accelerator if there is one, else cpu)")
    add("--dtype", help="compute dtype (default: float32 on the CPU, bfloat16 elsewhere)")
    add("--stored-dtype", help="dtype of the checkpoint, if it differs: weights are then cast on the way")
    add("--passes", type=int, default=5, help="timed passes of each way (default: %(default)s)")
    add("--tokens", type=int, help="tokens of an input (default: 256 on the CPU, 4096 elsewhere)")
    add("--source", choices=("file", "ram"), help="where masters are (default: file on the CPU, else ram)")
    add("--folder", help="where the checkpoint is written (default: the user's cache folder)")
    add("--keep", action="store_true", help="keep the checkpoint, and use it again the next time")


def _demo(options: argparse.Namespace) -> int:
    from dynswap_ext.demo.compare import run_demo, show

    result = run_demo(options)
    show(result)
    return 1 if result.differing else 0
