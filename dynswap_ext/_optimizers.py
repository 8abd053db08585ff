"""Optimizers tell the sessions of their steps: what a fused one writes bumps no version counter."""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["Stepped", "follow", "unfollow"]


class Stepped(Protocol):
    """What is told of the steps: a session."""

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        """An optimizer is about to write to these masters, of which some may be another session's."""

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        """It has written to them, or to some."""


_sessions: Final[weakref.WeakSet[Stepped]] = weakref.WeakSet()
_hooks: Final[list[Any]] = []


def follow(session: Stepped) -> None:
    """Tell a session of every optimizer's steps, for as long as it lives or until `unfollow`."""
    _sessions.add(session)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def unfollow(session: Stepped) -> None:
    """Tell it no more."""
    _sessions.discard(session)
    while _hooks and not _sessions:
        _hooks.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A closure may make the gradients of others; those cost a page fault a page.
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
