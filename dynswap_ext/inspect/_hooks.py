"""Watching a forward from outside: hooks that are gone afterwards, and a model left as it was."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dynswap_ext._swap.state import is_scripted, modules_of, session_of
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._tree import entries

__all__ = ["arguments", "computes_on", "isolated_forward", "watching"]

#: Of a module, and of what it was called with.
Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
#: Of a module, and of what it returned; None if it raised.
Leave = Callable[[nn.Module, Any], None]


def arguments(
    given: Any, kwargs: Mapping[str, Any] | None, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from what is given as the inputs of a call.

    Parameters
    ----------
    given
        A list or tuple: the positional ones. A mapping: keywords. Anything else: the only one. None: none.
    kwargs
        More keywords.
    name
        What `given` was given as, for the error.

    Raises
    ------
    ConfigError
        `kwargs` is no mapping of names, or both name the same argument.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"kwargs is a {type(kwargs).__name__}; expected a mapping of argument names")
    keywords = dict(kwargs or {})
    if given is None:
        return (), keywords
    if not isinstance(given, Mapping):
        return (tuple(given) if isinstance(given, (list, tuple)) else (given,)), keywords
    both = sorted(set(given) & set(keywords))
    wrong = [key for key in (*given, *keywords) if not isinstance(key, str)]
    if both or wrong:
        why = f"both name {', '.join(both)}" if both else f"{wrong[0]!r} is no name of an argument"
        raise ConfigError(
            f"{name} is a mapping, so its entries are keyword arguments, and {why}; for a model that takes a "
            f"mapping as its one argument, give {name}=(mapping,)"
        )
    return (), {**given, **keywords}


def computes_on(root: nn.Module) -> torch.device:
    """Return where a model computes: as installed, else where its first weight is, else the CPU."""
    modules = modules_of(root)
    device = next((session.device for module in modules if (session := session_of(module))), None)
    return device or next(
        (m.device for module in modules for _, m, _ in entries(module)), torch.device("cpu")
    )


@contextmanager
def watching(modules: Iterable[nn.Module], enter: Enter, leave: Leave) -> Iterator[None]:
    """Call `enter` and `leave` around each call of the modules that this thread makes.

    Each `enter` has its `leave`, unless the exception that ends the call ends the block too. Hooks run
    before the user's on the way in and after them on the way out, and are gone when the block is left.
    TorchScript modules take none, and are passed over.
    """
    thread = threading.get_ident()
    running: list[nn.Module] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            running.append(module)
            enter(module, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread or not any(other is module for other in running):
            return  # another pre-hook raised before ours ran
        while running:
            ended = running.pop()  # above the module: those that an interrupt ended without their hooks
            leave(ended, output if ended is module else None)
            if ended is module:
                return

    with ExitStack() as hooks:
        for module in modules:
            if is_scripted(type(module)):
                continue
            for handle in (
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ):
                hooks.callback(handle.remove)
        yield


@contextmanager
def isolated_forward(root: nn.Module, *, evaluate: bool = False) -> Iterator[None]:
    """Leave no trace of a forward: random numbers continue as if it had not run, and compiled code rests.

    Code that `torch.compile` has made runs no hook, so what it was made from runs in its place. With
    `evaluate`, every module is in eval mode and there are no gradients. The flag is set by itself: a
    `train()` of the model's own may do more, such as merging adapters.
    """
    numpy: Any = sys.modules.get("numpy.random")
    masters = [master for module in modules_of(root) for _, master, _ in entries(module)]
    devices = {computes_on(root), *(master.device for master in masters)}
    accelerated = [
        device for device in devices if device.type not in ("cpu", "meta") and device.index is not None
    ]
    kind = min((device.type for device in accelerated), default="cuda")
    indices = sorted(device.index for device in accelerated if device.type == kind)
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
