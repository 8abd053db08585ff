"""Short labels for the names of several weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Final

#: A dot between two words of a name, and not one of the dots in ``{0..31}`` or ``[0..31]``.
_DOT: Final = re.compile(r"\.(?![^{}\[\]]*[\]}])")
#: The number of a slice of a weight, as in ``experts.down_proj[3]``.
_PLACE: Final = re.compile(r"\[(\d+)\]$")


def key_of(name: str) -> tuple[str | None, ...]:
    """Return a key that is the same for names that differ only in their numbers."""
    return tuple(None if word.isdecimal() else _PLACE.sub("[]", word) for word in name.split("."))


def pattern_of(names: Sequence[str], most: int | None = None) -> str:
    """Return one pattern for names that differ only in their numbers, such as ``layers.{0..31}.weight``.

    Numbers that form more than `most` ranges are written as the first and the last: ``layers.{0…31}.weight``.
    """
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_word(list(dict.fromkeys(column)), most) for column in columns)


def label_of(names: Sequence[str], each: bool = False) -> str:
    """Return one label for weights that travel together: ``layers.0.mlp (up_proj … down_proj), 3 weights``.

    The names are in the order of use, and the label has the first and the last module. `each`: the names are
    patterns that stand for several groups, so the label ends in "3 weights each".
    """
    if len(names) <= 1:
        return names[0] if names else "?"
    owners = list(dict.fromkeys(map(_owner, names)))
    if len(owners) == 1 and len(names) == 2:
        first, second = (_DOT.split(name)[-1] for name in names)
        return f"{owners[0]}{'.' if owners[0] else ''}{{{first}, {second}}}"
    count = f"{len(names)} weights{' each' if each else ''}"
    shared = common_words([_DOT.split(owner) for owner in owners])
    rest = [".".join(_DOT.split(owner)[len(shared) :]) for owner in owners]
    prefix = ".".join(shared)
    if len(owners) == 1:
        return f"{prefix or 'the model'}, {count}"
    among = ", ".join(rest) if len(rest) == 2 else f"{rest[0]} … {rest[-1]}"
    return f"{prefix} ({among}), {count}" if prefix else f"{among}, {count}"


def label_of_groups(groups: Sequence[Sequence[str]]) -> str:
    """Return one label for several groups of weights, in the order of use.

    The names of the weights of one group differ from those of another only in their numbers.
    """
    if len(groups) == 1:
        return label_of(groups[0])
    patterns = [pattern_of(names, most=3) for names in zip(*groups, strict=True)]
    shared = common_words([_DOT.split(_owner(pattern)) for pattern in patterns])
    if len(patterns) == 1 or any("{" in word for word in shared):
        return label_of(patterns, each=True)
    # The groups do not match layers: they have weights of consecutive modules.
    first, last = (_owner(name) for name in (groups[0][0], groups[-1][-1]))
    return f"{first} … {last}, {len(patterns)} weights each"


def common_words(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that all lists begin with."""
    alike = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))
    return [words[0] for words in alike]


def wrapped(label: str, width: int) -> str:
    """Break a label into lines of at most `width`: at spaces and dots, in longer words at underscores."""
    lines = [""]
    for part in re.findall(r"[^ .]*[ .]|[^ .]+", label):
        pieces = [part] if len(part.rstrip()) <= width else re.findall(rf"[^_]{{1,{width - 1}}}_?|_", part)
        for piece in pieces:
            if len(lines[-1]) + len(piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines if line)


def _owner(name: str) -> str:
    return ".".join(_DOT.split(name)[:-1])


def _word(words: list[str], most: int | None) -> str:
    if len(words) == 1:
        return words[0]
    if place := _PLACE.search(words[0]):
        numbers_of_parts = [word[place.start() + 1 : -1] for word in words]
        return f"{words[0][: place.start()]}[{_word(numbers_of_parts, most).strip('{}')}]"
    numbers = sorted(int(word) for word in words)
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        ranges.append(f"{first}..{rest[-1]}" if rest else str(first))
    if most is not None and len(ranges) > most:
        ranges = [f"{numbers[0]}…{numbers[-1]}"]
    return "{" + ",".join(ranges) + "}"
