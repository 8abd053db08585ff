"""Hooks of mkdocs: patterns in the navigation, and links from a page to files of the repository.

In `nav`, a pattern of file names is replaced by the pages that match it, in their order. A link to a file
outside docs/ works where the repository is browsed. The site has no such page: it links to `repo_url`, if
mkdocs.yml has one, else it shows the link's text. A file that is not there is a warning, which `strict` makes
an error.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("mkdocs.hooks.site_hooks")  # mkdocs counts warnings of loggers below its own
_OUTSIDE = re.compile(
    r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?(?P<title> \"[^\"]*\")?\)"
)


def on_config(config: Any) -> None:
    """Expand the patterns of the navigation."""
    config["nav"] = _expanded(config["nav"], Path(config["docs_dir"]))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Check the links of a page to files outside docs/, and point them to the repository."""
    docs = Path(config["docs_dir"])
    source = docs / page.file.src_uri
    repository = (config["repo_url"] or "").rstrip("/")

    def pointed(link: re.Match[str]) -> str:
        target = (source.parent / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.is_relative_to(docs.parent):
            return link[0]  # mkdocs looks at it
        if not target.exists():
            _log.warning("%s links to %s, which is not there", page.file.src_uri, link["path"])
        if not repository:
            return link["text"]
        path = f"{target.relative_to(docs.parent)}{link['anchor'] or ''}"
        return f"[{link['text']}]({repository}/blob/HEAD/{path})"

    return _OUTSIDE.sub(pointed, markdown)


def _expanded(entries: list[Any], folder: Path) -> list[Any]:
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            expanded += [page.relative_to(folder).as_posix() for page in sorted(folder.glob(entry))]
        elif isinstance(entry, dict):
            expanded.append({title: _section(value, folder) for title, value in entry.items()})
        else:
            expanded.append(entry)
    return expanded


def _section(value: Any, folder: Path) -> Any:
    return _expanded(value, folder) if isinstance(value, list) else value
