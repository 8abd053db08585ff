"""The models of one install: a module, or a pipeline, list, tuple or dict of modules, which may be nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from dynswap_ext._util.listing import listed
from dynswap_ext.errors import ConfigError

#: A module, or a container of modules: a pipeline of transformers, or one with `components` (diffusers), a
#: mapping, a list or a tuple. Containers may be nested. Other things in pipelines and mappings (a tokenizer,
#: None) are skipped.
Installable: TypeAlias = Any

#: What the pipelines of transformers derive from.
_PIPELINE: Final = ("transformers.pipelines.base", "Pipeline")


class Models(nn.Module):
    """Holds several models by name, as one tree. Users never see it, and it is never installed itself.

    It lives for one walk through the tree: an install keeps only weak references to modules.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(models)  # `add_module` refuses names with a dot, which nested containers give


def as_tree(given: Installable) -> nn.Module:
    """Return a module as it is, and a container as `Models` of its modules, named by their keys or indices.

    Raises
    ------
    ConfigError
        `given` is neither, there is no module in it, or a list or tuple holds something else (those inside a
        pipeline or mapping may).
    """
    if isinstance(given, nn.Module):
        return given
    contents = _contents(given)
    if contents is None:
        raise ConfigError(
            f"model is a {type(given).__name__}; expected a torch.nn.Module, a pipeline with components, or "
            f"a list, tuple or dict of them{_instead_of(given)}"
        )
    found: dict[str, nn.Module] = {}
    known: set[int] = set()
    for name, model in _models(contents, "", {id(given)}, strict=isinstance(given, (list, tuple))):
        if id(model) not in known:
            known.add(id(model))
            found[name] = model
    if not found:
        held = [f"{name} ({type(value).__name__})" for name, value in contents.items()]
        what = listed(held) or "nothing"
        raise ConfigError(f"the {type(given).__name__} holds no torch.nn.Module to install: it has {what}")
    return Models(found)


def _instead_of(given: Any) -> str:
    """Return the end of an error message: what to pass in place of `given`; empty if that is not known."""
    if isinstance(given, type):
        return f". Make the model first: {given.__name__}(...)" if issubclass(given, nn.Module) else ""
    if isinstance(given, (str, PathLike)):
        return ". A checkpoint is loaded first: model = dynswap_ext.checkpoint.load(model, path)"
    if isinstance(getattr(given, "model", None), nn.Module):  # a trainer
        return ". Pass its model: install(x.model)"
    return ""


def models_in(tree: nn.Module) -> dict[str, nn.Module]:
    """Return the models of a tree from `as_tree`, by name; the name of a single module is empty."""
    if not isinstance(tree, Models):
        return {"": tree}
    return {name: model for name, model in tree._modules.items() if model is not None}


def _models(
    contents: Mapping[str, Any], prefix: str, above: set[int], *, strict: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a container, and of containers in it, with their names.

    `above` has the ids of the containers that this one is in. If `strict`, the container is a list or tuple:
    ConfigError if there is anything else in it.
    """
    for key, value in contents.items():
        inner = None if isinstance(value, nn.Module) else _contents(value)
        if isinstance(value, nn.Module):
            yield f"{prefix}{key}", value
        elif inner is not None and id(value) not in above:
            inner_strict = strict and isinstance(value, (list, tuple))
            yield from _models(inner, f"{prefix}{key}.", above | {id(value)}, strict=inner_strict)
        elif inner is None and strict:
            shown = "" if isinstance(value, torch.Tensor) else f" ({value!r:.60})"
            raise ConfigError(
                f"number {prefix}{key} of the models is a {type(value).__name__}{shown}; expected a "
                "torch.nn.Module, a pipeline with components, or a list, tuple or dict of them. "
                f"{'Pass the module that owns it' if not shown else 'Leave it out'}"
            )


def _contents(given: Any) -> dict[str, Any] | None:
    """Return a container's contents by name, in the order of use if it is known; None for other objects."""
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return {str(place): value for place, value in enumerate(given)}
    if any((cls.__module__, cls.__name__) == _PIPELINE for cls in type(given).__mro__):
        return {name: getattr(given, name, None) for name in ("model", "assistant_model")}
    components = None if isinstance(given, type) else getattr(given, "components", None)
    if not isinstance(components, Mapping):
        return None
    # Pipelines of diffusers say in which order their models run: "text_encoder->unet->vae".
    order = str(getattr(given, "model_cpu_offload_seq", None) or "").split("->")
    place = {name: index for index, name in enumerate(order)}
    return dict(sorted(components.items(), key=lambda item: place.get(item[0], len(order))))
