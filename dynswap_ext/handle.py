"""One install, as its user holds it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from os import PathLike
from typing import NoReturn

import torch

from dynswap_ext._installation import Installation
from dynswap_ext._provider import obstacle_to_giving_way
from dynswap_ext._swap.class_swap import take_pending
from dynswap_ext._swap.compile_support import flush_graphs
from dynswap_ext._tuning import Tuning
from dynswap_ext.profile.recording import Recorder, figures_of
from dynswap_ext.profile.report import Report
from dynswap_ext.profile.stats import Stats
from dynswap_ext.profile.timeline import write_plot
from dynswap_ext.profile.trace import write_trace


class Handle:
    """Controls one install: figures, recordings, plans. Leaving its ``with`` block uninstalls."""

    def __init__(self, install: Installation) -> None:
        self._install = install
        self._recorder = Recorder(lambda: install.session)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a Handle cannot be copied or pickled: it belongs to one model in this process. Copy or pickle "
            "the model (copies of an installed model are plain), and install that"
        )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._install.options.device

    @property
    def dtype(self) -> torch.dtype | None:
        """What floating weights are cast into; None if they are not."""
        return self._install.options.dtype

    @property
    def budget(self) -> int | None:
        """Bytes for streamed and resident weights in the current plan; None for "minimum"."""
        return self._install.budget.bytes

    @property
    def automatic(self) -> bool:
        """Whether the budget is "auto"; `budget` is then its present amount."""
        return self._install.budget.automatic

    @property
    def provider(self) -> str:
        """Either "native" or "python"."""
        return self._install.session.provider

    @property
    def backend(self) -> str:
        """What copies weights to the device: "host", "cuda", "torch" (torch's own streams) or "python"."""
        return self._install.session.backend

    @property
    def active(self) -> bool:
        """Whether any module is installed through this handle, even if the model itself is gone."""
        return self._install.active

    def stats(self) -> Stats:
        """Return what has been counted so far. Works after an uninstall too."""
        flush_graphs()
        counters = self._install.session.stats()
        return Stats.from_counters(counters, provider=self.provider, backend=self.backend)

    def reset_stats(self) -> None:
        """Set the counters to zero; the plan stays."""
        self._install.session.reset_stats()

    def flush(self) -> None:
        """Write back to the masters what was written on handed-out tensors."""
        take_pending()
        self._install.session.flush()

    def retune(self, budget: int | float | str | None = None) -> None:
        """Measure the model's next calls, and choose again what stays on the device.

        The next call is not measured, the two after it are, and the fourth begins with the new plan. Its
        residents are the weights that save the most time, according to the engine on its virtual clock (the
        pure-Python provider spreads them evenly). Call this when the inputs have changed, for example to
        another batch size or resolution.

        Parameters
        ----------
        budget : int, float or str, optional
            As for `install`; "auto" is what the measured calls leave. Default: unchanged (an automatic budget
            stays automatic).

        Raises
        ------
        ConfigError
            The budget has a value that cannot be used, or the model has been uninstalled or installed again.
        """
        self._install.retune(budget)

    @property
    def tuning(self) -> Tuning | None:
        """What the latest tuning measured and decided; None before the first."""
        return self._install.tuner.latest

    # Where the time goes ------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what each group of weights has cost so far, and where the time was lost; ``print`` shows it.

        Returns
        -------
        dynswap_ext.profile.report.Report
            It comes from counters that are always kept, and covers everything since the install, or since
            `reset_stats`. Works after an uninstall too.
        """
        install, options = self._install, self._install.options
        stats, rows = self.stats(), figures_of(install.session)
        why, sampled = install.provider.reason, install.session.sampled_bytes
        automatic, device = self.automatic, str(self.device)
        giving_way = obstacle_to_giving_way(self.provider, self.device) if automatic else None
        return Report(
            rows,
            stats,
            device,
            self.budget,
            options.prefetch,
            why,
            sampled,
            automatic=automatic,
            giving_way=giving_way,
        )

    def record(self) -> AbstractContextManager[None]:
        """Record copies, waits and uses while a block runs, for `trace` and `plot`.

        All threads are recorded. A new recording drops the previous one, even if that is still running. A
        recording is bounded, and counts the spans that did not fit. While it runs, accesses are slower, most
        of all those of residents.

        Examples
        --------
        >>> with handle.record():  # doctest: +SKIP
        ...     model(x)
        >>> handle.trace("trace.json.gz")  # doctest: +SKIP
        """
        return self._recorder()

    def trace(self, path: str | PathLike[str], *, profiler: str | PathLike[str] | None = None) -> None:
        """Write what was recorded last as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

        It has lanes of copies, waits and compute, and the bytes on the device. Its clock is that of
        ``torch.profiler``, so the two files line up when they are opened together.

        Parameters
        ----------
        path
            JSON, compressed if it ends in ``.gz``.
        profiler
            A trace of the same run that ``torch.profiler`` exported; `path` then has its events, too.

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
            Its suffix chooses the format: ``.png``, ``.svg``, ``.pdf`` or another that matplotlib writes.

        Raises
        ------
        ConfigError
            Nothing was recorded, matplotlib is not installed, or it does not support the format.
        """
        write_plot(self._recorder.last, path, budget=self.budget)

    # The way back -------------------------------------------------------------------------------------

    def uninstall(self) -> None:
        """Give every module that this install serves its own class back, also one that has left the model.

        Has no effect if that was done already, or if another install has replaced this one.
        """
        self._install.undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        return f"<dynswap_ext.Handle {self._install.state}: {self._install}>"
