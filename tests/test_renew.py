"""Each record that README and docs cite can be made, and none is of too old a tree."""

from __future__ import annotations

import benchmark_scripts  # noqa: F401  (the folder that the next one is in)

import renew  # isort: skip


def test_each_record_that_is_cited_is_made_somewhere() -> None:
    cited = {age.record for age in renew.ages()}
    assert cited == set(renew.RUNS) | set(renew.ELSEWHERE)


def test_no_record_that_is_cited_is_too_old() -> None:
    assert [str(age) for age in renew.ages() if age.too_old] == []
