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
from dynswap_ext.checkpoint.options import cast_to
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import ConfigError

#: From a name, as the model has it, and the file's tensor to the tensor that becomes the master.
Transform: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]


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
        """Return a state dict of all values but some: made now, or, if `lazy`, when each is asked for."""
        names = {name: old for name, old in self.names.items() if name not in without}
        entries, objects = self.checkpoint.entries, self.checkpoint.objects
        sizes = {old: entries[old].nbytes for old in names.values() if old in entries}
        whole, given = sum(sizes.values()), 0
        report = self.report or (lambda given, whole: None)

        def make(old: str) -> Any:
            nonlocal given
            value = self._converted(old) if lazy else self._master(old)
            given += sizes.pop(old, 0)  # a module may ask for one twice
            report(given, whole)
            return value

        report(0, whole)
        made = {
            old: objects[old] if old in objects else partial(make, old) if lazy else make(old)
            for old in dict.fromkeys(names.values())
        }
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
