"""Gives a model the tensors of a checkpoint file without reading them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dynswap_ext.checkpoint.buffers import rebuild_unsaved
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.gguf.tensor import GGUFTensor
from dynswap_ext.checkpoint.keys import KeyReport
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import ConfigError

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Names of one parameter or buffer: more than one when modules share it.
_Tie = list[str]


def load(
    model_or_factory: ModuleT | Callable[[], ModuleT],
    path: str | PathLike[str],
    *,
    strict: bool = True,
) -> ModuleT:
    """Make the tensors of a checkpoint file the masters of a model, mapped and not read.

    Parameters
    ----------
    model_or_factory
        A module (on the meta device or with weights, which are let go), or a callable without arguments
        that makes one. The callable runs under ``torch.device("meta")``, so it neither allocates nor
        initialises weights.
    path
        A safetensors file, or a zip file that ``torch.save`` wrote.
    strict
        False leaves what the file lacks as it is and ignores what the model lacks, with a warning.
        Shapes have to agree all the same.

    Returns
    -------
    torch.nn.Module
        The module given, or the one made. Its parameters have the file's dtypes and the skeleton's
        ``requires_grad``; what modules share they go on sharing. The mapping is private: writing to such a
        tensor changes this process's copy of a page and never the file.

    Raises
    ------
    SourceError
        The file is not there, cut short, or of an unknown format.
    ConfigError
        Keys are missing, unexpected or of another shape (all are named at once), tied weights differ in
        the file, or a meta skeleton has buffers that no checkpoint holds and cannot be made again.
        The module is as it was.

    Notes
    -----
    Non-persistent buffers are in no checkpoint. A factory is called once more for them, outside the meta
    device, with its parameters let go as soon as they are registered. Two checkpoint entries for one shared
    weight are the one case where weights are read here: they are compared, since only one can be kept.
    """
    path = Path(path)
    factory: Callable[[], ModuleT] | None = None
    model: ModuleT
    if isinstance(model_or_factory, nn.Module):
        model = cast("ModuleT", model_or_factory)
    elif callable(model_or_factory):
        factory = model_or_factory
        with torch.device("meta"):
            model = factory()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model factory returned a {type(model).__name__}, not a torch.nn.Module")
    else:
        raise ConfigError(
            "load() takes a torch.nn.Module or a callable that makes one, "
            f"not a {type(model_or_factory).__name__}"
        )

    given = open_checkpoint(path)
    before = _snapshot(model)
    try:
        _assign(model, given, strict)
        rebuild_unsaved(model, factory, unless=set(model.state_dict(keep_vars=True)))
    except BaseException:
        _restore(before)
        raise
    return model


def _assign(model: nn.Module, checkpoint: Checkpoint, strict: bool) -> None:
    path = checkpoint.path
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    ties = _ties(own)
    given = _with_ties(checkpoint, ties)
    report = KeyReport.compare(own, given, path)
    if report.mismatched:
        raise ConfigError(report.text(strict))
    _freeze_quantised(own, given)
    try:
        outcome = model.load_state_dict(given, strict=False, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error
    # What load_state_dict says counts, not the comparison: modules may rename keys while they load.
    report = report.only(missing=outcome.missing_keys, unexpected=outcome.unexpected_keys)
    if report:
        if strict:
            raise ConfigError(report.text(strict))
        warnings.warn(report.text(strict), stacklevel=3)
    _tie_again(model, ties)


def _freeze_quantised(own: dict[str, Any], given: dict[str, Any]) -> None:
    """Quantised blocks have no gradient, and load_state_dict gives what it assigns the skeleton's flag."""
    for name, tensor in own.items():
        if isinstance(tensor, nn.Parameter) and isinstance(given.get(name), GGUFTensor):
            tensor.requires_grad_(False)


# ---- ties --------------------------------------------------------------------------------------------------


def _ties(own: dict[str, Any]) -> list[_Tie]:
    names: dict[int, _Tie] = {}
    for name, tensor in own.items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), []).append(name)
    return [tie for tie in names.values() if len(tie) > 1]


def _with_ties(checkpoint: Checkpoint, ties: list[_Tie]) -> dict[str, Any]:
    """The file's entries, with those of shared weights under each of their names."""
    given = OrderedDict(checkpoint)
    if checkpoint.versions is not None:  # load_state_dict reads them off that attribute
        given._metadata = checkpoint.versions  # type: ignore[attr-defined]
    for tie in ties:
        present = [name for name in tie if name in given]
        if not present:
            continue
        kept = given[present[0]]
        for name in present[1:]:
            if not _same(kept, given[name]):
                raise ConfigError(
                    f"the model shares one weight between {present[0]} and {name}, and {checkpoint.path} "
                    "has two different ones; untie them in the model's configuration, or delete one from "
                    "the file"
                )
        given.update(dict.fromkeys(tie, kept))
    return given


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.data_ptr() == right.data_ptr():
        return True
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # bytes, so that NaN equals itself


def _tie_again(model: nn.Module, ties: list[_Tie]) -> None:
    for tie in ties:
        owner, _, attribute = tie[0].rpartition(".")
        first = model.get_submodule(owner)
        parameter = first._parameters.get(attribute)
        buffer = first._buffers.get(attribute)
        for name in tie[1:]:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if parameter is not None and attribute in module._parameters:
                module._parameters[attribute] = parameter
            elif buffer is not None and attribute in module._buffers:
                module._buffers[attribute] = buffer


# ---- all or nothing ----------------------------------------------------------------------------------------

_Entries = tuple[
    nn.Module, dict[str, nn.Parameter | None], dict[str, torch.Tensor | None], list[tuple[nn.Parameter, bool]]
]


def _snapshot(model: nn.Module) -> list[_Entries]:
    # References are enough: load_state_dict(assign=True) replaces tensors and writes into none.
    # What it does write is whether they are trained (_freeze_quantised).
    return [
        (
            module,
            dict(module._parameters),
            dict(module._buffers),
            [(parameter, parameter.requires_grad) for parameter in module.parameters(recurse=False)],
        )
        for module in model.modules()
    ]


def _restore(entries: list[_Entries]) -> None:
    for module, parameters, buffers, trained in entries:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
