"""Says how a checkpoint's keys differ from a model's, all at once and with what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

#: Keys of one kind that an error lists before it only counts them.
_LISTED = 10
#: difflib compares each pair; past this many candidates a guess costs more than it is worth.
_CANDIDATES = 4000


@dataclass(frozen=True)
class KeyReport:
    """The differences between a model's state dict and a file's entries.

    ``bool(report)`` is True when there are any.
    """

    path: Path
    missing: tuple[str, ...]  # in the model alone
    unexpected: tuple[str, ...]  # in the file alone
    mismatched: tuple[str, ...]  # sentences: the name, and both shapes or dtypes

    @classmethod
    def compare(cls, own: dict[str, Any], given: dict[str, Any], path: Path) -> KeyReport:
        """Compares by name, shape and kind of dtype."""
        mismatched = [
            sentence
            for name, tensor in own.items()
            if name in given and (sentence := _mismatch(name, tensor, given[name]))
        ]
        return cls(
            path=path,
            missing=tuple(name for name in own if name not in given),
            unexpected=tuple(name for name in given if name not in own),
            mismatched=tuple(mismatched),
        )

    def only(self, *, missing: Iterable[str], unexpected: Iterable[str]) -> KeyReport:
        """The report with the lists that load_state_dict made."""
        return replace(self, missing=tuple(missing), unexpected=tuple(unexpected))

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def text(self, strict: bool) -> str:
        """The whole report as a message for a person; `strict` as in `load`."""
        lines = [f"{self.path} does not fit the model:"]
        lines += _listing("mismatched", self.mismatched)
        lines += _listing("missing (in the model, not in the file)", self._with_guesses())
        lines += _listing("unexpected (in the file, not in the model)", self.unexpected)
        if hint := self._prefix_hint():
            lines.append(hint)
        if strict and not self.mismatched:
            lines.append("Load with strict=False if that is meant: what is missing keeps its present value.")
        return "\n".join(lines)

    def _with_guesses(self) -> tuple[str, ...]:
        candidates = self.unexpected[:_CANDIDATES]
        guessed = [
            f"{name}  (the file has {close[0]})"
            if (close := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75))
            else name
            for name in self.missing[:_LISTED]
        ]
        return (*guessed, *self.missing[_LISTED:])

    def _prefix_hint(self) -> str:
        """Files saved from a wrapper have one prefix too many, or one too few."""
        missing, unexpected = set(self.missing), set(self.unexpected)
        if not missing or not unexpected:
            return ""
        longer, shorter, side = unexpected, missing, "file"
        if min(map(len, unexpected)) < min(map(len, missing)):
            longer, shorter, side = missing, unexpected, "model"
        some = min(shorter, key=len)
        for name in longer:
            prefix = name.removesuffix(some)
            if prefix != name and prefix.endswith(".") and all(prefix + rest in longer for rest in shorter):
                whole = (
                    "load into that submodule"
                    if side == "model"
                    else "rename the keys, or wrap the model alike"
                )
                return f"The keys of the {side} begin with {prefix!r} and the other's do not: {whole}."
        return ""


def _mismatch(name: str, own: Any, given: Any) -> str:
    if not isinstance(own, torch.Tensor) or not isinstance(given, torch.Tensor):
        return ""  # extra state: the module itself judges it
    if own.shape != given.shape:
        return f"{name}: the model has {list(own.shape)}, the file {list(given.shape)}"
    if own.is_floating_point() != given.is_floating_point() or own.is_complex() != given.is_complex():
        return f"{name}: the model has {own.dtype}, the file {given.dtype}"
    return ""


def _listing(title: str, entries: tuple[str, ...]) -> list[str]:
    if not entries:
        return []
    shown = [f"  {title}: {len(entries)}", *(f"    {entry}" for entry in entries[:_LISTED])]
    return shown if len(entries) <= _LISTED else [*shown, f"    ... and {len(entries) - _LISTED} more"]
