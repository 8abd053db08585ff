"""`handle.report()` of a mixture of experts: one line for the experts of all layers, and why they stay."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from sample_recordings import FakeSession
from torch import nn

from conftest import PRETEND, Provider
from dynswap_ext._util.name_patterns import key_of, label_of_groups, pattern_of
from sample_experts import EXPERTS, WIDTH, Fused, Mixture, OneByOne, choices

DTYPE = None if PRETEND else torch.float64
LAYERS = 48


@pytest.mark.parametrize("experts", [Fused, OneByOne])
@pytest.mark.parametrize("part", [3, 24])
def test_experts_of_all_layers_share_a_line(
    provider: Provider, experts: Callable[[], nn.Module], part: int
) -> None:
    model = Mixture(experts, layers=LAYERS)
    whole = sum(parameter.nbytes for parameter in model.parameters()) * (1 if PRETEND else 2)
    options = {"budget": whole // part} if provider.native else {}
    handle = provider.install(model, dtype=DTYPE, **options)
    for _ in range(4):
        x = provider.randn(1, WIDTH, dtype=DTYPE or torch.float32)
        with torch.no_grad():
            model(x, choices(LAYERS, device=provider.device))
    report = handle.report()
    text = report.text(width=120)
    assert len(text.splitlines()) < 45
    if not provider.native:
        assert not any(row.by_use for row in report.rows)
        return
    used = [row for row in report.rows if row.by_use]
    assert len(used) == EXPERTS * LAYERS and not any(row.resident for row in used)
    (line,) = (line for line in text.splitlines() if "by\u00a0use," in line)
    assert re.search(rf" {EXPERTS * LAYERS} .* by\u00a0use,", line)
    (share,) = re.findall(r"by use: (\d+)% of the uses of", text)
    copies = sum(row.copies for row in used)
    assert int(share) == round(100 * (1 - copies / (4 * 2 * LAYERS)))
    assert (share == "75") == (part == 3)  # the same experts each time, so only the first pass copies them


def test_parts_of_a_weight_have_their_places_in_the_pattern() -> None:
    groups = [
        [f"layers.{layer}.experts.{name}[{i}]" for name in ("up", "down")]
        for layer in (0, 1)
        for i in (0, 1, 2)
    ]
    assert len({tuple(map(key_of, names)) for names in groups}) == 1
    assert pattern_of([names[0] for names in groups]) == "layers.{0..1}.experts.up[0..2]"
    assert label_of_groups(groups) == "layers.{0..1}.experts.{up[0..2], down[0..2]}"


@pytest.mark.parametrize("cause", ["bus-bound", "late prefetch", "not predicted", "arena full", "slot held"])
def test_without_prefetch_that_is_the_advice(cause: str) -> None:
    session = FakeSession(6)
    session.figures[2].update(causes={cause: 10**8}, misses=9)
    advised = [
        re.findall(r"(prefetch|budget)=", session.report(prefetch=ahead).diagnosis)[-1] for ahead in (0, 2)
    ]
    assert advised == [
        "budget" if cause == "slot held" else "prefetch",
        "prefetch" if cause == "late prefetch" else "budget",
    ]
    if cause != "slot held":
        assert session.report(prefetch=0).diagnosis.endswith("prefetch=2 would help")
