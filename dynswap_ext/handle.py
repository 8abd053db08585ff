"""One install, as its user holds it."""

from __future__ import annotations

from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch

from ._provider import Session
from ._recording import InRecording, Recorder, figures_of
from ._stats import Stats
from ._traced import let_go
from ._tuning import Tuner, Tuning
from .config import Options

if TYPE_CHECKING:
    from .inspect.report import Report

__all__ = ["Handle", "Install"]


class Install(Protocol):
    """What a handle has of its install. Does not keep the model alive."""

    @property
    def options(self) -> Options:
        """What it was asked for."""

    @property
    def reason(self) -> str:
        """Why its provider is not the native one; empty if it is, or if pure Python was asked for."""

    @property
    def active(self) -> bool:
        """Whether it serves any module."""

    @property
    def session(self) -> Session:
        """What serves it by now."""

    @property
    def tuner(self) -> Tuner | None:
        """What measures it, if anything does."""

    def retune(self, budget: int | float | str | None) -> None:
        """Measure it anew."""

    def undo(self) -> None:
        """Uninstall. Idempotent."""


class Handle:
    """One install. Leaving its ``with`` block uninstalls."""

    def __init__(self, record: Install) -> None:
        self._record = record
        self._recorder = Recorder(lambda: record.session)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._record.options.device

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating weights are cast into; None if they are not."""
        return self._record.options.dtype

    @property
    def budget(self) -> int | None:
        """Bytes for streamed and resident weights together, as they are planned with now."""
        tuner = self._record.tuner
        return self._record.options.budget if tuner is None else tuner.budget

    @property
    def provider(self) -> str:
        """Either "native" or "python"."""
        return self._record.session.provider

    @property
    def backend(self) -> str:
        """Either "host", "cuda", or "torch" (pure Python)."""
        return self._record.session.backend

    @property
    def active(self) -> bool:
        """Whether any module is installed through this handle, even if the model itself is gone."""
        return self._record.active

    def stats(self) -> Stats:
        """What has been counted so far, also after an uninstall."""
        let_go()
        counters = self._record.session.stats()
        return Stats.from_counters(counters, provider=self.provider, backend=self.backend)

    def reset_stats(self) -> None:
        """Set the counters to zero; the plan stays."""
        self._record.session.reset_stats()

    def flush(self) -> None:
        """What was written on handed-out tensors is in the masters when this returns."""
        let_go()
        self._record.session.flush()

    def retune(self, budget: int | float | str | None = None) -> None:
        """Measure the model's next calls, and choose anew what stays on the device.

        One call goes by, two are measured, and the one after begins with the new plan: residents are those
        weights that save the most time, by the engine on its virtual clock (the pure-Python provider spreads
        them evenly). Worth it when the inputs have become others: another batch size, another resolution.

        Parameters
        ----------
        budget : int, float or str, optional
            As for `install`; "auto" is what the measured calls leave. Default: as it is (or goes on being
            automatic).

        Raises
        ------
        ConfigError
            The budget is none, or the model has been uninstalled.
        """
        self._record.retune(budget)

    @property
    def tuning(self) -> Tuning | None:
        """What the latest tuning measured, and what came of it; None before there was one."""
        tuner = self._record.tuner
        return None if tuner is None else tuner.latest

    # Where the time goes ------------------------------------------------------------------------------

    def report(self) -> Report:
        """Say what each group of weights has cost so far, and what the time was lost to. ``print`` it.

        Returns
        -------
        dynswap_ext.inspect.report.Report
            From counters that are always kept; of everything since the install, or since `reset_stats`. Works
            after an uninstall too.
        """
        from .inspect.report import Report

        stats = self.stats()
        options = self._record.options
        rows = figures_of(self._record.session)
        reason = self._record.reason
        sampled = self._record.session.sampled_bytes
        return Report(rows, stats, str(options.device), self.budget, options.prefetch, reason, sampled)

    def record(self) -> InRecording:
        """Record copies, waits and uses while a block runs, for `trace` and `plot`.

        >>> with handle.record():  # doctest: +SKIP
        ...     model(x)
        >>> handle.trace("trace.json.gz")  # doctest: +SKIP

        All threads are recorded. What was recorded before is dropped, also by a second recording that begins
        while this one runs. A recording is bounded; it says what did not fit. Accesses are slower meanwhile,
        those of residents most.
        """
        return self._recorder()

    def trace(self, path: str | PathLike[str], *, profiler: str | PathLike[str] | None = None) -> None:
        """Write what was recorded last as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        It has lanes of copies, waits and compute, and the bytes on the device. Its times are those of
        ``torch.profiler``: both files, opened together, line up.

        Parameters
        ----------
        path
            JSON, compressed if it ends in ``.gz``.
        profiler
            A trace that ``torch.profiler`` exported of the same run; `path` then has all of it, too.

        Raises
        ------
        ConfigError
            Nothing was recorded, or `profiler` is no such trace.
        """
        from .inspect.trace import write_trace

        write_trace(self._recorder.last, path, profiler)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what was recorded last: copies, waits and compute over time, by group, and device memory.

        Needs matplotlib (``pip install dynswap-ext[plot]``).

        Parameters
        ----------
        path
            Its ending chooses the format: ``.png``, ``.svg``, ``.pdf`` and what else matplotlib writes.

        Raises
        ------
        ConfigError
            Nothing was recorded, matplotlib is not there, or it does not know the format.
        """
        from .inspect.timeline import write_plot

        write_plot(self._recorder.last, path, budget=self.budget)

    # The way back -------------------------------------------------------------------------------------

    def uninstall(self) -> None:
        """Give back every module that this install serves, whether or not it is still in the model.

        No effect if that was done already, or if another install has replaced this one.
        """
        self._record.undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        state = "active" if self.active else "undone"
        return f"<dynswap_ext.Handle {state}: {self.provider}/{self.backend} on {self.device}>"
