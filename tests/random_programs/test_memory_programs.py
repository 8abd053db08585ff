"""Random programs under a cap on memory: if one runs with the minimum, it runs with an automatic budget."""

from __future__ import annotations

import warnings

import pytest

import pretend_cuda
from gpu_under_test import only_pretended_cuda
from memory_programs import judge
from seeds import SECONDS, seeds

pytestmark = [only_pretended_cuda, pytest.mark.usefixtures("gives_way")]

#: Seeds of programs. In most of them, weights that stay on the device (residents) have to give way.
SHORT = (1, 2, 0, 5, 17, 27, 30, 34, 35, 40, 41, 43)


def test_what_runs_with_the_minimum_runs_with_an_automatic_budget() -> None:
    verdicts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds(SHORT):
            verdicts.append(judge(seed))
            assert not verdicts[-1].failure, f"seed {seed}: {verdicts[-1]}"
    pretend_cuda.reset()
    if len(verdicts) >= len(SHORT):
        assert sum(each.minimum_ran for each in verdicts) > len(verdicts) // 2
        assert sum(each.gave_way > 0 for each in verdicts) > len(verdicts) // (8 if SECONDS else 2)
