"""`handle.record()` and `handle.trace()`: the contents of the file, and its agreement with torch.profiler."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_recordings import FakeSession
from torch.profiler import ProfilerActivity, profile, record_function

from conftest import Provider
from dynswap_ext import ConfigError, DynswapWarning
from dynswap_ext._python import statistics as statistics_of_python
from dynswap_ext.profile.trace import as_trace
from sample_models import mlp

Event = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def own_lanes(trace: dict[str, Any]) -> dict[str, list[Event]]:
    """Return the spans of the package's process, by the name of their lane."""
    events = trace["traceEvents"]
    (process,) = (e["pid"] for e in events if e.get("args", {}).get("name") == "dynswap_ext")
    own = [event for event in events if event.get("pid") == process]
    names = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
    lanes: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in own:
        if event["ph"] == "X":
            lanes[names[event["tid"]]].append(event)
    return lanes


def assert_no_overlap(lane: list[Event]) -> None:
    for before, after in itertools.pairwise(lane):
        assert before["ts"] + before["dur"] <= after["ts"], (before, after)


def test_lanes_of_copies_waits_and_compute(provider: Provider, tmp_path: Path) -> None:
    model = mlp(features=512, layers=5)
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 512)
    model(x)
    before = handle.stats()
    with handle.record():
        for _ in range(2):
            model(x)
    after = handle.stats()
    model(x)  # not recorded
    handle.trace(tmp_path / "trace.json")
    trace = read(tmp_path / "trace.json")
    lanes = own_lanes(trace)
    assert {name.split(" ")[0] for name in lanes} == {"copy", "wait", "compute"}
    copies = [event for name, lane in lanes.items() if name.startswith("copy") for event in lane]
    # A copy that is under way when a recording begins or ends is in only one of the two.
    ahead = after.depth + 1 if provider.native else 0
    assert abs(len(copies) - (after.copies - before.copies)) <= ahead
    assert sum(event["args"]["bytes"] for event in copies) > 0
    for lane in lanes.values():
        assert_no_overlap(lane)
    (computing,) = (lane for name, lane in lanes.items() if name == "compute (MainThread)")
    used = {name for event in computing for name in event["args"]["weights"].split(", ")}
    assert used == {name for name, _ in model.named_parameters()}
    marks = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert marks == ["pass 1", "pass 2"]
    held = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert held and 0 < max(held) <= after.peak_bytes


def test_accesses_of_residents_are_seen(provider: Provider) -> None:
    model = mlp(features=64)
    handle = provider.install(model, dtype=torch.float64, budget="64MiB")
    x = provider.randn(2, 64)
    model(x)
    with handle.record():
        model(x)
    recording = handle._recorder.last
    assert list(recording.of("copy", "wait")) == []
    used = {name for span in recording.of("use") for name in recording.groups[span.group].names}
    assert used == {name for name, _ in model.named_parameters()}


def test_it_lines_up_with_the_profiler(provider: Provider, tmp_path: Path) -> None:
    """A marker around the recorded pass encloses it, and each layer's compute encloses its operator."""
    model = mlp(features=1024, layers=4)
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(8, 1024)
    model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(x)  # the profiler's own first time is slow
        with record_function("the recorded pass"), handle.record():
            model(x)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    handle.trace(tmp_path / "own.json.gz")
    handle.trace(tmp_path / "both.json", profiler=tmp_path / "torch.json")

    torch_trace, own, both = (read(tmp_path / name) for name in ("torch.json", "own.json.gz", "both.json"))
    assert own["baseTimeNanoseconds"] == torch_trace["baseTimeNanoseconds"] == both["baseTimeNanoseconds"]
    assert len(both["traceEvents"]) == len(own["traceEvents"]) + len(torch_trace["traceEvents"])
    for trace in (both, {"traceEvents": own["traceEvents"] + torch_trace["traceEvents"]}):
        (marker,) = (e for e in trace["traceEvents"] if e["name"] == "the recorded pass" and e["ph"] == "X")
        begin, end = marker["ts"], marker["ts"] + marker["dur"]
        lanes = own_lanes(trace)
        waits_and_compute = [
            event for name, lane in lanes.items() if not name.startswith("copy") for event in lane
        ]
        slack = 100  # microseconds, between two calibrations of one clock
        assert all(begin - slack <= e["ts"] and e["ts"] + e["dur"] <= end + slack for e in waits_and_compute)
        computing = lanes["compute (MainThread)"]
        products = [
            e
            for e in trace["traceEvents"]
            if e["name"] == "aten::addmm" and begin <= e["ts"] <= end and e["tid"] == marker["tid"]
        ]
        assert len(products) == 4
        if provider.native and provider.device.type != "cpu":
            continue  # on a device, spans are the device's time, but torch's events are the host's
        for layer, product in zip((0, 2, 4, 6), products, strict=True):
            middle = product["ts"] + product["dur"] / 2
            (during,) = (e for e in computing if e["ts"] <= middle <= e["ts"] + e["dur"])
            assert f"{layer}.bias" in during["args"]["weights"]


