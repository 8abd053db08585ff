"""A plan in a file: what one process has measured and learned, for the next one that runs the same model.

The file is JSON. It holds the order in which groups of weights are used, which of them stay on the device,
the budget and the measurements behind it. It also says for which weights, device, options and versions it was
made. If one of these differs, the plan might be slow or too large, so it is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import show_budget, show_rate, show_seconds
from dynswap_ext._util.written_files import check_folder, explained
from dynswap_ext._version import __version__
from dynswap_ext.errors import ConfigError

_FORMAT: Final = 1
_REMEDY: Final = "Install without plan=, call the model a few times, and save a new plan"


@dataclass(frozen=True)
class Tuning:
    """Measurements of passes, and the plan that followed from them. Times are in seconds of one pass.

    ``print`` shows it.
    """

    #: The number of passes that were measured; 0 if none could be.
    passes: int
    #: Bytes that weights may take on the device in the new plan; None: only what `prefetch` needs.
    budget: int | None
    #: Bytes by which the peak of the device's memory in the measured passes exceeded its use before them. 0
    #: if they were not measured for this plan.
    activation_bytes: int
    #: Time of a pass without waits for weights. With several threads, the time in which not all of them
    #: waited, divided by the passes that they made together.
    compute_seconds: float
    #: Time of a pass that was spent in waits for weights.
    wait_seconds: float
    #: Bytes per second of the copies, while any was under way; 0 if there were none.
    bytes_per_second: float
    #: Time of a pass with the plan before, according to the engine's simulation. None if no weights could be
    #: chosen by time: without a budget or copies, or with the pure-Python provider.
    seconds_before: float | None
    #: Time of a pass with the new plan, according to the engine's simulation. None if no weights could be
    #: chosen by time: without a budget or copies, or with the pure-Python provider.
    seconds_after: float | None
    #: Bytes of weights that stayed on the device (residents) and lost their memory to other tensors inside a
    #: call, since the tuning before this one.
    given_way_bytes: int = 0

    def __str__(self) -> str:
        rate = show_rate(self.bytes_per_second, "B/s")
        lines = [
            f"budget {show_budget(self.budget)}"
            + (f"; activations {format_bytes(self.activation_bytes)}" if self.activation_bytes else ""),
            f"{self.passes} passes measured: {show_seconds(self.compute_seconds)} of compute and "
            f"{show_seconds(self.wait_seconds)} of waits each; "
            + (f"copies at {rate}" if self.bytes_per_second else "no copies"),
        ]
        if self.seconds_before is not None and self.seconds_after is not None:
            lines.append(
                f"predicted: {show_seconds(self.seconds_after)} a pass with the new plan, "
                f"{show_seconds(self.seconds_before)} with the one before"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class SavedPlan:
    """A plan, as `Handle.save_plan` writes it to a file."""

    #: Bytes for weights on the device; None: what `prefetch` needs.
    budget: int | None
    #: Whether the budget was "auto", so that it was measured.
    automatic: bool
    prefetch: int
    #: None if no passes were measured.
    tuning: Tuning | None
    #: Groups, residents (groups that stay on the device) and order of use, as a session returned them.
    plan: Mapping[str, Any]
    #: The device, backend, dtype, `keep` and versions that the plan was made for.
    made_for: Mapping[str, str]
    #: Bytes for tensors that are saved for backward, if they were measured with the budget; else None.
    activations: int | None = None
    #: The path of the file, for messages.
    path: str = ""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file in one step, so that no reader finds an incomplete one."""
        where = check_folder(path, "plan")
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        part = where.with_name(f"{where.name}.{os.getpid()}.part")
        with explained(where):
            try:
                part.write_text(json.dumps({"dynswap_ext plan": _FORMAT, **content}), encoding="utf-8")
                part.replace(where)
            finally:
                part.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: str | PathLike[str]) -> SavedPlan:
        """Read a file that `write` has made; raise ConfigError for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("dynswap_ext plan") != _FORMAT:
                raise ValueError("it has another format")
            saved = cls(**content, path=str(path))
            if wrong := saved._wrong():
                raise ValueError(f"its {wrong} is {content[wrong]!r}")
        except OSError as error:
            raise ConfigError(f"plan is {str(path)!r}, which cannot be read: {error.strerror}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"plan is {str(path)!r}, which is no plan that Handle.save_plan wrote ({error}). {_REMEDY}"
            ) from error
        return saved if saved.tuning is None else replace(saved, tuning=saved._tuning(content["tuning"]))

    def _tuning(self, measured: Mapping[str, Any]) -> Tuning:
        """Return the measurements from their fields in the file."""
        try:
            if wrong := [
                name for name, value in measured.items() if not isinstance(value, (int, float, type(None)))
            ]:
                raise TypeError(f"{wrong[0]} is no number")
            return Tuning(**measured)
        except TypeError as error:
            raise self.refused(f"what was measured is damaged: {error}") from error

    def _wrong(self) -> str:
        """Return the name of a field whose value has the wrong type or range; empty if all are right."""
        measured: object = self.tuning
        known = {
            "budget": self.budget is None or (type(self.budget) is int and self.budget > 0),
            "automatic": type(self.automatic) is bool,
            "activations": self.activations is None
            or (type(self.activations) is int and self.activations > 0),
            "prefetch": type(self.prefetch) is int and 0 <= self.prefetch < 1 << 32,
            "tuning": measured is None or isinstance(measured, dict),
            "plan": isinstance(self.plan, dict),
            "made_for": isinstance(self.made_for, dict),
        }
        return next((name for name, right in known.items() if not right), "")

    def check(self, made_for: Mapping[str, str]) -> None:
        """Raise ConfigError if the plan was made for another device, backend, dtype, `keep` or version."""
        for what, now in made_for.items():
            if (then := self.made_for.get(what)) != now:
                raise self.refused(f"its {what} is {then}, and here it is {now}")

    def refused(self, why: str) -> ConfigError:
        """Return a ConfigError that says why the plan does not apply, and what to do."""
        return ConfigError(f"plan is {self.path!r}, and {why}. {_REMEDY}")


def made_for(
    device: torch.device, backend: str, dtype: torch.dtype | None, keep: Sequence[str]
) -> dict[str, str]:
    """Return what a plan depends on besides the weights, as words by name: device, versions and so on."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return {
        "device": device.type if name is None else str(name(device)),
        "backend": backend,
        "dtype": str(dtype),
        "keep": ", ".join(keep) or "nothing",
        "dynswap_ext": __version__,
        "torch": torch.__version__,
    }
