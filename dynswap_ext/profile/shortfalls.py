"""Finds in what an install does less than it was asked for, for `Handle.check`."""

from __future__ import annotations

from collections.abc import Iterator

from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.units import show_seconds
from dynswap_ext.profile.report import Report


def shortfalls(report: Report, seconds: float, *, stalled: float | None, staged: float) -> Iterator[str]:
    """Yield a sentence for each thing that falls short, with its figure and what to do.

    Parameters
    ----------
    report
        The figures of the install.
    seconds
        The time over which they were counted.
    stalled
        The largest share of that time that the model may have waited for weights; None: any.
    staged
        The largest share of the bytes of masters in RAM that may not be page-locked.
    """
    stats, host = report.stats, report.host
    # The system takes the page cache back, of which there was room for all when it was filled.
    if host is not None and host.limit is not None and host.total - host.page_cache > host.limit:
        yield f"weights take more of the host's RAM than host_budget= allows: {host}"
    if not report.rows or not any(row.hits or row.misses or row.copies for row in report.rows):
        yield f"nothing is streamed: {report.diagnosis}"
        return
    if report.reason:
        yield f"it is slower than it could be: {report.reason}"
    if stats.overflow_bytes:
        budget = stats.arena_bytes + stats.resident_bytes if report.budget is None else report.budget
        yield (
            f"weights took up to {format_bytes(stats.overflow_bytes)} beyond the budget, as tensors that "
            "were handed out are kept; drop them after their use, or give a budget of "
            f"{exact_bytes(budget + stats.overflow_bytes)}"
        )
    in_ram = stats.pinned_bytes + stats.staged_bytes
    if stats.staged_bytes > staged * in_ram:
        yield (
            f"{format_bytes(stats.staged_bytes)} of {format_bytes(in_ram)} of masters in RAM are not "
            "page-locked, and go through a small pinned buffer, which is slower; the warning "
            "at the install says why"
        )
    if report.shared_out is not None and report.shared_out.why_not:
        yield f"mesh= is given, and {report.shared_out}"
    waited = report.stall_ns / 1e9
    if stalled is not None and waited > stalled * seconds:
        yield (
            f"{show_seconds(waited)} of {show_seconds(seconds)} went by waiting for weights, more than "
            f"stalled={stalled:g} allows: {report.diagnosis}"
        )
