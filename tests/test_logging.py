"""Logging: off by default, on through `logging` or DYNSWAP_LOG, and never where weights are accessed."""

from __future__ import annotations

import _thread
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import children
import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, DynswapWarning, checkpoint
from dynswap_ext._util.warn import warn
from sample_models import mlp

LOGGER = "dynswap_ext"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unset DYNSWAP_LOG for a test, and restore the logger after it."""
    monkeypatch.delenv("DYNSWAP_LOG", raising=False)
    logger = logging.getLogger(LOGGER)
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_installs_plans_and_uninstalls(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    model = mlp(features=64)
    handle = provider.install(model, dtype=torch.float64, budget="64MiB")
    model(provider.randn(2, 64))
    handle.uninstall()
    chosen, installed, options, ended = messages(caplog)
    assert f"the {provider.backend} provider serves {provider.device}" in chosen
    stats = handle.stats()
    assert installed.startswith("installed Sequential in ")
    assert f"{stats.groups} groups of " in installed
    assert f"{stats.resident_groups} of them resident" in installed
    assert f"{handle.provider}/{handle.backend} on {provider.device}" in installed
    assert "prefetch=2" in options
    assert ended.startswith("uninstalled: ") and f"{stats.misses} misses" in ended


def test_a_new_plan(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(features=64)
    provider.install(model, dtype=torch.float64, budget="64MiB")
    model(provider.randn(2, 64))
    caplog.set_level(logging.INFO, LOGGER)
    model[0].weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float16))
    model(provider.randn(2, 64))
    model(provider.randn(2, 64))
    planned = [message for message in messages(caplog) if message.startswith("planned again Sequential")]
    assert 1 <= len(planned) <= 2


def test_what_replaced_what(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(features=64)
    provider.install(model, dtype=torch.float64, budget="64MiB")
    caplog.set_level(logging.INFO, LOGGER)
    part = provider.install(model[0], budget="32MiB")
    whole = provider.install(model, budget="minimum")
    partly, kept, wholly = (message for message in messages(caplog) if message.startswith("an install ("))
    assert "budget 32 MiB) replaces an earlier one (" in partly
    assert partly.endswith("dtype float64, budget 64 MiB) for a part of its modules")
    for message in (kept, wholly):
        assert "budget minimum) replaces an earlier one (" in message
        assert message.endswith(("budget 64 MiB)", "budget 32 MiB)"))
    assert sum(message.startswith("replaced by a later install: ") for message in messages(caplog)) == 2
    assert not part.active and whole.active


def test_warnings_are_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    provider = Provider("python", "python", torch.device("cpu"))
    model = mlp(features=64)
    handle = provider.install(model, dtype=torch.float64, budget="40KiB")
    with pytest.warns(DynswapWarning, match="budget of"):
        kept = [model[i].weight for i in (0, 2, 4)]
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert record.levelno == logging.WARNING and "0.weight" in record.getMessage()
    del kept
    handle.uninstall()


def test_a_thread_without_a_python_frame_can_warn(recwarn: pytest.WarningsRecorder) -> None:
    """A thread without a Python frame can warn, such as autograd's for backward on a device."""
    _thread.start_new_thread(warn, ("nobody is below",))
    end = time.monotonic() + 5
    while not recwarn.list and time.monotonic() < end:
        time.sleep(0.01)
    assert [str(each.message) for each in recwarn.list] == ["nobody is below"]


def test_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    checkpoint.load(mlp(), tmp_path / "model.safetensors")
    checkpoint.load(mlp(), tmp_path / "model.safetensors", dtype=torch.bfloat16)
    mapped, converted = messages(caplog)
    assert "model.safetensors into Sequential: 6 entries of safetensors, mapped, in " in mapped
    assert "converted" in converted


def test_accesses_are_not_logged(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    model = mlp()
    provider.install(model, dtype=torch.float64)
    before = len(caplog.records)
    for _ in range(3):
        model(provider.randn(2, 16))
    assert len(caplog.records) == before


def run(level: str | None, code: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "DYNSWAP_LOG"}
    if level is not None:
        environment["DYNSWAP_LOG"] = level
    install = (
        "import logging, torch, dynswap_ext\n"
        "model = torch.nn.Linear(4, 4)\n"
        "handle = dynswap_ext.install(model, device='cpu', provider='python', dtype=torch.float64)\n"
        "handle.uninstall()\n"
        "print(logging.root.handlers, logging.root.level)\n"
    )
    return children.run(install + code, env=environment)


def test_it_is_off_by_default() -> None:
    ended = run(None)
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout == "[] 30\n"


def test_the_environment_turns_it_on() -> None:
    debug, warning = run("DEBUG"), run("warning")
    assert debug.stdout == warning.stdout == "[] 30\n"  # the root logger is left to the program
    assert " dynswap_ext DEBUG: the python provider serves cpu" in debug.stderr
    assert " dynswap_ext INFO: installed Linear in " in debug.stderr
    assert " dynswap_ext INFO: uninstalled: " in debug.stderr
    assert warning.stderr == ""


def test_a_second_install_logs_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for level in ("info", "info", "off"):
        monkeypatch.setenv("DYNSWAP_LOG", level)
        dynswap_ext.install(mlp(), device="cpu", provider="python", dtype=torch.float64).uninstall()
        assert capsys.readouterr().err.count("installed Sequential") == (0 if level == "off" else 1)


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNSWAP_LOG", "loud")
    model = mlp()
    expected = "DYNSWAP_LOG is 'loud'; expected one of debug, info, warning, error, off"
    with pytest.raises(ConfigError, match=expected):
        dynswap_ext.install(model)
    assert not dynswap_ext.is_installed(model)
    with pytest.raises(ConfigError, match=expected):
        checkpoint.load(model, tmp_path / "there is none")
