"""One random model under both providers: which budgets they refuse, and in which words.

The smallest budgets differ: the engine lays weights out at the device's alignment, and copies modules that
share weights together. So an engine's smallest budget is that of pure Python or larger, and without shared
weights not by more than the padding. Which weights stay on the device with that budget may differ.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import dynswap_ext

WIDTH = 24
#: The most bytes that an engine's layout adds to a weight.
PADDING = 4096


def make(dice: random.Random) -> tuple[nn.Sequential, bool]:
    """Return torch's own modules, whose weights a call needs all at once, and whether some share one."""
    kinds = (
        lambda: nn.Linear(WIDTH, dice.randint(1, 9) * WIDTH, bias=dice.random() < 0.7),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.Embedding(dice.randint(1, 200), WIDTH),
        lambda: nn.MultiheadAttention(WIDTH, 2),
        lambda: nn.LSTM(WIDTH, WIDTH, dice.randint(1, 2)),
    )
    layers = [dice.choice(kinds)() for _ in range(dice.randint(1, 6))]
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    shared = len(linear) > 1 and dice.random() < 0.3
    if shared:
        linear[-1].weight = linear[0].weight
    for layer in linear:
        if dice.random() < 0.2:  # a bias with gaps, which no plan has
            layer.bias = nn.Parameter(torch.zeros(2 * layer.out_features)[::2])
    return nn.Sequential(*layers), shared


@dataclass
class Answers:
    """The budgets that a provider plans and refuses for a model, and the words of its refusal."""

    planned: int
    smallest: int | None
    refusal: str


def ask(model: nn.Module, device: torch.device, provider: str, **options: Any) -> Answers:
    def install(budget: int | str) -> dynswap_ext.Handle:
        return dynswap_ext.install(model, device=device, provider=provider, budget=budget, **options)

    def refused(budget: int) -> dynswap_ext.BudgetError | None:
        try:
            install(budget)
        except dynswap_ext.BudgetError as error:
            return error
        finally:
            dynswap_ext.uninstall(model)
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dynswap_ext.DynswapWarning)  # the budget is small
        planned = install("minimum").stats().weight_bytes
        error = refused(1)
        if error is None:
            return Answers(planned, None, "")
        smallest = error.smallest_bytes
        assert smallest is not None and str(smallest) in str(error)
        assert refused(smallest) is None, f"{smallest} bytes do not work: {error}"
        # With a larger budget, groups differ, and the weights in `keep` may need less padding.
        if provider == "python" or "keep" not in options:
            less = refused(smallest - 1)
            assert less is not None and less.smallest_bytes == smallest, f"{provider}: {error}, then {less}"
    return Answers(planned, smallest, re.sub(r"[\d.]+ (KiB|MiB) \(\d+ bytes\)|\d+ bytes", "...", str(error)))


def judge(seed: int, device: torch.device) -> None:
    """Install a model under both providers with budgets around the smallest, and compare what they say."""
    dice = random.Random(seed)
    model, shared = make(dice)
    chosen: dict[str, Any] = {"dtype": dice.choice([torch.float64, torch.bfloat16])}
    if dice.random() < 0.4:
        chosen["keep"] = dice.choice(["0", "*.weight", "*.bias"])
        if chosen["keep"] != "0" and not any(fnmatchcase(n, chosen["keep"]) for n in model.state_dict()):
            del chosen["keep"]  # which is refused
    native, python = (ask(model, device, provider, **chosen) for provider in ("native", "python"))
    padding = PADDING * (1 + len(list(model.state_dict())))
    said = f"seed {seed}, {chosen}\n{model}\nnative: {native}\npython: {python}"
    assert python.planned <= native.planned <= python.planned + padding, said
    if python.smallest is None or native.smallest is None:
        assert python.smallest == native.smallest, said
        return
    assert python.smallest <= native.smallest, said
    if not shared:
        assert native.smallest <= python.smallest + padding, said
        assert native.refusal == python.refusal, said
