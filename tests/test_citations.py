"""Every cited invariant, note, page and link resolves.

An invariant is a heading of docs/architecture.md: ``### Invariant 1: name``. A note is defined once: a line
of a comment, a docstring or a page begins with its name, and then ends or goes on with a colon. Everywhere
else its name is a citation. A link to a source file names something in that file. A docstring or a ``///``
comment is read alone, as an editor shows it: it does not continue the one before it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "dynswap_ext", "tests", "benchmarks", "build_backend", "docs", "examples", ".github")
SUFFIXES = {".h", ".cpp", ".cu", ".py", ".pyi", ".md"}
ARCHITECTURE = Path("docs/architecture.md")
PROTECTIONS = Path("csrc/core/protection.h")

#: A blank, or the end of a line and the beginning of a comment on the next.
BLANK = r"(?:[ \t]+|[ \t]*\n[ \t]*(?:///?<?|#:?|\|)?[ \t]*)"
NOTE = re.compile(rf"\bNote{BLANK}\[([^\[\]]{{1,90}})\]")
DEFINED_NOTE = re.compile(
    r"^[ \t]*(?:///?[ \t]*|#+:?[ \t]*)?Note \[([^\[\]\n]+)\](?::|[ \t]*$)", re.MULTILINE
)
INVARIANT = re.compile(
    rf"\binvariants?{BLANK}(\d+(?:(?:,{BLANK}(?:and{BLANK})?|{BLANK}(?:and|or|to){BLANK})\d+)*)",
    re.IGNORECASE,
)
INVARIANT_HEADING = re.compile(r"^#+ Invariant (\d+): \S.*$", re.MULTILINE)
PAGE = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.md\b")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*([^()]*?)(?:\s+\"[^\"]*\")?\s*\)")
FENCED = re.compile(r"^([ \t]*)(```+|~~~+).*?^[ \t]*\2[ \t]*$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
QUALIFIED_NAME = re.compile(r"[A-Za-z_~]\w*(?:(?:::|\.)[A-Za-z_~]\w*)*(?:\(\))?")

#: The beginnings of a docstring or a ``///`` comment that continues the one before it.
LEANS = re.compile(
    r"(?:The )?[Ss]ame\b(?! \w+ as)|(?:Their|Its|Theirs|That|These|Both|Ditto|Likewise|Then|Also|See)\b"
    r"|As (?:above|before|it|they)\b|Of [a-z]",
)
DOC_COMMENT = re.compile(r"(?:^[ \t]*///(?!<)[^\n]*\n)+", re.MULTILINE)

Texts = Mapping[Path, str]


def _texts() -> dict[Path, str]:
    """Return the texts to search by their paths from the root, without this file, whose samples are wrong."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found = [path for path in (*paths, *ROOT.glob("*.md")) if path.suffix in SUFFIXES and path.is_file()]
    return {path.relative_to(ROOT): path.read_text() for path in found if path != Path(__file__).resolve()}


def _at(path: Path, text: str, offset: int) -> str:
    return f"{path}:{text.count(chr(10), 0, offset) + 1}"


def defined_notes(texts: Texts) -> dict[str, list[str]]:
    """Return where each note is defined."""
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        for match in DEFINED_NOTE.finditer(text):
            found.setdefault(match[1], []).append(_at(path, text, match.start(1)))
    return found


def problems_of_notes(texts: Texts) -> Iterator[str]:
    """Yield notes that are defined more than once, and citations of notes that are not defined."""
    defined = defined_notes(texts)
    for name, places in defined.items():
        if len(places) > 1:
            yield f"Note [{name}] is defined {len(places)} times: {', '.join(places)}"
    for path, text in texts.items():
        for match in NOTE.finditer(text):
            name = re.sub(BLANK, " ", match[1])
            if name not in defined:
                yield f"{_at(path, text, match.start())}: Note [{name}] is not defined"


def defined_invariants(page: str) -> list[int]:
    return [int(number) for number in INVARIANT_HEADING.findall(page)]


def cited_invariants(text: str) -> Iterator[tuple[int, int]]:
    """Yield the offset and the number of each citation."""
    for match in INVARIANT.finditer(text):
        for number in re.finditer(r"\d+", match[1]):
            yield match.start(), int(number[0])


def problems_of_invariants(texts: Texts) -> Iterator[str]:
    """Yield invariants that are not numbered from 1 on, and citations of missing ones."""
    defined = defined_invariants(texts[ARCHITECTURE])
    if defined != list(range(1, len(defined) + 1)):
        yield f"{ARCHITECTURE}: the invariants are numbered {defined}"
    for path, text in texts.items():
        for offset, number in cited_invariants(text):
            if number not in defined:
                yield f"{_at(path, text, offset)}: there is no invariant {number}"


