"""What an installed model answers to code that asks on which device, and in which dtype, it computes.

Note [Where a model computes]
Libraries put inputs, masks and caches on the device where a model computes, and learn it from the model's
parameters. The parameters of an installed model are masters, which are elsewhere. They have to be masters for
code that uses them as tensors (optimizers, `state_dict`, clipping). And a class may mean something else by
its property `device`. So the answer depends on what is read:

- A property `device` or `dtype` of a module's class is evaluated as usual, and the masters that it looks at
  are noted. If its answer is the device (the dtype) of one of them, it meant the weights, and the answer
  becomes the device (the dtype) in which the install computes with that master. Any other answer is left.
- Within `save_pretrained` a property `dtype` answers the dtype of the masters, because these are written.
- ``next(model.parameters()).device`` is no property. If its caller is in a forward, or in a library that
  `register_library` knows, the caller's bytecode tells whether it reads nothing else of the tensor. Then it
  gets a tensor that has the device and dtype in which the install computes with the weight. Functions of such
  a library that go through all parameters for the same purpose are known by name.

All other code that iterates over parameters gets masters. So outside a forward, a program's own
``next(model.parameters()).device`` is the device of a master. So it is in code that torch.compile traces,
where there is no caller to look at.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dynswap_ext._swap.kept_in_float32 import dtype_of
from dynswap_ext._swap.module_registry import served_by
from dynswap_ext._swap.state import session_of

#: Returns the (name, tensor) pairs of one module: the function that `nn.Module._named_members` takes.
Members = Callable[[nn.Module], Iterable[tuple[str, Any]]]

#: A master that was read: its module, its name and the tensor.
LookedAt = tuple[nn.Module, str, torch.Tensor]

_NAMES: Final = ("device", "dtype")
#: The method of libraries that writes a model, and in its config the dtype to load it in.
_SAVE: Final = "save_pretrained"
#: What an `_Answer` has of its weight, so that the condition of a generator expression may read it.
_KNOWN: Final = (
    *_NAMES,
    *("dim", "is_complex", "is_floating_point", "ndim", "numel", "requires_grad", "shape", "size"),
)
#: Whether a graph of torch.compile takes the answer of a property as a constant; otherwise it breaks there.
CONSTANT_IN_GRAPHS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
#: Instructions that read a local variable.
_LOADS: Final = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")
#: The parts of the name of an instruction for two variables, such as STORE_FAST_LOAD_FAST.
_ONE_VARIABLE: Final = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")
_TORCH: Final = nn.Module.__module__

#: By a library's top-level module: its functions that go through parameters only for a device or a dtype.
_libraries: dict[str, frozenset[str]] = {}


def register_library(library: str, *askers: str) -> None:
    """Register a library that reads the device or dtype of a model's first parameter.

    Its code then gets the device and dtype in which the install computes with that weight. `library` is its
    top-level module, which need not be installed. `askers` are its functions that go through all parameters
    for a device or a dtype, and return that.
    """
    _libraries[library] = frozenset(askers)


# Properties ---------------------------------------------------------------------------------------------


class _Asking(threading.local):
    #: The masters at which the property has looked that is being evaluated on this thread; None: none is.
    looked: list[LookedAt] | None = None
    #: Whether this thread is in a `save_pretrained`.
    saving: bool = False


_asking = _Asking()


def namespace_for(cls: type) -> dict[str, Any]:
    """Return what a swap class has in place of the original's `device`, `dtype` and `save_pretrained`."""
    found = {}
    for name in _NAMES:
        defined = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        if isinstance(defined, property) and defined.fget is not None:
            found[name] = property(_answering(defined.fget), defined.fset, defined.fdel, defined.__doc__)
    save = inspect.getattr_static(cls, _SAVE, None)
    return {**found, _SAVE: _saving(save)} if inspect.isfunction(save) else found


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, _asking.saving = _asking.saving, True
        try:
            return save(self, *args, **kwargs)
        finally:
            _asking.saving = outer

    return saved


