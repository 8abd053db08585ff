"""Where each weight of a model lives, and what an install does with it; found without an access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext._swap.protocol import Service
from dynswap_ext._swap.state import session_of
from dynswap_ext._swap.subclasses import inner_names, is_plain
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext.inspect._tensors import storages_of
from dynswap_ext.inspect._tree import Node, entries

__all__ = ["WeightLocation", "stored_bytes", "weights_of"]


@dataclass(frozen=True)
class WeightLocation:
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


def weights_of(nodes: Sequence[Node]) -> dict[int, tuple[WeightLocation, ...]]:
    """Describe the weights of a tree as they are now: each module's own, by the module's id."""
    names: dict[int, tuple[str, torch.Tensor]] = {}  # with the master, so that no other one gets its id
    mappings: list[FileMappings] = []  # read once, and only for a model with weights on the CPU
    weights: dict[int, tuple[WeightLocation, ...]] = {}
    for node in nodes:
        if node.same_as is not None:
            continue
        session = session_of(node.module)
        services = {} if session is None else session.services(node.module)
        weights[id(node.module)] = tuple(
            _weight(node, name, services.get(name), master, is_parameter, names, mappings)
            for name, master, is_parameter in entries(node.module)
        )
    return weights


def _weight(
    node: Node,
    name: str,
    service: Service | None,
    master: torch.Tensor,
    is_parameter: bool,
    names: dict[int, tuple[str, torch.Tensor]],
    mappings: list[FileMappings],
) -> WeightLocation:
    full = f"{node.path}.{name}" if node.path else name
    first, _ = names.setdefault(id(master), (full, master))
    made = not isinstance(master, UninitializedTensorMixin)
    place, file = _place(master, mappings) if made else ("not made yet", None)
    return WeightLocation(
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
        served=service,
    )


def _place(master: torch.Tensor, mappings: list[FileMappings]) -> tuple[str, Path | None]:
    if master.device.type != "cpu":
        return ("meta" if master.device.type == "meta" else "device"), None
    inner = inner_names(master)
    if inner:
        return _place(getattr(master, inner[0]), mappings)
    if not mappings:
        mappings.append(FileMappings())
    try:
        mapping = mappings[0].find(master.data_ptr())
        if mapping is not None:
            return "file", mapping.path
        if master.is_pinned():
            return "pinned RAM", None
        shared = master.is_shared()  # type: ignore[no-untyped-call]
        return ("shared RAM" if shared else "RAM"), None
    except (NotImplementedError, RuntimeError):
        return "RAM", None  # a class that shows no address


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
