"""The dtypes in which transformers or diffusers would have loaded the weights of a model.

This asks the libraries themselves what their `from_pretrained(dtype=...)` does, for the plain models that an
installed model is compared with. An install does not ask: it follows the rule of Note [Kept in float32].
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dynswap_ext.errors import DynswapWarning

#: Names in modules of peft: of the layer that it adapts, and of the copies of a layer that it saves whole.
_OF_PEFT = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def dtypes_as_loaded(model: nn.Module, dtype: torch.dtype | None) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Return the floating weights to which ``from_pretrained(dtype=dtype)`` would give another dtype.

    The keys are the module that owns a weight and its name there, the values the dtype that it would have.
    Modules that are not part of a model of transformers or diffusers have no keys.
    """
    found: dict[tuple[nn.Module, str], torch.dtype] = {}
    if dtype is None:
        return found
    for root in _library_models(model):
        try:
            loaded = (_of_transformers if _is("transformers", root) else _of_diffusers)(root, dtype)
        except Exception as error:
            # Another version of the library, or a constructor that takes more than a config.
            warnings.warn(
                f"what from_pretrained(dtype={dtype}) does with a {type(root).__name__} cannot be asked "
                f"({type(error).__name__}: {error}); all its weights are cast, as .to(dtype) does",
                DynswapWarning,
                stacklevel=4,
            )
            continue
        for path, module in root.named_modules(remove_duplicate=False):
            for own, weight in (*module._parameters.items(), *module._buffers.items()):
                name = _OF_PEFT.sub("", f"{path}.{own}".lstrip("."))
                if weight is not None and weight.is_floating_point() and loaded.get(name, dtype) != dtype:
                    found[module, own] = loaded[name]
    return found


def _library_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of transformers or diffusers in a tree of modules."""
    if _is("transformers", model) or _is("diffusers", model):
        yield model
        return
    for child in model.children():
        yield from _library_models(child)


def _is(library: str, module: nn.Module) -> bool:
    """Return whether a module is a model of this library. Does not import the library."""
    path, name = {
        "transformers": ("transformers.modeling_utils", "PreTrainedModel"),
        "diffusers": ("diffusers.models.modeling_utils", "ModelMixin"),
    }[library]
    kind = getattr(sys.modules.get(path), name, None)
    return kind is not None and isinstance(module, kind)


def _of_transformers(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    from transformers.core_model_loading import build_glob_alternation

    kind = type(model)
    with contextlib.ExitStack() as stack, torch.random.fork_rng(devices=[]):
        for context in kind.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        outline = kind(model.config)
    dtypes = _dtypes(outline)
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, pattern_of_group, _ = build_glob_alternation(list(plan))
        for name in outline.state_dict():
            match = pattern.search(name)
            if match is not None:
                dtypes[name] = plan[pattern_of_group[match.lastgroup]]
    return dtypes


def _of_diffusers(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    accelerate: Any = importlib.import_module("accelerate")  # diffusers uses it for this, too
    kind = type(model)
    before = torch.get_default_dtype()
    with accelerate.init_empty_weights(), torch.random.fork_rng(devices=[]):
        try:
            torch.set_default_dtype(dtype)
            outline = kind.from_config(model.config)
        finally:
            torch.set_default_dtype(before)
    dtypes = _dtypes(outline)
    kept = kind._keep_in_fp32_modules or []
    kept = kept if isinstance(kept, list) else [kept]
    for name in outline.state_dict():
        dtypes[name] = torch.float32 if not set(kept).isdisjoint(name.split(".")) else dtype
    return dtypes


def _dtypes(outline: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of a model's parameters and buffers, by name.

    The library has made the model from its config alone, so weights that are in no checkpoint keep these.
    """
    return {
        name: weight.dtype
        for named in (outline.named_parameters, outline.named_buffers)
        for name, weight in named(remove_duplicate=False)
    }
