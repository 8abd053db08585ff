"""What an installed model answers to those who ask where, and in which dtype, it computes.

Note [Where a model computes]
Libraries put inputs, masks and caches where a model computes, and they take that from its parameters. Those
of an installed model are masters, which are elsewhere. Yet masters they have to be for whoever uses them as
tensors (optimizers, `state_dict`, clipping), and a class is free to mean something else by its property
`device`. The answer is therefore decided by what the property reads while it is evaluated, not by its name
or its class:

- A property `device` or `dtype` of a module's class is evaluated as it is, and note is taken of the masters
  that it looks at. If it answers the device (the dtype) of one of them, it meant the weights, and the answer
  becomes where (in which dtype) the install computes with that one. Any other answer is the class's own.
- ``next(model.parameters()).device`` has no such frame around it. Where its caller is in a library of
  `register_library`, the caller's own instructions say whether it reads nothing else of the tensor; then the
  tensor that it gets answers for the weight. A helper that goes through all parameters to the same end is
  known by its name.

Everybody else who iterates gets masters: a program's own ``next(model.parameters()).device`` is where they
are. So does a library's where torch.compile traces it, as there is no caller to look at.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.state import session_of

#: Gives the (name, tensor) pairs of one module, as `nn.Module._named_members` is told to get them.
Members = Callable[[nn.Module], Iterable[tuple[str, Any]]]

_NAMES: Final = ("device", "dtype")
#: Whether a graph of torch.compile takes the answer of a property as a constant.
CONSTANT_IN_GRAPHS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_TORCH: Final = nn.Module.__module__

#: By the library's top module: its functions that go through parameters only to learn a device or a dtype.
_libraries: dict[str, frozenset[str]] = {}


def register_library(library: str, *askers: str) -> None:
    """Register a library that asks the first parameter for a device or a dtype: the weight answers.

    `library` is the name that its modules' names begin with; it need not be installed. `askers` are its
    functions that go through parameters for a device or a dtype, and return that.
    """
    _libraries[library] = frozenset(askers)


# Properties ---------------------------------------------------------------------------------------------


class _Asking(threading.local):
    #: What the property that is being evaluated has looked at: masters, and the sessions that serve them.
    looked: list[tuple[Any, torch.Tensor]] | None = None


_asking = _Asking()


def namespace_for(cls: type) -> dict[str, Any]:
    """The properties that a swap class has in place of the original's `device` and `dtype`, if it has any."""
    found = {}
    for name in _NAMES:
        defined = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        if isinstance(defined, property) and defined.fget is not None:
            found[name] = property(_answering(defined.fget), defined.fset, defined.fdel, defined.__doc__)
    return found


def _answering(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    #: By the id of a module: its session, what the property said of its masters, and what that became. A
    #: property that keeps its first answer looks at no master when it is asked again.
    before: dict[int, tuple[Any, Any, Any]] = {}

    @functools.wraps(getter)
    def answer(self: Any) -> Any:
        outer, _asking.looked = _asking.looked, []
        try:
            answered = getter(self)
            looked = _asking.looked
        finally:
            _asking.looked = outer
        if looked:
            translated = _translated(answered, looked)
            session = session_of(self)
            if translated != answered and session is not None:
                if id(self) not in before:
                    weakref.finalize(self, before.pop, id(self), None).atexit = False
                before[id(self)] = weakref.ref(session), answered, translated
            return translated
        served, said, became = before.get(id(self), (None, None, None))
        return (
            became if served is not None and served() is session_of(self) and said == answered else answered
        )

    # `torch.compiler.assume_constant_result`, without the second that importing torch._dynamo takes. A graph
    # that uses weights has guards on the masters and on the install anyway. Before torch 2.13 a module could
    # be no argument of such a function: there it breaks the graph (`torch.compiler.disable`).
    mark = "_dynamo_marked_constant" if CONSTANT_IN_GRAPHS else "_torchdynamo_disable"
    setattr(answer, mark, True)
    return answer


def _translated(answered: Any, looked: list[tuple[Any, torch.Tensor]]) -> Any:
    if isinstance(answered, torch.device):
        for session, master in reversed(looked):
            if master.device == answered:
                return answered if session is None else session.device
    elif isinstance(answered, torch.dtype):
        for session, master in reversed(looked):
            if master.dtype == answered:
                return answered if session is None else _dtype(session, master)
    return answered


def looked_at(module: nn.Module, master: Any) -> None:
    """A master was given to somebody by its name."""
    if _asking.looked is not None and isinstance(master, torch.Tensor):
        _asking.looked.append((session_of(module), master))


# Parameters ---------------------------------------------------------------------------------------------


def as_asked(members: Members) -> Members | None:
    """How to get the members of modules for whoever asks for them now; None: as they are, for any purpose.

    To be called in `_named_members`, by which all of `parameters`, `named_parameters` and `buffers` go.
    """
    if _asking.looked is not None:
        return functools.partial(_noted, members)
    if _libraries and _is_question():
        return functools.partial(_answers, members)
    return None


def _noted(members: Members, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, master in members(module):
        looked_at(module, master)
        yield name, master


def _answers(members: Members, module: nn.Module) -> Iterator[tuple[str, Any]]:
    session = session_of(module)
    for name, master in members(module):
        if session is None or not isinstance(master, torch.Tensor):
            yield name, master
            continue
        device, dtype = session.device, _dtype(session, master)
        there = master.device == device and master.dtype == dtype
        yield name, master if there else _Answer(master.shape, device, dtype)


class _Answer(torch.Tensor):
    """Answers for a weight where it is computed with. Has no values."""

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> _Answer:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=dtype, device=device)  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"dynswap_ext: {func} was called on a tensor that answers the device and dtype of an installed "
            "model's weight, and has no values. Please report which library did so"
        )


def _dtype(session: Any, master: torch.Tensor) -> torch.dtype:
    dtype: torch.dtype | None = session.dtype
    return master.dtype if dtype is None or not master.is_floating_point() else dtype


def _is_question() -> bool:
    """Return whether torch goes through the members for code that only asks for a device or a dtype."""
    frame: FrameType | None = sys._getframe(3)  # over `as_asked` and `_named_members`
    while frame is not None and frame.f_globals.get("__name__") == _TORCH:
        frame = frame.f_back
    if frame is None:
        return False
    askers = _libraries.get(str(frame.f_globals.get("__name__")).partition(".")[0])
    if askers is None:
        return False
    return frame.f_code.co_name in askers or _reads_only_an_answer(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _reads_only_an_answer(code: CodeType, at: int) -> bool:
    """Whether the code, at the instruction `at`, reads a device or a dtype of what it gets, and no more."""
    instructions = list(dis.get_instructions(code))
    if code.co_name == "<genexpr>":  # next(p.device for p in model.parameters())
        yielded = [i for i, one in enumerate(instructions) if one.opname == "YIELD_VALUE"]
        return bool(yielded) and all(_is_answer(instructions[i - 1]) for i in yielded)
    if "next" not in code.co_names:
        return False
    following = (i + 1 for i, one in enumerate(instructions) if one.offset == at and "CALL" in one.opname)
    return any(_is_answer(instructions[i]) for i in following)  # next(model.parameters()).device


def _is_answer(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_ATTR" and instruction.argval in _NAMES
