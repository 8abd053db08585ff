"""Where each weight of a model lives, and what an install does with it; told without an access."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext import _handout
from dynswap_ext._state import STATE_KEY, session_of
from dynswap_ext._subclasses import adds_attributes_only, inner_names, is_plain
from dynswap_ext.inspect._tensors import storages_of
from dynswap_ext.inspect._tree import entries

if TYPE_CHECKING:
    from dynswap_ext.checkpoint.writing.sources import Mappings

__all__ = ["Surveyor", "Weight", "stored_bytes"]


@dataclass(frozen=True)
class Weight:
    """One master, under one of its names."""

    #: In the whole model, such as "layers.0.weight".
    name: str
    #: None while a lazy module has not made it.
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    elements: int
    #: Of the master as it is stored; a quantised one's are those of its parts.
    nbytes: int
    #: A parameter, else a buffer.
    is_parameter: bool
    #: A parameter that requires a gradient.
    trainable: bool
    #: The name under which the same master comes first; None if this is that name.
    tied_to: str | None
    #: "RAM", "pinned RAM", "shared RAM", "file" (mapped from it), "device", "meta", or "not made yet".
    place: str
    device: torch.device
    #: What it is mapped from; None for other places, and for a file that is deleted or was replaced.
    file: Path | None
    #: None on a plain model. "resident", "streamed", "in place" (handed out itself), or "converted" (at each
    #: access, by its `.to()`).
    served: str | None

    @property
    def lives(self) -> str:
        """Place and service in words."""
        place = self.place
        if place == "file":
            place = "file (gone)" if self.file is None else self.file.name
        elif place == "device":
            place = str(self.device)
        return f"{place}, {self.served}" if self.served else place


class Surveyor:
    """Describes the masters of one model as they are now."""

    def __init__(self) -> None:
        # With the master, so that no other one gets its id.
        self._names: dict[int, tuple[str, torch.Tensor]] = {}
        self._mappings: Mappings | None = None

    def describe(self, module: nn.Module, path: str) -> tuple[Weight, ...]:
        """A module's own weights; `path` is its place in the model."""
        return tuple(
            self._weight(module, name, master, is_parameter, f"{path}.{name}" if path else name)
            for name, master, is_parameter in entries(module)
        )

    def _weight(
        self, module: nn.Module, name: str, master: torch.Tensor, is_parameter: bool, full: str
    ) -> Weight:
        first, _ = self._names.setdefault(id(master), (full, master))
        made = not isinstance(master, UninitializedTensorMixin)
        place, file = self._place(master) if made else ("not made yet", None)
        return Weight(
            name=full,
            shape=tuple(master.shape) if made else None,
            dtype=master.dtype,
            elements=master.numel() if made else 0,
            nbytes=stored_bytes(master) if made else 0,
            is_parameter=is_parameter,
            trainable=is_parameter and master.requires_grad,
            tied_to=None if first == full else first,
            place=place,
            device=master.device,
            file=file,
            served=self._served(module, name, master, mapped=place == "file"),
        )

    def _place(self, master: torch.Tensor) -> tuple[str, Path | None]:
        if master.device.type == "meta":
            return "meta", None
        if master.device.type != "cpu":
            return "device", None
        names = inner_names(master)
        if names:
            return self._place(getattr(master, names[0]))
        try:
            mapped, found = self._find(master)
            if mapped:
                return "file", found
            if master.is_pinned():
                return "pinned RAM", None
            shared = master.is_shared()  # type: ignore[no-untyped-call]
            return ("shared RAM" if shared else "RAM"), None
        except (NotImplementedError, RuntimeError):
            return "RAM", None  # a class that shows no address

    def _find(self, master: torch.Tensor) -> tuple[bool, Path | None]:
        if self._mappings is None:
            # It reads what the process has mapped: once, and only for a model with weights on the CPU.
            from dynswap_ext.checkpoint.writing.sources import Mappings

            self._mappings = Mappings()
        mapped, place = self._mappings.find(master)
        return mapped, None if place is None else place.path

    def _served(self, module: nn.Module, name: str, master: torch.Tensor, *, mapped: bool) -> str | None:
        session = session_of(module)
        if session is None:
            return None
        native = session.provider == "native"
        if _handout.Place(session.device, session.dtype).holds(master) and not (native and mapped):
            return "in place"
        if not native:
            weight = module.__dict__[STATE_KEY].weights.get(name)
            return "converted" if weight is None else "resident" if weight.resident else "streamed"
        if not is_plain(master) and inner_names(master) is None and not adds_attributes_only(master):
            return "converted"
        return "resident" if session.residents(module).get(name) else "streamed"


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a master as it is stored: of its parts for a wrapper, as a quantised weight is."""
    if is_plain(tensor) and tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()  # a view of a larger storage has its own bytes
    names = inner_names(tensor)
    if names:
        return sum(stored_bytes(getattr(tensor, name)) for name in names)
    if tensor.layout is torch.strided:
        return int(tensor.numel() * tensor.element_size())
    return sum(storage.nbytes() for storage in storages_of(tensor))