def test_a_trace_without_a_base_is_merged_too(tmp_path: Path) -> None:
    recording = FakeSession(5).recording()
    own = as_trace(recording, base_ns=0)
    first = min(event["ts"] for event in own["traceEvents"] if event["ph"] == "X")
    assert first == pytest.approx((10**18 + recording.spans[0].begin) / 1000)


def test_a_trace_of_another_time_is_warned_of(provider: Provider, tmp_path: Path) -> None:
    if provider.native:
        pytest.skip("the same code for both providers")
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(provider.randn(2, 16))
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    with handle.record():
        model(provider.randn(2, 16))
    with pytest.warns(DynswapWarning, match="nothing of the time that was recorded"):
        handle.trace(tmp_path / "both.json", profiler=tmp_path / "torch.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no list of traceEvents"),
        ("{}", "no list of"),
    ],
)
def test_what_is_no_trace_is_refused(
    provider: Provider, tmp_path: Path, content: str | None, message: str
) -> None:
    handle = provider.install(mlp(), dtype=torch.float64)
    with handle.record():
        pass
    if content is not None:
        (tmp_path / "torch.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        handle.trace(tmp_path / "both.json", profiler=tmp_path / "torch.json")
    assert not (tmp_path / "both.json").exists()


def test_nothing_recorded(provider: Provider, tmp_path: Path) -> None:
    handle = provider.install(mlp(), dtype=torch.float64)
    for write in (handle.trace, handle.plot):
        with pytest.raises(ConfigError, match=r"with handle\.record\(\):"):
            write(tmp_path / "trace.json")
        with handle.record(), pytest.raises(ConfigError, match="still running"):
            write(tmp_path / "trace.json")
        handle._recorder._last = None


def test_a_missing_folder_is_named(provider: Provider, tmp_path: Path) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    with handle.record():
        model(provider.randn(2, model[0].in_features))
    for write, what in ((handle.trace, "trace"), (handle.plot, "picture")):
        with pytest.raises(ConfigError, match=f"there is no folder .*nowhere for the {what} file"):
            write(tmp_path / "nowhere" / "file.png")


def test_a_second_recording_starts_afresh(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 16)

    def passes() -> int:
        return sum(1 for _ in handle._recorder.last.of("pass"))

    with handle.record():
        model(x)
        model(x)
        with handle.record():
            model(x)
        model(x)  # the outer recording was dropped when the inner one began
    assert passes() == 1
    with handle.record():
        model(x)
        model(x)
    assert passes() == 2


def test_it_ends_on_an_exception_and_after_an_uninstall(provider: Provider, tmp_path: Path) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError), handle.record():
        model(provider.randn(2, 16))
        raise ZeroDivisionError
    with handle.record():
        model(provider.randn(2, 16))
        handle.uninstall()
    handle.trace(tmp_path / "trace.json")
    lanes = own_lanes(read(tmp_path / "trace.json"))
    assert lanes["compute (MainThread)"]
    used = {name for e in lanes["compute (MainThread)"] for name in e["args"]["weights"].split(", ")}
    assert used == {name for name, _ in model.named_parameters()}


def test_each_thread_has_lanes(provider: Provider, tmp_path: Path) -> None:
    model = mlp(features=128)
    handle = provider.install(model, dtype=torch.float64)
    done = threading.Barrier(3)

    def work() -> None:
        with torch.no_grad():
            model(provider.randn(2, 128))
        done.wait(60)

    threads = [threading.Thread(target=work, name=f"consumer {i}") for i in range(2)]
    with handle.record():
        for thread in threads:
            thread.start()
        while done.n_waiting < 2:
            pass
    done.wait(60)
    for thread in threads:
        thread.join()
    handle.trace(tmp_path / "trace.json")
    lanes = own_lanes(read(tmp_path / "trace.json"))
    for i in range(2):
        used = {n for e in lanes[f"compute (consumer {i})"] for n in e["args"]["weights"].split(", ")}
        assert used == {name for name, _ in model.named_parameters()}


def test_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_of_python, "_MOST_SPANS", 20)
    model = mlp()
    provider = Provider("python", "python", torch.device("cpu"))
    handle = provider.install(model, dtype=torch.float64)
    with handle.record():
        for _ in range(3):
            model(provider.randn(2, 16))
    recording = handle._recorder.last
    # A pass is a mark, and a copy, a wait and a use for each of 6 weights.
    assert len(recording.spans) == 20 and recording.dropped == 3 * 19 - 20
    assert as_trace(recording)["dynswap_ext"]["dropped_spans"] == 37
    handle.uninstall()


def test_copies_at_one_time_are_in_lanes_of_their_own() -> None:
    session = FakeSession(20, passes=3, threads=3)  # each with a bus of its own
    trace = as_trace(session.recording(), base_ns=10**18)
    lanes = own_lanes(trace)
    assert {"copy", "copy 2", "copy 3"} <= set(lanes)
    by_start: dict[str, int] = defaultdict(int)
    for name, lane in lanes.items():
        assert_no_overlap(lane)
        by_start[name.split(" ")[0]] += len(lane)
    assert by_start["copy"] == sum(span[0] == "copy" for span in session.spans)
    assert by_start["compute"] == sum(span[0] == "use" for span in session.spans)
