"""What a load gives a model: a checkpoint's tensors under the model's names, as they are or converted."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dynswap_ext._progress import Told
from dynswap_ext._subclasses import is_plain
from dynswap_ext.checkpoint.loading.window import Window
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import ConfigError

__all__ = ["Incoming", "LazyState", "Processing", "Transform"]

#: From a name, as the model has it, and the file's tensor to the tensor that becomes the master.
Transform: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Processing:
    """What is done to each tensor on its way: in this order, moved, cast, transformed."""

    device: torch.device
    dtype: torch.dtype | None
    transform: Transform | None

    @classmethod
    def of(
        cls,
        device: torch.device | str | int,
        dtype: torch.dtype | None,
        transform: Transform | None,
        *,
        assign: bool,
    ) -> Processing:
        """The arguments of `load`, checked.

        Raises
        ------
        ConfigError
            One of them has a value that cannot be used.
        """
        try:
            where = torch.device(device)
            torch.empty(0, device=where)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"device is {device!r}: {error}; expected 'cpu', which reads nothing, or an accelerator"
            ) from error
        if where.type == "meta":
            raise ConfigError("device is 'meta', which holds no values; init_empty(factory) makes a skeleton")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"dtype is {dtype!r}; expected a floating dtype such as torch.bfloat16, or None"
            )
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform is {transform!r}; expected a function of a name and a tensor")
        if not assign and (where.type != "cpu" or dtype is not None):
            raise ConfigError(
                "assign=False copies values into the module's own tensors, which keep device and dtype: "
                "leave device and dtype out, or call model.to(device, dtype) first"
            )
        return cls(where, dtype, transform)

    def wanted(self, entry_dtype: torch.dtype, encoding: str) -> torch.dtype:
        """The dtype of an entry after the cast: its own, unless it is a floating one."""
        cast = self.dtype is not None and entry_dtype.is_floating_point and not encoding
        return self.dtype if cast and self.dtype is not None else entry_dtype


class LazyState(UserDict[str, Any]):
    """A state dict whose values are made when they are asked for, and not kept."""

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return value.make() if isinstance(value, _Later) else value


@dataclass(frozen=True)
class _Later:
    make: Callable[[], Any]


class Incoming:
    """A checkpoint's entries under a model's names.

    Parameters
    ----------
    checkpoint
        Where they come from.
    names
        The model's names, each with the checkpoint's.
    processing
        What is done to them.
    window
        Reads the checkpoint.
    told
        Who is told of the bytes that were given, and of all that will be.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        processing: Processing,
        window: Window,
        told: Told | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.names = dict(names)
        self._processing = processing
        self._window = window
        self._told = told
        self._given: set[str] = set()
        self._given_bytes = self._whole = 0
        self._first: dict[str, str] = {}  # of shared weights: each name with the one that is converted

    @property
    def converted(self) -> bool:
        """Whether any entry is read before it is given."""
        how = self._processing
        return how.transform is not None or how.device.type != "cpu" or how.dtype is not None

    @property
    def transformed(self) -> bool:
        """Whether shapes and dtypes are known only once the values are made."""
        return self._processing.transform is not None

    def share(self, ties: list[list[str]]) -> None:
        """Give what the model shares under each of its names, from the one entry there has to be.

        Raises
        ------
        ConfigError
            The checkpoint has two, and they differ.
        """
        for tie in ties:
            present = [name for name in tie if self.names.get(name) in self.checkpoint.entries]
            if not present:
                continue
            for name in present[1:]:
                if not self._window.same(self.names[present[0]], self.names[name]):
                    raise ConfigError(
                        f"the model shares one weight between {present[0]} and {name}, and "
                        f"{self.checkpoint.path} has two different ones; untie them in the model's "
                        "configuration, or leave one out of the file or by rename="
                    )
            self.names.update(dict.fromkeys(tie, self.names[present[0]]))
            self._first.update(dict.fromkeys(tie, present[0]))

    def described(self) -> dict[str, Any]:
        """The names, with the entry of each whose shape is known before it is made."""
        entries = {} if self.transformed else self.checkpoint.entries
        return {name: entries.get(old) for name, old in self.names.items()}

    def state(self, *, but: Collection[str] = ()) -> OrderedDict[str, Any]:
        """The values, each made once; all of them, but some."""
        self._expect(but)
        made: dict[str, Any] = {}
        for name in self.names:
            first = self._first.get(name, name)
            if first not in made and name not in but:
                made[first] = self._value(first)
                self._tell(first)
        return self._versioned(
            {name: made[self._first.get(name, name)] for name in self.names if name not in but}
        )

    def lazy_state(self, *, but: Collection[str] = ()) -> LazyState:
        """The same, each made when it is asked for."""
        self._expect(but)

        def make(name: str) -> torch.Tensor:
            made = self._own_value(name)
            self._tell(name)
            return made

        def later(name: str) -> Any:
            old = self.names[name]
            if old in self.checkpoint.objects:
                return self.checkpoint.objects[old]
            return _Later(lambda: make(self._first.get(name, name)))

        state = LazyState({name: later(name) for name in self.names if name not in but})
        state._metadata = self.checkpoint.versions  # type: ignore[attr-defined]
        return state

    def _expect(self, but: Collection[str]) -> None:
        firsts = {self._first.get(name, name) for name in self.names if name not in but}
        self._whole = sum(map(self._size_of, firsts))
        self._given.clear()
        self._given_bytes = 0
        if self._told is not None:
            self._told(0, self._whole)

    def _tell(self, name: str) -> None:
        if self._told is not None and name not in self._given:
            self._given.add(name)
            self._given_bytes += self._size_of(name)
            self._told(self._given_bytes, self._whole)

    def _size_of(self, name: str) -> int:
        entry = self.checkpoint.entries.get(self.names[name])
        return 0 if entry is None else entry.nbytes

    def _versioned(self, values: dict[str, Any]) -> OrderedDict[str, Any]:
        state = OrderedDict(values)
        if self.checkpoint.versions is not None:  # load_state_dict reads them off that attribute
            state._metadata = self.checkpoint.versions  # type: ignore[attr-defined]
        return state

    def _value(self, name: str) -> Any:
        old = self.names[name]
        entry = self.checkpoint.entries.get(old)
        if entry is None:
            return self.checkpoint.objects[old]
        how = self._processing
        as_stored = how.device.type == "cpu" and how.wanted(entry.dtype, entry.encoding) == entry.dtype
        if as_stored and how.transform is None:
            return self._mapped(old)
        made = self._own_value(name)
        if as_stored and is_plain(made) and self._window.holds(old, made):
            return self._mapped(old)  # the transform left it as it was
        return made

    def _mapped(self, old: str) -> torch.Tensor:
        tensor = self.checkpoint.tensor(old)
        # A model takes a parameter as it is: one that an open checkpoint keeps has to stay what it is.
        return tensor.detach() if type(tensor) is torch.nn.Parameter else tensor

    def _own_value(self, name: str) -> torch.Tensor:
        old, how = self.names[name], self._processing
        entry = self.checkpoint.entries[old]
        with torch.no_grad():
            source = self._window.read(old, how.device, how.wanted(entry.dtype, entry.encoding))
            return source if how.transform is None else self._transformed(name, source)

    def _transformed(self, name: str, source: torch.Tensor) -> torch.Tensor:
        assert self._processing.transform is not None
        called = name if name == self.names[name] else f"{name} ({self.names[name]} in the file)"
        try:
            made = self._processing.transform(name, source)
        except Exception as error:
            raise ConfigError(
                f"the transform failed at {called} of {self.checkpoint.path}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, torch.Tensor) or made.is_meta:
            what = "a tensor on the meta device" if isinstance(made, torch.Tensor) else f"{made!r}"
            raise ConfigError(
                f"the transform made {what} of {called} of {self.checkpoint.path}; expected a tensor with "
                "values (the tensor that it was given leaves the entry as it is)"
            )
        return made.detach() if is_plain(made) else made
