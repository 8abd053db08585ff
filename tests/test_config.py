"""Bad input is refused with a message that says what was given and what is expected."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import dynswap_ext
from dynswap_ext import ConfigError, DynswapWarning, checkpoint, config, inspect, planning
from dynswap_ext._util import devices
from dynswap_ext._util.memory import format_bytes, free_bytes, parse_bytes, ram_limit
from dynswap_ext.config import HostBudget
from sample_models import mlp


@pytest.mark.parametrize(
    ("given_budget", "expected"),
    [
        (1, 1),
        (6_000_000_000, 6_000_000_000),
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("512 MB", 512_000_000),
        ("512MB", 512_000_000),
        ("1.5e9", 1_500_000_000),
        ("1.5KiB", 1536),
        ("100", 100),
        ("100 B", 100),
        ("2 TiB", 2 << 40),
        (1.5e9, 1_500_000_000),
        ("6G", 6 << 30),
        ("512m", 512 << 20),
        (0.5, 0.5),
        ("50%", 0.5),
        (" 1/4 ", 0.25),
        ("100%", 1.0),
        (1.0, 1.0),
    ],
)
def test_budgets(given_budget: Any, expected: float) -> None:
    parsed = parse_bytes(given_budget)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        0.0,
        -0.5,
        "0",
        "-6GiB",
        "6 apples",
        "GiB",
        "",
        "1.2.3",
        "0%",
        "150%",
        "3/2",
        "1/0",
        "%",
        1.5,
        2.0,
        "nan",
        "1e999",
        float("nan"),
        float("inf"),
        True,
        None,
        [6],
        b"6GiB",
    ],
)
def test_bad_budgets_name_the_accepted_forms(bad: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_bytes(bad)
    message = str(raised.value)
    assert message.startswith(f"budget is {bad!r}")
    for form in ("6GiB", "512 MB", "1.5e9", "fraction"):
        assert form in message
    assert ("Did you mean '1.5GiB'?" in message) is (bad == 1.5)


@given(st.integers(1, 1 << 50))
def test_an_integer_means_bytes_in_every_form(amount: int) -> None:
    assert parse_bytes(amount) == parse_bytes(str(amount)) == parse_bytes(f"{amount} B") == amount


@given(st.text())
def test_text_is_read_or_refused(text: str) -> None:
    try:
        amount = parse_bytes(text)
    except ConfigError:
        return
    assert amount >= 1 if isinstance(amount, int) else 0 < amount <= 1


@example(1)
@example(2)
@given(st.integers(0, 1 << 60))
def test_formatted_amounts_can_be_read_again(amount: int) -> None:
    text = format_bytes(amount)
    if amount:
        assert parse_bytes(text) == pytest.approx(amount, rel=1e-3, abs=1)


def test_a_fraction_is_one_of_the_free_memory() -> None:
    free = free_bytes(torch.device("cpu"))
    assert 1 << 20 < free < 1 << 50
    half = config.resolve(device="cpu", budget=0.5).budget.bytes
    assert half == pytest.approx(free / 2, rel=0.2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "nonsense"}, r"device is 'nonsense'.*available here: cpu"),
        ({"device": "meta"}, r"device is 'meta'.*available here: cpu.*FakeTensorMode\(allow_non_fake_inputs"),
        ({"device": "cuda:99"}, r"device is 'cuda:99'.*available here: cpu"),
        (
            {"device": "cuda:256"},
            r"device is 'cuda:256', whose index is too large.*'cuda:0'; available here: cpu",
        ),
        ({"device": "cpu:300"}, r"device is 'cpu:300'"),
        ({"device": 10**30}, r"device is 1000"),
        ({"device": []}, r"device is \[\]"),
        ({"device": True}, r"device is True"),
        ({"device": 1.5}, r"device is 1.5"),
        ({"dtype": torch.int8}, r"dtype is torch.int8; expected a floating dtype.*torch.bfloat16"),
        ({"dtype": torch.bool}, r"dtype is torch.bool"),
        ({"dtype": torch.complex64}, r"dtype is torch.complex64"),
        ({"dtype": "bfloat"}, r"dtype is 'bfloat'; expected bf16, fp16, fp32 or another floating dtype"),
        ({"dtype": "float8_e4m3fn"}, r"dtype is torch.float8_e4m3fn, in which torch's layers cannot compute"),
        ({"dtype": float}, r"dtype is <class 'float'>"),
        ({"prefetch": -1}, r"prefetch is -1; expected the number of groups"),
        ({"prefetch": 1.5}, r"prefetch is 1.5"),
        ({"prefetch": True}, r"prefetch is True"),
        ({"budget": "lots"}, r"budget is 'lots'; expected .*, or 'auto', or 'minimum'$"),
        ({"budget": "Minimun"}, r"Did you mean 'minimum'\?"),
        ({"budget": "atuo"}, r"Did you mean 'auto'\?"),
        ({"budget": -5}, r"budget is -5; expected"),
        ({"device": "6GiB"}, r"device is '6GiB'.*An amount of memory is a budget: budget='6GiB'"),
        ({"host_budget": "much"}, r"host_budget is 'much'; expected .*of the RAM.*'auto', or 'minimum'"),
        ({"host_budget": -1}, r"host_budget is -1; expected a number of bytes"),
        ({"host_budget": True}, r"host_budget is True; expected a number of bytes"),
        ({"host_budget": 10**400}, r"host_budget is 1000.*; expected a number of bytes"),
        ({"host_budget": 1024}, r"host_budget is 1 KiB, and the weights that are in RAM already.*at least"),
        ({"host_budget": "1.5"}, r"host_budget is '1.5', which is 1 byte; expected a size with its unit"),
        ({"provider": "cuda"}, r"provider is 'cuda'; expected one of auto, native, python"),
        ({"provider": "natve"}, r"expected one of auto, native, python. Did you mean 'native'\?"),
        ({"strict_budget": "no"}, r"strict_budget is 'no'; expected True or False"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], expected: str) -> None:
    model = mlp()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=expected):
        dynswap_ext.install(model, **{"device": "cpu", **options})
    assert [type(module) for module in model.modules()] == classes


class _FromPretrained:
    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> nn.Module:
        raise AssertionError("the dtype was not refused before")


_TAKE_A_DEVICE: dict[str, Callable[[Path, Any], object]] = {
    "load": lambda path, device: checkpoint.load(mlp, path, device=device),
    "measure": lambda path, device: planning.measure(mlp(), torch.zeros(1), device=device),
    "measure_machine": lambda path, device: planning.measure_machine(device),
    "memory_profile": lambda path, device: inspect.memory_profile(
        mlp(), input_data=torch.zeros(1), device=device
    ),
}
_TAKE_A_DTYPE: dict[str, Callable[[Path, Any], object]] = {
    "load": lambda path, dtype: checkpoint.load(mlp, path, dtype=dtype),
    "convert": lambda path, dtype: checkpoint.convert(path, path.with_name("new.safetensors"), dtype=dtype),
    "from_pretrained": lambda path, dtype: checkpoint.from_pretrained(_FromPretrained, path, dtype=dtype),
    "outline": lambda path, dtype: planning.outline(path, dtype=dtype),
    "outline_of_model": lambda path, dtype: planning.outline_of_model(mlp(), dtype=dtype),
    "measure": lambda path, dtype: planning.measure(mlp(), torch.zeros(1), device="cpu", dtype=dtype),
    "measure_machine": lambda path, dtype: planning.measure_machine("cpu", dtype=dtype),
}


@pytest.mark.parametrize("name", _TAKE_A_DEVICE)
@pytest.mark.parametrize("device", ["nonsense", "cuda:256", "cuda:99", 1.5], ids=str)
def test_other_functions_refuse_a_bad_device_as_install_does(name: str, device: Any, tmp_path: Path) -> None:
    checkpoint.save(mlp(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^device is {device!r}[^\n]*; available here: cpu"):
        _TAKE_A_DEVICE[name](tmp_path / "model.safetensors", device)


@pytest.mark.parametrize("name", _TAKE_A_DTYPE)
@pytest.mark.parametrize("dtype", ["nonsense", torch.int8, 3], ids=str)
def test_other_functions_refuse_a_bad_dtype_as_install_does(name: str, dtype: Any, tmp_path: Path) -> None:
    checkpoint.save(mlp(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^dtype is {dtype!r}; expected [^\n]*floating dtype"):
        _TAKE_A_DTYPE[name](tmp_path / "model.safetensors", dtype)


def test_defaults() -> None:
    options = config.resolve()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert options.device.type == (accelerator.type if accelerator else "cpu")
    assert options.device.type == "cpu" or options.device.index is not None
    assert (options.dtype, options.prefetch, options.budget.bytes) == (None, 2, None)
    assert options.host_budget.locked == int(0.8 * ram_limit())
    assert options.host_budget.copies < sys.maxsize
    assert 0 < options.host_budget.page_cache < 1 << 60
    assert not options.strict_budget


@pytest.mark.parametrize(("budget", "said"), [(1, "1, which is 1 byte."), ("6", "'6', which is 6 bytes.")])
def test_a_budget_of_hardly_any_bytes_gets_a_hint(budget: int | str, said: str) -> None:
    with pytest.warns(DynswapWarning, match=f"the budget is {said}.*'6GiB'.*1.0 or '100%' is all of it"):
        assert config.resolve(device="cpu", budget=budget).budget.bytes == int(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.resolve(device="cpu", budget=1024)
    with pytest.warns(DynswapWarning, match=f"activations is {said}.*'6GiB'"):
        config.resolve(device="cpu", activations=budget, activations_folder=tempfile.gettempdir())


def test_more_bytes_than_any_machine_has() -> None:
    options = config.resolve(
        device="cpu", host_budget="1e30", activations="1e30", activations_folder=tempfile.gettempdir()
    )
    assert options.budget.activations == options.host_budget.total == sys.maxsize


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "available_devices", lambda: ("cpu",))
    begins = r"^device is 'cuda'; available here: cpu\. This torch \(2.*"
    for built, said in ((False, "is built without CUDA; install one"), (True, "finds no driver or no GPU")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        with pytest.raises(ConfigError, match=begins + said):
            config.resolve(device="cuda")
    with pytest.raises(ConfigError, match=r"^device is 'xpu'; available here: cpu$"):
        config.resolve(device="xpu")


def test_names_in_other_forms() -> None:
    assert config.resolve(device="cpu", dtype="bf16").dtype == torch.bfloat16
    assert config.resolve(device="cpu", dtype="torch.float16").dtype == torch.float16
    assert config.resolve(device="cpu", budget="AUTO").budget.automatic
    least = config.resolve(device="cpu", budget=" Minimum ")
    assert least.budget == config.Budget(None)


def test_host_memory_is_bounded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "free_bytes", lambda device: 10 << 30)
    monkeypatch.setattr(config, "ram_limit", lambda: 64 << 30)
    for asked, bounds in {
        "auto": HostBudget(locked=int(0.8 * (64 << 30)), copies=5 << 30, page_cache=8 << 30),
        " Minimum ": HostBudget(page_locks=False, caches=False),
        "24GiB": HostBudget(24 << 30),
        0.25: HostBudget(16 << 30),
        2**64: HostBudget(sys.maxsize),
    }.items():
        assert config.resolve(device="cpu", host_budget=asked).host_budget == bounds


def test_what_the_free_ram_allows_where_it_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(device: torch.device) -> int:
        raise ConfigError("the free memory of 'cpu' cannot be told here")

    monkeypatch.setattr(config, "free_bytes", untold)
    bounds = config.resolve(device="cpu").host_budget
    assert (bounds.copies, bounds.page_cache) == (0, 0)


def test_errors_can_be_caught_as_what_they_are() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(dynswap_ext.BudgetError, ValueError)
    assert issubclass(dynswap_ext.SourceError, OSError)
    for name in ("ConfigError", "BudgetError", "SourceError", "DeviceError", "OutOfMemoryError"):
        assert issubclass(getattr(dynswap_ext, name), dynswap_ext.DynswapError)
        assert issubclass(getattr(dynswap_ext, name), RuntimeError)


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNSWAP_PROVIDER", "fast")
    with pytest.raises(ConfigError, match="DYNSWAP_PROVIDER is 'fast'; expected one of auto, native, python"):
        dynswap_ext.install(mlp(), device="cpu")


def test_the_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNSWAP_PROVIDER", "python")
    assert config.resolve().provider == "python"
    assert config.resolve(provider="native").provider == "native"
    monkeypatch.setenv("DYNSWAP_PROVIDER", " Native ")
    assert config.resolve().provider == "native"
    assert config.resolve(provider="python").provider == "python"
    monkeypatch.delenv("DYNSWAP_PROVIDER")
    assert config.resolve().provider == "auto"
