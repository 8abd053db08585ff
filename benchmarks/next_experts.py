"""How often the next layer's router, applied to the input of this layer's router, names the right experts.

A small Qwen3-MoE of transformers (8 layers, 32 experts, 4 active) is trained on the sources of Python's
standard library, byte by byte, because routers without training say little about trained ones. Nothing is
downloaded.

accuracy      The share of the chosen experts that is named, with as many names as a token has experts (4),
              and with more. "distance 2" asks the router after the next one; "most used" names the experts
              that are used most.
from a file   The model generates (token by token, with a cache), with room for the dense weights and a part
              of the experts: copies a token with guesses and without, and how many guesses were right.

Only named experts that are not on the device yet matter. With more room, fewer of these are right, as
experts that are used often are there already.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynswap_ext
from common import Record, parser
from dynswap_ext import testing

LAYERS, EXPERTS, ACTIVE, WIDTH = 8, 32, 4, 128
ROWS, LENGTH = 8, 128


def text(most: int) -> Tensor:
    read = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if len(read) < most and "site-packages" not in path.parts:
            read += path.read_bytes()[:20_000]
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long()


def build() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
    )
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def train(model: nn.Module, data: Tensor, steps: range, last: int) -> None:
    """Train for the given steps. The learning rate falls until step `last`."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - 0.9 * step / last)
        generator = torch.Generator().manual_seed(step)
        begins = torch.randint(len(data) - LENGTH, (ROWS,), generator=generator)
        batch = torch.stack([data[begin : begin + LENGTH] for begin in begins.tolist()])
        model(batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def named(scores: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    return chosen.scatter_(-1, scores.topk(count, -1).indices, True)


@torch.inference_mode()
def accuracy(model: Any, data: Tensor) -> dict[str, Any]:
    """Return how many experts are named right in text that the model has not seen."""
    gates = [layer.mlp.gate for layer in model.model.layers]
    inputs: list[Tensor] = []
    hooks = [gate.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for gate in gates]
    batch = data[: ROWS * LENGTH].view(ROWS, LENGTH)
    loss = float(model(batch, labels=batch).loss)
    for hook in hooks:
        hook.remove()
    scores = [[F.linear(rows, gate.weight) for gate in gates] for rows in inputs]
    chosen = [named(scores[at][at], ACTIVE) for at in range(LAYERS)]

    def right(of: Callable[[int], Tensor], begin: int, count: int = ACTIVE) -> list[float]:
        return [
            float((named(of(at), count) & chosen[at]).sum() / chosen[at].sum()) for at in range(begin, LAYERS)
        ]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    used = [each.float().mean(0, keepdim=True).expand(len(each), -1) for each in chosen]
    by_layer = right(lambda at: scores[at - 1][at], 1)
    figures: dict[str, Any] = {
        "loss": loss,
        **{f"named {count}": mean(right(lambda at: scores[at - 1][at], 1, count)) for count in (4, 5, 6, 8)},
        "by layer": {str(at + 2): value for at, value in enumerate(by_layer)},
        "distance 2": mean(right(lambda at: scores[at - 2][at], 2)),
        "most used": mean(right(lambda at: used[at], 1)),
        "most used quarter": mean([float(each[0].topk(EXPERTS // 4).values.sum()) / ACTIVE for each in used]),
    }
    of_rows = {"named": 0.0, "right": 0.0, "chosen": 0.0}
    for at in range(1, LAYERS):  # for 32 tokens at a time: all experts that any of them uses
        guess, real = (
            each.view(-1, 32, EXPERTS).any(1) for each in (named(scores[at - 1][at], ACTIVE), chosen[at])
        )
        of_rows["named"] += float(guess.sum())
        of_rows["right"] += float((guess & real).sum())
        of_rows["chosen"] += float(real.sum())
    figures["32 tokens, named"] = of_rows["right"] / of_rows["chosen"]
    figures["32 tokens, right"] = of_rows["right"] / of_rows["named"]
    return figures


@torch.inference_mode()
def generate(state: dict[str, Tensor], data: Tensor, share: float, count: int, guess: bool) -> dict[str, Any]:
    from transformers import DynamicCache

    model = build().eval()
    model.load_state_dict(state)
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    dense = sum(p.nbytes for p in model.parameters()) - experts
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        testing.map_from_file(model, Path(folder) / "masters.pt")
        handle = dynswap_ext.install(model, device="cpu", budget=int(1.1 * dense + share * experts))
        nothing = mock.patch("dynswap_ext._swap.expert_slices.following", lambda master: None)
        with handle, contextlib.nullcontext() if guess else nothing:
            cache = DynamicCache()
            for at in range(2 * count):
                if at == count:
                    handle.reset_stats()
                    begin = time.perf_counter()
                token = data[at].view(1, 1)
                outputs.append(model(token, past_key_values=cache, use_cache=True).logits)
            seconds, stats = time.perf_counter() - begin, handle.stats()
    return {
        "outputs": torch.cat(outputs),
        "copies": stats.copies / count,
        "guesses": stats.guesses / count,
        "right": stats.right_guesses / count,
        "bytes": stats.bytes_moved / count,
        "stall_ns": stats.stall_ns / count,
        "seconds": seconds / count,
        "peak_bytes": stats.peak_bytes,
    }


def main() -> int:
    given = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    record = Record("next_experts", given.tiny)
    data = text(50_000 if given.tiny else 4_000_000)
    unseen = data[-20_000:]
    stops = (0, 1, 2) if given.tiny else (0, 100, 400)
    model = build()
    for before, stop in zip((0, *stops), stops, strict=False):
        train(model.train(), data[:-20_000], range(before, stop), stops[-1])
        record.figures[f"{stop} steps"] = accuracy(model.eval(), unseen)
        print(f"{stop} steps: {record.figures[f'{stop} steps']}", flush=True)
    trained = record.figures[f"{stops[-1]} steps"]
    record.bar("trained: named of the chosen experts", trained["named 4"], at_least=0.8)
    for share in (1 / 8, 1 / 4, 1 / 2):
        rows = {
            name: generate(model.state_dict(), unseen, share, 8 if given.tiny else 200, guess)
            for name, guess in (("without", False), ("with", True))
        }
        without, with_guesses = rows["without"], rows["with"]
        assert torch.equal(without.pop("outputs"), with_guesses.pop("outputs"))
        figures: dict[str, Any] = dict(rows)
        figures["ahead"] = with_guesses["right"] / max(without["copies"], 1e-9)
        figures["bytes"] = with_guesses["bytes"] / max(without["bytes"], 1e-9)
        record.figures[f"room for {share}"] = figures
        print(f"room for {share}: {figures}", flush=True)
        if share == 1 / 8:
            record.bar(
                "room for 1/8: copies that are there before the choice", figures["ahead"], at_least=0.5
            )
            record.bar("room for 1/8: bytes with guesses / without", figures["bytes"], at_most=1.25)
        record.write(given.output)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
