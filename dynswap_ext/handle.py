"""`Handle`: the user's object for one install."""

from __future__ import annotations

import contextlib
import time
import weakref
from contextlib import AbstractContextManager
from os import PathLike
from typing import NoReturn

import torch

from dynswap_ext._host_memory import host_memory
from dynswap_ext._installation import Installation
from dynswap_ext._provider import obstacle_to_giving_way
from dynswap_ext._saved_plan import Tuning
from dynswap_ext._swap.class_swap import take_pending
from dynswap_ext._swap.compile_support import flush_graphs
from dynswap_ext.errors import BudgetError, OutOfMemoryError, ShortfallError
from dynswap_ext.profile.recording import Recorder
from dynswap_ext.profile.report import Report, rows_of
from dynswap_ext.profile.shared_out import SharedOut
from dynswap_ext.profile.shortfalls import shortfalls
from dynswap_ext.profile.stats import Stats
from dynswap_ext.profile.timeline import write_plot
from dynswap_ext.profile.trace import write_trace


class Handle:
    """The user's object for one install: its figures, recordings and plans, and the way to end it.

    As a context manager it uninstalls at the end of the block.
    """

    def __init__(self, install: Installation) -> None:
        self._install = install
        self._recorder = Recorder(lambda: install.session)
        install.handle = weakref.ref(self)

    @classmethod
    def of(cls, install: Installation) -> Handle:
        """Return the handle of an install: the one that is in use, or a new one."""
        known = None if install.handle is None else install.handle()
        return known if isinstance(known, cls) else cls(install)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a Handle cannot be copied or pickled: it belongs to one model in this process. Copy or pickle "
            "the model (copies of an installed model are plain), and install that"
        )

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self._install.options.device

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype into which floating weights are cast on their way to the device; None: they are not."""
        return self._install.options.dtype

    @property
    def budget(self) -> int | None:
        """Bytes of the device that weights may take in the current plan; None: only what `prefetch` needs."""
        return self._install.budget.bytes

    @property
    def activations(self) -> int | None:
        """Bytes of the device that tensors saved for backward may take now; None: all of them stay there."""
        return self._install.budget.activations

    @property
    def automatic(self) -> bool:
        """Whether the budget is "auto", so that `budget` changes with what the measured calls leave."""
        return self._install.budget.automatic

    @property
    def provider(self) -> str:
        """What serves accesses to weights: "native" (the C++ extension) or "python"."""
        return self._install.session.provider

    @property
    def backend(self) -> str:
        """What copies weights: "host" (to the CPU), "cuda", "torch" (torch's own streams) or "python"."""
        return self._install.session.backend

    @property
    def active(self) -> bool:
        """Whether this install still serves a module, even if the model itself is gone."""
        return self._install.active

    def stats(self) -> Stats:
        """Return the counters so far, and the figures of the plan. Works after an uninstall too."""
        flush_graphs()
        counters = self._install.session.stats()
        return Stats.from_counters(counters, provider=self.provider, backend=self.backend)

    def reset_stats(self) -> None:
        """Set the counters of `stats` and `report` to zero. The plan stays."""
        self._install.session.reset_stats()
        self._install.counted_since = time.monotonic()

    def flush(self) -> None:
        """Write to the masters what was written on tensors that `module.weight` returned."""
        take_pending()
        self._install.session.flush()

    def retune(self, budget: int | float | str | None = None) -> None:
        """Measure the model's next calls, and choose again what stays on the device.

        The next call is not measured, the two after it are, and the fourth begins with the new plan. The
        weights that then stay on the device are those that save the most time, according to the engine's own
        simulation (the pure-Python provider spreads them evenly). Call this when the inputs have changed, for
        example to another batch size or resolution.

        Parameters
        ----------
        budget : int, float or str, optional
            The new budget, as for `install`; "auto" is what the measured calls leave. Default: unchanged (an
            automatic budget stays automatic).

        Raises
        ------
        ConfigError
            The budget has a value that cannot be used, or the model has been uninstalled or installed again.
        """
        self._install.retune(budget)

    def save_plan(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, for ``install(model, plan=path)`` in another process.

        There, the first pass has the budget of this install, the same weights stay on the device, the others
        are fetched ahead in the same order, and nothing is measured. Save the plan once the model has run as
        it will in use: the order is that of the latest passes.

        Raises
        ------
        ConfigError
            Calls are still being measured for a new plan (budget "auto", or after `retune`), `release` has
            given the memory back, the provider is pure Python, the file cannot be written, or the model has
            been uninstalled or installed again.
        """
        self._install.save_plan(path)

    def release(self) -> AbstractContextManager[object]:
        """Give all device memory of the install back, also to other processes.

        Masters stay where they are, so nothing is copied back except what was written on tensors that
        `module.weight` returned. The model stays installed, and its next call takes the memory again. Until
        then, each read of a weight copies it into memory of its own. Weights that the program holds keep
        their memory. CUDA graphs that have captured weights become invalid, with a warning.

        Returns
        -------
        A context manager that calls `resume` at the end of its block, if the model is still installed then.

        Raises
        ------
        ConfigError
            The model has been uninstalled or installed again.

        Examples
        --------
        >>> with handle.release():  # doctest: +SKIP
        ...     generate_with_another_model()
        """
        self._install.release()
        at_the_end: contextlib.ExitStack = contextlib.ExitStack()
        at_the_end.push(self._resume_after)
        return at_the_end

    def resume(self) -> None:
        """Take the memory again that `release` gave back, and copy the weights there that stay on the device.

        The copies run while the program goes on, and a call waits for the weights that it needs.

        Raises
        ------
        ConfigError
            The model has been uninstalled or installed again.
        OutOfMemoryError
            The device does not have the memory any more, even for an automatic budget that has shrunk. The
            model still works: each access copies its weight, and the next call tries again.
        BudgetError
            The weights have grown, and the budget is too small for them.
        """
        self._install.resume()

    def _resume_after(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.active:
            return
        try:
            self.resume()
        except (BudgetError, OutOfMemoryError):
            if error is None:  # else the error of the block is the one to report
                raise

    @property
    def tuning(self) -> Tuning | None:
        """The latest measurements of passes, and the plan that followed from them; None before the first."""
        return self._install.tuner.latest

    # Where the time goes ------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what each group of weights has cost so far, and where time was lost; ``print`` shows it.

        Returns
        -------
        dynswap_ext.profile.report.Report
            It comes from counters that are always kept, and covers everything since the install, or since
            `reset_stats`. Only copy times and waits on an accelerator are those of the latest recording
            (`record`). Works after an uninstall too.
        """
        install = self._install
        return Report(
            stats=self.stats(),
            rows=rows_of(install.session),
            device=str(self.device),
            budget=self.budget,
            prefetch=install.options.prefetch,
            reason=install.provider.reason,
            sampled_bytes=install.session.sampled_bytes,
            automatic=self.automatic,
            headroom=install.options.headroom,
            activations=self.activations,
            giving_way=obstacle_to_giving_way(self.provider, self.device) if self.automatic else None,
            host=host_memory(),
            shared_out=self._shared_out(),
        )

    def _shared_out(self) -> SharedOut | None:
        mesh, figures = self._install.options.mesh, self._install.session.shared_out()
        return None if mesh is None or figures is None else SharedOut(ranks=mesh.size, **figures)

    def check(self, *, stalled: float | None = None, staged: float = 0.0) -> None:
        """Raise an error if the install does less than it was asked for, as a check for tests and jobs.

        The figures are those since the install, or since `reset_stats`. It is an error if no weight was
        copied or used, if weights took more of the device's memory than the budget or more RAM than
        `host_budget` (the page cache left out), if a slower provider or backend serves the device than was
        asked for, or if a share below is exceeded.

        Parameters
        ----------
        stalled : float, optional
            Largest share of the time that the model may have waited for weights, summed over the threads that
            call it. On an accelerator, where streams wait and not threads, waits are those of the latest
            `record`. Default: not checked.
        staged : float
            Largest share of the bytes of masters in RAM that may go through the small pinned buffer because
            they are not page-locked. Default: 0.0, none. Not checked if `host_budget` rules page-locking out.

        Raises
        ------
        ShortfallError
            Names each thing that falls short, with its figure and the remedy.
        """
        seconds = time.monotonic() - self._install.counted_since
        if not self._install.options.host_budget.page_locks:
            staged = 1.0  # as it was asked for
        found = list(shortfalls(self.report(), seconds, stalled=stalled, staged=staged))
        if found:
            raise ShortfallError("; ".join(found))

    def record(self) -> AbstractContextManager[None]:
        """Record copies, waits and uses while a block runs, for `trace` and `plot`.

        All threads are recorded. A new recording drops the previous one, even if that is still running. The
        size of a recording is bounded, and it counts the spans that did not fit. While it runs, accesses are
        slower, most of all those to weights that stay on the device.

        Examples
        --------
        >>> with handle.record():  # doctest: +SKIP
        ...     model(x)
        >>> handle.trace("trace.json.gz")  # doctest: +SKIP
        """
        return self._recorder()

    def trace(self, path: str | PathLike[str], *, profiler: str | PathLike[str] | None = None) -> None:
        """Write what was recorded last as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        The trace has lanes of copies, waits and compute, and the bytes on the device. It has the clock of
        ``torch.profiler``, so that traces of both line up when they are opened together.

        Parameters
        ----------
        path
            The trace, as JSON; compressed if the name ends in ``.gz``.
        profiler
            A trace that ``torch.profiler`` exported of the same run, whose events are added to `path`.

        Raises
        ------
        ConfigError
            Nothing was recorded, or `profiler` is not such a trace.
        """
        write_trace(self._recorder.last, path, profiler)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what was recorded last: copies, waits and compute over time, by group, and device memory.

        Needs matplotlib (``pip install dynswap-ext[plot]``).

        Parameters
        ----------
        path
            The picture. Its suffix chooses the format: ``.png``, ``.svg``, ``.pdf`` or another of
            matplotlib's.

        Raises
        ------
        ConfigError
            Nothing was recorded, matplotlib is not installed, or it does not support the format.
        """
        write_plot(self._recorder.last, path, budget=self.budget)

    # The way back -------------------------------------------------------------------------------------

    def uninstall(self) -> None:
        """Give every module that this install serves its own class back, even if it has left the model.

        It has no effect if it was called already, or if another install has replaced this one.
        """
        self._install.undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<dynswap_ext.Handle {self._install.state}: {self._install}>"
