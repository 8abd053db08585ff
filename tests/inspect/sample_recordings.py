"""Recordings like those of the native engine, made by hand: a bus, a ring, residents and a consumer."""

from __future__ import annotations

from typing import Any

from dynswap_ext.profile.recording import Recording, Span, figures_of
from dynswap_ext.profile.report import Report
from dynswap_ext.profile.stats import Stats

MILLISECOND = 1_000_000
CONSUMER = 4711


class FakeSession:
    """A session with computed passes, for code that only needs figures and spans."""

    provider = "native"
    backend = "host"

    def __init__(
        self,
        layers: int = 5,
        *,
        passes: int = 2,
        residents: int = 3,
        copy_ns: int = 3 * MILLISECOND,
        compute_ns: int = 2 * MILLISECOND,
        ahead: int = 3,
        skipped: int = 0,
        threads: int = 1,
    ) -> None:
        self.names = [["embed.weight"]]
        self.names += [
            [
                f"blocks.{i}.attention.qkv.weight",
                f"blocks.{i}.attention.qkv.bias",
                f"blocks.{i}.mlp.up.weight",
            ]
            for i in range(layers - 2)
        ]
        self.names += [["head.weight"]]
        self.resident = [residents > 0 and i % residents == 1 for i in range(layers)]
        self.size = 12 << 20
        self.figures: list[dict[str, Any]] = [
            {
                "names": names,
                "bytes": self.size,
                "source": "pinned RAM",
                "resident": resident,
                **dict.fromkeys(("hits", "late_hits", "misses", "copies", "bytes_moved", "copy_ns"), 0),
                "causes": {},
                "by_use": False,
                "held_by": "",
            }
            for names, resident in zip(self.names, self.resident, strict=True)
        ]
        self.spans: list[tuple[str, int, int, int, str, int, int]] = []
        self.dropped = 0
        self.began = 10**15
        for thread in range(threads):
            self._run(passes, copy_ns, compute_ns, ahead, skipped, CONSUMER + thread)
        self.spans.sort(key=lambda span: span[2])

    def _run(self, passes: int, copy_ns: int, compute_ns: int, ahead: int, skipped: int, thread: int) -> None:
        now, bus = self.began + thread % 7 * MILLISECOND // 3, self.began
        order = [(p, g) for p in range(passes) for g in range(len(self.figures))]
        done: dict[int, float] = {}
        arrived: dict[tuple[int, int], tuple[int, int, str]] = {}
        upcoming = 0
        for position, (number, group) in enumerate(order):
            if group == 0:
                self.spans.append(("pass", -1, now, now, "", 0, thread))
            while upcoming < len(order) and upcoming <= position + ahead:
                when, what = order[upcoming]
                if not (self.resident[what] and what in done):
                    demanded = upcoming == position
                    wobble = copy_ns * (what * 7919 % 13) // 26
                    begin = max(bus, now)
                    bus = begin + copy_ns * 3 // 4 + wobble
                    detail = "demanded" if demanded else "prefetched"
                    self.spans.append(("copy", what, begin, bus, detail, self.size, 0))
                    arrived[when, what] = begin, bus, detail
                    self.figures[what]["copies"] += 1
                    self.figures[what]["copy_ns"] += bus - begin
                    self.figures[what]["bytes_moved"] += self.size
                    done[what] = bus
                upcoming += 1
            figure = self.figures[group]
            _, there, detail = arrived.get((number, group), (0, 0, "prefetched"))
            if there > now:
                cause = "first use" if number == 0 else "bus-bound"
                if number and skipped and group % skipped == 0:
                    cause = ("not predicted", "late prefetch", "slot held", "arena full")[
                        group // skipped % 4
                    ]
                self.spans.append(("wait", group, now, there, cause, self.size, thread))
                figure["causes"][cause] = figure["causes"].get(cause, 0) + there - now
                figure["held_by"] = "head.weight" if cause == "slot held" else figure["held_by"]
                now = there
                figure["late_hits"] += detail == "prefetched"
            figure["hits" if detail == "prefetched" else "misses"] += 1
            on_device = (sum(self.resident[: group + 1]) if number == 0 else sum(self.resident)) + min(
                ahead, 1 + group
            )
            self.spans.append(("use", group, now, now, "", on_device * self.size, thread))
            now += compute_ns // 2 + compute_ns * (group * 104729 % 11) // 10
        self.end = max(now, bus)

    def stats(self) -> dict[str, int]:
        def total(key: str) -> int:
            return sum(figure[key] for figure in self.figures)

        resident = sum(self.resident) * self.size
        return {
            **{key: total(key) for key in ("hits", "late_hits", "misses", "copies", "bytes_moved")},
            "stall_ns": sum(sum(figure["causes"].values()) for figure in self.figures),
            "peak_bytes": resident + 3 * self.size,
            "groups": len(self.figures),
            "resident_groups": sum(self.resident),
            "weight_bytes": len(self.figures) * self.size,
            "resident_bytes": resident,
            "arena_bytes": 3 * self.size,
            "depth": 2,
        }

    def groups(self) -> list[dict[str, Any]]:
        return self.figures

    def record(self, on: bool) -> None:
        pass

    def timeline(self) -> dict[str, Any]:
        return {"spans": self.spans, "dropped": self.dropped, "clock": "monotonic"}

    # What the package makes of it ---------------------------------------------------------------------

    def recording(self) -> Recording:
        spans = tuple(Span(*span) for span in self.spans)
        names = {CONSUMER: "MainThread"}
        return Recording(figures_of(self), spans, self.dropped, self.began, self.end, 10**18, names)

    def report(self, budget: int | None = 6 * (12 << 20), prefetch: int = 2) -> Report:
        stats = Stats.from_counters(self.stats(), provider=self.provider, backend=self.backend)
        return Report(figures_of(self), stats, "cpu", budget, prefetch)
