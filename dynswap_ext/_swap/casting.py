"""Which weights an install with a dtype casts.

Note [What dtype= casts]
``install(model, dtype=...)`` computes what ``model.to(dtype)`` would: it casts the floating masters that
the model has then, but for those that their library keeps in float32 (Note [Kept in float32]). What is
registered later keeps its dtype if that is wider, so it is not rounded, as in a model that was cast before.
peft, for instance, puts adapters in float32 over a base in half precision. What has a narrower dtype, or one
of the same width, is cast. Three things come later and are not new:

- Another master under a name that is served, as `load_state_dict(assign=True)` brings it.
- A master that is served already, under another name or in another module (a tie, a parametrization).
- A copy of an installed module. Copies are plain and have the masters' dtype, while the copy of a cast module
  has the dtype of the compute. So this module notes what was cast.

These are cast as before.
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

#: Copies of installed modules: the dtype into which the original was cast, and the names of what was.
_copies: Final[weakref.WeakKeyDictionary[nn.Module, tuple[torch.dtype, frozenset[str]]]] = (
    weakref.WeakKeyDictionary()
)


def note_copy(module: nn.Module, copied: object) -> None:
    """Note which weights of a module are cast, in case its copy joins an install."""
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
    """Return the names of masters that are cast although they join later, by their module's place."""
    noted = {place: _copies.get(module) for place, module in enumerate(modules)} if _copies else {}
    return {place: note[1] for place, note in noted.items() if note is not None and note[0] == dtype}
