"""Damaged checkpoints of each format either open or end in a SourceError, in bounded time and memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sample_checkpoints import SAMPLES, Sample, look

from dynswap_ext.checkpoint.formats.safetensors_file import DTYPES

#: Bytes of address space that this process may take for a damaged sample of a few KB.
_ADDRESS_SPACE = 4 << 30

fuzzed = settings(
    max_examples=120,
    deadline=5000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Make large allocations fail: those of the sizes that a damaged file claims."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module", params=SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return SAMPLES[request.param](tmp_path_factory.mktemp(request.param))


@contextmanager
def _damaged(sample: Sample, content: bytes) -> Iterator[None]:
    whole = sample.damaged.read_bytes()
    sample.damaged.write_bytes(content)
    try:
        with _bounded_memory():
            yield
    finally:
        sample.damaged.write_bytes(whole)


def test_whole_samples_open(sample: Sample) -> None:
    opened = look(sample.opened)
    assert opened is not None and len(opened.entries) >= 2


@fuzzed
@given(data=st.data())
@pytest.mark.slow
def test_changed_bytes(sample: Sample, data: st.DataObject) -> None:
    content = bytearray(sample.damaged.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers are at the start, or in zip files at the end.
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(300, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'\0\xff"{}[]0-.'))
    with _damaged(sample, bytes(content)):
        look(sample.opened)


@fuzzed
@given(data=st.data())
@pytest.mark.slow
def test_cuts_and_insertions(sample: Sample, data: st.DataObject) -> None:
    content = sample.damaged.read_bytes()
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    filling = data.draw(st.binary(max_size=32) | st.just(content[begin:end] * 2))
    with _damaged(sample, content[:begin] + filling + content[end:]):
        look(sample.opened)


# ---- JSON --------------------------------------------------------------------------------------------------

_numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([-1, 0, 1, 3, 4, 12, 48, 60, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, True, None])
)
_values = st.recursive(
    _numbers | st.text(max_size=8) | st.sampled_from(["F32", "F4", "../x", "/x", "model.safetensors", "\0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*at, key))


def _put(value: Any, at: tuple[Any, ...], new: Any) -> None:
    for key in at[:-1]:
        value = value[key]
    value[at[-1]] = new


@fuzzed
@given(data=st.data())
def test_other_values_in_the_header_of_safetensors(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sample = SAMPLES["safetensors"](tmp_path_factory.mktemp("safetensors"))
    content = sample.opened.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        _put(header, data.draw(st.sampled_from(list(_places(header)))), data.draw(_values))
    text = json.dumps(header).encode()
    sample.opened.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with _bounded_memory():
        opened = look(sample.opened)
    if opened is not None:  # then the library has to open it too, and find the same
        with safe_open(sample.opened, "pt") as file:
            assert set(file.keys()) == set(opened.entries)
            for name, entry in opened.entries.items():
                listed = file.get_slice(name)
                assert tuple(listed.get_shape()) == entry.shape
                assert DTYPES[listed.get_dtype()] == entry.dtype


@fuzzed
@given(data=st.data())
def test_other_values_in_an_index(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    sample = SAMPLES["index"](tmp_path_factory.mktemp("index"))
    index = json.loads(sample.damaged.read_text())
    _put(index, data.draw(st.sampled_from(list(_places(index)))), data.draw(_values))
    sample.damaged.write_text(json.dumps(index))
    with _bounded_memory():
        look(sample.opened)
