"""A checkpoint's tensors under a model's names, as they are in the file or converted.

What is computed with is read into memory of its own, a window at a time. Read through the mapping, the pages
would stay part of this process, a file cut short meanwhile would end the process, and values would include
what was written to the mapping of a checkpoint that is open for longer.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dynswap_ext._swap.subclasses import inner_names, is_plain
from dynswap_ext._util.progress import ProgressCallback
from dynswap_ext.checkpoint.formats.common import read_into
from dynswap_ext.checkpoint.loading.walk import LazyState
from dynswap_ext.checkpoint.options import cast_to
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import ConfigError, SourceError

#: From a name, as the model has it, and the file's tensor to the tensor that becomes the master.
Transform: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]

_malloc_trim: Callable[[int], object] = getattr(
    ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", lambda _: None
)

#: Less than that the heap holds without harm, and a mapping would cost more than it.
_OF_THE_HEAP = 1 << 16
#: What is read at a time of an entry that is cast, moved or compared. Larger ones read no faster.
_WINDOW = 16 << 20


@dataclass
class ModelEntries:
    """A checkpoint's entries under a model's names: on its way each is moved, cast and transformed."""

    checkpoint: Checkpoint
    #: The model's names, each with the checkpoint's.
    names: dict[str, str]
    device: torch.device
    dtype: torch.dtype | None
    transform: Transform | None
    window: Window
    #: Called with the bytes that the model has got, and with those that it will get.
    report: ProgressCallback | None = None

    def __post_init__(self) -> None:
        self._called = {old: name for name, old in self.names.items()}  # by the model, before ties are shared

    @property
    def converted(self) -> bool:
        """Whether any entry is read before the model gets it."""
        return self.transform is not None or self.device.type != "cpu" or self.dtype is not None

    def share(self, state: Mapping[str, Any]) -> None:
        """Use one entry for each weight that the model's state has under several names.

        Ties are the model's: two modules that hold one parameter. A file that has one range of bytes under
        two names does not tie the model's weights. ConfigError if the checkpoint has two entries that differ.
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
        """Return a state dict of all values but `without`; if `lazy`, each is made when it is asked for."""
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
            given += sizes.pop(old, 0)  # a module may ask for one twice
            report(given, whole)
            return value

        report(0, whole)
        made = {old: partial(make, old) if lazy else make(old) for old in dict.fromkeys(names.values())}
        state: Any = (LazyState if lazy else OrderedDict)((name, made[old]) for name, old in names.items())
        state._metadata = self.checkpoint.versions  # where load_state_dict looks for them
        return state  # type: ignore[no-any-return]

    def _master(self, old: str) -> torch.Tensor:
        """Return an entry as it is mapped, if it is not to be changed and no transform does."""
        entry = self.checkpoint.entries[old]
        as_stored = self.device.type == "cpu" and cast_to(self.dtype, entry) == entry.dtype
        if not as_stored or self.transform is not None:
            converted = self._converted(old)
            if not (as_stored and is_plain(converted) and self.window.holds(old, converted)):
                return converted
        tensor = self.checkpoint.tensor(old)
        # A model takes a parameter as it is: one that an open checkpoint keeps has to stay what it is.
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
    """Reads entries of one checkpoint, whose files are open until the block ends.

    Each method raises SourceError if a file cannot be read, or has become shorter.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._files: dict[Path, Any] = {}
        self._since_trim = 0

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of its own with the values of an entry."""
        entry = self._range(name)
        if entry is None:
            tensor = self._checkpoint.tensor(name)
            if not is_plain(tensor):
                return tensor.to(device=device, dtype=dtype)
            return tensor.detach().to(device=device, dtype=dtype, copy=True)
        if device.type == "cpu" and dtype == entry.dtype:
            self._trim(entry.nbytes)
            flat = _memory(entry.nbytes).view(dtype)
            self._fill(name, entry, 0, flat)
        else:
            flat = torch.empty(entry.nbytes // entry.dtype.itemsize, dtype=dtype, device=device)
            parts = torch.split(flat, _WINDOW // entry.dtype.itemsize)
            for part, block in zip(parts, self._blocks(name, entry), strict=False):
                part.copy_(block)
        return flat.view(entry.shape)

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor is to the bit what the entry is in the file."""
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
        """Return the entry, if its bytes in the file are its values in order."""
        entry = self._checkpoint.entries[name]
        return None if entry.offset is None or entry.encoding else entry

    def _blocks(self, name: str, entry: Entry) -> Iterator[torch.Tensor]:
        """Yield the values in order, one block after the other in the same memory."""
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

    def _trim(self, nbytes: int) -> None:
        """Let the heap give holes back: what a transform returns lies between what it needed meanwhile."""
        self._since_trim += nbytes
        if self._since_trim > _WINDOW:
            self._since_trim = 0
            _malloc_trim(0)


def _memory(nbytes: int) -> torch.Tensor:
    """Allocate bytes that go back to the system when they are freed.

    The heap would keep holes between what stays: next to a result of half the size, one of the size of each
    tensor that was read.
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
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # so that NaN equals itself
