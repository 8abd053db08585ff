"""Warns of casts of an installed model's masters that do not do what a user may expect.

Note [Masters that are cast]
``model.half()``, ``pipe.to(torch.float16)`` and the like cast the masters, as they cast the weights of any
model, and the next call uses the new ones. In two cases the result may be a surprise, and there is a warning
of each, once for a session. After ``install(dtype=...)``, the model still computes in the dtype of the
install. And masters that were mapped from a file have been read, and take RAM from then on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.kept_in_float32 import dtype_of
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.warn import warn
from dynswap_ext.lossless.tensor import LosslessTensor


class _Cast:
    """The casts to warn of when the outermost `_apply` of installed modules ends."""

    def __init__(self) -> None:
        #: The first cast that does not change the dtype of the compute: the session, that dtype, and the new
        #: dtype of the master.
        self.without_effect: tuple[Any, torch.dtype, torch.dtype] | None = None
        #: The first cast of a master that was mapped from a file: the session, and the master's new dtype.
        self.from_file: tuple[Any, torch.dtype] | None = None
        self._files: FileMappings | None = None

    def note(self, session: Any, module: nn.Module, name: str, master: torch.Tensor, was_at: int) -> None:
        computed = dtype_of(session, module, name, master)
        if computed != master.dtype and self.without_effect is None:
            self.without_effect = session, computed, master.dtype
        if self.from_file is None:
            self._files = self._files or FileMappings()
            if self._files.find(was_at) is not None:
                self.from_file = session, master.dtype

    def tell(self) -> None:
        """Warn of the casts that were noted, of each kind once for a session."""
        for key, found in (("dtype", self.without_effect), ("file", self.from_file)):
            if found is None or key in _told.setdefault(found[0], set()):
                continue
            _told[found[0]].add(key)
            root = model_of(found[0])
            name = "the model" if root is None else f"the {type(root).__name__}"
            if key == "dtype":
                warn(
                    f"{name} is installed with dtype={found[0].dtype} and still computes in that: the cast "
                    f"to {found[-1]} changed the masters (the tensors that the model owns). To compute in "
                    f"{found[-1]}, call dynswap_ext.install(model, dtype={found[-1]}) instead",
                    always=True,
                )
            else:
                warn(
                    f"{name} was mapped from a file; the cast to {found[-1]} has read its masters, which "
                    "take RAM now. To leave them in the file, and cast on the way to the device, load the "
                    f"model again and call dynswap_ext.install(model, dtype={found[-1]})",
                    always=True,
                )


#: The kinds of cast ("dtype", "file") of which each session has warned.
_told: Final[weakref.WeakKeyDictionary[Any, set[str]]] = weakref.WeakKeyDictionary()


class _Casting(threading.local):
    now: _Cast | None = None


_casting: Final = _Casting()
#: The classes of masters whose casts are noted.
_KINDS: Final = (torch.Tensor, nn.Parameter, LosslessTensor)


@contextlib.contextmanager
def noting_casts(module: nn.Module) -> Iterator[None]:
    """Warn of casts of a module's masters inside the block, when the outermost such block ends.

    See Note [Masters that are cast].
    """
    session, around = session_of(module), _casting.now
    if session is None or torch.compiler.is_dynamo_compiling():
        yield
        return
    cast = _casting.now = around or _Cast()
    # The storages are kept so that mappings of files stay until their addresses have been looked up.
    before = [
        (name, master, master.dtype, master.untyped_storage(), _address(master))
        for name, master, _ in own_masters(module)
        if type(master) in _KINDS and master.is_floating_point() and _has_bytes(master)
    ]
    try:
        yield
    finally:
        _casting.now = around
    if session_of(module) is not session:
        return
    held = {name: master for name, master, _ in own_masters(module)}
    for name, _, dtype, _, address in before:
        if name in held and held[name].dtype != dtype:
            cast.note(session, module, name, held[name], address)
    if around is None:
        cast.tell()


def _address(master: torch.Tensor) -> int:
    # That of a coded master's values would decode it for good.
    coded = isinstance(master, LosslessTensor)
    return master.untyped_storage().data_ptr() if coded else master.data_ptr()


def _has_bytes(master: torch.Tensor) -> bool:
    return master.layout is torch.strided and not master.is_meta
