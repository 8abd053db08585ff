"""Which weights an install with a dtype casts.

Note [What dtype= casts]
``install(model, dtype=...)`` casts what ``model.to(dtype)`` would: the floating masters that the model has at
that time, except those that their library keeps in float32 (Note [Kept in float32]). A master that is
registered later keeps its dtype if that is wider, so that it is not rounded. The same happens to a model that
was cast with `.to`: peft, for example, puts adapters in float32 over a base in half precision. If the dtype
of a later master is narrower, or of the same width, it is cast. Three kinds of masters come later but are not
new. They are cast like those of the install:

- A master that replaces another one under its name, as with `load_state_dict(assign=True)`.
- A master that is served already, under another name or in another module (a tie, a parametrization).
- A master in a copy of an installed module. The copy is plain and has the masters' dtype, while a copy of a
  module that `.to` has cast would have the dtype of the compute. So this module notes which masters are cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from dynswap_ext._swap.kept_in_float32 import dtype_of
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.own_masters import own_masters

#: By a copy of an installed module: the dtype into which the original's masters are cast, and their names.
_copies: Final[weakref.WeakKeyDictionary[nn.Module, tuple[torch.dtype, frozenset[str]]]] = (
    weakref.WeakKeyDictionary()
)


def note_copy(module: nn.Module, copied: object) -> None:
    """Note which weights of an installed module are cast, in case its copy `copied` joins an install."""
    session = session_of(module)
    if session is None or session.dtype is None or not isinstance(copied, nn.Module) or copied is module:
        return
    cast = [
        name
        for name, master, _ in own_masters(module)
        if master.is_floating_point() and dtype_of(session, module, name, master) == session.dtype
    ]
    if cast:
        _copies[copied] = session.dtype, frozenset(cast)


def cast_as_copies(modules: Sequence[nn.Module], dtype: torch.dtype | None) -> dict[int, frozenset[str]]:
    """Return the names of masters to cast in modules that join an install later, by place in `modules`.

    The modules are copies of installed ones, in which these masters are cast into the same dtype.
    """
    noted = {place: _copies.get(module) for place, module in enumerate(modules)} if _copies else {}
    return {place: note[1] for place, note in noted.items() if note is not None and note[0] == dtype}
