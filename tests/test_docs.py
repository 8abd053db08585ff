"""The contract's page names its tests, and states each result in one clause."""

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


def test_the_contract_says_each_result_in_one_clause() -> None:
    """Each result is a clause. More is in notes under the table, of which each is cited and exists."""
    page = (TESTS.parent / "docs" / "contract.md").read_text()
    sections = page.split("\n## ")[1:]
    cited_at_all = 0
    for section in sections:
        table = "\n".join(line for line in section.splitlines() if line.startswith("| "))
        cells = [cell.strip() for line in table.splitlines() for cell in line.split(" | ")]
        assert [cell for cell in cells if len(cell.split()) > 30] == []
        cited = set(re.findall(r" \((\d+)\)", table))
        assert cited == set(re.findall(r"^(\d+)\. ", section, re.MULTILINE)), section.splitlines()[0]
        cited_at_all += len(cited)
    assert len(sections) > 7 and cited_at_all > 15
