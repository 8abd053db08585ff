"""Bytes that a token of a mixture of experts moves, with experts fetched one by one and whole.

A Qwen3-MoE of transformers with 32 experts, of which 2 are active, is mapped from a file. The budget is a
quarter of its bytes. Its router is replaced by one that draws its choices: all experts are equally likely
(random), by Zipf's law (skewed), or every second choice is one of the last token's (repeating).

one by one   As a model is installed: chosen experts move, and those that are used most stay.
whole        Fused parameters, or modules, are prefetched in the learned order, like any other weights.

Bytes are compared with those of the active experts. "last_token" is the share of the chosen experts that the
last token chose too, which is the most that a prediction from it could have prefetched.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dynswap_ext
from common import Record, parser
from dynswap_ext import testing
from dynswap_ext._swap import plan_request

EXPERTS, ACTIVE = 32, 2
IMPLEMENTATIONS = "eager", "grouped_mm", "batched_mm", "modules"
Route = Callable[[int], list[int]]


class Experts(nn.Module):
    """Experts that are modules, in place of the fused ones."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, place, None])
        return out


class Router(nn.Module):
    """Draws its choices, and counts how many were also those of the last token."""

    def __init__(self, route: Route, layer: int) -> None:
        super().__init__()
        self.route, self.layer = route, layer
        self.last: set[int] = set()
        self.repeated = self.chosen = 0

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        rows = [self.route(self.layer) for _ in range(x.shape[0])]
        for row in rows:
            self.repeated += len(self.last & set(row))
            self.chosen += len(row)
            self.last = set(row)
        return None, torch.full((len(rows), ACTIVE), 1 / ACTIVE, dtype=x.dtype), torch.tensor(rows)


def routes(seed: int) -> dict[str, Route]:
    draw = random.Random(seed)
    last: dict[int, list[int]] = {}
    order: dict[int, list[int]] = {}
    likely = [1 / (rank + 1) for rank in range(EXPERTS)]

    def distinct(one: Callable[[], int]) -> list[int]:
        row: list[int] = []
        while len(row) < ACTIVE:
            if (index := one()) not in row:
                row.append(index)
        return row

    def skewed(layer: int) -> list[int]:
        ranked = order.setdefault(layer, draw.sample(range(EXPERTS), EXPERTS))
        return distinct(lambda: draw.choices(ranked, likely)[0])

    def repeating(layer: int) -> list[int]:
        before = last.get(layer, [])
        kept = [index for index in before if draw.random() < 0.5]
        rest = iter(draw.sample([index for index in range(EXPERTS) if index not in kept], ACTIVE))
        last[layer] = (kept + list(rest))[:ACTIVE]
        return last[layer]

    return {"random": lambda _: draw.sample(range(EXPERTS), ACTIVE), "skewed": skewed, "repeating": repeating}


def build(implementation: str, route: Route, layers: int, width: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        experts_implementation="eager" if implementation == "modules" else implementation,
        output_router_logits=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate = Router(route, number)
        if implementation == "modules":
            layer.mlp.experts = Experts(width, width).to(torch.bfloat16)
    return model


def whole(modules: Sequence[nn.Module], stacked: Iterable[int]) -> dict[int, Any]:
    """Return no experts. This replaces the function that finds them (`experts_of_modules`)."""
    return {}


def tokens(model: nn.Module, count: int) -> Iterator[float]:
    """Run tokens, and yield the seconds of each."""
    for number in range(count):
        begin = time.perf_counter()
        with torch.inference_mode():
            model(torch.tensor([[number % 256]]), use_cache=False)
        yield time.perf_counter() - begin


def measure(
    implementation: str, routing: str, way: str, layers: int, width: int, count: int
) -> dict[str, Any]:
    model = build(implementation, routes(1)[routing], layers, width)
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    active = sum(p.nbytes for p in experts) * ACTIVE // EXPERTS
    model_bytes = sum(p.nbytes for p in model.parameters())
    found: Any = whole if way == "whole" else plan_request.experts_of_modules
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(plan_request, "experts_of_modules", found),
    ):
        testing.map_from_file(model, Path(folder) / "masters.pt")
        try:
            handle = dynswap_ext.install(model, device="cpu", budget=model_bytes // 4)
        except dynswap_ext.BudgetError as error:
            return {"failure": f"needs {error.smallest_bytes} bytes"}
        with handle:
            list(tokens(model, count))
            handle.reset_stats()
            seconds = list(tokens(model, count))
            stats = handle.stats()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {
        "model_bytes": model_bytes,
        "active_bytes": active,
        "bytes_a_token": stats.bytes_moved / count,
        "part_of_active": stats.bytes_moved / count / active,
        "part_of_budget": stats.peak_bytes / (model_bytes // 4),
        "overflow_bytes": stats.overflow_bytes,
        "seconds_a_token": statistics.median(seconds),
        "last_token": sum(r.repeated for r in routers) / sum(r.chosen for r in routers),
    }


def main() -> int:
    given = parser(__doc__).parse_args()
    torch.set_num_threads(1)  # a token of this model is too small for more
    record = Record("experts", given.tiny)
    layers, width, count = (2, 32, 4) if given.tiny else (6, 384, 40)
    for implementation in IMPLEMENTATIONS:
        for routing in routes(0):
            rows = {}
            for way in ("one by one", "whole"):
                rows[way] = measure(implementation, routing, way, layers, width, count)
                print(f"{implementation:<10} {routing:<9} {way:<10} {rows[way]}", flush=True)
            figures: dict[str, Any] = dict(rows)
            ours, other = rows["one by one"], rows["whole"]
            if "failure" not in other and "failure" not in ours:
                figures["time_of_whole"] = ours["seconds_a_token"] / other["seconds_a_token"]
            record.figures[f"{implementation}, {routing}"] = figures
            if routing == "random":
                name = f"{implementation}: bytes a token / active bytes"
                record.bar(name, ours.get("part_of_active", float("inf")), at_most=1.3)
            record.write(given.output)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
