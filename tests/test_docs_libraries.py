"""The table of libraries names tests that exist, and all programs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "libraries.md").read_text()
NAMED = re.findall(r"`((?:programs/|contract/)?test_\w+\.py)(?:::(\w+))?`", PAGE)


def test_every_test_named_is_there() -> None:
    for file, function in NAMED:
        parsed = ast.parse((TESTS / file).read_text())
        functions = {node.name for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{file} has no {function}"


def test_every_row_names_a_test() -> None:
    table = PAGE.split("<!-- end -->")[1].split("## Other tools that move weights")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 15
    for row in rows:
        assert any(f"`{file}" in row for file, _ in NAMED), row


def test_the_table_of_other_tools_is_the_tests() -> None:
    parsed = ast.parse((TESTS / "programs" / "test_other_offloading.py").read_text())
    tested = {}
    for call in ast.walk(parsed):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Combination":
            name = tuple(ast.literal_eval(argument) for argument in call.args[:2])
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            tested[name] = ast.literal_eval(given["refused"]) if "refused" in given else True
    written = {}
    for row in PAGE.split("## Other tools that move weights")[1].splitlines():
        if row.startswith("| ") and "---" not in row and "library" not in row:
            library, feature, before, after, _ = (cell.strip() for cell in row.split("|")[1:-1])
            assert before == after
            written[library, feature] = before == "refused"
    assert tested and written == tested


def test_no_program_is_left_out() -> None:
    programs = {f"programs/{path.name}" for path in (TESTS / "programs").glob("test_*.py")}
    own = {"programs/test_demo_on_the_device.py"}
    assert programs - own == {file for file, _ in NAMED if file.startswith("programs/")}