def _is_saved(session: Any) -> bool:
    """Return whether a dtype that is asked for now is the one to write a model in.

    It is within `save_pretrained`, except in a call of the model there, which computes.
    """
    return _asking.saving and not (session is not None and session.inside_call())


def _answering(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    #: By the id of a module: its session, the property's answer from its masters, and the translated answer.
    #: A property that keeps its first answer looks at no master when it is read again.
    before: dict[int, tuple[Any, Any, Any]] = {}

    @functools.wraps(getter)
    def answer(self: Any) -> Any:
        outer, _asking.looked = _asking.looked, []
        try:
            answered = getter(self)
            looked = _asking.looked
        finally:
            _asking.looked = outer
        session, translated = session_of(self), answered
        if looked:
            translated = _translated(answered, looked)
            if translated != answered and session is not None:
                if id(self) not in before:
                    weakref.finalize(self, before.pop, id(self), None).atexit = False
                before[id(self)] = weakref.ref(session), answered, translated
        else:
            served, said, became = before.get(id(self), (None, None, None))
            if served is not None and served() is session and said == answered:
                translated = became
        return answered if isinstance(answered, torch.dtype) and _is_saved(session) else translated

    # This does what `torch.compiler.assume_constant_result` does, without the second that it takes to import
    # torch._dynamo. A graph that uses weights has guards on the masters and on the install anyway. Before
    # torch 2.13 such a function could not take a module as its argument. So there this does what
    # `torch.compiler.disable` does, and breaks the graph.
    mark = "_dynamo_marked_constant" if CONSTANT_IN_GRAPHS else "_torchdynamo_disable"
    setattr(answer, mark, True)
    return answer


def _translated(answered: Any, looked: list[LookedAt]) -> Any:
    for module, name, master in reversed(looked):
        if answered in (master.device, master.dtype):
            session = session_of(module)
            if session is None:
                return answered
            device, dtype = _place_of(session, module, name, master)
            return device if isinstance(answered, torch.device) else dtype
    return answered


def _place_of(
    session: Any, module: nn.Module, name: str, master: torch.Tensor
) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype in which a session computes with a module's master."""
    served = served_by.get(session)
    if served is not None and served.ignores(module, name):
        return master.device, master.dtype
    return session.device, dtype_of(session, module, name, master)


def looked_at(module: nn.Module, name: str, master: Any) -> None:
    """Note for the property that is being evaluated, if any, that a master was read."""
    if _asking.looked is not None and isinstance(master, torch.Tensor):
        _asking.looked.append((module, name, master))


# Parameters ---------------------------------------------------------------------------------------------


def as_asked(module: nn.Module, members: Members) -> Members | None:
    """Return the function to get the members of modules by, for code that only asks for a device or a dtype.

    None for other code, which gets `members` and may use them for any purpose. Call this directly from
    `_named_members`, which serves `parameters`, `buffers` and the like: the caller's frame is looked at.
    """
    if _asking.looked is not None:
        return functools.partial(_noted, members)
    session = session_of(module)
    if _is_question(inside_call=session is not None and session.inside_call()):
        return functools.partial(_answers, members)
    return None


def _noted(members: Members, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, master in members(module):
        looked_at(module, name, master)
        yield name, master


def _answers(members: Members, module: nn.Module) -> Iterator[tuple[str, Any]]:
    session = session_of(module)
    for name, master in members(module):
        if session is None or not isinstance(master, torch.Tensor):
            yield name, master
            continue
        device, dtype = _place_of(session, module, name, master)
        if _is_saved(session):
            dtype = master.dtype
        there = master.device == device and master.dtype == dtype
        yield name, master if there else _Answer(master, device, dtype)


class _Answer(torch.Tensor):
    """A tensor without values, of the device and dtype in which an install computes with a weight."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> _Answer:
        make: Any = torch.Tensor._make_wrapper_subclass
        options = {"dtype": dtype, "device": device, "requires_grad": weight.requires_grad}
        return make(cls, weight.shape, **options)  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"dynswap_ext: {func} was called on a tensor that answers the device and dtype of an installed "
            "model's weight, and has no values. Please report which library did so"
        )


def _is_question(*, inside_call: bool) -> bool:
    """Return whether torch goes through the members for code that only asks for a device or a dtype."""
    frame: FrameType | None = sys._getframe(3)  # the caller of `_named_members`, which calls `as_asked`
    while frame is not None and frame.f_globals.get("__name__") == _TORCH:
        frame = frame.f_back
    if frame is None:
        return False
    askers = _libraries.get(str(frame.f_globals.get("__name__")).partition(".")[0])
    if askers is None and not inside_call:
        return False
    return frame.f_code.co_name in (askers or ()) or _reads_only_an_answer(frame.f_code, frame.f_lasti)


class _Step(NamedTuple):
    """One instruction of CPython's bytecode, which reads or writes one variable at most."""

    operation: str
    argument: Any
    offset: int


def _steps(code: CodeType) -> Iterator[_Step]:
    for one in dis.get_instructions(code):
        parts = _ONE_VARIABLE.findall(one.opname) if isinstance(one.argval, tuple) else ()
        if len(parts) == 2:  # since Python 3.13: STORE_FAST_LOAD_FAST and the like
            for part, variable in zip(parts, one.argval, strict=True):
                yield _Step(part, variable, one.offset)
        else:
            yield _Step(one.opname, one.argval, one.offset)


@functools.lru_cache(maxsize=4096)
def _reads_only_an_answer(code: CodeType, at: int) -> bool:
    """Return whether code that asks for parameters at the instruction `at` reads only a device or a dtype."""
    steps = list(_steps(code))
    if code.co_name == "<genexpr>":  # next(p.device for p in model.parameters())
        place = next((i for i, one in enumerate(steps) if one.operation == "FOR_ITER"), None)
        yielded = [i for i, one in enumerate(steps) if one.operation == "YIELD_VALUE"]
        return (
            place is not None
            and all(_reads(steps[i - 1], _NAMES) for i in yielded)
            and _only_reads(steps, place + 1, _KNOWN)  # its condition, too
        )
    # In Python 3.12, once the code is warm, `at` lies behind FOR_ITER, in that instruction's inline cache.
    place = max((i for i, one in enumerate(steps) if one.offset <= at), default=None)
    if place is None:
        return False
    operation = steps[place].operation
    if "CALL" in operation and "next" in code.co_names:
        # A call in Python 3.11 is two instructions, and `at` is the first of them once the code is warm.
        place += 1 if operation == "PRECALL" else 0
        if _reads(steps[place + 1], _NAMES):  # next(model.parameters()).device
            return True
    elif operation != "FOR_ITER":
        return False
    # After `p = next(model.parameters())`, or in `for p in model.parameters()`, only p.device may be read.
    return _only_reads(steps, place + 1, _NAMES)


def _only_reads(steps: list[_Step], place: int, names: Collection[str]) -> bool:
    """Return whether the variable set at a place is set only there, and only these attributes of it are read.

    If a pair is unpacked there, such as a name and its parameter, its second variable is meant.
    """
    if steps[place].operation == "UNPACK_SEQUENCE" and steps[place].argument == 2:
        place += 2
    stored = steps[place]
    if stored.operation != "STORE_FAST":
        return False
    users = [i for i, one in enumerate(steps) if one.argument == stored.argument and i != place]
    return len(users) > 0 and all(steps[i].operation in _LOADS and _reads(steps[i + 1], names) for i in users)


def _reads(step: _Step, names: Collection[str]) -> bool:
    return step.operation in ("LOAD_ATTR", "LOAD_METHOD") and step.argument in names
