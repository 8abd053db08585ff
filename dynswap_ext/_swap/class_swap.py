"""The swap class: the subclass that takes a module's class's place while it is installed.

There is one for each original class, provider and naming. By default it has the names of its original. It
adds no attributes to instances, and puts a descriptor of the provider in the place of each parameter and
buffer. Its other methods keep three promises: masters that are asked for are up to date, what is registered
on an installed module joins the install, and copies, slices and pickles of an installed module are plain.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynswap_ext._swap import call_by_name
from dynswap_ext._swap.assigned_buffers import as_buffer, before, forget_assigned, settle
from dynswap_ext._swap.class_identity import metaclass_over
from dynswap_ext._swap.compile_support import dtype_handed_out, flush_graphs, getter, live, release_inputs
from dynswap_ext._swap.device_moves import staying
from dynswap_ext._swap.device_queries import Members, as_asked, looked_at
from dynswap_ext._swap.device_queries import namespace_for as answers_for
from dynswap_ext._swap.distributed import refuse_sharding
from dynswap_ext._swap.master_casts import noting_casts
from dynswap_ext._swap.module_registry import note_joined
from dynswap_ext._swap.other_offloading import WATCHED, refuse_hook
from dynswap_ext._swap.parameter_proxy import master_of, stand_in
from dynswap_ext._swap.parametrized import copy_over, is_copy, made_by_torch
from dynswap_ext._swap.plain_copies import copiers_for, is_part, made_plain, plain_reduction, plain_state
from dynswap_ext._swap.read_by_graphs import before_name, dtype_name, live_name
from dynswap_ext._swap.set_attributes import take_attributes
from dynswap_ext._swap.state import is_scripted, modules_of, original_class, session_of, set_class
from dynswap_ext._swap.torch_modules import namespace_for
from dynswap_ext.errors import ConfigError

#: Returns the ``__name__`` of a swap class and further entries of its namespace, given its original class.
ClassNaming = Callable[[type], tuple[str, dict[str, Any]]]

# Reentrant: a metaclass's code runs under it.
_lock = threading.RLock()
# Values are weak, too: a swap class holds its original, the key, as a base, and would keep it alive for ever.
# LOCK: guarded by `_lock`.
_swap_classes: weakref.WeakKeyDictionary[
    type, weakref.WeakValueDictionary[tuple[type, ClassNaming | None], type]
] = weakref.WeakKeyDictionary()


def swap_class(cls: type, attribute_type: type, naming: ClassNaming | None = None) -> type | None:
    """Find or make the swap class of a module class.

    `attribute_type` is the provider's data descriptor: ``attribute_type(name, getter)`` serves one name, and
    torch.compile may trace `getter` in its place. `naming` gives swap classes another name (`compat`); by
    default they have that of the original.

    Returns None for a class that cannot be swapped: the class of a TorchScript module, whose attributes live
    in C++, one that cannot be derived from, and one whose instances cannot be given the derived class.
    """
    cls = original_class(cls)
    if is_scripted(cls):
        return None
    with _lock:
        made = _swap_classes.setdefault(cls, weakref.WeakValueDictionary()).get((attribute_type, naming))
        if made is None:
            made = _make(cls, attribute_type, naming)
            if made is not None:
                _swap_classes[cls][attribute_type, naming] = made
        return made


def ensure(swap: type, name: str) -> bool:
    """Put the provider's descriptor for `name` on a swap class, once; return whether it serves the name.

    It does not serve a name that the original class defines itself, as a property or a class attribute.
    """
    owner: Any = next(base for base in swap.__mro__ if is_swap_class(base))
    if is_copy(owner):
        # It goes on the base, which the module keeps if the parametrisation is removed.
        return ensure(owner.__bases__[0], name) and name not in owner.__dict__
    present = owner.__dict__.get(name)
    if present is not None:
        return isinstance(present, owner._dynswap_attribute)
    original = owner._dynswap_original
    if any(name in base.__dict__ for base in original.__mro__ if not is_swap_class(base)):
        return False
    setattr(owner, name, owner._dynswap_attribute(name, getter(name)))
    setattr(owner, live_name(name), live(name))
    setattr(owner, before_name(name), before(name))
    setattr(owner, dtype_name(name), dtype_handed_out(name))
    becomes = owner.__dict__.get("cls_to_become")
    if becomes is not None:
        ensure(becomes, name)
    return True


def is_swap_class(cls: type) -> bool:
    """Return whether `cls` is a swap class itself, and not a class that is derived from one."""
    return "_dynswap_original" in cls.__dict__


def _make(cls: type, attribute_type: type, naming: ClassNaming | None) -> type | None:
    name, shown = (cls.__name__, {}) if naming is None else naming(cls)
    own: dict[str, Any] = {
        "__slots__": (),
        "_dynswap_original": cls,
        "_dynswap_attribute": attribute_type,
        "_dynswap_naming": naming,
        **copiers_for(cls, _flush),
        **shown,
    }
    if made_by_torch(cls):
        base = swap_class(cls.__bases__[0], attribute_type, naming)
        return None if base is None else copy_over(cls, name, base, own)
    of_provider: Callable[[type], dict[str, Any]] = getattr(
        attribute_type, "namespace_for", call_by_name.namespace_for
    )
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__init__": _initialiser(cls),
        **namespace_for(cls, _join, _before_removal),
        **of_provider(cls),
        **answers_for(cls),
        **own,
    }
    becomes = getattr(cls, "cls_to_become", None)
    if isinstance(becomes, type) and issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        # A lazy module sets its class to this one when it gets its weights, and so stays installed.
        namespace["cls_to_become"] = swap_class(becomes, attribute_type, naming)
    try:
        for bases in _bases_for(cls):
            made: type = metaclass_over(type(cls))(name, bases, namespace)
            if _assignable(made, cls):
                return made
    except Exception:  # the code of a metaclass or of an `__init_subclass__`, whatever it raises
        return None
    return None


def _bases_for(cls: type) -> Iterator[tuple[type, ...]]:
    """Yield the bases to try for a swap class of `cls`, one choice after the other."""
    if issubclass(cls, _Swapped):  # it was derived from a swap class, and has all of its behaviour
        yield (cls,)
        return
    if not issubclass(cls, torch.fx.GraphModule):  # which tells its classes by the names of their bases
        yield _Swapped, cls
    # If the first base of `cls` has no `__dict__` (ABC, Generic), Python lets instances of `cls` have a
    # derived class only if `cls` is its first base. Then an `__init_subclass__` of `cls` would run.
    if not _has_init_subclass(cls):
        yield (_behaviour_over(cls),)


def _has_init_subclass(cls: type) -> bool:
    """Return whether deriving from `cls` runs another `__init_subclass__` than `object`'s or `Generic`'s."""
    owner = next(base for base in cls.__mro__ if "__init_subclass__" in base.__dict__)
    return owner is not object and owner.__module__ != "typing"


def _assignable(made: type, cls: type) -> bool:
    """Return whether Python lets instances of `cls` have the class `made`, by its rule for `__class__`."""
    ours, theirs = _layout_root(made), _layout_root(cls)
    return ours is theirs or (ours.__base__ is theirs.__base__ and _layout(ours) == _layout(theirs))


def _layout_root(cls: type) -> type:
    base = cls.__base__
    while base is not None and _layout(base) == _layout(cls):
        cls, base = base, base.__base__
    return cls


def _layout(cls: type) -> tuple[int, ...]:
    return cls.__basicsize__, cls.__itemsize__, cls.__dictoffset__, cls.__weakrefoffset__


def _initialiser(cls: type) -> Callable[..., None]:
    # `self.__class__(...)`, with which containers make their slices, gives a plain module.
    initialise: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_swap_class(type(self)) and session_of(self) is None:
            set_class(self, cls)
        initialise(self, *args, **kwargs)

    return __init__


def _behaviour_over(base: type) -> type:
    """Make a class with the methods that all swap classes have, derived from `base`."""

    class _Swapped(base):  # type: ignore[misc]
        if base is not object:
            __slots__ = ()
            __qualname__ = base.__qualname__

        _dynswap_original: type
        _dynswap_attribute: type
        _dynswap_naming: ClassNaming | None
        #: Whether a move of the model to its compute device leaves the masters where they are
        #: (Note [Sent where it computes]).
        _dynswap_stays = True

        def __init_subclass__(cls, **kwargs: Any) -> None:
            # For a swap class, the original's own hook does not run: it may require arguments or register
            # the class, and a swap class is no new kind of module. It runs for a class that a user derives.
            if "_dynswap_original" not in cls.__dict__:
                super().__init_subclass__(**kwargs)

        @classmethod
        def _dynswap_ensure(cls, name: str) -> bool:
            return ensure(cls, name)

        # What is registered after the install joins it. In place of a handed-out tensor its master is
        # registered.

        def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
            super().register_parameter(name, master_of(param))
            _adopt(self, name)

        def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
            super().register_buffer(name, master_of(tensor), persistent)
            _adopt(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in WATCHED:
                refuse_hook(self, name)
            if name == "__class__":
                value = _still_swapped(self, value)
            if isinstance(value, torch.Tensor):
                value = as_buffer(self, name, master_of(value))
            elif value is None:
                forget_assigned(self, name)
            super().__setattr__(name, value)
            if isinstance(value, nn.Module):
                _join(self, value)

        def __delattr__(self, name: str) -> None:
            _before_removal(self, name)
            super().__delattr__(name)

        def add_module(self, name: str, module: nn.Module | None) -> None:
            super().add_module(name, module)
            _join(self, module)

        # Before masters are read or written, what was written on handed-out tensors is written to them.

        def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
            _flush_module(self)
            super()._save_to_state_dict(*args, **kwargs)

        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            with _masters_change(self):
                super()._load_from_state_dict(*args, **kwargs)

        def _named_members(
            self, get_members_fn: Members, *args: Any, **kwargs: Any
        ) -> Iterator[tuple[str, Any]]:
            refuse_sharding(self)
            asked = None if torch.compiler.is_dynamo_compiling() else as_asked(self, get_members_fn)
            if asked is None:
                _flush(self)
            return cast(
                Iterator[tuple[str, Any]], super()._named_members(asked or get_members_fn, *args, **kwargs)
            )

        def get_parameter(self, target: str) -> nn.Parameter:
            return cast(nn.Parameter, _master_at(self, target, "_parameters", super().get_parameter))

        def get_buffer(self, target: str) -> torch.Tensor:
            return cast(torch.Tensor, _master_at(self, target, "_buffers", super().get_buffer))

        def _replicate_for_data_parallel(self) -> Any:
            return made_plain(self, super()._replicate_for_data_parallel())

        def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with noting_casts(self), _masters_change(self):
                return super()._apply(staying(self, fn) if self._dynswap_stays else fn, *args, **kwargs)

        # TorchScript calls this before it compiles. torch.jit.trace calls the model, and is refused there
        # (`_call_begins` in _installation.py).

        def __prepare_scriptable__(self) -> Any:
            if session_of(self) is not None:
                raise ConfigError(
                    f"torch.jit.script was called on a {original_class(type(self)).__qualname__} that is "
                    "installed; TorchScript knows no weights that are fetched when they are read. Call "
                    "dynswap_ext.uninstall(model) first, or use torch.compile, which an install takes part in"
                )
            return self

        # Copies and pickles are plain modules. Only methods that every class has are overridden here, and
        # not `__deepcopy__`: a wrapper that forwards attributes, such as peft's, would find the one of the
        # module inside, and a copy of the wrapper would be a copy of that module.

        def __reduce_ex__(self, protocol: Any) -> Any:
            _flush_module(self)
            _flush_sharing(self)
            return plain_reduction(self, super().__reduce_ex__(protocol))

        if sys.version_info >= (3, 11):  # since then every class has `__getstate__`

            def __getstate__(self) -> Any:
                _flush_module(self)
                return plain_state(super().__getstate__())

    return _Swapped


_Swapped: Final = _behaviour_over(object)


def _still_swapped(module: Any, cls: Any) -> Any:
    """Return the class that a module gets when other code sets its class to `cls`.

    For an installed module it is the swap class of `cls`, so that the module stays installed.
    """
    if session_of(module) is None or not isinstance(cls, type) or hasattr(cls, "_dynswap_original"):
        return cls  # a swap class, or a class that is derived from one, keeps the module installed
    swap = type(module)
    made = swap_class(cls, swap._dynswap_attribute, swap._dynswap_naming)
    if made is None:
        return cls
    for name in (*vars(module)["_parameters"], *vars(module)["_buffers"]):
        ensure(made, name)
    return made


def _adopt(module: Any, name: str) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # a graph may put another master under a name that is served, and registers no new names
    session = session_of(module)
    if session is not None and ensure(type(module), name):
        session.adopt(module, name)


def _join(module: Any, child: Any) -> None:
    session = session_of(module)
    if session is not None and isinstance(child, nn.Module):
        _put_masters(child)
        attribute_type, naming = type(module)._dynswap_attribute, type(module)._dynswap_naming
        session.attach(child, lambda cls: swap_class(cls, attribute_type, naming))
        note_joined(session, child)


def _put_masters(root: nn.Module) -> None:
    """Replace handed-out tensors that are registered in modules of a tree with their masters.

    A parametrisation, for example, registers the weight as it has read it from the installed module.
    """
    for module in modules_of(root):
        if not is_scripted(type(module)):
            held: list[dict[str, Any]] = [module._parameters, module._buffers]
            for members in held:
                members.update({name: master_of(tensor) for name, tensor in members.items()})


def _before_removal(module: Any, name: str) -> None:
    """Prepare for the removal of a parameter or buffer from a module.

    If a forward removes it, the tensor that it was handed out represents the master from then on, so that it
    can be registered again. What a graph has assigned to a buffer of this name is forgotten.
    """
    session = session_of(module)
    if session is not None:
        forget_assigned(module, name)
    if session is None or torch.compiler.is_dynamo_compiling() or not session.inside_call():
        return
    for members in ("_parameters", "_buffers"):
        master = vars(module)[members].get(name)
        if master is not None:
            stand_in(getattr(module, name), master)


def _master_at(module: Any, target: str, members: str, otherwise: Callable[[str], Any]) -> Any:
    """Return the up-to-date master at a dotted path, for `get_parameter` and `get_buffer`.

    `members` is the dict of the module in which masters of the kind are. If it has no master of the name,
    `otherwise`, which is torch's own method, is asked.
    """
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    master = vars(owner).get(members, {}).get(name)
    if master is None:
        return otherwise(target)
    looked_at(owner, name, master)
    _flush_module(owner)
    return master


def take_pending() -> None:
    """Write to the masters what sessions do not know of, in all installs.

    That is what graphs have assigned to buffers, and attributes that were set on handed-out tensors of
    subclasses.
    """
    flush_graphs()
    take_attributes()


def _flush(module: Any) -> None:
    session = session_of(module)
    if session is not None:
        take_pending()
        session.flush()


def _flush_module(module: Any) -> None:
    session = session_of(module)
    if session is not None:
        settle(module)
        release_inputs()
        take_attributes()
        session.flush_module(module)


def _flush_sharing(module: Any) -> None:
    """Bring all masters up to date if one of the module's shares memory: `deepcopy` copies that once.

    So it copies, with this module, what modules have whose turn comes later.
    """
    session = session_of(module)
    masters = (*module._parameters.values(), *module._buffers.values())
    if session is not None and any(is_part(master) for master in masters if master is not None):
        session.flush()


def _may_be_swapped(module: nn.Module) -> bool:
    """Return whether torch may convert a parameter by `swap_tensors`. It always does so with wrappers."""
    masters = [each for each in module._parameters.values() if each is not None]
    return torch.__future__.get_swap_module_params_on_conversion() or any(
        is_traceable_wrapper_subclass(master) for master in masters
    )


@contextlib.contextmanager
def _masters_change(module: Any) -> Iterator[None]:
    """Bring a module's masters up to date, let the block replace or write them, and check them after it."""
    session = session_of(module)
    settle(module)
    release_inputs()
    if session is not None and _may_be_swapped(module):
        session.release(module)
    elif session is not None:
        session.flush_module(module)
    yield
    if session is not None and session_of(module) is session:
        session.check(module)
