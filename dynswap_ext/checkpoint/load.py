"""Gives a model the tensors of a checkpoint, without reading those that can stay mapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dynswap_ext import config
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.listing import listed
from dynswap_ext._util.log import log_to_stderr, logger
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.progress import ProgressOption, check_progress, shown
from dynswap_ext._util.units import show_seconds
from dynswap_ext._util.warn import warn
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.loading.entries import ModelEntries, Transform, Window
from dynswap_ext.checkpoint.loading.identity import Snapshot
from dynswap_ext.checkpoint.loading.keys import KeyReport
from dynswap_ext.checkpoint.loading.skeleton import factory_of, fill_unsaved, make_skeleton
from dynswap_ext.checkpoint.loading.walk import custom_loaders, load_state
from dynswap_ext.checkpoint.options import Rename, check_dtype, renamed
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.errors import ConfigError, DynswapError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@check_option_names
def load(
    target: ModuleT | Callable[[], ModuleT],
    path: str | PathLike[str] | Checkpoint,
    *,
    device: torch.device | str | int = "cpu",
    dtype: torch.dtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    transform: Transform | None = None,
    assign: bool = True,
    coded: bool = False,
    weights_only: bool = True,
    progress: ProgressOption = False,
) -> ModuleT:
    r"""Make the tensors of a checkpoint the masters of a model, mapped rather than read.

    Parameters
    ----------
    target
        A module (on the meta device or with weights, installed or not), or a callable without arguments that
        makes one. The callable runs on the meta device, without initialising weights, as in `init_empty`.
    path
        A checkpoint of any format (see docs/checkpoints.md), or one that is open. Models that are loaded from
        one open checkpoint share its memory.
    device
        Where the masters go. On the CPU they stay mapped. To another device they are moved in windows of
        16 MiB.
    dtype
        A floating dtype for floating entries. An entry that has it already stays mapped; others are read and
        cast into memory, in windows of 16 MiB. Encoded entries (GGUF's) are left as they are.
    strict
        False only warns of keys that differ: weights that the file lacks keep their values, and entries that
        the model lacks are ignored. Shapes still have to agree.
    rename
        From the checkpoint's names to the model's: a function, or rules as in ``{r"^module\.": ""}``. None
        as a new name leaves the entry out.
    transform
        ``transform(name, tensor) -> tensor``, called with gradients disabled, for one entry after the other.
        It is given the name in the model and a copy of the tensor, on `device` and in `dtype`. (Tensor
        subclasses, such as GGUF's blocks, are not copied.) What it returns becomes the master, also a tensor
        subclass. An entry that is neither moved nor cast, and that it returns unchanged, stays mapped.
    assign
        True: the file's tensors become the masters. The model's parameter objects stay, so that optimizers
        still have them; gradients are dropped. False: values are copied, one tensor after the other, into the
        model's own tensors, which keep their memory, device and dtype. If either tensor is a subclass, it is
        copied through ``module_load``.
    coded
        True: bfloat16, float32 and float16 entries are read into RAM, one after the other, in a code without
        loss, in which trained weights take some 30 %, 15 % and 10 % less. A weight that is written to, as by
        training, is decoded for good. For frozen models a little larger than RAM, if their disk is slow.
    weights_only
        False lets a pickle run code: only for files from people whose code you would run.
    progress
        True shows a bar where stderr is a terminal or a notebook. A function is called with the bytes of the
        file that the model has received, and the total. What stays mapped counts immediately.

    Returns
    -------
    torch.nn.Module
        The module given, or the one made. Its parameters keep their ``requires_grad``, except those that have
        become tensors that cannot have a gradient (quantised blocks). Shared weights stay shared. The mapping
        is private: writing to a mapped tensor changes this process's copy of a page, never the file.

    Raises
    ------
    SourceError
        The file does not exist, cannot be read, is cut short, or is of an unknown format.
    ConfigError
        An argument cannot be used; keys are missing, unexpected or of another shape (all are named together);
        the transform failed; tied weights differ in the file; or the model has tensors on the meta device
        that no checkpoint holds and that cannot be made again.

    Notes
    -----
    After an error the module is as it was. With ``assign=False`` that holds for errors that are found before
    the first byte is written (in arguments, names, shapes, ties). If the disk, a transform or a module's own
    loading fails after that, the tensors loaded so far keep the file's values.

    Non-persistent buffers, and tensors that are plain attributes, are in no checkpoint. To make them, the
    factory (`target`, or the one given to `init_empty`) is called once more, outside the meta device, and its
    parameters are freed as soon as they are registered. If the checkpoint has two entries for one shared
    weight, both are read and compared, as only one can be kept.
    """
    log_to_stderr(config.log_level())
    begun = time.monotonic()
    where = _checked_device(device, dtype, transform, assign, coded)
    check_progress(progress)
    if not isinstance(path, (str, PathLike, Checkpoint)):
        raise ConfigError(_no_path(path))
    checkpoint = (
        path if isinstance(path, Checkpoint) else open_checkpoint(Path(path), weights_only=weights_only)
    )
    model, factory = _skeleton(target)
    names = renamed(checkpoint, rename)
    count = len(names)
    snapshot = Snapshot(model)
    try:
        with Window(checkpoint) as window, shown(progress, "loading") as report:
            own: dict[str, Any] = model.state_dict(keep_vars=True)
            entries = ModelEntries(checkpoint, names, where, dtype, transform, window, coded, report)
            _load_entries(model, own, entries, snapshot, strict=strict, assign=assign)
        snapshot.keep_objects()
        fill_unsaved(model, factory, saved=own)
    except BaseException:
        snapshot.restore()
        raise
    logger.info(
        "loaded %s into %s: %d entries of %s, %s, in %s",
        checkpoint.path,
        type(model).__name__,
        count,
        checkpoint.format,
        "converted" if entries.converted else "mapped" if assign else "copied",
        show_seconds(time.monotonic() - begun),
    )
    return model


def _no_path(given: Any) -> str:
    """Return the error for a `path` of another type. A state dict is not shown, as it may be long."""
    shown = f"of type {type(given).__name__}" if isinstance(given, Mapping | nn.Module) else repr(given)
    message = f"path is {shown}; expected a path, or an open checkpoint"
    if isinstance(given, Mapping):
        return f"{message}. To load tensors that are in memory, call model.load_state_dict(...)"
    if callable(given):
        return f"{message}. The model, or the function that makes it, comes first: load(model, path)"
    return message


def _checked_device(device: Any, dtype: Any, transform: Any, assign: bool, coded: bool) -> torch.device:
    """Return the device of the masters. Raise ConfigError if the arguments cannot be used together."""
    if device is None:
        raise ConfigError("device is None; expected 'cpu', which reads nothing, or an accelerator")
    if str(device) == "meta":
        raise ConfigError("device is 'meta', which holds no values; init_empty(factory) makes a skeleton")
    where = resolve_device(device)
    check_dtype(dtype)
    if transform is not None and not callable(transform):
        raise ConfigError(f"transform is {transform!r}; expected a function of a name and a tensor")
    if not isinstance(coded, bool):
        raise ConfigError(f"coded is {coded!r}; expected True or False")
    if coded and (where.type != "cpu" or not assign):
        raise ConfigError(
            "coded=True keeps coded masters in RAM, from which install() streams them: leave device and "
            "assign=False out"
        )
    if not assign and (where.type != "cpu" or dtype is not None):
        raise ConfigError(
            "assign=False copies values into the module's own tensors, which keep device and dtype: "
            "leave device and dtype out, or call model.to(device, dtype) first"
        )
    return where


def _skeleton(
    target: ModuleT | Callable[[], ModuleT],
) -> tuple[ModuleT, Callable[[], nn.Module] | None]:
    if isinstance(target, nn.Module):
        return cast("ModuleT", target), factory_of(target)
    if callable(target):
        return make_skeleton(target), target
    raise ConfigError(
        f"load() takes a torch.nn.Module or a callable that makes one, not a {type(target).__name__}"
    )


def _load_entries(
    model: nn.Module,
    own: Mapping[str, Any],
    entries: ModelEntries,
    snapshot: Snapshot,
    *,
    strict: bool,
    assign: bool,
) -> None:
    """Load the entries into the model. Raise ConfigError if keys or shapes differ.

    If `strict` is False, a warning names the keys that differ.
    """
    path, names = entries.checkpoint.path, entries.names
    entries.share(own)
    known = {} if entries.transform else entries.checkpoint.entries  # a transform may make other shapes
    report = KeyReport.compare(model, own, {name: known.get(old) for name, old in names.items()}, path, names)
    certain = report.certain(custom_loaders(model)) if report else report
    # Fail before anything is read, which takes long, or copied, which cannot be undone.
    early = entries.converted or not assign
    if certain.mismatched or (early and strict and certain):
        raise ConfigError(report.text(strict))
    left_out = certain.unexpected if early else ()
    empty = [name for name, tensor in own.items() if name in names and getattr(tensor, "is_meta", False)]
    if empty and not assign:
        raise ConfigError(
            f"assign=False copies values into the module's own tensors, and {len(empty)} of them are on the "
            f"meta device: {listed(empty)}; leave assign=False out, or call "
            "model.to_empty(device='cpu') first"
        )
    state = entries.state(without=left_out, lazy=not assign)
    if assign:
        final = KeyReport.compare(model, own, state, path, names) if entries.transform else report
        if final.mismatched:
            raise ConfigError(final.text(strict))
        snapshot.freeze(own, state)
    try:
        missing, unexpected = load_state(model, state, assign=assign)
    except DynswapError:
        raise
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error
    # Report the keys that the model has found, not those of the comparison: modules may rename keys.
    report = replace(report, missing=missing, unexpected=[*unexpected, *left_out])
    if report and strict:
        raise ConfigError(report.text(strict))
    if report:
        warn(report.text(strict))
