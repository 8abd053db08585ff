"""The tensor that code outside a forward gets for a weight: what is set on it reaches the master.

Inside the call of an installed module, a weight reads as a plain tensor on the compute device, which is all
that a forward needs and what torch.compile accepts. Code outside means the parameter: `m.weight.grad`,
`m.weight.requires_grad_(False)`, `m.weight.data = t`, `m.weight.register_hook(...)`. So it gets a tensor with
the same bytes, of the class `ParameterProxy`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from dynswap_ext._swap.expert_slices import ExpertSlices
from dynswap_ext._util.untraced import untraced
from dynswap_ext.errors import BudgetError, OutOfMemoryError
from dynswap_ext.lossless.tensor import LosslessTensor, attributes_of

# Attributes in the `__dict__` of tensors. A proxy has its master and, if it is an alias of the tensor that a
# forward gets, that tensor, which has a weak reference to the proxy. The class has no slots for them, so that
# it can be given to a tensor that exists. The native provider uses the same names (csrc/session/access.cpp).
_MASTER: Final = "_dynswap_master"
_ALIAS: Final = "_dynswap_alias"
_TENSOR: Final = "_dynswap_tensor"

_T = TypeVar("_T")
#: Returns what a master is handed out as; None if it is not served.
Fetch = Callable[[torch.Tensor], torch.Tensor | None]

#: A function of each provider, to call with a tensor whose `.data` is taken, and with that alias, on which
#: writes do not bump the version of the tensor. If the provider has handed the tensor out, it returns a
#: function that takes such writes to the master, to be called once the alias is gone; else None.
untracked_alias_made: Final[list[Callable[[torch.Tensor, torch.Tensor], Callable[[], object] | None]]] = []
#: A function of each provider, to call with a tensor whose master is about to have other data. It returns a
#: function that hands the master out after that, as a tensor on which writes are noticed; or None if the
#: provider does not serve the tensor.
handed_out_again: Final[list[Callable[[torch.Tensor], Fetch | None]]] = []

#: A function of each provider, to call with a tensor that was written in place. If the provider has handed it
#: out, it takes the write to the master, and returns True; else False.
take_to_master: Final[list[Callable[[torch.Tensor], bool]]] = []

#: Weak references to each `.data` of a handed-out tensor that is alive. `_gone` is called when it dies.
_data_alive: Final[set[weakref.ref[torch.Tensor]]] = set()

_plain: Final[Any] = torch.Tensor
_REGISTER: Final = nn.Module.register_parameter.__code__
_OPTIMIZE: Final = inspect.unwrap(torch.optim.Optimizer.add_param_group).__code__


class ParameterProxy(torch.Tensor):
    """A weight as code outside a forward gets it: the values are on the device, all else is the master's.

    What is set on it, such as `.grad`, hooks and attributes, is set on the master. A detached proxy has no
    master, and behaves like any tensor.
    """

    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The values, on the device. If it is set, the master gets the new values, too."""
        alias: torch.Tensor = _plain.data.__get__(self)
        take = _note_alias(self, alias)
        if take is not None:  # See Note [Two writes, one weight]
            _data_alive.add(weakref.ref(alias, functools.partial(_gone, take)))
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        master = master_of(self)
        if master is self:
            _plain.data.__set__(self, value)
        elif not shows_the_same(value, self):  # `w.data += t` was a write in place, which reaches the master
            shape = self.shape
            vars(self).pop(_TENSOR, None)
            handed_out = give_data(self, master, value, None, self.dtype, self.device)
            if handed_out is not None:
                vars(self)[_TENSOR] = handed_out
                # While this tensor is held, an access returns it, as it would return the parameter itself:
                # peft merges DoRA through two names of one weight. A tensor that requires gradients and has
                # had another shape is not returned, because its graph is of that shape. And a master that is
                # handed out as it is keeps nothing of the install.
                if handed_out is not master and (handed_out.shape == shape or not self.requires_grad):
                    vars(handed_out)[_ALIAS] = weakref.ref(self)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the master, on the master's device and in the master's dtype."""
        master = master_of(self)
        own = master is self or _plain.retains_grad.__get__(self)  # of `backward(inputs=[w])`
        return _plain.grad.__get__(self) if own else master.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        master = master_of(self)
        if master is self:
            _plain.grad.__set__(self, value)
        else:
            master.grad = None if value is None else value.to(device=master.device, dtype=master.dtype)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether the master requires gradients."""
        master = master_of(self)
        if master is self:
            return _plain.requires_grad.__get__(self)  # type: ignore[no-any-return]
        return master.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ParameterProxy:
        """Make the master require gradients, or not; the next read of the weight follows it."""
        master = master_of(self)
        _plain.requires_grad_(master, requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the master is a leaf, as a parameter is, so that libraries freeze and train it.

        A torch optimizer gets the answer for this tensor itself, and refuses it: a step would change only the
        values on the device, and keep them there.
        """
        told = self if sys._getframe(1).f_code is _OPTIMIZE else master_of(self)
        return _plain.is_leaf.__get__(told)  # type: ignore[no-any-return]

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node that takes gradients to the master; None while torch registers it in a parametrisation."""
        caller = sys._getframe(1)
        if caller.f_code is _REGISTER and isinstance(caller.f_locals.get("self"), ParametrizationList):
            return None  # torch takes leaves only; the master takes the tensor's place when the list joins
        return _plain.grad_fn.__get__(self)

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        """Register the hook on the master: it is called in each backward pass, as a parameter's is."""
        return _plain.register_hook(master_of(self), hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        return _plain.register_post_accumulate_grad_hook(master_of(self), hook)

    def retain_grad(self) -> None:
        """Do nothing, because the gradient of the master is kept anyway."""
        if master_of(self) is self:
            _plain.retain_grad(self)

    def set_(self, *source: Any, **options: Any) -> ParameterProxy:
        """Give the master other data, as assigning to `.data` does; this tensor stays the same object."""
        self.data = _plain.set_(torch.empty(0, dtype=self.dtype, device=self.device), *source, **options)
        return self

    def detach(self) -> torch.Tensor:
        """Return a tensor with the same bytes that has no graph and no master."""
        # `nn.Parameter(w)` requires that it has this class.
        detached = _plain.detach(self)
        detached.__class__ = ParameterProxy
        return detached  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = _plain_copy(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        values = _plain.__repr__(_plain.detach(self), **options)
        return f"Parameter containing:\n{values}" if isinstance(self, nn.Parameter) else values

    def __getattr__(self, name: str) -> Any:
        master = self.__dict__.get(_MASTER)
        if master is None or name == "__dict__":
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        if isinstance(master, LosslessTensor) and name not in attributes_of(master):
            # What is handed out of it is plain, and has nothing that its class adds.
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        return getattr(master, name)

    def __setattr__(self, name: str, value: Any) -> None:
        master = self.__dict__.get(_MASTER)
        if master is None or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(master, name, value)

    def __delattr__(self, name: str) -> None:
        master = self.__dict__.get(_MASTER)
        if master is None or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(master, name)


def give_data(
    tensor: torch.Tensor,
    master: torch.Tensor,
    value: torch.Tensor,
    as_master: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Assign `value` to the `.data` of a handed-out tensor and of its master.

    The master keeps its device. It keeps its dtype if `value` has the dtype of the handed-out tensor; else it
    gets that of `value`.

    `as_master` is what the master gets, if the caller knows better than to convert `value`. `dtype` and
    `device` are those of the tensor before, as its `.data` may be replaced already.

    Returns the tensor that the master is handed out as from now on, whose bytes the handed-out tensor shows
    then. Returns None if that has bytes of its own: there was no room, or the shape or dtype has changed.
    """
    fetches = [fetch for serve in handed_out_again if (fetch := serve(tensor)) is not None]
    if as_master is None:
        wanted = master.dtype if value.dtype == dtype else value.dtype
        as_master = value.detach().to(device=master.device, dtype=wanted)
        if as_master.data_ptr() == value.data_ptr() and _take_to_master(value):
            as_master = as_master.clone()  # else the master would have, and hold, the memory of a copy
    value = value.to(device=device)
    _plain.data.__set__(tensor, value)  # frees the memory of the old bytes for the new ones
    master.data = as_master
    # What is written on the tensor from now on has to reach the master, as before. So the tensor is given the
    # bytes that the master is handed out as. If there is no room for them beside the old bytes, which a view
    # may hold, writes on the tensor do not reach the master any more.
    handed_out = None
    with contextlib.suppress(BudgetError, OutOfMemoryError):
        handed_out = next((fetched for fetch in fetches if (fetched := fetch(master)) is not None), None)
    if handed_out is None or handed_out.shape != value.shape or handed_out.dtype != value.dtype:
        return None
    # A LosslessTensor has no memory of its own.
    shown = handed_out.make_plain() if isinstance(handed_out, LosslessTensor) else handed_out
    _plain.data.__set__(tensor, _plain.detach(shown))
    _note_alias(handed_out, tensor)
    return handed_out


def take_writes_to_master(name: str) -> Callable[..., Any]:
    """Return the tensor method of this name, wrapped to take what it has written to the master.

    See Note [Two writes, one weight].
    """
    method: Any = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def write(self: ParameterProxy, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _take_to_master(self)

    return write


def _take_to_master(tensor: torch.Tensor) -> bool:
    """Take what was written on a tensor to its master; return whether the tensor was handed out."""
    return any(take(tensor) for take in take_to_master)


def _note_alias(tensor: torch.Tensor, alias: torch.Tensor) -> Callable[[], object] | None:
    """Note that what is written on `alias` does not show in the version of `tensor`.

    Return a function that takes such writes to the master; None if the tensor was not handed out.
    """
    return next((take for note in untracked_alias_made if (take := note(tensor, alias)) is not None), None)


def _gone(take: Callable[[], object], alias: weakref.ref[torch.Tensor]) -> None:
    """Take what was written on an alias to the master, now that nothing holds it."""
    _data_alive.discard(alias)
    take()


_WRITING_OPERATORS: Final = (
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
)
for _name in dir(torch.Tensor):
    _writes = _name in _WRITING_OPERATORS or (_name.endswith("_") and not _name.startswith("_"))
    if _writes and _name not in vars(ParameterProxy):
        setattr(ParameterProxy, _name, take_writes_to_master(_name))


def master_of(tensor: _T) -> _T:
    """Return the master of a handed-out tensor; for anything else, the argument.

    A tensor that was read outside a forward knows its master. One that was read in a forward knows it only
    after `stand_in`.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if type(tensor) is ParameterProxy or (not compiling and _is_of_a_forward(tensor)):
        return vars(tensor).get(_MASTER, tensor)  # type: ignore[no-any-return]
    return tensor


def stand_in(tensor: torch.Tensor, master: torch.Tensor) -> None:
    """Let a tensor that a forward was handed out represent its master, which is leaving its module.

    A forward may remove a weight and register it under another name, as peft does for LoRA on a parameter.
    What it registers is the tensor that it was handed out, and the master is to be registered instead.
    """
    if _is_of_a_forward(tensor) and tensor is not master:
        vars(tensor)[_MASTER] = master


def _is_of_a_forward(tensor: object) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is ExpertSlices


def plain_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a forward gets for a weight, given what code outside a forward gets."""
    return vars(tensor).get(_TENSOR, tensor) if type(tensor) is ParameterProxy else tensor


@untraced
def make_proxy(tensor: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Turn a handed-out tensor into a `ParameterProxy` of its master, and return it.

    If the tensor already has a proxy, that is returned. A master or a tensor of a subclass is returned as it
    is.
    """
    if type(tensor) is torch.Tensor and tensor is not master:
        known = vars(tensor).get(_ALIAS)
        if known is not None and (alias := known()) is not None:
            return alias  # type: ignore[no-any-return]
        vars(tensor)[_MASTER] = master
        tensor.__class__ = ParameterProxy
    return tensor


def shows_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors show the same bytes in the same way."""
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and one.layout == other.layout == torch.strided
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.data_ptr() == other.data_ptr()
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )


def _plain_copy(tensor: ParameterProxy) -> torch.Tensor:
    with torch.inference_mode(False):
        values = _plain.detach(tensor).clone()
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
