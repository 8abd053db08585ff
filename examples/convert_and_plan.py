"""Convert a checkpoint to another dtype, and plan for it: what a pass takes under each budget.

    python examples/convert_and_plan.py model.pt model.safetensors --dtype bfloat16 --tokens 512 --budget 6

No model is made and none runs. Converting takes some 40 MB whatever the size; planning reads headers. Without
`--bandwidth` and `--compute` the plan is for an assumed GPU over PCIe 4.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch

from dynswap_ext import checkpoint, planning
from dynswap_ext.errors import BudgetError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a checkpoint of any format that checkpoint.load takes")
    parser.add_argument("target", type=Path, help="a new .safetensors file, or a folder for shards")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--budget", type=float, default=6.0, help="memory for weights, in GiB")
    parser.add_argument("--bandwidth", type=float, help="GB/s from RAM to the device")
    parser.add_argument("--compute", type=float, help="TFLOPS of the device")
    parser.add_argument("--tokens", type=int, default=1, help="rows that a pass multiplies by each matrix")
    options = parser.parse_args()

    done = checkpoint.convert(
        options.source, options.target, dtype=getattr(torch, options.dtype), overwrite=True
    )
    print(
        f"converted    {done.tensors} tensors, {done.source_bytes / 1e6:,.1f} MB "
        f"to {done.written_bytes / 1e6:,.1f} MB"
    )
    print(
        f"rate         {done.written_bytes / 1e6 / max(done.seconds, 1e-9):.0f} MB/s, read back and compared"
    )
    print(
        f"peak memory  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB, torch included"
    )

    outline = planning.outline(done.path)
    rates = planning.ASSUMED
    compute = options.compute * 1e12 if options.compute else rates.arithmetic
    bandwidth = options.bandwidth * 1e9 if options.bandwidth else rates.bandwidth
    machine = planning.Machine("given", bandwidth, compute, rates.memory)
    weights = planning.timed(outline.weights, machine, rows=options.tokens)
    plan = planning.plan(weights, bandwidth=machine.bandwidth)

    print(f"\n{'budget':>13}  {'resident':>8}  {'pass':>11}  {'limit':>11}")
    for found in plan.predictions:
        print(
            f"{found.budget / 2**20:9,.1f} MiB  {found.resident_share:8.0%}  {found.seconds * 1e3:8.2f} ms"
            f"  {found.limit_seconds * 1e3:8.2f} ms"
        )
    print(f"compute hides all copies from about {plan.hidden_from / 2**20:,.1f} MiB on")
    try:
        asked = plan.at(int(options.budget * 2**30))
    except BudgetError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{options.budget} GiB: {asked.seconds * 1e3:.2f} ms a pass, {asked.to_resident:.2f} x all resident"
    )


if __name__ == "__main__":
    main()
