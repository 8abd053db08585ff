"""Tensors that no checkpoint holds: a meta skeleton has to get them made once more, for real."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from dynswap_ext.checkpoint.formats.common import listed
from dynswap_ext.checkpoint.loading.skeleton import make_without_weights
from dynswap_ext.errors import ConfigError

#: Types of most of what a module keeps beside tensors; `isinstance` with torch.Tensor is slow.
_NO_TENSORS = frozenset([type(None), bool, int, float, str, dict, OrderedDict, set, list, tuple])


def remake_unsaved(
    model: nn.Module, factory: Callable[[], nn.Module] | None, *, unless: Collection[str]
) -> dict[str, torch.Tensor]:
    """Real tensors for those on the meta device that a state dict never holds.

    These are non-persistent buffers, and tensors that a module keeps as plain attributes.

    Parameters
    ----------
    model
        The loaded module; it is not changed.
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
        return {}
    if factory is None:
        raise ConfigError(
            f"the skeleton is on the meta device and no checkpoint holds {listed(lost, 10)} (non-persistent "
            "buffers, or tensors kept as plain attributes); give load() what makes the model instead of the "
            "model, as in load(lambda: Model(config), path), or make the skeleton with "
            "init_empty(lambda: Model(config)), and they are made again"
        )
    twin = make_without_weights(factory)
    remade = {name: _member(twin, name) for name in lost}
    for name, made in remade.items():
        if made is None or made.is_meta:
            raise ConfigError(
                f"no checkpoint holds {listed(lost, 10)}, and calling the factory again made no value for "
                f"{name}; make it on the CPU explicitly (device='cpu') or register it as a persistent buffer"
            )
    return {name: made for name, made in remade.items() if made is not None}


def put_in(model: nn.Module, remade: dict[str, torch.Tensor]) -> None:
    """Give the model what `remake_unsaved` made for it."""
    for name, made in remade.items():
        owner, _, attribute = name.rpartition(".")
        home = model.get_submodule(owner)
        if attribute in home._buffers:
            home._buffers[attribute] = made
        else:
            home.__dict__[attribute] = made


def _member(root: nn.Module, name: str) -> torch.Tensor | None:
    owner, _, attribute = name.rpartition(".")
    try:
        module = root.get_submodule(owner)
    except AttributeError:
        return None  # a module that was added to the model after it was made
    made = module._buffers.get(attribute, module.__dict__.get(attribute))
    return made if isinstance(made, torch.Tensor) else None


def _meta_tensors(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for members in (module._buffers, module.__dict__):
            for attribute, value in members.items():
                if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor) and value.is_meta:
                    yield f"{prefix}.{attribute}" if prefix else attribute
