"""What the site adds to mkdocs: patterns in its navigation, and links to files outside docs/."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name in (
        "docs/index.md",
        *(f"docs/decisions/{name}.md" for name in ("002-b", "001-a")),
        "csrc/engine.h",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# A page\n")
    return tmp_path / "docs"


def test_a_pattern_stands_for_the_pages_that_match_it(hooks: Any, docs: Path) -> None:
    nav = [{"Home": "index.md"}, {"Project": ["absent*.md", "decisions/*.md", {"More": "index.md"}]}]
    config = {"docs_dir": str(docs), "nav": nav}
    hooks.on_config(config)
    pages = ["decisions/001-a.md", "decisions/002-b.md", {"More": "index.md"}]
    assert config["nav"] == [{"Home": "index.md"}, {"Project": pages}]


@pytest.mark.parametrize(
    ("given", "shown", "repository"),
    [
        ("[`core`](../csrc/engine.h#L3)", "`core`", None),
        (
            "[`core`](../csrc/engine.h#L3)",
            "[`core`](https://host/r/blob/HEAD/csrc/engine.h#L3)",
            "https://host/r/",
        ),
        ("![a chart](../csrc/engine.h)", "![a chart](../csrc/engine.h)", None),
        ("[a page](decisions/001-a.md)", "[a page](decisions/001-a.md)", None),
    ],
    ids=["text", "link", "an image is left", "a page is left"],
)
def test_links_to_files_of_the_repository(
    hooks: Any, docs: Path, given: str, shown: str, repository: str | None
) -> None:
    assert on_page(hooks, docs, given, repository) == f"see {shown}."


def test_a_link_to_no_file_is_warned_of(hooks: Any, docs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        on_page(hooks, docs, "[gone](../csrc/gone.h)", None)
        on_page(hooks, docs, "[here](../csrc/engine.h)", None)
    assert [record.getMessage() for record in caplog.records] == [
        "index.md links to ../csrc/gone.h, which is not there"
    ]


def on_page(hooks: Any, docs: Path, text: str, repository: str | None) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    config = {"docs_dir": str(docs), "repo_url": repository}
    shown: str = hooks.on_page_markdown(f"see {text}.", page=page, config=config, files=None)
    return shown
