"""Restores a model after a failed load, and keeps its parameter objects after a successful one.

An optimizer, an average of weights or another module may hold a parameter object. So loaded values are moved
into the objects that the model had: by `.data =` if torch allows it, else (a skeleton on the meta device, for
instance) by `torch.utils.swap_tensors`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dynswap_ext._swap.state import session_of
from dynswap_ext._swap.subclasses import is_plain
from dynswap_ext._util.listing import listed
from dynswap_ext._util.warn import warn
from dynswap_ext.lossless.tensor import LosslessTensor, attributes_of


class Snapshot:
    """The tensors of a model and the extra state of its modules, as they were before a load."""

    def __init__(self, model: nn.Module) -> None:
        # References are enough, as a load with assign=True replaces tensors and does not write to them.
        self._held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module, _, _ in self._held
            if type(module).set_extra_state is not nn.Module.set_extra_state
        ]
        # If this is set, load_state_dict swaps the content of the tensor objects.
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        self._undo: list[Callable[[], object]] = [
            _unmaterialise(tensor) if is_lazy(tensor) else _swap_back(tensor)
            for tensor in (*model.parameters(), *model.buffers())
            if swapping or is_lazy(tensor)
        ]

    def restore(self) -> None:
        """Give the model back its tensors and its extra state."""
        for undo in reversed(self._undo):
            undo()
        for module, parameters, buffers in self._held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
            _refresh(module)
        for module, state in self._extra:
            module.set_extra_state(state)

    def freeze(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Set `requires_grad` to False for parameters whose new values cannot have gradients.

        Blocks of quantised weights cannot.
        """
        for name, parameter in own.items():
            value = given.get(name)
            if not (isinstance(parameter, nn.Parameter) and parameter.requires_grad):
                continue
            if not isinstance(value, torch.Tensor) or is_plain(value):
                continue
            try:
                value.detach().requires_grad_(True)
            except RuntimeError:
                self._undo.append(partial(parameter.requires_grad_, True))
                parameter.requires_grad_(False)

    def keep_objects(self) -> None:
        """Move the loaded values into the tensor objects that the model had before, and keep ties.

        Warns of tensors for which torch cannot do that.
        """
        kept: dict[int, torch.Tensor] = {}
        lost: list[str] = []
        for module, parameters, buffers in self._held:
            changed = [
                (members, name, old, new)
                for before, members in ((parameters, module._parameters), (buffers, module._buffers))
                for name, old in before.items()
                if old is not None and (new := members.get(name)) is not None and new is not old
            ]
            if not changed:
                continue
            _prepare(module)
            for members, name, old, new in changed:
                if id(old) not in kept:
                    kept[id(old)] = self._moved(old, new)
                    if kept[id(old)] is new:
                        lost.append(f"{type(module).__name__}.{name}")
                members[name] = kept[id(old)]  # type: ignore[assignment]
            _refresh(module)
        if lost:
            warn(
                f"{len(lost)} tensor(s) of the model are new objects after the load, as torch cannot swap "
                f"them ({listed(lost)}): build optimizers that were made before the load again"
            )

    def _moved(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the old object with the new values, or the new object if torch cannot move them."""
        takes_data = (
            type(old) is type(new)
            and is_plain(old)
            and not old.is_inference()
            and torch._has_compatible_shallow_copy_type(old, new)
        )
        try:
            self._undo.append(_set_data(old, new) if takes_data else _swap(old, new))
        except RuntimeError:
            return new
        return old


def _prepare(module: nn.Module) -> None:
    """Drop references to a module's tensors that would prevent a swap. `_refresh` makes them again."""
    session = session_of(module)
    if session is not None:
        session.release(module)
    elif isinstance(module, nn.RNNBase):
        vars(module)["_flat_weight_refs"] = []  # weak references, with which torch refuses a swap


def _refresh(module: nn.Module) -> None:
    """Update what else refers to a module's tensors: the session of an install, or an RNN's flat weights."""
    session = session_of(module)
    if session is not None:
        session.check(module)
    elif isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _set_data(old: torch.Tensor, new: torch.Tensor) -> Callable[[], object]:
    data, grad = old.data, old.grad

    def undo() -> None:
        old.data = data
        old.grad = grad

    try:
        old.grad = None  # it belongs to other values, and perhaps to another dtype
        old.data = new.data
        with torch.no_grad():
            torch.autograd.graph.increment_version(old)  # backward raises if a graph has saved the old values
    except BaseException:
        undo()
        raise
    return undo


def _swap(old: torch.Tensor, new: torch.Tensor) -> Callable[[], object]:
    exact = all(is_plain(each) or isinstance(each, LosslessTensor) for each in (old, new))
    attributes = attributes_of(old) if exact else {}
    other = new if isinstance(new, nn.Parameter) else new.detach()
    torch.utils.swap_tensors(old, other)  # type: ignore[no-untyped-call]
    vars(old).update(attributes)
    return lambda: torch.utils.swap_tensors(old, other)  # type: ignore[no-untyped-call]


def _swap_back(tensor: torch.Tensor) -> Callable[[], object]:
    held, saved, grad, required = vars(tensor), tensor.detach(), tensor.grad, tensor.requires_grad

    def undo() -> None:
        if vars(tensor) is not held:  # it was swapped
            _swap(tensor, nn.Parameter(saved, required) if isinstance(tensor, nn.Parameter) else saved)
            tensor.grad = grad

    return undo


def _unmaterialise(tensor: Any) -> Callable[[], object]:
    kind, data = type(tensor), tensor.data

    def undo() -> None:
        if type(tensor) is not kind:
            tensor.data = data
            tensor.__class__ = kind

    return undo
