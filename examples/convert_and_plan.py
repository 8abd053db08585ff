"""Convert a checkpoint to another dtype, and predict the time of a pass under each budget.

    python examples/convert_and_plan.py model.pt model.safetensors --dtype bf16 --tokens 512 --budget 6GiB

The options are those of `dynswap convert` and `dynswap plan`. No model is built or run. Converting takes some
40 MB of memory for a checkpoint of any size, and planning reads only headers. Without `--bandwidth` and
`--compute`, the plan is for an assumed GPU on PCIe 4.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch

from dynswap_ext import checkpoint, planning
from dynswap_ext.errors import BudgetError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", type=Path, help="a checkpoint in any format that checkpoint.load reads")
    parser.add_argument("dst", type=Path, help="a path that ends in .safetensors, or a folder for shards")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating tensors (default: unchanged)")
    parser.add_argument("--shard", metavar="SIZE", help="largest size of a file, such as 5GB")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
    parser.add_argument("--budget", default="6GiB", help="memory for weights (default: 6GiB)")
    parser.add_argument("--bandwidth", help="from RAM to the device, such as 25GB/s")
    parser.add_argument("--compute", help="throughput of the device, such as 120TFLOPS")
    parser.add_argument("--tokens", type=int, default=1, help="rows that a pass multiplies by each matrix")
    options = parser.parse_args()

    dtype = DTYPES.get(options.dtype)
    done = checkpoint.convert(
        options.src,
        options.dst,
        dtype=dtype,
        max_shard_size=options.shard,
        overwrite=options.overwrite,
    )
    before, after = done.source_bytes / 1e6, done.written_bytes / 1e6
    print(f"converted    {done.tensors} tensors, {before:,.1f} MB to {after:,.1f} MB")
    print(f"rate         {after / max(done.seconds, 1e-9):.0f} MB/s, read back and compared")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"peak memory  {peak:.0f} MiB, torch included")

    outline = planning.outline(done.path)
    machine = planning.ASSUMED.with_rates(bandwidth=options.bandwidth, arithmetic=options.compute)
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
        asked = plan.at(options.budget)
    except BudgetError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{asked.budget / 2**20:,.1f} MiB: {asked.seconds * 1e3:.2f} ms a pass, "
        f"{asked.to_resident:.2f} times as long as with all weights on the device"
    )


if __name__ == "__main__":
    main()
