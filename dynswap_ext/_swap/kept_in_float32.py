"""Weights that their library keeps in float32 when the model is loaded in half precision.

Note [Kept in float32]
Classes of transformers and diffusers name weights that lose too much in half precision: Wan's norms, T5's
`wo`, the router's bias in a mixture of experts. `from_pretrained(dtype=...)` leaves them in float32, and so
does an install with that dtype; `model.to(dtype)` ignores the lists and casts them. Each library has its own
rule for the names. In transformers a name is a pattern that is searched in the whole name of a weight; one
list applies to float16, the other (`_strict`) to bfloat16 as well. In diffusers a name is one part of the
dotted name, for both dtypes.

No list names the frequencies of rotary embeddings. They are buffers that are in no checkpoint, so
`from_pretrained` does not cast them, and both libraries make them in float32. In bfloat16 a frequency is off
by up to 0.4 %, which at the thousandth token is an angle of up to four radians. The libraries make other
buffers that are in no checkpoint in float32 or in the dtype that is asked for. The buffer does not tell which
of the two, so these are cast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._util.own_masters import own_masters

#: Classes of transformers have both lists, those of diffusers only the first.
_NAMES: Final = "_keep_in_fp32_modules"
_STRICT: Final = "_keep_in_fp32_modules_strict"
_HALF: Final = (torch.float16, torch.bfloat16)
#: A class with this in its name has frequencies as its unsaved buffers; transformers goes by the name, too.
_ROTARY: Final = "RotaryEmbedding"
#: Only of these libraries: a class of code in a checkpoint may have tables in the dtype that is asked for.
_LIBRARIES: Final = ("transformers", "diffusers")
#: In any class, an unsaved buffer whose name ends so has frequencies.
_FREQUENCIES: Final = "inv_freq"


def kept_in_float32(modules: Sequence[nn.Module], dtype: torch.dtype | None) -> dict[int, frozenset[str]]:
    """Return the names of masters that are not cast below float32, by their module's place in `modules`.

    `modules` are those of a tree. Modules without such masters are left out. The result is empty if `dtype`
    is not float16 or bfloat16.
    """
    if dtype not in _HALF:
        return {}
    place_of = {id(module): place for place, module in enumerate(modules)}
    kept: dict[int, set[str]] = {}
    for root in modules:
        if not hasattr(type(root), _NAMES):
            continue
        is_kept = _rule_of(root, dtype)
        for path, module in _named_modules(root):
            names = {name for name, _, _ in own_masters(module) if is_kept(path + name)}
            kind = type(module)
            rotary = _ROTARY in kind.__name__ and kind.__module__.partition(".")[0] in _LIBRARIES
            unsaved = module._non_persistent_buffers_set
            names |= {name for name in unsaved if rotary or name.endswith(_FREQUENCIES)}
            if names and id(module) in place_of:
                kept.setdefault(place_of[id(module)], set()).update(names)
    return {place: frozenset(names) for place, names in kept.items()}


def dtype_of(session: Any, module: nn.Module, name: str, master: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a session hands out a module's master."""
    if session.dtype is None or not master.is_floating_point():
        return master.dtype
    dtype: torch.dtype = session.dtype_of(module, name)
    return dtype


def _rule_of(module: nn.Module, dtype: torch.dtype | None) -> Callable[[str], object]:
    """Return a function that tells from a master's name whether the module's class keeps it in float32."""
    names = _listed(module, _NAMES)
    if not hasattr(type(module), _STRICT):
        return lambda name: not names.isdisjoint(name.split("."))
    patterns = _listed(module, _STRICT) | (names if dtype is torch.float16 else set())
    if not patterns:
        return lambda name: False
    return re.compile("|".join(p.replace("*", ".*") for p in sorted(patterns))).search


def _listed(module: nn.Module, attribute: str) -> set[str]:
    listed = getattr(module, attribute, None) if hasattr(type(module), attribute) else None
    return {listed} if isinstance(listed, str) else set(listed or ())


def _named_modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a tree, each with the prefix of its names; a module with two names comes twice."""
    yield path, root
    for name, child in list(root._modules.items()):  # other threads may add and remove some
        if child is not None:
            yield from _named_modules(child, f"{path}{name}.")
