"""Compares predictions of `dynswap plan --model` with measured passes of a model on disk, on the CPU.

For each input and each budget the model is measured (compute module by module, reads of its file). Then it
runs streamed in a process of its own, with none of the file in the page cache when a pass begins. Then it is
measured once more, as a machine's speed changes. The prediction is the mean of both. Each bar is the
predicted time divided by the measured one.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path

import torch

from common import Record, native_available, parser
from dynswap_ext import checkpoint, planning
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, checkpoint_file, config_for
from dynswap_ext.demo.run import INSTALLED, Job, Outcome, run_apart


def measured(path: Path, config: DecoderConfig, tokens: int, passes: int) -> planning.Measured:
    model = checkpoint.load(lambda: Decoder(config), path).eval()
    inputs = torch.randint(config.vocabulary, (1, tokens))
    return planning.measure(model, inputs, device="cpu", passes=passes)


def compare(
    record: Record, name: str, job: Job, sides: tuple[planning.Measured, planning.Measured], outcome: Outcome
) -> None:
    """Add the figures and the bars of one budget to the record."""
    predictions = [
        planning.predict(
            found.weights,
            budgets=[job.budget],
            bandwidth=found.bandwidth,
            latency=found.latency,
            prefetch=job.prefetch,
        )[0]
        for found in sides
    ]
    record.figures[name] = {
        "budget": job.budget,
        "bandwidth": [found.bandwidth for found in sides],
        "compute_seconds": [found.compute_seconds for found in sides],
        "predicted": [dataclasses.asdict(prediction) for prediction in predictions],
        "taken": dataclasses.asdict(outcome),
    }
    seconds = statistics.median(outcome.seconds)
    predicted = statistics.mean(prediction.seconds for prediction in predictions)
    print(f"{name}: {predicted:.3f} s predicted, {seconds:.3f} s taken")
    record.bar(f"{name}: time of a pass, predicted / taken", predicted / seconds, at_least=0.8, at_most=1.25)
    if outcome.moved_bytes_per_pass:
        moved = predictions[0].moved_bytes / outcome.moved_bytes_per_pass
        record.bar(f"{name}: moved bytes, predicted / taken", moved, at_least=0.9, at_most=1.1)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="600MB")
    options.add_argument(
        "--shares", type=float, nargs="+", default=[0.15, 0.5, 0.8], help="budgets, of the model"
    )
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 512], help="of the inputs")
    options.add_argument("--prefetch", type=int, default=2)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.tiny:
        given.size, given.shares, given.tokens, given.passes = "24MB", [0.5], [1], 2
    record = Record("plan", given.tiny)
    if not native_available():
        return 0 if given.tiny else 2
    config = config_for(parse_size(given.size), torch.float32)
    with checkpoint_file(given.folder, config, torch.float32) as path:
        for tokens in given.tokens:
            before = measured(path, config, tokens, given.passes)
            for share in given.shares:
                budget = int(share * sum(weight.nbytes for weight in before.weights))
                job = Job(
                    baseline=INSTALLED,
                    checkpoint=path,
                    config=config,
                    tokens=tokens,
                    passes=given.passes,
                    budget=budget,
                    prefetch=given.prefetch,
                )
                outcome = run_apart(job)
                after = measured(path, config, tokens, given.passes)
                compare(record, f"{tokens} tokens, budget {share:g}", job, (before, after), outcome)
                before = after
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
