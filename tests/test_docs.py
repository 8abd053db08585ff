"""The contract's page names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_contract_names_tests_that_there_are() -> None:
    page = (TESTS.parent / "docs" / "contract.md").read_text()
    named = set(re.findall(r"`((?:contract/|checkpoint/)?test_\w+\.py)`", page))
    assert len(named) > 20
    assert sorted(name for name in named if not (TESTS / name).exists()) == []


def test_every_test_of_the_contract_is_named() -> None:
    page = (TESTS.parent / "docs" / "contract.md").read_text()
    missing = [path.name for path in (TESTS / "contract").glob("test_*.py") if path.name not in page]
    assert sorted(missing) == []
