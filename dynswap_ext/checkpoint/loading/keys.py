"""Reports all differences between a checkpoint's keys and a model's at once, with what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dynswap_ext._util.listing import listed
from dynswap_ext.checkpoint.reader import Entry

#: The most keys of one kind that an error lists. It counts the others.
_LISTED = 10
#: The most keys that a missing one is compared with, for a guess. difflib is slow.
_CANDIDATES = 4000
#: Prefixes that wrappers put into names, at the beginning or in the middle.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
#: Phrases for what `load` does about missing entries with strict=False.
_KEPT = "missing entries keep their present values"
_LEFT_EMPTY = "missing entries are left on the meta device, without values, for you to assign"


@dataclass(frozen=True)
class KeyReport:
    """The differences between a model's state dict and a file's entries. It is true if there are any."""

    path: Path
    old: Mapping[str, str]  # by the model's names, those of the file
    missing: Sequence[str]  # names in the model alone
    unexpected: Sequence[str]  # names in the file alone, after `rename`
    mismatched: Mapping[str, str]  # by name, a text with both shapes or dtypes
    library: str  # the package of the model's class
    on_meta: frozenset[str] = frozenset()  # the missing names whose tensors are on the meta device

    @classmethod
    def compare(
        cls,
        model: object,
        own: Mapping[str, Any],
        given: Mapping[str, Any],
        path: Path,
        old: Mapping[str, str],
    ) -> KeyReport:
        """Compare the model's state dict, `own`, with entries or tensors, by name, shape and kind of dtype.

        `given` has them by the model's names, and `old` the file's names.
        """
        differences = {
            name: _difference(tensor, given[name]) for name, tensor in own.items() if name in given
        }
        missing = [name for name in own if name not in given]
        return cls(
            path,
            old,
            missing=missing,
            unexpected=[name for name in given if name not in own],
            mismatched={name: difference for name, difference in differences.items() if difference},
            library=type(model).__module__.partition(".")[0],
            on_meta=frozenset(name for name in missing if getattr(own[name], "is_meta", False)),
        )

    def certain(self, custom_loaders: tuple[str, ...]) -> KeyReport:
        """Return the report without differences that a module's own way of loading may resolve.

        `custom_loaders` are the prefixes of such modules.
        """
        # BatchNorm itself adds `num_batches_tracked`.
        missing = (name for name in self.missing if not name.endswith("num_batches_tracked"))
        return replace(
            self,
            missing=[name for name in missing if not name.startswith(custom_loaders)],
            unexpected=[name for name in self.unexpected if not name.startswith(custom_loaders)],
            mismatched={k: v for k, v in self.mismatched.items() if not k.startswith(custom_loaders)},
        )

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def text(self, strict: bool) -> str:
        """Return the whole report as the message of an error, or of a warning if not `strict`."""
        mismatched = [f"{self._called(name)}: {text}" for name, text in self.mismatched.items()]
        unexpected = [self._called(name) for name in self.unexpected]
        lines = [f"{self.path} does not fit the model:"]
        on_meta = [name for name in self.missing if name in self.on_meta]
        for title, names in (
            ("mismatched", mismatched),
            ("missing (in the model, not in the file)", self._with_guesses()),
            ("unexpected (in the file, not in the model)", unexpected),
        ):
            if names:
                lines += [f"  {title}: {len(names)}", indent(listed(names, _LISTED, lines=True), "    ")]
        if hint := self._prefix_hint():
            lines.append(hint)
        if self.library == "transformers" and self.missing and self.unexpected:
            lines.append(
                "transformers renames and fuses the weights of some models when it loads them. "
                "dynswap_ext.checkpoint.from_pretrained(transformers.AutoModelForCausalLM, folder), or with "
                "the class that you load, opens the checkpoint as it does."
            )
        elif self.mismatched:
            lines.append(
                "Shapes and kinds of dtype have to agree: make the model with the configuration that the "
                "file was saved with, leave the entry out by rename= (None), or reshape it by transform=."
            )
        elif strict:
            lines.append(f"If this is intended, pass strict=False: {_LEFT_EMPTY if on_meta else _KEPT}.")
        if on_meta and not strict:
            lines.append(
                f"{len(on_meta)} missing entries are on the meta device and have no values "
                f"({listed(on_meta)}): torch may compute with them all the same, and give arbitrary numbers. "
                "Assign them before the model is used."
            )
        return "\n".join(lines)

    def _called(self, name: str) -> str:
        old = self.old.get(name, name)
        return name if old == name else f"{name} ({old} in the file)"

    def _with_guesses(self) -> list[str]:
        candidates = self.unexpected[:_CANDIDATES]
        guessed = [
            f"{name}  (the file has {self._called(close[0])})"
            if (close := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75))
            else name
            for name in self.missing[:_LISTED]
        ]
        return [*guessed, *self.missing[_LISTED:]]

    def _prefix_hint(self) -> str:
        """Return advice for keys that differ only by a prefix, as a wrapper adds it; empty if they do not."""
        missing, unexpected = set(self.missing), set(self.unexpected)
        for prefix in (*_front(unexpected, missing), *_WRAPPERS):
            if _mostly({name.replace(prefix, "") for name in unexpected if prefix in name}, missing):
                all_begin = all(name.startswith(prefix) for name in unexpected)
                where, begin = ("begin with", "^") if all_begin else ("have", r"(^|(?<=\.))")
                remedy = self._remedy(begin + re.escape(prefix), "")
                return f"The keys of the file {where} {prefix!r} and the model's do not: {remedy}."
        for prefix in (*_front(missing, unexpected), *_WRAPPERS):
            if _mostly({prefix + name for name in unexpected}, missing):
                return (
                    f"The keys of the model begin with {prefix!r} and the file's do not: load into that "
                    f"submodule, or {self._remedy('^', prefix)}."
                )
        return ""

    def _remedy(self, pattern: str, replacement: str) -> str:
        rule = f"{pattern!r}: {replacement!r}".replace("\\\\", "\\")
        if any(name != old for name, old in self.old.items()):
            return f"add to rename= the rule r{rule}"
        return f"give load() rename={{r{rule}}}"


def _front(longer: set[str], shorter: set[str]) -> list[str]:
    """Guess prefixes that the names in `longer` have, and those in `shorter` lack. Returns at most 8."""
    some = sorted(shorter, key=len)[:8]
    prefixes = {name.removesuffix(end) for end in some for name in longer if name.endswith(f".{end}")}
    return sorted(prefixes, key=len)[:8]


def _mostly(renamed: set[str], wanted: set[str]) -> bool:
    return bool(wanted) and 2 * len(renamed & wanted) > len(wanted)


def _difference(own: Any, given: Any) -> str:
    if not isinstance(own, torch.Tensor) or not isinstance(given, (torch.Tensor, Entry)) or is_lazy(own):
        return ""  # the module itself checks its extra state, and a lazy one takes the file's shapes
    shape = tuple(given.shape)
    if own.shape != shape and not (own.dim() == 0 and shape == (1,)):  # as torch before 0.4 saved scalars
        return f"the model has {list(own.shape)}, the file {list(shape)}"
    kind = (own.dtype.is_floating_point, own.dtype.is_complex)
    if kind != (given.dtype.is_floating_point, given.dtype.is_complex):
        return f"the model has {own.dtype}, the file {given.dtype}"
    return ""