def problems_of_pages(texts: Texts) -> Iterator[str]:
    """Yield pages in docs/ that code names and that do not exist."""
    for path, text in texts.items():
        for match in PAGE.finditer(text):
            if path.suffix != ".md" and Path(match[0]) not in texts:
                yield f"{_at(path, text, match.start())}: there is no {match[0]}"


def _masked(page: str) -> str:
    """Return a page without its code blocks, and with code spans changed so that they have no links."""
    page = FENCED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page)
    return CODE_SPAN.sub(lambda match: re.sub(r"[\[\]()]", "_", match[0]), page)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    made = set()
    for heading in HEADING.findall(FENCED.sub("", page)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


def _names_missing(label: str, target: Path) -> str:
    """Return the names in a link's text that its target does not have."""
    code = re.fullmatch(r"`([^`]+)`", label)
    if code is None or not target.is_file() or target.suffix == ".md":
        return ""
    name = code[1]
    if "/" in name or Path(name).suffix in SUFFIXES:
        return "" if f"/{target}".endswith(f"/{name}") else name
    text = target.read_text()
    if QUALIFIED_NAME.fullmatch(name):
        parts = re.findall(r"\w+", name)
        return next((part for part in parts if not re.search(rf"\b{part}\b", text)), "")
    return "" if name in text else name


def problems_of_links(pages: Texts, root: Path) -> Iterator[str]:
    """Yield relative links whose file, anchor or name in the file does not exist."""
    for path, page in pages.items():
        for match in LINK.finditer(_masked(page)):
            label, target = page[match.start(1) : match.end(1)], match[2]
            where = f"{_at(path, page, match.start())}: {target}"
            if re.match(r"[a-z]+:", target):
                continue
            if not target:
                yield f"{where}is empty"
                continue
            file, _, anchor = target.partition("#")
            to = (root / path.parent / file).resolve() if file else (root / path).resolve()
            if not to.exists():
                yield f"{where} is not there"
            elif anchor and (to.suffix != ".md" or anchor not in anchors(to.read_text())):
                yield f"{where} has no heading {anchor}"
            elif missing := _names_missing(label, to):
                yield f"{where} has no {missing}"


def _pages(texts: Texts) -> dict[Path, str]:
    return {path: text for path, text in texts.items() if path.suffix == ".md" and path.parts[0] != "tests"}


def docs(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of Python, and of each ``///`` comment of C++."""
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    elif path.suffix in (".h", ".cpp", ".cu"):
        for match in DOC_COMMENT.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match[0].replace("///", "").strip()


def protections(header: str) -> list[str]:
    """Return the names in `enum class Protection`, without the first and last, which are no protections."""
    body = header[header.index("enum class Protection") :]
    names = re.findall(r"^  (\w+),? ", body[: body.index("};")], re.MULTILINE)
    return [name for name in names if name not in ("none", "count")]


def test_notes_resolve() -> None:
    texts = _texts()
    assert len(defined_notes(texts)) > 40
    assert list(problems_of_notes(texts)) == []


def test_invariants_resolve() -> None:
    texts = _texts()
    assert sum(len(list(cited_invariants(text))) for text in texts.values()) > 30
    assert len(defined_invariants(texts[ARCHITECTURE])) >= 11
    assert list(problems_of_invariants(texts)) == []


def test_pages_that_code_names_are_there() -> None:
    assert list(problems_of_pages(_texts())) == []


def test_links_resolve() -> None:
    pages = _pages(_texts())
    assert sum(len(LINK.findall(_masked(page))) for page in pages.values()) > 100
    assert list(problems_of_links(pages, ROOT)) == []


def test_every_protection_is_in_the_architecture() -> None:
    texts = _texts()
    names = protections(texts[PROTECTIONS])
    assert len(names) > 30
    page = texts[ARCHITECTURE]
    assert [name for name in names if f"[`PROTECTED({name})`](" not in page] == []


def test_every_docstring_stands_alone() -> None:
    texts = _texts()
    product = [path for path in texts if path.parts[0] in ("csrc", "dynswap_ext")]
    found = [(f"{path}:{line}", doc) for path in product for line, doc in docs(path, texts[path])]
    assert len(found) > 1500
    assert [where + ": " + doc[:40] for where, doc in found if LEANS.match(doc)] == []
