"""Names of weights, written short."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def key_of(name: str) -> tuple[str | None, ...]:
    """What names have in common that differ in their numbers alone."""
    return tuple(None if word.isdecimal() else word for word in name.split("."))


def pattern_of(names: Sequence[str], most: int | None = None) -> str:
    """One name for names of one key, such as ``layers.{0..31}.weight``.

    Where numbers have more than `most` ranges, only the ends are named, as in ``layers.{0…31}.weight``.
    """
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_word(list(dict.fromkeys(column)), most) for column in columns)


def label_of(names: Sequence[str], most: int = 4) -> str:
    """One name for names that travel together, such as ``layers.0.{weight, bias}``."""
    if len(names) <= 1:
        return names[0] if names else "?"
    modules = [name.split(".")[:-1] for name in names]
    prefix = "".join(f"{word}." for word in common_words(modules))
    rest = [name.removeprefix(prefix) for name in names]
    more = [f"{len(rest) - most + 1} more"] if len(rest) > most else []
    return f"{prefix}{{{', '.join([*rest[: most - 1 if more else most], *more])}}}"


def common_words(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that all lists begin with."""
    alike = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))
    return [words[0] for words in alike]


def _word(words: list[str], most: int | None) -> str:
    if len(words) == 1:
        return words[0]
    numbers = sorted(int(word) for word in words)
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        ranges.append(f"{first}..{rest[-1]}" if rest else str(first))
    if most is not None and len(ranges) > most:
        ranges = [f"{numbers[0]}…{numbers[-1]}"]
    return "{" + ",".join(ranges) + "}"
