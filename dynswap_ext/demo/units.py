"""Sizes, shares and times as people write and read them."""

from __future__ import annotations

from fractions import Fraction

from dynswap_ext._memory import format_bytes, parse_bytes
from dynswap_ext.errors import ConfigError


def parse_size(text: str) -> int:
    """Bytes of "1.5GB", "384MiB" or "1048576"."""
    try:
        return int(parse_bytes(text))
    except ConfigError:
        raise ConfigError(f"{text!r} is not a size; write one as 1.5GB or 384MiB") from None


def parse_share(text: str, whole: int) -> int:
    """Bytes of a size, or of a share of `whole` written as "1/4", "25%" or "0.25"."""
    number = text.strip().removesuffix("%")
    try:
        share = Fraction(number) / (100 if "%" in text else 1)
    except (ValueError, ZeroDivisionError):
        return parse_size(text)
    if share > 1:
        return parse_size(text)
    if share <= 0:
        raise ConfigError(f"{text!r} is not a share above zero; write one as 1/4 or 25%")
    return int(whole * share)


def show_bytes(size: float | None) -> str:
    """A size with a binary unit; a dash for None."""
    return "-" if size is None else format_bytes(round(size))


def show_seconds(seconds: float | None) -> str:
    """1.234 s, 12.3 ms; a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
