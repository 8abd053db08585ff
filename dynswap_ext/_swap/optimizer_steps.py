"""Tells sessions of optimizers' steps, as what a fused optimizer writes bumps no version counter."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dynswap_ext._swap.protocol import Session

_sessions: Final[weakref.WeakSet[Session]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


def add_step_listener(session: Session) -> None:
    """Tell the session of the steps of every `torch.optim.Optimizer`, until it is removed or dies."""
    _sessions.add(session)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def remove_step_listener(session: Session) -> None:
    """Stop telling a session of steps. No effect if it is not told."""
    _sessions.discard(session)
    while _hooks and not _sessions:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A closure may give other masters a gradient. Their writes are seen too, at a page fault for each page.
    masters = [master for master in _masters_of(optimizer) if master.grad is not None]
    for session in tuple(_sessions):
        session.expect_writes(masters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    masters = _masters_of(optimizer)  # the step may have dropped their gradients
    for session in tuple(_sessions):
        session.note_writes(masters)


def _masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if torch.compiler.is_compiling():
        return []
    return [master for group in optimizer.param_groups for master in group["params"] if master.requires_grad]
