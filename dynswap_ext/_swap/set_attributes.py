"""What is set on a handed-out tensor of a class of its own: `m.weight.scale = t` of a quantised weight.

Note [What is set on a wrapper]
-------------------------------
A tensor of a class of its own has attributes, and what the model is handed out is another object than the
master: what is set there would be gone with it. So it is remembered with the attributes that it was given.
When it is gone, or masters are asked for, those that are others by now are set on the master. Its `__dict__`
outlives it for that.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Final

import torch
from torch import nn

_MISSING: Final = object()
#: What the providers keep beside the class's own.
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
        """Return the tensor; None if it is gone, or if the master or what is inside has changed since."""
        same_inner = all(self._given.get(name) is tensor for name, tensor in inner.items())
        same_others = all(
            self._of_master.get(name, _MISSING) is value
            for name, value in vars(master).items()
            if name not in inner
        )
        return self._tensor() if same_inner and same_others and self._master is master else None

    def take_to_master(self) -> None:
        """Set on the master what was set on the tensor, on the device where the master has such."""
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


#: Those that are alive; and by the master's id, the one that was handed out last.
_alive: Final[set[_HandedOut]] = set()
_latest: Final[dict[int, _HandedOut]] = {}


def note_handed_out(tensor: torch.Tensor, master: torch.Tensor) -> None:
    """Remember the attributes of a handed-out tensor, so that what is set on it reaches the master."""
    handed_out = _HandedOut(tensor, master)
    _alive.add(handed_out)
    _latest[id(master)] = handed_out


def handed_out_before(master: torch.Tensor, inner: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that was handed out last, if it is alive and another would be the same."""
    known = _latest.get(id(master))
    return None if known is None else known.tensor(master, inner)


def take_attributes() -> None:
    """Set on the masters what was set on handed-out tensors that are alive."""
    for handed_out in list(_alive):
        handed_out.take_to_master()


def moved(value: Any, device: torch.device) -> Any:
    """Return an attribute on a device, if it knows how to go there.

    A module stays where it is: bitsandbytes' weights know whose they are, and `.to()` would move its masters.
    """
    if isinstance(value, nn.Module) or not callable(getattr(value, "to", None)):
        return value
    # Some move themselves in place, and return nothing.
    own = value if isinstance(value, torch.Tensor) else copy.copy(value)
    there = own.to(device)
    return own if there is None else there
