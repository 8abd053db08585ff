"""Takes attributes that are set on a handed-out tensor of a subclass to the master: `m.weight.scale = t`.

Note [What is set on a wrapper]
-------------------------------
A tensor of a subclass, such as a quantised weight, has attributes. What the model is handed out is another
object than the master, and what is set on that object would be lost with it. So each handed-out tensor is
remembered with the attributes that it was given. When the tensor dies, or when masters are asked for, the
attributes that have changed are set on the master. The `__dict__` of the tensor is kept for that.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Final

import torch
from torch import nn

_MISSING: Final = object()
#: The prefix of attributes that this package sets on tensors.
_OURS: Final = "_dynswap"


class _HandedOut:
    """A tensor that was handed out, with the attributes that it was given."""

    def __init__(self, tensor: torch.Tensor, master: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor, self._gone)
        self._master = master
        self._now = vars(tensor)
        self._given = dict(self._now)
        self._of_master = dict(vars(master))

    def tensor(self, master: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the tensor; None if it is dead, or if the master, its attributes or `inner` have changed.

        `inner` has the inner tensors of a wrapper, by their names.
        """
        same_inner = all(self._given.get(name) is tensor for name, tensor in inner.items())
        same_others = all(
            self._of_master.get(name, _MISSING) is value
            for name, value in vars(master).items()
            if name not in inner
        )
        return self._tensor() if same_inner and same_others and self._master is master else None

    def take_to_master(self) -> None:
        """Copy the attributes that have changed on the tensor to the master, on the device of the old value.

        If the old value is no tensor, that is the device of the master.
        """
        for name in {*self._now, *self._given}:
            value = self._now.get(name, _MISSING)
            if value is self._given.get(name, _MISSING) or name.startswith(_OURS):
                continue
            if value is _MISSING:
                with contextlib.suppress(AttributeError):
                    delattr(self._master, name)
            else:
                old = getattr(self._master, name, None)
                where = old.device if isinstance(old, torch.Tensor) else self._master.device
                setattr(self._master, name, moved(value, where))
        self._given = dict(self._now)
        self._of_master = dict(vars(self._master))

    def _gone(self, _: object) -> None:
        _alive.discard(self)
        if _latest.get(id(self._master)) is self:
            del _latest[id(self._master)]
        self.take_to_master()


#: The handed-out tensors that are alive; and the one that was handed out last, by the id of its master.
_alive: Final[set[_HandedOut]] = set()
_latest: Final[dict[int, _HandedOut]] = {}


def note_handed_out(tensor: torch.Tensor, master: torch.Tensor) -> None:
    """Remember the attributes of a handed-out tensor, so that what is set on it reaches the master."""
    handed_out = _HandedOut(tensor, master)
    _alive.add(handed_out)
    _latest[id(master)] = handed_out


def handed_out_before(master: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that was handed out last for a master; None if it is dead, or if a new one is needed.

    `inner` has the inner tensors of a wrapper, by their names.
    """
    known = _latest.get(id(master))
    return None if known is None else known.tensor(master, inner)


def take_attributes() -> None:
    """Copy the attributes that have changed on handed-out tensors that are alive to their masters."""
    for handed_out in list(_alive):
        handed_out.take_to_master()


def moved(value: Any, device: torch.device) -> Any:
    """Return the value of an attribute moved to a device, if it has a method `to`; else the value itself.

    A module is not moved: weights of bitsandbytes refer to their module, and its `.to()` would move masters.
    """
    if isinstance(value, nn.Module) or not callable(getattr(value, "to", None)):
        return value
    # The method of some classes moves the object in place, and returns nothing.
    own = value if isinstance(value, torch.Tensor) else copy.copy(value)
    there = own.to(device)
    return own if there is None else there
