"""`handle.plot()`: files of each format, and pictures in which everything is legible."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_recordings import FakeSession

from conftest import Provider
from dynswap_ext import ConfigError
from dynswap_ext.profile.timeline import draw
from sample_models import mlp

BUDGET = 300 << 20


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.slow
def test_formats(provider: Provider, tmp_path: Path, ending: str, begins: bytes) -> None:
    model = mlp(features=64)
    handle = provider.install(model, dtype=torch.float64, budget="64MiB")
    with handle.record():
        model(provider.randn(2, 64))
    path = tmp_path / f"plot.{ending}"
    handle.plot(path)
    assert path.read_bytes().startswith(begins) and path.stat().st_size > 5_000


def test_what_cannot_be_drawn(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    with handle.record():
        pass
    with pytest.raises(ConfigError, match="no weight was used"):
        handle.plot(tmp_path / "plot.png")
    there = mlp().to(provider.device)
    handle_there = provider.install(there)
    with handle_there.record():
        there(provider.randn(2, 16, dtype=torch.float32))
    with pytest.raises(ConfigError, match="except those that need no move"):
        handle_there.plot(tmp_path / "plot.png")
    with handle.record():
        model(provider.randn(2, 16))
    with pytest.raises(ConfigError, match=r"plot\.txt cannot be drawn: expected an ending such as \.png"):
        handle.plot(tmp_path / "plot.txt")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install dynswap-ext\[plot\]"):
        handle.plot(tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


def tick_labels(axis: Any) -> list[Any]:
    """Return the labels that are drawn. A tick may be beyond the end of its axis."""
    low, high = sorted(axis.get_view_interval())
    at_and_label = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    return [label for at, label in at_and_label if low <= at <= high]


def boxes(texts: list[Any]) -> list[Any]:
    return [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]


def overlapping(found: list[Any]) -> list[tuple[Any, Any]]:
    return [(a, b) for a, b in itertools.combinations(found, 2) if a.padded(-1).overlaps(b.padded(-1))]


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(FakeSession(2, passes=1), id="2 groups"),
        pytest.param(FakeSession(5), id="5 groups"),
        pytest.param(FakeSession(24, skipped=3), id="24 groups"),
        pytest.param(FakeSession(60, skipped=5), id="60 groups"),
        pytest.param(FakeSession(500, skipped=9), id="500 groups"),
        pytest.param(FakeSession(20, passes=60), id="60 passes"),
        pytest.param(FakeSession(8, threads=9), id="9 threads"),
    ],
)
@pytest.mark.slow
def test_labels_are_apart(session: FakeSession) -> None:
    figure = draw(session.recording(), budget=BUDGET)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    texts: list[Any] = []
    for axes in figure.axes:
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
        texts += [*tick_labels(axes.yaxis), axes.yaxis.label, axes.title, axes._left_title, axes.xaxis.label]
    texts += [*tick_labels(figure.axes[-1].xaxis), *legend.get_texts()]
    found = boxes(texts)
    assert overlapping(found) == []
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width + 1 and box.y1 <= height + 1 for box in found)
    _, groups, _ = figure.axes
    labels = [label.get_text() for label in groups.get_yticklabels()]
    assert labels[0] == "embed.weight" and labels[-1] == "head.weight" and len(labels) <= 24


def test_all_that_was_recorded_is_drawn() -> None:
    session = FakeSession(30, passes=3, skipped=2)
    figure = draw(session.recording(), budget=BUDGET)
    lanes, groups, memory = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["copy", "wait", "compute"]
    rows = sum(len(collection.get_paths()) for collection in groups.collections)
    assert rows == sum(span[0] in ("copy", "wait", "use") for span in session.spans)
    (legend,) = figure.legends
    named = " ".join(text.get_text() for text in legend.get_texts())
    for cause in {span[4] for span in session.spans if span[0] == "wait"}:
        assert f"wait, {cause}: " in named
    # The budget's line is the one that the axes hold beside the steps and the marks of passes.
    assert BUDGET / (1 << 20) in [line.get_ydata()[0] for line in memory.lines]
    assert "3 passes in" in lanes.get_title(loc="left")


#: Colour blindness as matrices for linear RGB: Machado, Oliveira and Fernandes (2009), full severity.
VISIONS = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long waves": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no middle waves": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_can_be_told_apart(vision: str) -> None:
    """Any two colours of a lane differ in CIE Lab by far more than the least visible difference (2.3)."""
    from dynswap_ext.profile import timeline

    seen = torch.tensor(VISIONS[vision], dtype=torch.float64)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def lab(colour: str) -> torch.Tensor:
        srgb = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], dtype=torch.float64)
        linear = torch.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        xyz = to_xyz.double() @ (seen @ linear).clamp(0, 1) / torch.tensor([0.9505, 1.0, 1.089])
        f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
        return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    together = (
        [timeline._PREFETCHED, timeline._DEMANDED, timeline._OUT, timeline._COMPUTE],
        [timeline._OUT, *timeline._WAIT.values()],
        [timeline._COMPUTE, *timeline._WAIT.values()],
        ["#FFFFFF", *timeline._WAIT.values(), timeline._PREFETCHED],
    )
    for colours in together:
        for one, other in itertools.combinations(colours, 2):
            assert torch.dist(lab(one), lab(other)) > 12, (one, other)
