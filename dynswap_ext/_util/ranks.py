"""Runs steps on all ranks of a process group, and exchanges their results and errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dynswap_ext.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")


class Ranks:
    """The ranks of a process group. A step succeeds on all of them or fails on all of them.

    `caller` names the function that needs them, and `failure` what has happened if a step fails.
    """

    def __init__(self, group: ProcessGroup | None, caller: str, failure: str) -> None:
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                f"{caller} was called without a process group; expected one of several ranks. Start the "
                "program with torchrun, and call torch.distributed.init_process_group() first"
            )
        self._distributed = distributed
        self._group = group
        self._caller, self._failure = caller, failure
        self.own = distributed.get_rank(group)
        if self.own < 0:
            raise ConfigError(f"{caller} was called by a rank that is not in the group; expected its ranks")

    def name(self, rank: int) -> int:
        """Return the global number of a rank of the group."""
        if self._group is None:
            return rank
        return self._distributed.get_global_rank(self._group, rank)

    def together(self, what: str, work: Callable[[], _T]) -> list[_T]:
        """Do some work on every rank, and return the results by rank.

        `what` names the work in an error ("comparing the weights"). If a rank fails, ConfigError is raised on
        all ranks, with the reason of that rank.
        """
        answer: tuple[_T | None, str] = (None, "")
        cause: Exception | None = None
        try:
            answer = (work(), "")
        except Exception as error:
            cause, answer = error, (None, str(error) or type(error).__name__)
        answers: list[Any] = [None] * self._distributed.get_world_size(self._group)
        try:
            self._distributed.all_gather_object(answers, answer, self._group)
        except RuntimeError as error:  # what it says is of sockets
            raise ConfigError(
                f"{self._failure}: another rank does not answer ({what}); expected all ranks to call "
                f"{self._caller}. One has ended, or has not called it within the timeout of the process "
                "group; its own output says why"
            ) from error
        for rank, (_, why) in enumerate(answers):
            if why:
                try:
                    raise ConfigError(f"{self._failure}: {why} (rank {self.name(rank)}, {what})") from cause
                finally:
                    del cause  # a cycle through this frame would keep the memory mapped
        return [result for result, _ in answers]


def this_host() -> str:
    """Return a name of this host and container. Ranks with the same name can open each other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise ConfigError(f"sharing memory between ranks needs Linux and its /proc ({error})") from error
