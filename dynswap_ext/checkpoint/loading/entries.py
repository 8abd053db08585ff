"""Gives `load` the tensors of a checkpoint by the model's names, mapped or converted.

Entries that are cast, moved, transformed or compared are read from the file, not through its mapping. Pages
that are read through a mapping count as this process's memory. A file that is cut short meanwhile would end
the process. And an open checkpoint's mapping may have been written to.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from dynswap_ext._swap.subclasses import inner_names, is_plain
from dynswap_ext._util.heap import HeapTrimmer
from dynswap_ext._util.progress import ProgressCallback
from dynswap_ext.checkpoint.formats.common import read_into
from dynswap_ext.checkpoint.loading.walk import LazyState
from dynswap_ext.checkpoint.options import cast_to
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.lossless.code import CODABLE
from dynswap_ext.lossless.tensor import LosslessTensor, encoded

#: A function of a name in the model and the file's tensor. It returns the tensor that becomes the master.
Transform: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]

#: Up to so many bytes are allocated from the heap, where a mapping would cost more.
_OF_THE_HEAP = 1 << 16
#: Bytes that are read at a time of an entry that is cast, moved or compared. Larger windows are no faster.
_WINDOW = 16 << 20


@dataclass
class ModelEntries:
    """A checkpoint's entries by a model's names, each moved, cast and transformed as `load` is asked to."""

    checkpoint: Checkpoint
    #: By the model's names, those of the checkpoint.
    names: dict[str, str]
    device: torch.device
    dtype: torch.dtype | None
    transform: Transform | None
    window: Window
    #: Whether weights are held in RAM in the lossless code, where that is smaller.
    coded: bool = False
    #: Called with the bytes that the model has received, and the total.
    report: ProgressCallback | None = None

    def __post_init__(self) -> None:
        #: By the checkpoint's names, those of the model. They stay when `share` changes `names`.
        self._called = {old: name for name, old in self.names.items()}

    @property
    def converted(self) -> bool:
        """Whether entries may have to be read before the model gets them: to transform, move or cast them."""
        return self.transform is not None or self.device.type != "cpu" or self.dtype is not None or self.coded

    def share(self, state: Mapping[str, Any]) -> None:
        """Use one entry for all names of a weight that several modules of the model share.

        Only the model decides what is shared. A file that has one range of bytes under two names does not tie
        the model's weights. ConfigError if the checkpoint has different entries for one weight.
        """
        ties: dict[int, list[str]] = {}
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                ties.setdefault(id(tensor), []).append(name)
        for tie in ties.values():
            present = [name for name in tie if self.names.get(name) in self.checkpoint.entries]
            if len(tie) < 2 or not present:
                continue
            first = self.names[present[0]]
            for name in present[1:]:
                if not self.window.same(first, self.names[name]):
                    raise ConfigError(
                        f"the model shares one weight between {present[0]} and {name}, and "
                        f"{self.checkpoint.path} has two different ones; untie them in the model's "
                        "configuration, or leave one out of the file or by rename="
                    )
            self.names.update(dict.fromkeys(tie, first))

    def state(self, *, without: Collection[str] = (), lazy: bool = False) -> Mapping[str, Any]:
        """Return a state dict without the names in `without`. If `lazy`, a value is made at each access."""
        names = {name: old for name, old in self.names.items() if name not in without}
        entries, objects = self.checkpoint.entries, self.checkpoint.objects
        sizes = {old: entries[old].nbytes for old in names.values() if old in entries}
        whole, given = sum(sizes.values()), 0
        report = self.report or (lambda given, whole: None)

        def make(old: str) -> Any:
            nonlocal given
            if old in objects:
                return objects[old]
            value = self._converted(old) if lazy else self._master(old)
            given += sizes.pop(old, 0)  # counted once, although a module may ask for an entry twice
            report(given, whole)
            return value

        report(0, whole)
        made = {old: partial(make, old) if lazy else make(old) for old in dict.fromkeys(names.values())}
        state: Any = (LazyState if lazy else OrderedDict)((name, made[old]) for name, old in names.items())
        state._metadata = self.checkpoint.versions  # where load_state_dict looks for them
        return state  # type: ignore[no-any-return]

    def _master(self, old: str) -> torch.Tensor:
        """Return an entry's mapped tensor, or a new one if a cast, a move, the transform or `coded` asks."""
        entry = self.checkpoint.entries[old]
        as_stored = self.device.type == "cpu" and cast_to(self.dtype, entry) == entry.dtype
        if not as_stored or self.transform is not None or (self.coded and entry.dtype in CODABLE):
            converted = self._converted(old)
            if self.coded and is_plain(converted):
                smaller = encoded(converted, f"{old} of {self.checkpoint.path}")
                if smaller is not converted:
                    return smaller
            if not (as_stored and is_plain(converted) and self.window.holds(old, converted)):
                return converted
        tensor = self.checkpoint.tensor(old)
        # A model would take a parameter itself, and change it, although the open checkpoint keeps it.
        return tensor.detach() if type(tensor) is torch.nn.Parameter else tensor

    def _converted(self, old: str) -> torch.Tensor:
        with torch.no_grad():
            source = self.window.read(old, self.device, cast_to(self.dtype, self.checkpoint.entries[old]))
            if self.transform is None:
                return source
            name = self._called[old]
            what = f"{name if name == old else f'{name} ({old} in the file)'} of {self.checkpoint.path}"
            try:
                result = self.transform(name, source)
            except Exception as error:
                raise ConfigError(
                    f"the transform failed at {what}: {type(error).__name__}: {error}"
                ) from error
        if not isinstance(result, torch.Tensor) or result.is_meta:
            kind = "a tensor on the meta device" if isinstance(result, torch.Tensor) else f"{result!r}"
            raise ConfigError(
                f"the transform made {kind} of {what}; expected a tensor with values (the tensor that it "
                "was given leaves the entry as it is)"
            )
        return result.detach() if is_plain(result) else result


