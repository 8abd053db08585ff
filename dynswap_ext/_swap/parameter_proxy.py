"""A handed-out tensor as it is seen from outside a forward: what is set on it reaches the master.

Inside the call of an installed module a weight is a plain tensor on the compute device, which is all that a
forward needs and what torch.compile takes. Whoever looks at the model from outside means the parameter:
`m.weight.grad`, `m.weight.requires_grad_(False)`, `m.weight.data = t`, `m.weight.register_hook(...)`. There
an access gives an alias of that tensor, of the class below.
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

# All in the `__dict__` of tensors: the class adds no slots, so that it can be given to a tensor that exists.
# The native provider makes most proxies itself, under the same names (csrc/session/access.cpp).
_MASTER: Final = "_dynswap_master"
_ALIAS: Final = "_dynswap_alias"
_TENSOR: Final = "_dynswap_tensor"

_T = TypeVar("_T")
Fetch = Callable[[torch.Tensor], torch.Tensor | None]

#: Called with a tensor whose `.data` is taken, and with that alias: what is written on the alias does not
#: bump the version of the tensor. The providers' own, of which the one that handed the tensor out returns a
#: function that takes such writes to the master, to be called once the alias is gone; the others return None.
untracked_alias_made: Final[list[Callable[[torch.Tensor, torch.Tensor], Callable[[], object] | None]]] = []
#: Called with a tensor whose master is about to have other data: how to get what the master is handed out as
#: then, on which writes are looked for. The providers' own; None from one that does not serve the tensor.
handed_out_again: Final[list[Callable[[torch.Tensor], Fetch | None]]] = []

#: Called with a tensor that was written in place: takes that to its master. The providers' own, of which the
#: one that handed the tensor out answers True.
take_to_master: Final[list[Callable[[torch.Tensor], bool]]] = []

#: References to the `.data` of handed-out tensors that are alive. Each is called when its `.data` is gone.
_data_alive: Final[set[weakref.ref[torch.Tensor]]] = set()

_plain: Final[Any] = torch.Tensor
_REGISTER: Final = nn.Module.register_parameter.__code__
_OPTIMIZE: Final = inspect.unwrap(torch.optim.Optimizer.add_param_group).__code__


class ParameterProxy(torch.Tensor):
    """Forwards to its master whatever a parameter keeps beside its values. Values are the device's.

    One that was detached has no master, and is a tensor like any other.
    """

    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The values, on the device. Set: the master's values (and the tensor's own)."""
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
                # While this tensor is held, an access gives it, as it would give the parameter itself: peft
                # merges DoRA through two names of one weight. One of another shape has no graph for that, and
                # a master that is handed out as it is keeps nothing of the install.
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
        """Make the master require gradients, or not; the next access follows it."""
        master = master_of(self)
        _plain.requires_grad_(master, requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the master is a leaf, as a parameter is: libraries freeze and train what is one.

        But an optimizer, which would step on the device's values and keep them there, is told the truth.
        """
        told = self if sys._getframe(1).f_code is _OPTIMIZE else master_of(self)
        return _plain.is_leaf.__get__(told)  # type: ignore[no-any-return]

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node that takes gradients to the master."""
        caller = sys._getframe(1)
        if caller.f_code is _REGISTER and isinstance(caller.f_locals.get("self"), ParametrizationList):
            return None  # torch is moving the parameter there; the master takes its place when the list joins
        return _plain.grad_fn.__get__(self)

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        """Register the hook on the master: it is called in each backward pass, as a parameter's is."""
        return _plain.register_hook(master_of(self), hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        return _plain.register_post_accumulate_grad_hook(master_of(self), hook)

    def retain_grad(self) -> None:
        """Do nothing: a parameter's gradient is kept anyway."""
        if master_of(self) is self:
            _plain.retain_grad(self)

    def set_(self, *source: Any, **options: Any) -> ParameterProxy:
        """Give the master other data, as assigning to `.data` does; this tensor stays the same object."""
        self.data = _plain.set_(torch.empty(0, dtype=self.dtype, device=self.device), *source, **options)
        return self

    def detach(self) -> torch.Tensor:
        """Detach, from the graph and from the master."""
        # `nn.Parameter(w)` insists on the class.
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

    The master keeps its device, and its dtype if `value` has the dtype of the tensor: what a forward computes
    has that. `as_master`: what the master gets, if the caller knows better. `dtype` and `device`: those that
    the tensor had, whose `.data` may be another by now. Returns what the master is handed out as from now on,
    whose bytes the tensor has then; None if the tensor has bytes of its own, because there was no room or the
    shape or dtype has changed.
    """
    fetches = [fetch for serve in handed_out_again if (fetch := serve(tensor)) is not None]
    if as_master is None:
        wanted = master.dtype if value.dtype == dtype else value.dtype
        as_master = value.detach().to(device=master.device, dtype=wanted)
        if as_master.data_ptr() == value.data_ptr() and _take_to_master(value):
            as_master = as_master.clone()  # else the master would lie in a copy's place, and hold it
    value = value.to(device=device)
    _plain.data.__set__(tensor, value)  # the place of the old bytes is free for the new ones
    master.data = as_master
    # What is written on this tensor from now on has to reach the master as before. Where there is no room for
    # it beside the old bytes, which a view's base may hold, it is a tensor like any other.
    handed_out = None
    with contextlib.suppress(BudgetError, OutOfMemoryError):
        handed_out = next((fetched for fetch in fetches if (fetched := fetch(master)) is not None), None)
    if handed_out is None or handed_out.shape != value.shape or handed_out.dtype != value.dtype:
        return None
    _plain.data.__set__(tensor, _plain.detach(handed_out))
    _note_alias(handed_out, tensor)
    return handed_out


def take_writes_to_master(name: str) -> Callable[..., Any]:
    """Return the tensor method of this name, which then takes what it wrote to the master.

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
    """Take what was written on a handed-out tensor to its master; return whether the tensor is one."""
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

    A tensor that was read outside a forward has one; one that was read in a forward only after `stand_in`.
    """
    if type(tensor) is ParameterProxy:
        return vars(tensor).get(_MASTER, tensor)  # type: ignore[no-any-return]
    if not torch.compiler.is_dynamo_compiling() and _is_of_a_forward(tensor):
        return vars(tensor).get(_MASTER, tensor)  # type: ignore[no-any-return]
    return tensor


def stand_in(tensor: torch.Tensor, master: torch.Tensor) -> None:
    """Note the master of a tensor that a forward was handed out; the master is leaving its module.

    A forward may remove a weight and register it under another name, as peft does for LoRA on a parameter.
    It registers the tensor that it was handed out, which is not the master.
    """
    if _is_of_a_forward(tensor) and tensor is not master:
        vars(tensor)[_MASTER] = master


def _is_of_a_forward(tensor: object) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is ExpertSlices


def plain_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a forward would get where this was seen from outside."""
    return vars(tensor).get(_TENSOR, tensor) if type(tensor) is ParameterProxy else tensor


@untraced
def make_proxy(tensor: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Make a handed-out tensor itself one that is seen from outside, and return it."""
    if type(tensor) is torch.Tensor and tensor is not master:
        known = vars(tensor).get(_ALIAS)
        if known is not None and (alias := known()) is not None:
            return alias  # type: ignore[no-any-return]
        vars(tensor)[_MASTER] = master
        tensor.__class__ = ParameterProxy
    return tensor


def shows_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both show the same bytes in the same way."""
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
