"""The types of a baseline, its setting, and the model that it prepares."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from head_to_head.job import FILE, RAM

REFERENCE, PEER, OURS = "reference", "peer", "ours"
_DROP_EVERY = 32 << 20
EXTRA = "pip install 'dynswap-ext[peers]'"


@dataclass(frozen=True)
class Setting:
    """The device, files and model that a baseline is given."""

    device: torch.device
    placement: str
    checkpoint: Path
    scratch: Path
    build: Callable[[], nn.Module]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the checkpoint."""
        return self.checkpoint.stat().st_size

    def mapped(self) -> nn.Module:
        """Return the model with masters that are mapped from the checkpoint, without reading them."""
        return checkpoint.load(self.build, self.checkpoint).requires_grad_(False).eval()

    def in_ram(self) -> nn.Module:
        """Return the model with weights in ordinary memory."""
        model, read = self.mapped(), 0
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
            read += tensor.nbytes
            if read > _DROP_EVERY:
                drop_file_cache(self.checkpoint)  # or the mapping would count, too
                read = 0
        drop_file_cache(self.checkpoint)
        return model


@dataclass(frozen=True)
class Prepared:
    """A model that can be called, with its handle if dynswap has prepared it."""

    model: nn.Module
    handle: Any = None  #: dynswap's
    note: str = ""


@dataclass(frozen=True)
class Baseline:
    """One way to run a model.

    Attributes
    ----------
    name, kind
        `kind` is REFERENCE (all weights where they compute, to compare others with), PEER or OURS.
    prepare
        Makes the model ready, as the baseline's documentation says.
    does
        What it has to do in a call, by placement. On an accelerator ``"bus"`` stands for RAM. The baseline
        does not run with other placements.
    package
        The module it needs.
    accelerator
        The reason why it does not run on the CPU; "" if it does.
    compiles
        Whether it runs under torch.compile.
    python
        The version of Python that it needs.
    rewrites
        Whether it writes its files again in each process, with other names.
    """

    name: str
    kind: str
    prepare: Callable[[Setting], Prepared]
    does: dict[str, str] = field(default_factory=dict)
    package: str = ""
    accelerator: str = ""
    compiles: bool = False
    python: tuple[int, int] = (3, 10)
    rewrites: bool = False

    def has(self, placement: str, device: torch.device) -> bool:
        """Return whether the baseline runs with that placement on that device."""
        return self.task(placement, device) != ""

    def task(self, placement: str, device: torch.device) -> str:
        """Return what the baseline has to do in a call there; "" if it does not run there."""
        return self.does.get("bus" if placement == RAM and device.type != "cpu" else placement, "")

    def why_not(self, device: torch.device) -> str:
        """Return the reason why the baseline cannot run here; "" if it can."""
        if sys.version_info < self.python:
            return f"it needs Python {'.'.join(map(str, self.python))}"
        if self.accelerator and device.type == "cpu":
            return self.accelerator
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: {EXTRA}"
        return ""


def compiled(prepare: Callable[[Setting], Prepared]) -> Callable[[Setting], Prepared]:
    """Return a `prepare` that puts the model under torch.compile."""

    def prepare_compiled(setting: Setting) -> Prepared:
        prepared = prepare(setting)
        prepared.model.compile()
        return prepared

    return prepare_compiled


__all__ = [
    "FILE", "OURS", "PEER", "RAM", "REFERENCE", "Baseline", "Prepared", "Setting", "compiled",
]  # fmt: skip
