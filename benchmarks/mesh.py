"""Ranks that install with `mesh=`: a pass against the limit of their buses and links, and what each reads.

pass    The real engine and the real exchange of parts on a virtual clock: Llama-3-70B (shapes.py) in
        bfloat16 on 1, 2, 4 and 8 cards, with as much memory as prefetch=2 needs, and with half of the card.
        The limit is the longest of the compute, the streamed bytes / cards over one bus, and what comes from
        the other cards over the link. The card is an assumption, and a gather slows no kernel down.
bytes   Processes on the CPU, with a decoder of 256 MiB that share_masters() has given them. What one of
        them reads of it in a pass, once the order of use is known, against its part of the weights.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import distributed

import dynswap_ext
import shapes
from common import Record, native_available, parser
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, config_for
from virtual_clock import Machine, simulate

#: An 80 GB card on PCIe 4. Both figures of arithmetic and memory are what kernels reach, not the peaks.
_CARD = Machine("80 GB card on PCIe 4", bus=25e9, arithmetic=220e12, memory=1.6e12)
_LINK = 200e9  # bytes a second that a card receives from the others
_BUDGETS = {"minimum": 0, "half of the card": 40 * 10**9}
#: One token is bound by the bus; a prompt as long as the context is bound by compute on 2 cards or more.
_PROMPTS = {"1 token": 1, "8192 tokens": 8192}
_CARDS = (1, 2, 4, 8)
_MOST = 1.10  # for 4 cards or more
_PASSES = 5  # of each rank on the CPU


def simulate_passes(record: Record, prompts: dict[str, int], passes: int) -> None:
    shared_out = []
    for prompt, tokens in prompts.items():
        weights = _CARD.workload(shapes.llama_3_70b(tokens))
        for budget, nbytes in _BUDGETS.items():
            for cards in _CARDS:
                mesh = (cards, _LINK) if cards > 1 else None
                result = simulate(weights, nbytes, _CARD.bus, passes, mesh=mesh)
                part = result["streamed_bytes"] / cards
                limits = {
                    "compute": result["compute_seconds"],
                    "bus": part / _CARD.bus,
                    "link": part * (cards - 1) / _LINK,
                }
                longest = max(limits, key=limits.__getitem__)
                ratio = result["seconds_per_pass"] / limits[longest]
                name = f"{prompt}, {budget}, {cards} {'cards' if cards > 1 else 'card'}"
                record.figures[name] = {"limits": limits, "bound": longest, "time / limit": ratio, **result}
                bound = _MOST if cards >= 4 else None
                record.bar(f"{name}: time of a pass / limit ({longest})", ratio, at_most=bound)
                if cards > 1:
                    shared_out.append(result["gathered"] / result["copies"])
    record.bar("copies that are shared out, 2 to 8 cards: worst", min(shared_out), at_least=0.99)


def work(rank: int, ranks: int, store: str, config: DecoderConfig) -> dict[str, Any]:
    """One rank's work."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{store}", datetime.timedelta(seconds=60), rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    model = Decoder(config).bfloat16().requires_grad_(False)
    dynswap_ext.share_masters(model)
    tokens = torch.randint(config.vocabulary, (1, 4))
    read = []
    # In another dtype than the masters' nothing is used where it is, also on the CPU.
    handle = dynswap_ext.install(
        model, device="cpu", dtype=torch.float32, prefetch=2, mesh=distributed.group.WORLD
    )
    with torch.inference_mode():
        for _ in range(_PASSES):
            before = handle.stats().bytes_moved
            output = model(tokens)
            read.append(handle.stats().bytes_moved - before)
    shared_out = handle.report().shared_out
    distributed.barrier()
    handle.uninstall()
    distributed.destroy_process_group()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "weights": weights,
        "parts": [ranks * nbytes / weights for nbytes in read],
        "received_bytes": shared_out.received_bytes if shared_out else 0,
        "output": float(output.double().abs().sum()),
    }


def read_bytes(record: Record, counts: tuple[int, ...], config: DecoderConfig) -> None:
    outputs = set()
    for ranks in counts:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as processes,
        ):
            job = partial(work, ranks=ranks, store=f"{folder}/store", config=config)
            rows = list(processes.map(job, range(ranks)))  # each waits for all, so each has a process
        outputs |= {row["output"] for row in rows}
        parts = [max(of_pass) for of_pass in zip(*(row.pop("parts") for row in rows), strict=True)]
        record.figures[f"{ranks} ranks"] = {
            "ranks": rows,
            "parts": {str(n): part for n, part in enumerate(parts)},
        }
        name = f"{ranks} ranks: bytes that one reads in a pass / its part of the weights"
        record.bar(f"{name}, first pass", parts[0])
        record.bar(f"{name}, from the third on", max(parts[2:]), at_least=0.9, at_most=1.02)
    record.bar("outputs that there are", float(len(outputs)), at_most=1.0)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="256MiB", help="of the model on the CPU (default: %(default)s)")
    options.add_argument("--passes", type=int, default=12, help="on the virtual clock; half are warm-up")
    given = options.parse_args()
    record = Record("mesh", given.tiny)
    if not native_available():
        return 0 if given.tiny else 2
    if given.tiny:
        given.size = "64MB"  # smaller weights are not shared
    simulate_passes(record, dict(list(_PROMPTS.items())[:1]) if given.tiny else _PROMPTS, given.passes)
    config = config_for(parse_size(given.size), torch.bfloat16)
    read_bytes(record, (2,) if given.tiny else (2, 4), config)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
