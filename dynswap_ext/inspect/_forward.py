"""Runs a forward under hooks that note each call of a module, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dynswap_ext._swap.state import is_scripted, modules_of, original_class
from dynswap_ext.inspect._model import Node, computes_on, entries

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """One call of one module. Its figures are bytes of live memory over those before the forward."""

    #: The module's path, such as "layers.0"; "" for the model itself.
    path: str
    #: The name of the module's class; for an installed module, that of its own class.
    class_name: str
    #: The number of calls of other modules inside which this one was made.
    depth: int
    #: The number of earlier calls of the same module.
    index: int
    #: Live bytes when the call began.
    before: int
    #: Live bytes when the call ended.
    after: int
    #: The most live bytes while the call ran, calls inside it included.
    peak: int
    #: Shapes of the tensors among the arguments.
    input_shapes: Shapes
    #: Shapes of the tensors in the result; empty if the call raised an error.
    output_shapes: Shapes = ()

    @property
    def kept(self) -> int:
        """Bytes that the call left: outputs, and what autograd saves. Negative if it freed more than that."""
        return self.after - self.before

    @property
    def extra(self) -> int:
        """Bytes that the call needed for itself at its peak, over what was there before it."""
        return self.peak - self.before


def tensors_in(value: Any, inside: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested sequences, sets, mappings and dataclasses, such as outputs of transformers.

    `inside` has the ids of the containers around the value, so that one that contains itself ends the search.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    if id(value) not in inside:
        for part in parts:
            yield from tensors_in(part, inside | {id(value)})


def _shapes_in(value: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


@contextmanager
def watched(
    nodes: Sequence[Node], live: Callable[[], tuple[int, int]] = lambda: (0, 0)
) -> Iterator[list[Call]]:
    """Collect the calls that this thread makes of a tree's modules, in the order in which they begin.

    The hooks for this run before the user's when a module is called, and after them when it returns. They are
    removed at the end of the block. TorchScript modules take no hooks and are left out. `live` returns the
    live bytes, and the most since it was called last.
    """
    thread = threading.get_ident()
    paths = {id(node.module): node.path for node in nodes if node.same_as is None}
    times: Counter[str] = Counter()
    calls: list[Call] = []
    running: list[tuple[int, nn.Module]] = []  # index into `calls`, and module

    def settle() -> int:
        now, peak = live()
        for number, _ in running:
            calls[number] = replace(calls[number], peak=max(calls[number].peak, peak))
        return now

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return
        now, path = settle(), paths[id(module)]
        name, shapes = original_class(type(module)).__name__, _shapes_in((args, kwargs))
        running.append((len(calls), module))
        calls.append(Call(path, name, len(running) - 1, times[path], now, now, now, shapes))
        times[path] += 1

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread or not any(other is module for _, other in running):
            return  # another pre-hook raised an error before `enter` ran
        now = settle()
        ended: nn.Module | None = None
        while ended is not module:  # calls inside it may have ended without their hooks, at an interrupt
            number, ended = running.pop()
            shapes = _shapes_in(output) if ended is module else ()
            calls[number] = replace(calls[number], after=now, output_shapes=shapes)

    with ExitStack() as hooks:
        for node in nodes:
            module = node.module
            if node.same_as is not None or is_scripted(type(module)):
                continue
            for handle in (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True, always_call=True),
            ):
                hooks.callback(handle.remove)
        yield calls


@contextmanager
def isolated_forward(root: nn.Module, *, evaluate: bool = False) -> Iterator[None]:
    """Restore the states of random numbers after a forward, and run it without compiled code.

    Code of `torch.compile` runs no hooks, so the code that it was compiled from runs. With `evaluate`, every
    module is in eval mode inside the block, and there are no gradients. The flag `training` is set directly,
    because `train()` of a model may do more, such as merging adapters.
    """
    numpy: Any = sys.modules.get("numpy.random")
    masters = [master for module in modules_of(root) for _, master, _ in entries(module)]
    devices = {computes_on(root), *(master.device for master in masters)}
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = min((device.type for device in accelerators), default="cuda")
    indices = sorted(device.index for device in accelerators if device.type == kind)
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.set_state, numpy.get_state())
        stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if evaluate:
            stack.enter_context(torch.no_grad())
            for top in modules_of(root):
                for module in top.modules() if is_scripted(type(top)) else (top,):
                    if hasattr(module, "training"):  # a frozen TorchScript module has no such flag
                        stack.callback(setattr, module, "training", module.training)
                        module.training = False
        yield
