"""A checkpoint's tensors under a model's names, as they are in the file or converted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from dynswap_ext._swap.subclasses import is_plain
from dynswap_ext._util.progress import ProgressCallback
from dynswap_ext.checkpoint.loading.walk import LazyState
from dynswap_ext.checkpoint.loading.window import Window
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import ConfigError

__all__ = ["ModelEntries", "Processing", "Transform"]

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
        """Check the arguments of `load`.

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

    def dtype_of(self, entry_dtype: torch.dtype, encoding: str) -> torch.dtype:
        """The dtype of an entry after the cast: its own, unless it is a floating one."""
        cast = entry_dtype.is_floating_point and not encoding
        return self.dtype if cast and self.dtype is not None else entry_dtype


class ModelEntries:
    """A checkpoint's entries under a model's names; `names` has those, each with the checkpoint's.

    `report` is called with the bytes that the model has got, and with those that it will get.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        processing: Processing,
        window: Window,
        report: ProgressCallback | None = None,
    ) -> None:
        self.checkpoint, self.names = checkpoint, dict(names)
        self._processing, self._window, self._report = processing, window, report
        self._first: dict[str, str] = {}  # of shared weights: each name with the one that is converted

    @property
    def converted(self) -> bool:
        """Whether any entry is read before the model gets it."""
        how = self._processing
        return self.transformed or how.device.type != "cpu" or how.dtype is not None

    @property
    def transformed(self) -> bool:
        """Whether shapes and dtypes are known only once the values are made."""
        return self._processing.transform is not None

    def share(self, state: Mapping[str, Any]) -> None:
        """Use one entry for each weight that the model's state has under several names.

        Ties are the model's: two modules that hold one parameter. A file that has one range of bytes under
        two names does not tie the model's weights.

        Raises
        ------
        ConfigError
            The checkpoint has two, and they differ.
        """
        ties: dict[int, list[str]] = {}
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                ties.setdefault(id(tensor), []).append(name)
        for tie in ties.values():
            present = [name for name in tie if self.names.get(name) in self.checkpoint.entries]
            if len(tie) < 2 or not present:
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

    def state(self, *, without: Collection[str] = (), lazy: bool = False) -> Mapping[str, Any]:
        """Return a state dict of all values but some: made now, or, if `lazy`, when each is asked for."""
        firsts = {name: self._first.get(name, name) for name in self.names if name not in without}
        sizes = {first: self._nbytes(first) for first in firsts.values()}
        whole, given = sum(sizes.values()), 0

        def make(first: str) -> Any:
            nonlocal given
            value = self._converted(first) if lazy else self._value(first)
            given += sizes.pop(first, 0)  # a module may ask for one twice
            if self._report is not None:
                self._report(given, whole)
            return value

        if self._report is not None:
            self._report(0, whole)
        state: Any
        if lazy:
            objects = self.checkpoint.objects
            state = LazyState(
                (name, objects[self.names[name]] if self.names[name] in objects else partial(make, first))
                for name, first in firsts.items()
            )
        else:
            values = {first: make(first) for first in dict.fromkeys(firsts.values())}
            state = OrderedDict((name, values[first]) for name, first in firsts.items())
        state._metadata = self.checkpoint.versions  # where load_state_dict looks for them
        return state  # type: ignore[no-any-return]

    def _nbytes(self, name: str) -> int:
        entry = self.checkpoint.entries.get(self.names[name])
        return 0 if entry is None else entry.nbytes

    def _value(self, name: str) -> Any:
        """What the model gets under that name: an object, a mapped tensor, or a converted one."""
        old, how = self.names[name], self._processing
        entry = self.checkpoint.entries.get(old)
        if entry is None:
            return self.checkpoint.objects[old]
        as_stored = how.device.type == "cpu" and how.dtype_of(entry.dtype, entry.encoding) == entry.dtype
        if not as_stored or self.transformed:
            converted = self._converted(name)
            # Did the transform leave it as it was?
            if not (as_stored and is_plain(converted) and self._window.holds(old, converted)):
                return converted
        tensor = self.checkpoint.tensor(old)
        # A model takes a parameter as it is: one that an open checkpoint keeps has to stay what it is.
        return tensor.detach() if type(tensor) is torch.nn.Parameter else tensor

    def _converted(self, name: str) -> torch.Tensor:
        old, how = self.names[name], self._processing
        entry = self.checkpoint.entries[old]
        with torch.no_grad():
            source = self._window.read(old, how.device, how.dtype_of(entry.dtype, entry.encoding))
            if how.transform is None:
                return source
            what = f"{name if name == old else f'{name} ({old} in the file)'} of {self.checkpoint.path}"
            try:
                result = how.transform(name, source)
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
