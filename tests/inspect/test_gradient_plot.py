"""The contents of the picture of gradients, for any number of parameters."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynswap_ext import ConfigError
from dynswap_ext._util import pictures
from dynswap_ext.inspect import gradient_flow, gradients

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield a list that gets the figures that are saved."""
    found: list[Any] = []

    def save(figure: Any, path: Any) -> None:
        found.append(figure)
        pictures.save(figure, path)

    monkeypatch.setattr(gradients, "save", save)
    yield found


def model(layers: int) -> nn.ModuleList:
    made = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))
    for index, layer in enumerate(made):
        layer.weight.grad = torch.full((2, 2), 10.0 ** -(index % 7))
    return made


@pytest.mark.parametrize("layers", [1, 20, 500, 3000])
@pytest.mark.slow
def test_names_do_not_overlap(layers: int, drawn: list[Any], tmp_path: Path) -> None:
    gradient_flow(model(layers)).plot(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    figure.draw_without_rendering()
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert len(labels) == min(layers, {500: 56, 3000: 60}.get(layers, layers))
    assert labels[0].get_text() == "0.weight"
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    assert all(box.y0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)


def test_values_and_marks(drawn: list[Any], tmp_path: Path) -> None:
    made = model(5)
    made[1].weight.grad = None
    made[2].weight.grad.zero_()
    made[3].weight.grad[0, 0] = math.nan
    gradient_flow(made).plot(tmp_path / "flow.svg", title="mine")
    (figure,) = drawn
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    heights = list(lines["mean"].get_ydata())
    assert heights[0] == 1.0 and heights[4] == pytest.approx(1e-4)
    assert all(math.isnan(height) for height in heights[1:4])
    marks = {
        label: list(line.get_xdata()) for label, line in lines.items() if label not in ("mean", "maximum")
    }
    assert marks == {"no gradient": [1], "all zero": [2], "NaN or infinite": [3]}
    assert axes.get_title() == "mine" and axes.get_yscale() == "log"
    colours = {line.get_color() for line in axes.lines}
    assert len(colours) == 5


def test_nothing_but_marks(tmp_path: Path) -> None:
    made = model(2)
    made[0].weight.grad.zero_()
    made[1].weight.grad.fill_(math.inf)
    gradient_flow(made).plot(tmp_path / "flow.pdf")
    assert (tmp_path / "flow.pdf").stat().st_size > 0


def test_a_suffix_that_is_no_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flow\.xyz cannot be drawn: .*png"):
        gradient_flow(model(1)).plot(tmp_path / "flow.xyz")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install dynswap-ext\[plot\]"):
        gradient_flow(model(1)).plot(tmp_path / "flow.png")
    assert not list(tmp_path.iterdir())
