"""Tables fit the terminal: a row is a line, figures are complete, long names are cut in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dynswap_ext import cli, inspect
from dynswap_ext._util.listing import listed
from dynswap_ext._util.tables import as_text, plain_table, shortened

LLAMA = "model.layers.{}.post_attention_layernorm.weight"
UNET = "down_blocks.{}.attentions.1.transformer_blocks.0.attn1.to_out.0.weight"
WIDTHS = (80, 100, 120, 200)


def nested(words: list[str], leaf: nn.Module) -> nn.Module:
    for word in reversed(words):
        parent = nn.Module()
        parent.add_module(word, leaf)
        leaf = parent
    return leaf


def checked(text: str, width: int) -> list[str]:
    lines = text.splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= width
    return lines


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [LLAMA, UNET])
def test_show(
    name: str, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    path = tmp_path / "model.safetensors"
    save_file({name.format(layer): torch.ones(1280, 3, layer + 1, 1) for layer in range(3)}, path)
    assert cli.main(["show", str(path)]) == 0
    lines = checked(capsys.readouterr().out, width)
    rows = [line for line in lines if "float32" in line and "dtypes" not in line]
    assert len(rows) == 3
    for layer, row in enumerate(rows):
        assert f"1280 x 3 x {layer + 1} x 1 " in row and row.split()[-1] == "KiB"
        shown = row.split()[0]
        head, _, tail = shown.partition("…")
        assert name.format(layer).startswith(head) and name.format(layer).endswith(tail)
        assert "…" not in shown or (width < 120 and head.endswith("."))
    assert any(line.startswith("smallest budget") for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_summary(width: int) -> None:
    words = UNET.format(0).split(".")[:-1]
    found = inspect.summary(nested(words, nn.Linear(1280, 1280)), depth=None)
    lines = checked(as_text(found, width=width), width)
    rows = lines[2 : 3 + len(words)]
    assert "1,639,680" in rows[-1] and "6.255 MiB" in rows[-1] and "0: Linear" in rows[-1]
    for word, row in zip(words, rows[1:], strict=True):
        assert row.split()[0] == f"{word}:"


def test_columns_that_do_not_fit_are_left_out_and_figures_are_whole() -> None:
    columns = ("name", "first", "second", "third")
    row = ("a" * 50, "123,456,789,012", "999.9 GiB", "[1, 320, 64, 64]")
    table = plain_table(columns, [row], right=("first", "second"), optional=("third", "first"))
    for width in range(35, 110):
        text = "\n".join(checked(as_text(table, width=width), width))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            assert (cell in text) == (column in text)
        assert "second" in text and "aaaa" in text and text.count("a") <= 51
    assert "third" in as_text(table, width=100) and "third" not in as_text(table, width=50)
    assert "first" in as_text(table, width=50) and "first" not in as_text(table, width=35)


@pytest.mark.parametrize("width", WIDTHS)
def test_plan(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({UNET.format(layer): torch.ones(64, 64) for layer in range(30)}, path)
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "resident" in text and "resi-" not in text
    checked(text, width)


@pytest.mark.parametrize("name", [LLAMA.format(3), UNET.format(0), "x" * 90, "a b", "blocks.{0..31}.weight"])
@pytest.mark.parametrize("width", range(12, 60, 7))
def test_a_name_keeps_its_ends(name: str, width: int) -> None:
    found = shortened(name, width)
    assert len(found) <= width
    head, dots, tail = found.partition("…")
    assert (found == name) if not dots else (name.startswith(head) and name.endswith(tail) and head and tail)


@pytest.mark.parametrize("width", range(12, 40))
def test_a_row_that_is_nested_deeply_gives_up_its_indent_first(width: int) -> None:
    found = shortened(" " * 20 + "up: Linear", width)
    assert found.lstrip() == "up: Linear" and len(found) <= width


def test_the_summary_of_deep_nesting_fits_a_narrow_terminal() -> None:
    found = inspect.summary(nested(["a"] * 20, nn.Linear(1, 1)), depth=None)
    assert "a: Linear" in checked(as_text(found, width=60), 60)[22]


def test_names_that_are_not_listed_are_counted() -> None:
    names = list("abcdefg")
    assert listed(names) == "a, b, c, d, e and 2 more" and listed(names, 7) == "a, b, c, d, e, f, g"
    assert listed(names, 5, lines=True).splitlines() == [*"abcde", "and 2 more"] and listed([]) == ""
