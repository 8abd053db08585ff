"""The safetensors format: headers that are refused, and odd ones that are not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sample_checkpoints import assert_same, refused, state, weights

from dynswap_ext.checkpoint.formats import file_mapping, open_checkpoint
from dynswap_ext.checkpoint.formats.safetensors_file import DTYPES
from dynswap_ext.testing import assert_bit_equal


def _write(path: Path, header: object, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_entries_are_where_the_library_put_them(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "w", metadata={"format": "pt", "ß": "ü"})
    checkpoint = open_checkpoint(tmp_path / "w")
    assert_same(weights(checkpoint), state())
    assert checkpoint.metadata == {"format": "pt", "ß": "ü"}
    content = (tmp_path / "w").read_bytes()
    for name, entry in checkpoint.entries.items():
        assert entry.offset is not None
        assert content[entry.offset : entry.offset + entry.nbytes] == state()[name].numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype).reshape(2, -1)
    save_file(
        {"a": torch.zeros(3), "b": values, "scalar": values[0, 0].clone(), "none": values[:0]}, tmp_path / "w"
    )
    opened = open_checkpoint(tmp_path / "w")
    for name, value in {"b": values, "scalar": values[0, 0], "none": values[:0]}.items():
        assert_bit_equal(opened[name], value)


HEADERS: dict[str, tuple[object, str]] = {
    "no JSON": (b"{not json", "damaged safetensors header"),
    "no UTF-8": (b'{"\xff": 1}', "utf-8"),
    "UTF-16": (b"{\0" + "}".encode("utf-16-le"), "damaged"),
    "deep": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "deep, and whole": (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "lists 'a'"),
    "a name twice": (
        b'{"weight":%b,"weight":%b}' % ((json.dumps(_tensor()).encode(),) * 2),
        "'weight' twice",
    ),
    "a field twice": (
        b'{"weight":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "'dtype' twice",
    ),
    "NaN": (b'{"weight":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "NaN"),
    "infinity": (b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', "Infinity"),
    "5,000 digits": (b'{"weight":{"dtype":"F32","shape":[%b]}}' % (b"9" * 5000), "damaged"),
    "overlap": (
        {"a": _tensor(), "weight": _tensor((1,), (4, 8))},
        "'weight' overlaps 'a'.*not.*several|gaps",
    ),
    "same bytes": ({"a": _tensor(), "weight": _tensor()}, "'weight' overlaps 'a'"),
    "gap before": ({"weight": _tensor((1,), (4, 8))}, "'weight' leaves 4 bytes unused after the header"),
    "gap behind": ({"weight": _tensor((1,), (0, 4))}, "4 bytes follow 'weight'"),
    "offsets and shape": ({"weight": _tensor(offsets=(0, 4))}, "weight.*disagree"),
    "a length below zero": ({"weight": _tensor((-1,), (4, 0))}, "weight.*length -1"),
    "past the end": ({"weight": _tensor((4,), (0, 16))}, "cut short.*needs"),
    "far past the end": ({"weight": _tensor((1 << 60,), (0, 1 << 62))}, "cut short"),
    "metadata a list": ({"__metadata__": [1], "weight": _tensor()}, "__metadata__.*object of text"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "weight": _tensor()}, "__metadata__.*object of text"),
    "half a surrogate": (b'{"\\ud800":%b}' % json.dumps(_tensor()).encode(), "surrogates"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_header(case: str, tmp_path: Path) -> None:
    header, pattern = HEADERS[case]
    path = _write(tmp_path / "model.safetensors", header)
    refused(path, pattern)
    refused(path, "download or copy it again")
    if case != "a name twice":  # of which the library takes the last
        with pytest.raises(SafetensorError):
            safe_open(path, "pt")


@pytest.mark.parametrize(
    "listing",
    [
        3,
        None,
        [],
        {},
        {"shape": [2], "data_offsets": [0, 8]},
        _tensor(dtype="F4"),
        _tensor(dtype="float32"),
        _tensor(dtype=None),
        _tensor(dtype=["F32"]),
        _tensor(2),
        _tensor("2"),
        _tensor({"2": 2}),
        _tensor([2.0]),
        _tensor([True, 2]),
        _tensor([-2]),
        _tensor([-1, -2]),
        _tensor(["2"]),
        _tensor([[2]]),
        _tensor([None]),
        _tensor([1 << 32, 1 << 32, 1 << 32]),
        _tensor([1 << 63, 0], [0, 0]),
        _tensor([1 << 62, 1 << 62, 0], [0, 0]),
        _tensor([3]),
        _tensor(offsets=[0]),
        _tensor(offsets=[0, 8, 16]),
        _tensor(offsets=8),
        _tensor(offsets=[0.0, 8.0]),
        _tensor(offsets=[False, 8]),
        _tensor(offsets=[-8, 0]),
        _tensor(offsets=[8, 0]),
        _tensor(offsets=["0", "8"]),
        _tensor(offsets=[1 << 70, (1 << 70) + 8]),
        _tensor("x" * 10_000),
    ],
    ids=repr,
)
def test_bad_listing(listing: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "w", {"weight": listing})
    refused(path, r"lists 'weight' as .*cannot be mapped.*download or copy it again|cut short")


def test_header_length_that_is_a_lie(tmp_path: Path) -> None:
    for length in (99, 1 << 20, (1 << 63) - 1, (1 << 64) - 1):
        (tmp_path / "w").write_bytes(length.to_bytes(8, "little") + b'{"a": 1}')
        refused(tmp_path / "w", "cut short" if length < 10**8 else "the format allows 100,000,000")


@pytest.mark.parametrize(
    "name", ["", " ", "a\0b", "../../x", "ß.weight", "\u202e", "\n", "__metadata", "x" * 5000]
)
def test_odd_names_are_names(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_write(tmp_path / "w", {name: _tensor()}))
    assert list(checkpoint) == [name] and checkpoint[name].shape == (2,)


def test_thousand_duplicates_are_found_at_once(tmp_path: Path) -> None:
    names = b",".join(b'"%d":1' % number for number in [*range(100_000), 99_999])
    refused(_write(tmp_path / "w", b"{%b}" % names), "'99999' twice")


def test_file_that_shrinks_between_header_and_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w"
    save_file({"a": torch.zeros(4096)}, path)
    mapped = file_mapping._mapped

    def shrink_first(*arguments: Any) -> Any:
        os.truncate(path, 4096)
        return mapped(*arguments)

    monkeypatch.setattr(file_mapping, "_mapped", shrink_first)
    refused(path, r"had 16.* KiB \(16\d+ bytes\) and has 4 KiB \(4096 bytes\) now.*nothing writes to it")


def test_file_that_is_replaced_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_file({"a": torch.ones(4096)}, path)
    checkpoint = open_checkpoint(path)
    save_file({"a": torch.zeros(4096)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert torch.equal(checkpoint["a"], torch.ones(4096))  # the file whose header was read
