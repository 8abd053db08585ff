"""Shows the progress of long operations, by a bar on a terminal or by calls of a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from dynswap_ext.errors import ConfigError

#: Called with the bytes done so far, and with those in all.
ProgressCallback: TypeAlias = Callable[[int, int], None]
ProgressOption: TypeAlias = bool | ProgressCallback


def check_progress(given: ProgressOption | None) -> ProgressOption:
    """Return the option `progress`, False for None. ConfigError if it is neither a bool nor a function."""
    if given is None or isinstance(given, bool) or callable(given):
        return given or False
    raise ConfigError(
        f"progress is {given!r}; expected True for a bar, False, or a function of the bytes done "
        "and the whole"
    )


@contextmanager
def shown(progress: ProgressOption, what: str) -> Iterator[ProgressCallback | None]:
    """Yield the function to call with the progress of an operation, or None if none is to be called.

    It is the user's function or, for True, one that draws a bar on stderr with the label `what`. It is None
    for False, and for a bar if stderr is neither a terminal nor a notebook.
    """
    progress = check_progress(progress)
    if not progress or not isinstance(progress, bool):
        yield progress or None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), Speed()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
