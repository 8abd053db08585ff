"""Tensors that no checkpoint holds: a meta skeleton has to make them once more, for real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dynswap_ext.errors import ConfigError


def rebuild_unsaved(model: nn.Module, factory: Callable[[], nn.Module] | None, *, unless: set[str]) -> None:
    """Replaces meta tensors that a state dict never holds by real ones.

    These are non-persistent buffers, and tensors that a module keeps as plain attributes.

    Parameters
    ----------
    model
        The loaded module.
    factory
        What made it, if known.
    unless
        Names that a state dict holds: whether those are there is the loader's business.

    Raises
    ------
    ConfigError
        There are such tensors and no factory, or a factory that does not make them for real. Names them.
    """
    lost = [name for name in _meta_tensors(model) if name not in unless]
    if not lost:
        return
    if factory is None:
        raise ConfigError(
            f"the skeleton is on the meta device and no checkpoint holds {_list(lost)} (non-persistent "
            "buffers, or tensors kept as plain attributes); give load() what makes the model instead of the "
            "model, as in load(lambda: Model(config), path), and they are made again"
        )
    with _weightless():
        twin = factory()
    for name in lost:
        owner, _, attribute = name.rpartition(".")
        module = twin.get_submodule(owner)
        made = module._buffers.get(attribute, module.__dict__.get(attribute))
        if made is None or made.is_meta:
            raise ConfigError(
                f"no checkpoint holds {_list(lost)}, and calling the factory again made no value for {name}; "
                "make it on the CPU explicitly (device='cpu') or register it as a persistent buffer"
            )
        home = model.get_submodule(owner)
        if attribute in home._buffers:
            home._buffers[attribute] = made
        else:
            home.__dict__[attribute] = made


def _meta_tensors(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for attribute, value in (*module._buffers.items(), *module.__dict__.items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{prefix}.{attribute}" if prefix else attribute


@contextmanager
def _weightless() -> Iterator[None]:
    """Modules made here, by this thread, have their parameters on the meta device and all else for real."""
    thread = threading.get_ident()
    seen: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id; the first keeps that id taken

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        if id(parameter) not in seen:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            seen[id(parameter)] = (parameter, empty)
        return seen[id(parameter)][1]

    # Torch annotates the hook as returning None; what it returns replaces the parameter.
    registration = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        registration.remove()


def _list(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
