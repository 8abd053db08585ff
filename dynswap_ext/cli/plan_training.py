"""The part of ``dynswap plan`` for training: what a step saves for backward, and what it takes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from dynswap_ext import planning
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.tables import plain_table
from dynswap_ext._util.units import show_seconds
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning import Plan

_TITLES = ("way", "bound", "most on\nthe device", "moved\neach way", "time of\na step", "x all\nstays")


@dataclasses.dataclass(frozen=True)
class Training:
    """What a step saves, and the ways to keep that with a budget for weights."""

    batch: int
    tokens: int
    saved: planning.SavedTensors
    #: Bytes for weights on the device.
    budget: int
    steps: tuple[planning.TrainingStep, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it, in bytes and seconds."""
        return dataclasses.asdict(self)

    def parts(self) -> tuple[Any, ...]:
        """Return the sentences and the table, for rich."""
        whole = self.steps[0].seconds
        rows = [
            (
                step.way,
                format_bytes(step.bound),
                format_bytes(step.peak_bytes),
                format_bytes(step.moved_bytes or None),
                show_seconds(step.seconds),
                f"{step.seconds / whole:.2f}" if whole else "-",
            )
            for step in self.steps
        ]
        saved = f"{format_bytes(self.saved.nbytes)} for backward"
        if self.saved.layers:
            left = format_bytes(self.saved.checkpointed_bytes)
            saved += f", and {left} if its {self.saved.layers} layers are checkpointed"
        return (
            Text(f"\nA training step of {self.batch:,} x {self.tokens:,} tokens saves {saved}."),
            plain_table(_TITLES, rows, right=_TITLES[1:]),
            Text(
                f"The budget for weights is {format_bytes(self.budget)}. The largest saved tensor has "
                f"{format_bytes(self.saved.largest_bytes)}. Times are limits of compute and copies. "
                "Gradients, the optimizer's states and what an adapter saves come on top."
            ),
        )


def check(options: argparse.Namespace) -> None:
    """Raise ConfigError if the options of ``--train`` lack what a step is planned from."""
    path = None if options.path is None else Path(options.path)
    if path is None or not (path.is_dir() or path.suffix == ".json"):
        given = "no path is given" if path is None else f"{path} is given"
        raise ConfigError(
            f"--train needs the config.json of a language model of transformers, or its folder; {given}"
        )
    if options.tokens is None:
        raise ConfigError("--train needs --tokens, the tokens of a row (and --batch, if there are more rows)")


def of(options: argparse.Namespace, plan: Plan, dtype: torch.dtype | None) -> Training:
    """Outline a step for the first budget that was asked for and works.

    If none works, it is the smallest that does; if none was asked for, a quarter of the model.
    """
    batch, tokens = options.batch or 1, options.tokens
    saved = planning.saved_for_backward(
        lambda: planning.make_causal_model(options.path, dtype=dtype),
        batch=batch,
        tokens=tokens,
        trains=options.train,
    )
    budget = (
        plan.asked[0]
        if plan.asked
        else plan.smallest
        if plan.too_small
        else max(plan.smallest, plan.all // 4)
    )
    steps = planning.training_steps(saved, plan.at(budget), bandwidth=plan.bandwidth, trains=options.train)
    return Training(batch, tokens, saved, budget, tuple(steps))
