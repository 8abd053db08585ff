"""Moves the bytes of masters to memory that several ranks map."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynswap_ext import _provider
from dynswap_ext._util.heap import HeapTrimmer
from dynswap_ext._util.places import address_of, parts_of
from dynswap_ext._util.shared_segment import MappedSegments, SharedSegment, offsets
from dynswap_ext.sharing.outline import Place

#: Of so many bytes that masters let go of, the C library may keep the memory.
_WINDOW = 16 << 20


class View(NamedTuple):
    """Where a tensor is in a segment. A master of a tensor subclass consists of several tensors (parts)."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Offer:
    """The segment of the first rank, as it is described to the others: how to open it, and its contents."""

    path: str
    #: The storages, one after the other. Sizes in bytes.
    storages: list[int]
    #: For each master, the views of its parts.
    views: list[list[View]]


class Segment:
    """A piece of shared memory, and the masters whose bytes it holds."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._segment: SharedSegment | None = None
        self._storages: list[torch.UntypedStorage] = []
        self._views: list[list[View]] = []

    def make(self) -> Offer:
        """Create the segment on the first rank. It is filled later."""
        sources: dict[int, tuple[int, int]] = {}
        views = []
        for place in self._places:
            own = []
            for part in parts_of(place.master):
                storage = part.untyped_storage()
                number, _ = sources.setdefault(storage._cdata, (len(sources), storage.nbytes()))
                offset = int(part.storage_offset())
                own.append(View(number, offset, tuple(part.shape), part.stride(), part.dtype))
            views.append(own)
        sizes = [size for _, size in sources.values()]
        self._segment = SharedSegment.make([*offsets(sizes)][-1])
        return Offer(self._segment.path, sizes, views)

    def map(self, offer: Offer) -> None:
        """Map the segment that the first rank has made."""
        self._segment = self._segment or SharedSegment.open(offer.path)
        pieces = list(zip(offsets(offer.storages), offer.storages, strict=False))
        mapped = _provider.map_shared(self._segment.descriptor, pieces)
        self._storages = [piece.untyped_storage() for piece in mapped]
        self._views = offer.views

    def fill(self, take: bool) -> None:
        """Copy the masters' bytes into the segment. `take` then moves the masters there for good."""
        parts: dict[int, list[tuple[torch.Tensor, View]]] = {}
        for place, views in zip(self._places, self._views, strict=True):
            for part, view in zip(parts_of(place.master), views, strict=True):
                parts.setdefault(view.storage, []).append((part, view))
        heap = HeapTrimmer(_WINDOW)
        for number, those in parts.items():
            self._storages[number].copy_(those[0][0].untyped_storage())
            if take:
                for part, view in those:
                    self._point(part, view)
                heap.count(self._storages[number].nbytes())
        heap.trim()

    def give(self, *, copies: bool) -> None:
        """Make the masters use the bytes in the segment, or copies of them."""
        made: dict[int, torch.Tensor] = {}
        heap = HeapTrimmer(_WINDOW)
        for place, views in zip(self._places, self._views, strict=True):
            master = place.master
            if not master.is_meta:
                for part, view in zip(parts_of(master), views, strict=True) if not copies else ():
                    self._point(part, view)
                    heap.count(part.nbytes)
                continue
            if id(master) not in made:
                with torch.inference_mode(False):  # whatever mode the caller is in
                    value = self._point(torch.empty(0, dtype=views[0].dtype), views[0])
                    value = value.clone() if copies else value
                    is_parameter = isinstance(master, nn.Parameter)
                    made[id(master)] = nn.Parameter(value, master.requires_grad) if is_parameter else value
            place.put(made[id(master)])
        heap.trim()

    def _point(self, part: torch.Tensor, view: View) -> torch.Tensor:
        with torch.inference_mode(part.is_inference()), torch.no_grad():
            return part.set_(self._storages[view.storage], view.offset, view.shape, view.strides)

    def close(self) -> None:
        """Close the segment, so that no further process can open it. What is mapped stays mapped."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


@functools.cache  # once for all calls
def keep_steps_private() -> None:
    """Make every optimizer copy a shared master before it changes it, as other ranks read the shared one."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    masters = (master for group in optimizer.param_groups for master in group["params"])
    # A closure makes the gradients later.
    make_private(master for master in masters if master.requires_grad or master.grad is not None)


def make_private(masters: Iterable[torch.Tensor]) -> None:
    """Let masters whose bytes are in a segment have copies of their own. Views of one storage stay that."""
    segments = MappedSegments()
    # The old ones are kept, so that no new storage has the address of one.
    copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for part in (part for master in masters for part in parts_of(master) if segments and part.is_cpu):
        if not segments.find(address_of(part)):
            continue
        storage = part.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage, storage.clone()  # type: ignore[no-untyped-call]
        with torch.inference_mode(part.is_inference()), torch.no_grad():
            part.set_(copies[storage._cdata][1], part.storage_offset(), part.size(), part.stride())
