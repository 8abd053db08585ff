"""GGUF files that are not what they should be: each error names the file, the key and the remedy."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from sample_checkpoints import SAMPLES, refused
from sample_gguf import array_of_strings, number, raw_header

import children
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.errors import SourceError

KEY = struct.pack("<Q", 1) + b"k"


def _refused(path: Path, content: bytes, pattern: str) -> None:
    path.write_bytes(content)
    refused(path, pattern)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.gguf"


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return SAMPLES["gguf"](tmp_path).opened.read_bytes()


def test_cut_anywhere(path: Path, whole: bytes) -> None:
    for length in range(4, len(whole) - 16, 3):  # the last bytes are padding
        _refused(path, whole[:length], "cut.*download or copy it again")


def test_cut_within_a_tensor(path: Path, whole: bytes) -> None:
    _refused(path, whole[:-32], r"cut short: a\.bias of shape \[4\] needs [\d,]+ bytes, the file has [\d,]+")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"GGUF", "cut short: the header of a GGUF file"),
        (raw_header(version=1), "version 1, 2 and 3 are read here.*convert"),
        (raw_header(version=9), "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian.*gguf-convert-endian"),
        (raw_header(counts=(1 << 62, 0)), "declares 4,611,686,018,427,387,904 tensors"),
        (raw_header(counts=(0, 1 << 62)), "damaged.*4,611,686,018,427,387,904 key-values"),
        (raw_header(counts=(0, 1)), "damaged or cut"),
        (raw_header([], [KEY + struct.pack("<I", 99)]), "damaged.*a value has the type 99"),
        (raw_header([], [struct.pack("<Q", 1 << 60) + b"k"]), "damaged.*has 1,152,921,504,606,846,976"),
        (raw_header([], [KEY + struct.pack("<IQ", 8, 1 << 60)]), "damaged.*has 1,152,921,504,606,846,976"),
        (raw_header([], [KEY + struct.pack("<IIQ", 9, 4, 1 << 25)]), "damaged"),
        (
            raw_header([], [KEY + struct.pack("<IIQ", 9, 8, 1 << 60)]),
            "damaged.*has 1,152,921,504,606,846,976",
        ),
        (raw_header([], [KEY + struct.pack("<IIQQ", 9, 8, 1 << 20, 1 << 60)]), "damaged"),
        (raw_header([], [KEY + struct.pack("<IIQ", 9, 9, 0)]), "damaged.*one of arrays"),
        (raw_header([], [number("k", 1), number("k", 2)]), "damaged.*k is there twice"),
        (raw_header([], [number("general.alignment", 3)]), "damaged.*power of two"),
        (raw_header([], [KEY + struct.pack("<IQ", 8, 2) + b"\xff\xff"]), "damaged.*UnicodeDecodeError"),
        (raw_header([("w", (1,), 99, 0)]), "damaged.*w has the type 99"),
        (raw_header([("w", (1,), 0, 0), ("w", (1,), 0, 32)]) + bytes(64), "w is listed twice"),
        (raw_header([("w", (8,), 0, 0), ("v", (8,), 0, 16)]) + bytes(64), "damaged.*w and v overlap"),
        (raw_header([("w", (8,), 0, 1 << 60)]) + bytes(64), "cut short: w"),
        (raw_header([("w", (8,), 0, (1 << 64) - 32)]) + bytes(64), "cut short: w"),
        (raw_header([], [KEY + struct.pack("<IQ", 8, 1 << 20)]), "damaged.*ends at"),
        (raw_header([("w", (1 << 25, 1 << 25), 0, 0)]) + bytes(64), "cut short: w"),
        (raw_header([("w", (1 << 63, 0), 0, 0)]) + bytes(64), "lists w with the shape"),
        (raw_header([("w", (1 << 32, 1 << 32), 12, 0)]) + bytes(64), "lists w with the shape"),
        (raw_header([("w", (1,) * 5, 0, 0)]) + bytes(64), "w has 5 dimensions"),
        (raw_header([("w", (100,), 12, 0)]) + bytes(64), r"lists w as Q4_K of shape \[100\].*blocks of 256"),
        (raw_header([("w", (), 12, 0)]) + bytes(144), r"lists w as Q4_K of shape \[\]"),
    ],
)
def test_damaged_header(content: bytes, pattern: str, path: Path) -> None:
    _refused(path, content, pattern)


def test_a_header_that_fits_by_itself(path: Path) -> None:
    """The header that the cases above damage is right as it is."""
    content = raw_header([("w", (2, 3), 0, 32)], [number("k", 5), array_of_strings("l", ["a"])])
    path.write_bytes(content + bytes(32) + torch.arange(6.0).numpy().tobytes())
    opened = open_checkpoint(path)
    assert opened["w"].tolist() == [[0, 1], [2, 3], [4, 5]] and opened.metadata == {"k": "5", "l": '["a"]'}


def test_blocks_that_are_not_decoded_are_named_when_they_are_asked_for(path: Path) -> None:
    content = raw_header([("v", (8,), 0, 0), ("w", (256, 2), 15, 32)])
    path.write_bytes(content + bytes(32 + 584))
    opened = open_checkpoint(path)
    assert opened.entries["w"].encoding == "Q8_K" and opened.entries["w"].nbytes == 584
    assert opened["v"].shape == (8,)
    with pytest.raises(SourceError, match=r"give w: .* type Q8_K .* only Q4_0, .*llama-quantize") as caught:
        opened["w"]
    assert str(path) in str(caught.value)


def test_the_package_is_not_there(path: Path, whole: bytes) -> None:
    script = (
        "import sys; sys.modules['gguf'] = None\n"
        "from pathlib import Path; from dynswap_ext.checkpoint.formats import open_checkpoint\n"
        "open_checkpoint(Path(sys.argv[1]))"
    )
    path.write_bytes(whole)
    run = children.run(script, path)
    assert f"SourceError: {path} is a GGUF file" in run.stderr
    assert "pip install dynswap-ext[gguf]" in run.stderr
