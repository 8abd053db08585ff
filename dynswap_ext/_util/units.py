"""Sizes, shares, times, rates and dtypes as people write and read them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import torch

from dynswap_ext._util.memory import (
    AUTO,
    MINIMUM,
    format_bytes,
    is_named,
    parse_amount,
    parse_bytes,
    parse_fraction,
)
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext.errors import ConfigError

_TIMES: Final = {"min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_SHOWN_TIMES: Final = (("s", 1.0), ("ms", 1e-3))
_THROUGHPUTS: Final = {
    f"{prefix}flop{ending}": 1000.0**power
    for power, prefix in enumerate(("", *"kmgtp"))
    for ending in ("s", "/s", "ps")
}


def parse_size(text: str, names: Sequence[str] = ()) -> int:
    """Return the bytes of "1.5GB", "384MiB" or "1048576".

    `names` are words that the caller takes instead of a size. The ConfigError suggests the nearest one.
    """
    try:
        size = parse_bytes(text)
    except ConfigError:
        size = 0.0
    if isinstance(size, float):  # a fraction, or no amount at all
        hint = did_you_mean(text.strip().lower(), names)
        raise ConfigError(f"{text!r} is not a size; write one as 1.5GB or 384MiB{hint}")
    return size


def parse_share(given: float | str, whole: int) -> int:
    """Return the bytes of a share of a model of `whole` bytes: 0.25, "1/4" or "25%"."""
    share = parse_fraction(str(given))
    if share is None or not 0 < share <= 1:
        raise ConfigError(f"{given!r} is not a share of the model; write one as 0.25, 1/4 or 25%")
    return max(1, int(whole * share))


def parse_planned(text: str) -> int:
    """Return the bytes of a budget to plan for, which has to be a size.

    Raises ConfigError for a fraction (of the free memory of a device), for "auto" and for "minimum", because
    their bytes depend on the device or on the model.
    """
    if is_named(text, AUTO):
        raise ConfigError(
            f"the budget is {text!r}; expected a size such as 6GiB: what install(budget={text!r}) takes "
            "depends on the device's free memory and on the activations"
        )
    if is_named(text, MINIMUM):
        raise ConfigError(
            f"the budget is {text!r}; expected a size such as 6GiB. install(budget={text!r}) works for every "
            "model; `dynswap plan --budget minimum` tells how much it takes"
        )
    share = parse_fraction(text)
    if share is not None and (share < 1 or re.search("[%/]", text)):
        raise ConfigError(
            f"the budget is {text!r}; expected a size such as 6GiB. install(budget={text!r}) takes that "
            "share of the device's free memory; a share of the model is --share, in Python shares="
        )
    return parse_size(text, (MINIMUM,))


def parse_model_budget(size: str | None, share: str | None, whole: int) -> int | None:
    """Return the bytes of ``--budget`` or of ``--share``; None if neither is given, ConfigError if both are.

    `whole` is the bytes of the model that ``--share`` is a share of.
    """
    if size and share:
        raise ConfigError("--budget and --share are two ways to give one budget; leave out one of them")
    if share:
        return parse_share(share, whole)
    return parse_planned(size) if size else None


def parse_run_budget(size: str | None, share: str | None, whole: int, default: int) -> int | str:
    """Return the bytes of ``--budget`` or of ``--share``, or "minimum"; `default` if neither is given.

    `whole` is the bytes of the model that ``--share`` is a share of.
    """
    if share is None and is_named(size, MINIMUM):
        return MINIMUM
    return parse_model_budget(size, share, whole) or default


def show_budget(budget: int | str | None, *, automatic: bool = False) -> str:
    """Return a budget as text: "6 GiB", "auto (6 GiB)" if it is automatic, "minimum" if it has no amount."""
    amount = format_bytes(budget) if isinstance(budget, int) else MINIMUM
    return f"{AUTO} ({amount})" if automatic else amount


def show_rate(rate: float, unit: str) -> str:
    """Return a rate as text, with a decimal prefix: 25 GB/s."""
    power = min(5, max(0, int(math.log10(rate) // 3))) if rate > 0 else 0
    return f"{rate / 1000**power:.4g} {' kMGTP'[power].strip()}{unit}"


def show_seconds(seconds: float | None) -> str:
    """Return a time as text: 1.234 s, 12.3 ms or 4.5 us; "-" for None."""
    if seconds is None:
        return "-"
    unit, size = next((found for found in _SHOWN_TIMES if seconds >= found[1]), ("us", 1e-6))
    return f"{seconds / size:.4g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"


def show_ns(ns: int) -> str:
    """Return nanoseconds as text: 1.3 s, 12 ms or 830 us; "-" for 0."""
    return show_seconds(ns / 1e9 if ns > 0 else None)


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of "25GB/s", "900 MiB/s" or "26e9"."""
    amount = re.sub(r"\s*/\s*s(ec)?\s*$", "", text)
    try:
        rate = float(parse_size(amount))
    except ConfigError:
        rate = 0.0
    if rate < 1000:  # no bus is so slow: the unit is missing
        raise ConfigError(f"{text!r} is not a bandwidth; write one as 25GB/s, in bytes, not bits")
    return rate


def parse_throughput(text: str) -> float:
    """Return the floating-point operations per second of "300TFLOPS" or "1.2 PFLOP/s"."""
    rate = parse_amount(text, _THROUGHPUTS)
    if not rate > 0:
        raise ConfigError(f"{text!r} is not a throughput above zero; write one as 300TFLOPS")
    return rate


def parse_seconds(text: str) -> float:
    """Return the seconds of "350ms", "1.2s" or "7us"."""
    seconds = parse_amount(text, _TIMES)
    if not seconds >= 0:
        raise ConfigError(f"{text!r} is not a time; write one as 350ms or 1.2s")
    return seconds


def parse_dtype(text: str | None, option: str = "--dtype") -> torch.dtype | None:
    """Return the floating dtype of "bf16", "float16" or "torch.float8_e4m3fn"; None for None."""
    if text is None:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, short.get(text, text.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"{option} is {text!r}; expected bf16, fp16, fp32 or another floating dtype of torch"
        )
    return found
