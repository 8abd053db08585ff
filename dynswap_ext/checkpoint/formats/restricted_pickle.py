"""Pickles of torch's own file formats, read without running anything that they name.

For the little pickles beside the bytes of tensors. Each name in them is looked up in a table of the caller's,
mostly of stand-ins, and before anything is built, the opcodes are checked: the pickle module itself would
allocate whatever number a damaged pickle gives.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Opcodes that these pickles have, with the bytes of argument that follow. Not among them: those that can
#: number a memo entry beyond the pickle's own length, and those that reach another registry of classes.
_FIXED: dict[int, int] = {
    **dict.fromkeys(b"()]}.0e2NRabsutQ", 0),
    **dict.fromkeys(
        b"\x81\x85\x86\x87\x88\x89\x93\x94", 0
    ),  # NEWOBJ, tuples, booleans, STACK_GLOBAL, MEMOIZE
    **dict.fromkeys(b"\x80Khq", 1),  # PROTO, BININT1, BINGET, BINPUT
    ord("M"): 2,  # BININT2
    **dict.fromkeys(b"Jj", 4),  # BININT, LONG_BINGET
    **dict.fromkeys(b"G\x95", 8),  # BINFLOAT, FRAME
}
#: The same, for opcodes whose argument has its length before it: the bytes of that length.
_COUNTED: dict[int, int] = {**dict.fromkeys(b"CU\x8a\x8c", 1), **dict.fromkeys(b"BX", 4)}
_GLOBAL, _STOP = ord("c"), ord(".")


def restricted_loads(
    data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Unpickle what has no names but those given, and the dtypes of torch.

    Parameters
    ----------
    data
        The pickle.
    names
        What "module.name" stands for: functions, `StandIn` and classes derived from it. A function should
        make nothing that grows with what it is given, or a small pickle makes much of it.
    persistent
        What a persistent id stands for.

    Raises
    ------
    pickle.UnpicklingError
        The pickle is damaged, or asks for more. Says what.
    """
    _check_opcodes(data)
    try:
        return _Unpickler(data, names, persistent).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # what a damaged pickle raises is open-ended: it calls the names as it likes
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__})") from error


class StandIn:
    """What an object of a class of torch becomes: its attributes, and nothing that runs."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = state if isinstance(state, dict) else {"state": state}


class _Callable:
    """A function that the pickle can call, and not change as it can change a function's attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, _state: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a function")


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._names = names
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            if not isinstance(found, torch.dtype):
                found = None
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        is_function = callable(found) and not isinstance(found, type)
        return _Callable(found) if is_function else found

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside itself")
        return self._persistent(pid)


def _check_opcodes(data: bytes) -> None:
    at, end = 0, len(data)
    while at < end:
        opcode = data[at]
        at += 1
        if (width := _FIXED.get(opcode)) is not None:
            at += width
            if opcode == _STOP:
                return
        elif (width := _COUNTED.get(opcode)) is not None:
            at += width + int.from_bytes(data[at : at + width], "little")
        elif opcode == _GLOBAL:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1 or end
        else:
            raise pickle.UnpicklingError(f"it has the opcode {opcode:#04x} at byte {at - 1:,}")
    raise pickle.UnpicklingError("it is cut short")
