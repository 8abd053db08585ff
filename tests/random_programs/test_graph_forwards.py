"""Random forwards under a compiler or an exporter: outputs of several calls, and the masters afterwards."""

from __future__ import annotations

import pytest

from conftest import PROVIDERS, Provider
from graph_forwards import HOW, judge
from seeds import seeds

#: Seeds that take some seconds each. Without Note [Lifted masters], exports with strict=False differ in them.
SHORT = (0, 5, 6, 7)
RECORDERS = [how for how in HOW if how != "eager"]


@pytest.mark.slow
@pytest.mark.parametrize("how", RECORDERS)
def test_as_a_moved_model(provider: Provider, how: str) -> None:
    if provider.device.type != "cpu":
        pytest.skip("compiles for minutes; the run on the CPU has it")
    verdicts = []
    for seed in seeds(SHORT, 1 / len(RECORDERS) / len(PROVIDERS)):
        verdicts.append(judge(seed, how, provider))
        assert not verdicts[-1].failure, f"{how}, {verdicts[-1].failure}"
    assert sum(each.compared for each in verdicts) >= len(verdicts) // 3, verdicts
