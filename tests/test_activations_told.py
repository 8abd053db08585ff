"""`activations=` in reports, recordings and plans, where the host has how much room, and `"auto"`."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._host_memory import host_memory
from dynswap_ext._util.memory import share_of_saved
from dynswap_ext.errors import SourceError
from dynswap_ext.profile.recording import SAVED_TENSORS
from sample_activations import ACTIVATION, LAYERS, LIMIT, Stack, pair


def trained(model: Stack, moved: Stack, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        testing.assert_bit_equal(model.step(x), moved.step(x))


def test_the_report_says_what_left(provider: Provider) -> None:
    model, moved, x = pair(provider)
    handle = provider.offload(model, LIMIT)
    assert "activations:" not in str(handle.report())
    trained(model, moved, x, 2)
    report, stats = handle.report(), handle.stats()
    assert stats.saved_step_bytes >= (2 * LAYERS - 1) * ACTIVATION  # but for the input, which the caller has
    (row,) = [row for row in report.rows if row.names == (SAVED_TENSORS,)]
    assert row.hits + row.misses > LAYERS
    assert row.copies > 0
    assert row.bytes_moved == stats.restored_bytes
    assert row.source == ("file" if provider.device.type == "cpu" else "pinned RAM")
    text = str(report)
    assert "activations: a step saves " in text
    assert SAVED_TENSORS in text


def test_the_report_says_that_all_of_it_stays(provider: Provider) -> None:
    model, moved, x = pair(provider)
    handle = provider.offload(model, "1GiB")
    trained(model, moved, x, 2)
    assert "and all of it stays on the device" in str(handle.report())
    assert handle.report().diagnosis.startswith("no weight has to be moved") or provider.device.type != "cpu"


@pytest.mark.parametrize("host_budget", ["auto", "minimum"])
def test_the_bound_holds_from_the_first_step_on(provider: Provider, tmp_path: Path, host_budget: str) -> None:
    """But for the tensor that is being saved."""
    model, _, x = pair(provider)
    handle = provider.offload(model, 6 * ACTIVATION, host_budget=host_budget, activations_folder=tmp_path)
    for _ in range(3):
        model.step(x)
        assert handle.stats().saved_bytes <= 7 * ACTIVATION


def test_a_recording_has_their_copies(provider: Provider, tmp_path: Path) -> None:
    model, moved, x = pair(provider)
    handle = provider.offload(model, LIMIT, dtype=torch.float64)
    moved.double()
    x = x.double()
    for _ in range(2):
        model.step(x)
    before = handle.stats().offloaded_bytes
    with handle.record():
        model.step(x)
    taken = handle._recorder.last
    index = next(i for i, group in enumerate(taken.groups) if group.names == (SAVED_TENSORS,))
    assert sum(span.bytes for span in taken.of("copy") if span.group == index) > LAYERS * ACTIVATION
    assert {span.group for span in taken.spans} <= set(range(-1, len(taken.groups)))
    out = list(taken.of("copy out"))
    assert {span.group for span in out} == {index}
    assert all(span.end > span.begin >= taken.begin for span in out)
    assert sum(span.bytes for span in out) == handle.stats().offloaded_bytes - before
    assert 0 < max(span.saved_bytes for span in taken.of("use")) <= LIMIT + 2 * ACTIVATION  # one, in float64
    handle.plot(tmp_path / "timeline.png")
    handle.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "copy out" in lanes
    assert max(
        event["args"]["bytes"] for event in events if event["name"] == SAVED_TENSORS and event["ph"] == "C"
    )


@pytest.mark.parametrize("budget", ["1MiB", "minimum", "auto"])
def test_a_plan_is_made_from_passes_with_saved_tensors(provider: Provider, budget: str) -> None:
    model, moved, x = pair(provider)
    moved.double()
    x = x.double()
    handle = provider.offload(model, LIMIT, dtype=torch.float64, budget="1MiB")
    model.step(x)
    handle.retune(budget)
    for _ in range(6):
        model.step(x)
        moved.step(x)
        expected = [grad.float() for grad in moved.gradients()]
        testing.assert_bit_equal(model.gradients(), expected)
    assert handle.tuning is not None
    assert handle.stats().offloaded_bytes > 0


@pytest.mark.parametrize("folder", [False, True], ids=["pageable", "file"])
def test_what_no_page_locked_memory_takes(provider: Provider, folder: bool, tmp_path: Path) -> None:
    if not provider.native or provider.device.type == "cpu":
        pytest.skip("on the CPU they go to a file in any case")
    model, moved, x = pair(provider)
    options: dict[str, Any] = {"activations_folder": tmp_path} if folder else {}
    handle = provider.offload(model, LIMIT, host_budget="minimum", **options)
    if folder:
        trained(model, moved, x, 4)
    else:
        with pytest.warns(dynswap_ext.DynswapWarning, match="memory that is not page-locked"):
            trained(model, moved, x, 1)
        trained(model, moved, x, 2)  # it is said once
    report = handle.report()
    (row,) = [row for row in report.rows if row.names == (SAVED_TENSORS,)]
    assert row.source == ("file" if folder else "RAM")
    assert report.host is not None
    assert report.host.activations == 0


def no_room_for_files(model: Stack, provider: Provider) -> int:
    """Return a `host_budget` that has room only for the masters and for the staging buffers of a device."""
    return sum(p.nbytes for p in model.parameters()) + (0 if provider.device.type == "cpu" else 64 << 20)


@contextmanager
def no_file_grows() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("has", ["room", "ranges"])
@pytest.mark.parametrize("past", [False, True], ids=["cached", "past the page cache"])
def test_a_file_that_takes_no_more(provider: Provider, tmp_path: Path, past: bool, has: str) -> None:
    """A forward raises, names the folder, and nothing is lost: the next step is right."""
    if not provider.native:
        pytest.skip("pure Python refuses activations=")
    on_cpu = provider.device.type == "cpu"
    if not on_cpu and not past:
        pytest.skip("without this bound, nothing goes to the file of an accelerator's")
    model, moved, x = pair(provider)
    bound = no_room_for_files(model, provider) if past else "auto"
    handle = provider.offload(model, LIMIT, host_budget=bound, activations_folder=tmp_path)
    if has == "ranges":  # of the step before, so that writes fail and not what reserves space for them
        trained(model, moved, x, 2)
    error = rf"cannot write .* to a file in '{tmp_path}': File too large; make room there"
    with no_file_grows(), pytest.raises(SourceError, match=error):
        for _ in range(2):  # in the second forward at the latest: other threads write the file
            found = model.step(x)
            testing.assert_bit_equal(found, moved.step(x))
    trained(model, moved, x, 2)
    assert handle.stats().restored_bytes > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_has_what_its_file_did_not_take(
    provider: Provider, tmp_path: Path, use_reentrant: bool
) -> None:
    """It is told by the next forward; not by what a backward computes again."""
    if not provider.native:
        pytest.skip("pure Python refuses activations=")

    def checkpointed(of: Stack, x: Tensor) -> Tensor:
        for layer in of.layers:
            x = x + checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=use_reentrant)
        return x

    model, moved, x = pair(provider, checkpointed)
    x.requires_grad_()
    bound = no_room_for_files(model, provider)
    provider.offload(model, ACTIVATION, host_budget=bound, activations_folder=tmp_path)
    trained(model, moved, x, 2)
    told = 0
    with no_file_grows():
        for _ in range(4):
            model.zero_grad()
            try:
                loss = model(x).square().mean()
            except SourceError:
                told += 1
                continue
            loss.backward()
            testing.assert_bit_equal(model.gradients(), moved.step(x))
    assert told > 0


@pytest.mark.parametrize("bound", ["minimum", "no room"])
def test_a_file_goes_past_the_page_cache_that_has_no_room(
    provider: Provider, tmp_path: Path, bound: str
) -> None:
    """A `host_budget` that leaves none for it is kept; what is written is what is read."""
    if not provider.native:
        pytest.skip("pure Python refuses activations=")
    model, moved, x = pair(provider)
    options = {"host_budget": "minimum" if bound == "minimum" else no_room_for_files(model, provider)}
    handle = provider.offload(model, LIMIT, activations_folder=tmp_path, **options)
    trained(model, moved, x, 3)
    host = handle.report().host
    assert host is not None
    assert host.page_cache == 0
    assert handle.stats().restored_bytes > LAYERS * ACTIVATION


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux tells which files are open")
def test_the_file_goes_with_the_last_that_needs_it(provider: Provider, tmp_path: Path) -> None:
    model, moved, x = pair(provider)
    handle = provider.offload(
        model, LIMIT, host_budget=no_room_for_files(model, provider), activations_folder=tmp_path
    )

    def open_files() -> list[str]:
        found = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the one by which they are listed
                found.append(os.readlink(each))
        return [path for path in found if path.startswith(str(tmp_path))]

    trained(model, moved, x, 2)
    loss = model(x).square().mean()
    assert open_files()
    handle.uninstall()
    assert open_files()
    model.zero_grad()
    loss.backward()
    testing.assert_bit_equal(model.gradients(), moved.step(x))
    del loss
    assert not open_files()
    assert host_memory().page_cache == 0
    assert not handle.active


def test_an_install_ends_though_its_file_takes_no_more(provider: Provider, tmp_path: Path) -> None:
    if not provider.native or provider.device.type == "cpu":
        pytest.skip("on the CPU a tensor is in the file before it leaves")
    model, moved, x = pair(provider)
    handle = provider.offload(model, LIMIT, host_budget="minimum", activations_folder=tmp_path)
    loss = model(x).square().mean()  # some of what it saves is on its way
    with no_file_grows():
        handle.uninstall()
    loss.backward()
    testing.assert_bit_equal(model.gradients(), moved.step(x))


def test_page_locked_memory_is_counted_and_given_back(provider: Provider) -> None:
    if not provider.native or provider.device.type == "cpu":
        pytest.skip("on the CPU nothing is page-locked")
    model, _, x = pair(provider)
    handle = provider.offload(model, LIMIT)
    found: list[int] = []
    for _ in range(3):
        loss = model(x).square().mean()
        host = handle.report().host
        assert host is not None
        assert "of activations" in str(host)
        found.append(host.activations)
        loss.backward()
    assert found[0] >= LAYERS * ACTIVATION
    assert max(found) <= 1.5 * found[0], "what came back is let go of, as the device has done with it"
    handle.uninstall()
    assert host_memory().activations == 0


def test_a_bound_on_the_host_holds_for_them(provider: Provider, tmp_path: Path) -> None:
    if not provider.native or provider.device.type == "cpu":
        pytest.skip("on the CPU nothing is page-locked")
    model, moved, x = pair(provider)
    masters = sum(p.nbytes for p in model.parameters())
    bound = masters + (64 << 20) + 6 * ACTIVATION
    handle = provider.offload(model, LIMIT, host_budget=bound, activations_folder=tmp_path)
    loss = model(x).square().mean()
    host = handle.report().host
    assert host is not None
    assert 0 < host.activations <= 6 * ACTIVATION
    loss.backward()
    testing.assert_bit_equal(model.gradients(), moved.step(x))


def test_what_nobody_else_has_any_more_leaves_again(provider: Provider) -> None:
    """What somebody else has stays, and does not count; when he lets go of it, it leaves and counts."""
    model, moved, x = pair(provider)
    handle = provider.offload(model, "1KiB")
    kept: list[torch.Tensor] = []

    def keeping(module: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in module.layers:
            y = torch.tanh(layer(x))
            kept.append(y)
            x = x + y
        return x

    model.forward_of = keeping
    for _ in range(3):
        testing.assert_bit_equal(model.step(x), moved.step(x))
    while_kept = handle.stats().offloaded_bytes
    model.step(x)
    per_step = handle.stats().offloaded_bytes - while_kept
    model.forward_of = Stack.plain
    kept.clear()
    for _ in range(3):
        testing.assert_bit_equal(model.step(x), moved.step(x))
    before = handle.stats().offloaded_bytes
    testing.assert_bit_equal(model.step(x), moved.step(x))
    assert handle.stats().offloaded_bytes - before >= per_step + (LAYERS - 2) * ACTIVATION


@pytest.mark.parametrize(
    ("room", "weights", "saved", "expected"),
    [
        (100, 40, 50, 55),  # all fits, and 10 are left
        (105, 400, 400, 60),  # as much of both is away: 355 of weights, and 355 of saved tensors
        (100, 1000, 100, 6),  # weights take nearly all of it
        (100, 100, 1000, 94),  # and saved tensors
        (64, 0, 640, 60),
    ],
)
def test_shares_of_weights_and_saved_tensors(room: int, weights: int, saved: int, expected: int) -> None:
    assert share_of_saved(room, weights, saved) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_runs_again_in_backward_is_no_pass(provider: Provider, reentrant: bool) -> None:
    def forward(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
        return x

    model, _, x = pair(provider, forward)
    handle = provider.install(model, dtype=torch.float64, budget="auto")
    x = x.double().requires_grad_()
    for _ in range(3):
        model.step(x)
        assert handle.tuning is None
    model.step(x)
    assert handle.tuning is not None
    assert handle.tuning.passes in (0, 2)  # pure Python records none


def test_auto_measures_and_keeps_what_fits(provider: Provider, tmp_path: Path) -> None:
    model, moved, x = pair(provider)
    handle = provider.offload(model, "auto", dtype=torch.float64, budget="auto")
    moved.double()
    x = x.double()
    for _ in range(6):
        model.step(x)
        moved.step(x)
        testing.assert_bit_equal(model.gradients(), [grad.float() for grad in moved.gradients()])
    assert handle.tuning is not None
    before = handle.stats()
    model.step(x)
    assert handle.stats().offloaded_bytes == before.offloaded_bytes, "all of it fits"
    handle.save_plan(tmp_path / "plan.json")
    handle.uninstall()
    again = provider.offload(model, "auto", dtype=torch.float64, budget=None, plan=tmp_path / "plan.json")
    assert again.activations == handle.activations
    expected = [grad.float() for grad in moved.step(x)]
    testing.assert_bit_equal(model.step(x), expected)
    again.reset_stats()
    testing.assert_bit_equal(model.step(x), expected)
    assert again.stats().offloaded_bytes == 0