class Window(ExitStack):
    """A context that reads entries of a checkpoint, and keeps its files open until the end.

    Each method raises SourceError if a file cannot be read, or has become shorter.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._files: dict[Path, Any] = {}
        #: The results of a transform stay in the heap, with the gaps of its temporary tensors between them.
        self._heap = HeapTrimmer(_WINDOW)

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of an entry in new memory. A tensor subclass is copied only if it is changed."""
        entry = self._range(name)
        if entry is None:
            tensor = self._checkpoint.tensor(name)
            if isinstance(tensor, LosslessTensor):
                tensor = tensor.decoded()
            if not is_plain(tensor):
                return tensor.to(device=device, dtype=dtype)
            return tensor.detach().to(device=device, dtype=dtype, copy=True)
        if device.type == "cpu" and dtype == entry.dtype:
            self._heap.count(entry.used_bytes)
            flat = _memory(entry.used_bytes).view(dtype)
        else:
            flat = torch.empty(entry.used_bytes // entry.dtype.itemsize, dtype=dtype, device=device)
        if device.type == "cpu" and dtype == entry.dtype and not entry.encoding:
            self._fill(name, entry, 0, flat)
        else:
            parts = torch.split(flat, _WINDOW // entry.dtype.itemsize)
            for part, block in zip(parts, self._blocks(name, entry), strict=False):
                part.copy_(block)
        return flat.view(entry.shape)

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor has the dtype, the shape and the bits of an entry in the file."""
        entry = self._range(name)
        if entry is None:
            return _equal(self._checkpoint.tensor(name), tensor)
        if (tensor.device.type, tensor.dtype, tuple(tensor.shape)) != ("cpu", entry.dtype, entry.shape):
            return False
        parts = torch.split(tensor.detach().reshape(-1), _WINDOW // entry.dtype.itemsize)
        return _all_equal(self._blocks(name, entry), parts)

    def same(self, left: str, right: str) -> bool:
        """Return whether two entries are equal to the bit."""
        first, second = self._range(left), self._range(right)
        if first is None or second is None:
            return _equal(self._checkpoint.tensor(left), self._checkpoint.tensor(right))
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        one_range = (first.file, first.offset) == (second.file, second.offset)
        return one_range or _all_equal(self._blocks(left, first), self._blocks(right, second))

    def _range(self, name: str) -> Entry | None:
        """Return the entry if one range of its file has exactly its values, in order; else None."""
        entry = self._checkpoint.entries[name]
        return entry if entry.offset is not None and entry.is_exact else None

    def _blocks(self, name: str, entry: Entry) -> Iterator[torch.Tensor]:
        """Yield the values of an entry in order, in blocks, which may reuse the same memory."""
        if entry.encoding:
            coded = _memory(entry.nbytes)
            self._fill(name, entry, 0, coded)
            flat = LosslessTensor(coded, entry.dtype, entry.shape, f"{name} in {entry.file}").view(-1)
            for part in torch.split(flat, _WINDOW // entry.dtype.itemsize):
                yield cast("LosslessTensor", part).decoded()
            return
        buffer = _memory(min(_WINDOW, entry.nbytes)).view(entry.dtype)
        for start in range(0, entry.nbytes, _WINDOW):
            block = buffer[: (entry.nbytes - start) // entry.dtype.itemsize]
            self._fill(name, entry, start, block)
            yield block

    def _fill(self, name: str, entry: Entry, skipped: int, into: torch.Tensor) -> None:
        if entry.file not in self._files:
            try:
                self._files[entry.file] = self.enter_context(entry.file.open("rb"))
            except OSError as error:
                raise SourceError(f"{entry.file} cannot be read at {name}: {error.strerror}") from error
        begin = (entry.offset or 0) + skipped
        read_into(self._files[entry.file], entry.file, begin, into.data_ptr(), into.nbytes, name)


def _memory(nbytes: int) -> torch.Tensor:
    """Allocate memory that goes back to the system when it is freed.

    Memory of the heap would not. If a transform returned tensors of half the size, the heap would keep a gap
    of the size of each tensor that was read, between the results.
    """
    if nbytes < _OF_THE_HEAP:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or type(left) is not type(right):
        return False
    if is_plain(left):
        return left.device == right.device and _all_equal([left.detach()], [right.detach()])
    names = inner_names(left)
    if names is None or names != inner_names(right):
        return left is right
    return all(_equal(getattr(left, name), getattr(right, name)) for name in names)


def _all_equal(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(left, right, strict=False))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # as bytes, a NaN equals itself
