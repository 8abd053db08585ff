"""Gives a model the tensors of a checkpoint, without reading them where that is not asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dynswap_ext._logging import follow_environment, logger
from dynswap_ext._progress import ProgressOption, check_progress, shown
from dynswap_ext._warn import warn
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.loading.buffers import put_in, remake_unsaved
from dynswap_ext.checkpoint.loading.identity import Before
from dynswap_ext.checkpoint.loading.incoming import Incoming, Processing, Transform
from dynswap_ext.checkpoint.loading.keys import KeyReport
from dynswap_ext.checkpoint.loading.skeleton import factory_of, make
from dynswap_ext.checkpoint.loading.ties import ties_of
from dynswap_ext.checkpoint.loading.walk import load_state, own_ways
from dynswap_ext.checkpoint.loading.window import Window
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.checkpoint.rename import Rename, renamed
from dynswap_ext.errors import ConfigError, DynswapError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


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
    weights_only: bool = True,
    progress: ProgressOption = False,
) -> ModuleT:
    r"""Make the tensors of a checkpoint the masters of a model, mapped and not read.

    Parameters
    ----------
    target
        A module (on the meta device or with weights, installed or not), or a callable without arguments that
        makes one, which runs as in `init_empty`.
    path
        A checkpoint of any format (see docs/checkpoints.md), or one that is open. Models that are loaded from
        one open checkpoint share its memory.
    device
        Where the masters are to be. The CPU: mapped. Elsewhere: moved there a window at a time.
    dtype
        A floating dtype for floating entries. One that has it already stays mapped; others are read, a
        window at a time, and cast into memory. Encoded entries (GGUF's) are left as they are.
    strict
        False leaves what the file lacks as it is and ignores what the model lacks, with a warning.
        Shapes have to agree all the same.
    rename
        From the checkpoint's names to the model's: a function, or rules as in ``{r"^module\.": ""}``. None
        as a new name leaves the entry out.
    transform
        ``transform(name, tensor) -> tensor``, called without gradients for one entry after the other, with
        the model's name and a tensor of its own, on `device` and in `dtype`. What it returns becomes the
        master, a tensor subclass as well; an entry that it returns as it was given stays mapped.
    assign
        True: the file's tensors become the masters, in the parameter objects that the model has, so that
        optimizers know them still; gradients are let go. False: values are copied into the model's own
        tensors, whose device and dtype stay, one after the other; where either is a tensor subclass,
        through its ``module_load``.
    weights_only
        False lets a pickle run code: only for files from somebody whose code you would run.
    progress
        True shows a bar where stderr is a terminal or a notebook. A function is called with the bytes of the
        file that the model has got, and the whole. What stays mapped is there at once.

    Returns
    -------
    torch.nn.Module
        The module given, or the one made. Its parameters have the skeleton's ``requires_grad``, unless they
        have become what has no gradient (quantised blocks); what modules share they go on sharing. The
        mapping is private: writing to such a tensor changes this process's copy of a page and never the file.

    Raises
    ------
    SourceError
        The file is not there, cut short, or of an unknown format.
    ConfigError
        An argument has a value that cannot be used; keys are missing, unexpected or of another shape (all are
        named at once); the transform failed; tied weights differ in the file; or a meta skeleton has buffers
        that no checkpoint holds and cannot be made again.

    After an error the module is as it was. With ``assign=False`` that holds for all that is found before the
    first byte is written: arguments, names, shapes, ties. A disk or a transform that fails after that, or a
    module's own way to load that does, leaves the tensors before it with the file's values.

    Notes
    -----
    Non-persistent buffers are in no checkpoint. For a skeleton of `init_empty`, or a factory, that is called
    once more for them, outside the meta device, with its parameters let go as soon as they are registered.
    Two checkpoint entries for one shared weight are compared, which reads them, since only one can be kept.
    """
    follow_environment()
    begun = time.monotonic()
    processing = Processing.of(device, dtype, transform, assign=assign)
    check_progress(progress)
    checkpoint = _open(path, weights_only)
    model, factory = _skeleton(target)
    names = renamed(checkpoint, rename)
    before = Before(model)
    try:
        with Window(checkpoint) as window, shown(progress, "loading") as told:
            own: dict[str, Any] = model.state_dict(keep_vars=True)
            incoming = Incoming(checkpoint, names, processing, window, told)
            _give(model, own, incoming, before, strict=strict, assign=assign)
        remade = remake_unsaved(model, factory, unless=own)
        before.keep_objects()
        put_in(model, remade)
    except BaseException:
        before.restore()
        raise
    logger.info(
        "loaded %s into %s: %d entries of %s, %s, in %.3f s",
        checkpoint.path,
        type(model).__name__,
        len(names),
        checkpoint.format,
        "converted" if incoming.converted else "mapped" if assign else "copied",
        time.monotonic() - begun,
    )
    return model


def _open(path: str | PathLike[str] | Checkpoint, weights_only: bool) -> Checkpoint:
    if isinstance(path, Checkpoint):
        return path
    try:
        return open_checkpoint(Path(path), weights_only=weights_only)
    except TypeError as error:
        if isinstance(path, (str, PathLike)):
            raise
        raise ConfigError(f"path is {path!r}; expected a path, or an open checkpoint") from error


def _skeleton(
    target: ModuleT | Callable[[], ModuleT],
) -> tuple[ModuleT, Callable[[], nn.Module] | None]:
    if isinstance(target, nn.Module):
        return cast("ModuleT", target), factory_of(target)
    if callable(target):
        return make(target), target
    raise ConfigError(
        f"load() takes a torch.nn.Module or a callable that makes one, not a {type(target).__name__}"
    )


def _give(
    model: nn.Module,
    own: Mapping[str, Any],
    incoming: Incoming,
    before: Before,
    *,
    strict: bool,
    assign: bool,
) -> None:
    """Let the model load, and say what does not fit."""
    path = incoming.checkpoint.path
    incoming.share(ties_of(own))
    report = KeyReport.compare(own, incoming.described(), path, incoming.names)
    certain = report.certain(own_ways(model)) if report else report
    # Reading takes long, and what is copied cannot be taken back.
    early = incoming.converted or not assign
    if certain.mismatched or (early and strict and certain):
        raise ConfigError(report.text(strict))
    left_out = certain.unexpected if early else ()
    if assign:
        state: Mapping[str, Any] = incoming.state(but=left_out)
        made = KeyReport.compare(own, state, path, incoming.names) if incoming.transformed else report
        if made.mismatched:
            raise ConfigError(made.text(strict))
        before.freeze(own, state)
    else:
        _refuse_meta(own, incoming.names)
        state = incoming.lazy_state(but=left_out)
    try:
        outcome = load_state(model, state, assign=assign)
    except DynswapError:
        raise
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error
    if outcome.errors:
        raise ConfigError("\n  ".join([f"{path} does not fit the model:", *outcome.errors]))
    # What it says counts, not the comparison: modules may rename keys while they load.
    report = report.only(missing=outcome.missing, unexpected=(*outcome.unexpected, *left_out))
    if report and strict:
        raise ConfigError(report.text(strict))
    if report:
        warn(report.text(strict))


def _refuse_meta(own: Mapping[str, Any], given: Collection[str]) -> None:
    empty = [name for name, tensor in own.items() if name in given and getattr(tensor, "is_meta", False)]
    if empty:
        raise ConfigError(
            f"assign=False copies values into the module's own tensors, and {len(empty)} of them are on the "
            f"meta device: {', '.join(empty[:5])}; leave assign=False out, or call "
            "model.to_empty(device='cpu') first"
        )
