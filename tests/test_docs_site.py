"""The code that extends mkdocs finds all that the pages in docs/ and their navigation name."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_patterns_and_links_of_the_site(caplog: pytest.LogCaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    patterns = re.findall(r"^ +- (\S*\*\S*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    config = {"docs_dir": str(DOCS), "repo_url": "https://host/r/", "nav": [{"Project": patterns}]}
    hooks.on_config(config)
    (section,) = config["nav"]
    assert isinstance(section, dict)
    assert (
        set(section["Project"])
        == {page.relative_to(DOCS).as_posix() for pattern in patterns for page in DOCS.glob(pattern)}
        != set()
    )
    pointed = 0
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        for path in DOCS.rglob("*.md"):
            page = SimpleNamespace(file=SimpleNamespace(src_uri=path.relative_to(DOCS).as_posix()))
            shown = hooks.on_page_markdown(path.read_text(), page=page, config=config, files=None)
            pointed += shown.count("](https://host/r/blob/HEAD/")
    assert pointed > 50 and caplog.records == []
