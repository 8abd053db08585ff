"""Serves a forward that torch.export traces over fake tensors in the places of the masters.

Note [Lifted masters]
`torch.export` (strict=False), and other tools that trace a forward into a program, lift the masters: in their
places are fake tensors, which stand for inputs of the program. What a forward gets for such a fake master is
its conversion, an operation of the program. A write on the converted tensor would change nothing else. So all
reads of a buffer get the same tensor, and at its end the program copies what was written on that tensor to
the input, from which torch takes it to the master. A parameter is converted by each read, so that the program
has it on the device only while it is used. If the forward has written on it, the written tensor is handed out
again. A buffer that the forward has assigned reads as the tensor that was assigned.
A program ends when its graph gets the output node. That is noticed at the graph, because reads need not be
inside a call of the model, and a call need not run a hook of this package.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from dynswap_ext._swap.changed_elements import changed_elements, with_changes

#: Where a graph that is being made keeps its `_Trace`.
_KEY: Final = "_dynswap_trace"


@dataclass(slots=True)
class _Handed:
    """A tensor that was handed out for a master while a forward was traced."""

    master: torch.Tensor
    tensor: torch.Tensor
    #: The tensor's version when the two were equal.
    version: int

    @property
    def written(self) -> bool:
        return self.tensor.is_inference() or self.tensor._version != self.version


class _Trace:
    """A program that is being traced, and the tensors that were handed out in it."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._create_node = graph.create_node
        #: By the identity of the master.
        self._handed: dict[int, list[_Handed]] = {}
        graph.create_node = self._create_node_or_end

    def known(self, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        for handed in self._handed.get(id(master), ()):
            again = handed.written or not isinstance(master, nn.Parameter)
            if again and handed.tensor.dtype == dtype:
                return handed.tensor
        return None

    def note(self, master: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor is not master:
            version = 0 if tensor.is_inference() else tensor._version
            handed = _Handed(master, tensor, version)
            self._handed.setdefault(id(master), []).append(handed)

    def _create_node_or_end(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Create a node of the graph; before the output node, copy what was written to the inputs."""
        if kind == "output":
            del self._graph.create_node, vars(self._graph)[_KEY]
            for of_master in list(self._handed.values()):
                for handed in of_master:
                    if handed.written:
                        _take_to_master(handed.tensor.detach(), handed.master.detach())
        return self._create_node(kind, *args, **kwargs)


def _take_to_master(written: torch.Tensor, master: torch.Tensor) -> None:
    more_precise = torch.promote_types(master.dtype, written.dtype) != written.dtype
    if more_precise:
        changed = changed_elements(written, master.to(written.device, written.dtype))
        written = with_changes(master, written, changed)
    master.copy_(written)


def is_lifted(master: torch.Tensor) -> bool:
    """Return whether a tensor is a fake one in a master's place, in a forward that is being traced."""
    return get_proxy_mode() is not None and is_fake(master)


def convert(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return what a forward gets for a master that torch converts at each read.

    While a forward is traced, it may get the tensor of an earlier read: see Note [Lifted masters].
    """
    if not is_lifted(master):
        return _converted(master, device, dtype)
    trace = _trace()
    tensor = trace.known(master, dtype)
    if tensor is None:
        # A tensor of inference mode would not count writes on it.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            tensor = master.to(device=device, dtype=dtype)
        if master.requires_grad and not tensor.requires_grad:
            tensor.requires_grad_()  # a parameter requires gradients under no_grad(), too
        trace.note(master, tensor)
    return tensor


def _converted(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not master.requires_grad:
        return master.to(device=device, dtype=dtype)
    with torch.enable_grad():  # a parameter requires gradients under no_grad(), too
        tensor = master.to(device=device, dtype=dtype)
    if torch.is_inference_mode_enabled() and not tensor.requires_grad:
        tensor.requires_grad_()
    return tensor


def master_of_assigned(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the master that takes the place of `old` where a traced forward assigns a value to a buffer."""
    master = value.to(device=old.device, dtype=old.dtype)
    _trace().note(master, value)
    return master


def _trace() -> _Trace:
    graph: Any = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
    held = vars(graph)
    if _KEY not in held:
        held[_KEY] = _Trace(graph)
    return held[_KEY]  # type: ignore[no-any-return]
