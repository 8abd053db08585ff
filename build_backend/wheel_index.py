"""Write an index of the wheels in a folder: static files in its folder simple, which pip takes as an index.

    python build_backend/wheel_index.py dist                   # links to the wheels in dist
    python build_backend/wheel_index.py dist --files https://github.com/OWNER/NAME/releases/download

With `--files` a link is to the wheel's path below that address: dist/v0.2.0/some.whl has to be there as
v0.2.0/some.whl. The metadata of each wheel is written next to it, and has to be next to it at the address,
too: pip reads it to choose a wheel. The format of the index:
https://packaging.python.org/en/latest/specifications/simple-repository-api/. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import html
import os
import re
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from urllib.parse import quote

PAGE = """<!DOCTYPE html>
<html>
<head><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>
<body>
{links}
</body>
</html>
"""


def main(arguments: list[str]) -> int:
    """Write the pages, and the metadata next to each wheel. Return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", metavar="URL", help="where the wheels are; default: in the folder")
    options = parser.parse_args(arguments)
    wheels = sorted(options.folder.rglob("*.whl"))
    if not wheels:
        parser.error(f"there is no wheel in {options.folder}; make wheel builds one")

    projects = defaultdict(list)
    for wheel in wheels:
        projects[re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()].append(wheel)
    for project, files in projects.items():
        page = options.folder / "simple" / project / "index.html"
        links = [link(wheel, options.files, options.folder, page.parent) for wheel in files]
        write(page, project, links)
    write(
        options.folder / "simple" / "index.html",
        "Packages",
        [f'<a href="{name}/">{name}</a><br>' for name in sorted(projects)],
    )
    return 0


def link(wheel: Path, files: str | None, folder: Path, page: Path) -> str:
    """Return the HTML link to a wheel, with its checksum and required Python, and write its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        metadata = archive.read(name)
    wheel.with_name(f"{wheel.name}.metadata").write_bytes(metadata)
    python = email.parser.BytesHeaderParser().parsebytes(metadata)["Requires-Python"] or ""
    path = quote((wheel.relative_to(folder) if files else Path(os.path.relpath(wheel, page))).as_posix())
    address = f"{files.rstrip('/')}/{path}" if files else path
    attributes = {
        "href": f"{address}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}",
        "data-requires-python": python,
        "data-core-metadata": f"sha256={hashlib.sha256(metadata).hexdigest()}",
    }
    text = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items() if value)
    return f"<a {text}>{wheel.name}</a><br>"


def write(page: Path, title: str, links: list[str]) -> None:
    """Write an HTML page of links, one on each line."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(PAGE.format(title=title, links="\n".join(links)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
