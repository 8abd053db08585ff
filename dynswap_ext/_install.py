"""One install: its options, its session, the modules that it serves, and how it begins and ends."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from dynswap_ext import _provider, config
from dynswap_ext._swap.class_swap import ClassNaming, swap_class
from dynswap_ext._swap.compile_support import release_inputs
from dynswap_ext._swap.grad_scaler import keep_scales_on_host
from dynswap_ext._swap.module_registry import ServedModules, model_of
from dynswap_ext._swap.optimizer_steps import add_step_listener, remove_step_listener
from dynswap_ext._swap.parametrized import give_back
from dynswap_ext._swap.protocol import Hooks, Session
from dynswap_ext._swap.state import is_scripted, modules_of, session_of
from dynswap_ext._swap.torch_modules import put_masters_back
from dynswap_ext._tuning import Tuner, smaller_budget
from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.untraced import untraced
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import BudgetError, ConfigError, OutOfMemoryError
from dynswap_ext.profile.first_pass import FirstPass

__all__ = ["Install", "detach", "install_of", "lock", "log_plan"]

#: One install or uninstall at a time: they change classes, and a tree may belong to several installs.
lock: Final = threading.RLock()


class Install:
    """One install. Does not keep the model alive.

    Parameters
    ----------
    options : Options
        What was asked for.
    provider : Provider
        What serves it.
    naming : callable, optional
        What its swap classes show (`compat`).
    """

    def __init__(
        self, options: config.Options, provider: _provider.Provider, naming: ClassNaming | None = None
    ) -> None:
        self.options = options
        #: Why its provider is not the native one; empty if it is, or if pure Python was asked for.
        self.reason = provider.reason
        #: What serves it by now.
        self.session = _new_session(provider, options)
        #: What measures its passes, if anything does.
        self.tuner: Tuner | None = None
        self._naming = naming
        self._served: ServedModules | None = None
        self._first_pass: FirstPass | None = None

    @property
    def installed(self) -> int:
        """How many modules were swapped, or have joined since, and have not been given back."""
        return self.session.modules

    @property
    def active(self) -> bool:
        """Whether any module is served by this install."""
        return self.installed > 0 and self._served is not None and self._served.serving()

    def start_auto_budget(self, model: nn.Module, provider: _provider.Provider) -> None:
        """`begin`; an automatic budget shrinks until there is memory for it."""
        try:
            self.begin(model, provider.attribute)
        except (BudgetError, OutOfMemoryError) as error:
            budget = self.options.budget
            if not self.options.automatic or budget is None:
                raise
            logger.info("a budget of %s does not work: %s", format_bytes(budget), error)
            self.close_session()
            smaller = smaller_budget(budget) if isinstance(error, OutOfMemoryError) else None
            self.options = replace(self.options, budget=smaller)
            self.session = _new_session(provider, self.options)
            self.start_auto_budget(model, provider)

    def begin(self, model: nn.Module, attribute: type) -> None:
        """Swap the tree. On an error the tree is as it was."""
        refused: list[type] = []

        def swap(cls: type) -> type | None:
            made = swap_class(cls, attribute, self._naming)
            if made is None and not is_scripted(cls):
                refused.append(cls)
            return made

        self.session.attach(model, swap)
        _installs[self.session] = self
        self._served = ServedModules(model, self.session, _forget)
        if self.options.automatic:
            self._tuner()
        if self.options.progress:
            self._first_pass = FirstPass(self.session, self._served.serving, self.options.progress)
        if self.options.device.type != "cpu":
            keep_scales_on_host(_computes_on)
        if refused:
            names = ", ".join(cls.__qualname__ for cls in refused)
            warn(f"these classes cannot be subclassed, so their modules are not installed: {names}")

    def everything(self) -> nn.Module | None:
        """Return all that this install serves, as one tree; None if it serves nothing."""
        return None if self._served is None else self._served.everything()

    def begin_again(self, model: nn.Module | None) -> None:
        """Put an install back, over the tree that it served, after another one failed to replace it."""
        if model is None:
            return
        detach(self.session, model)
        self.end()
        provider = _provider.select(self.options.provider, self.options.device)
        self.session = _new_session(provider, self.options)
        self.begin(model, provider.attribute)

    def _tuner(self) -> Tuner:
        assert self._served is not None
        options = self.options
        self.tuner = Tuner(self.session, self._served.tree, options.budget, automatic=options.automatic)
        return self.tuner

    def retune(self, budget: int | float | str | None) -> None:
        """See `Handle.retune`."""
        with lock:
            if not self.active:
                raise ConfigError("the model has been uninstalled: there is nothing to plan for")
            tuner = self.tuner or self._tuner()
            if budget is None:
                tuner.measure(tuner.budget)
            elif budget == "auto":
                tuner.measure(tuner.budget, automatic=True)
            else:
                tuner.measure(config.resolve_budget(budget, self.options.device), automatic=False)

    def undo(self) -> None:
        """Give back every module that this install serves, wherever it is. No effect if there is none."""
        with lock:
            served = self._served
            if served is None or not self.active:
                return
            for find in (served.tree, served.rest):
                if self.installed > 0 and (found := find()) is not None:
                    detach(self.session, found)
            self.end()

    def end_if_over(self) -> None:
        """End the install, unless modules are still served."""
        if not self.active:
            self.end()

    def end(self) -> None:
        """End the install, once every module was given back: close the session and forget it."""
        if self._first_pass is not None:
            self._first_pass.stop()
            self._first_pass = None
        self.close_session()
        _log_end(self.session)
        if self._served is not None:
            self._served.forget()
            _installs.pop(self.session, None)

    def close_session(self) -> None:
        """Let go of the device memory and the threads."""
        self.session.close()
        remove_step_listener(self.session)


#: By the session, which the install keeps. An entry goes with its install, or with its last module.
_installs: dict[Session, Install] = {}


def _forget(session: Session) -> None:
    """The last module of a session has died."""
    _installs.pop(session, None)


def install_of(session: Session) -> Install | None:
    """Return the install that a session belongs to; None if it has ended."""
    return _installs.get(session)


def _computes_on(device: torch.device) -> bool:
    return any(install.options.device == device for install in list(_installs.values()))


def detach(session: Session, model: nn.Module) -> None:
    """Give the modules of a tree that a session serves their own classes back."""
    release_inputs()
    give_back(model, session)
    for module in modules_of(model):
        if session_of(module) is session:
            put_masters_back(module)
    session.detach(model)


@untraced
def _replan(session: Session) -> None:
    """Plan again for the masters that a session's model has by now.

    If they do not fit the budget, the old plan stays, and what it does not know is moved at each access.
    """
    model = model_of(session)
    if model is None:
        return
    try:
        session.replan(model)
        log_plan("planned again", session, type(model).__name__)
    except (BudgetError, OutOfMemoryError) as error:
        warn(f"the model's weights have changed, and no new plan fits: {error}; the old plan stays")


@untraced
def _call_begins(session: Session) -> None:
    install = _installs.get(session)
    if install is not None and install.tuner is not None:
        install.tuner()


@untraced
def _call_failed(session: Session, error: BaseException) -> None:
    install = _installs.get(session)
    if install is not None and install.tuner is not None:
        install.tuner.call_failed(error)


_HOOKS: Final = Hooks(warn=warn, replan=_replan, call_begins=_call_begins, call_failed=_call_failed)


def _new_session(provider: _provider.Provider, options: config.Options) -> Session:
    session = provider.session(
        options.device,
        options.dtype,
        prefetch=options.prefetch,
        budget=options.budget,
        strict_budget=options.strict_budget,
        pin=options.pin,
        page_cache=options.page_cache,
        page_cache_always=options.page_cache_always,
        backend=provider.backend,
        hooks=_HOOKS,
    )
    add_step_listener(session)
    return session


def log_plan(what: str, session: Session, of: str) -> None:
    """Log what a plan came to."""
    if not logger.isEnabledFor(logging.INFO):
        return
    plan = session.stats()
    logger.info(
        "%s %s: %d modules, %s/%s on %s, %d groups of %s, %d of them resident (%s), arena %s, %d ahead",
        what,
        of,
        session.modules,
        session.provider,
        session.backend,
        session.device,
        plan["groups"],
        format_bytes(plan["weight_bytes"]),
        plan["resident_groups"],
        format_bytes(plan["resident_bytes"]),
        format_bytes(plan["arena_bytes"]),
        plan["depth"],
    )


def _log_end(session: Session) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    counted = session.stats()
    logger.info(
        "uninstalled: %d hits (%d late), %d misses, %s moved, %.3f s stalled, at most %s on %s",
        counted["hits"],
        counted["late_hits"],
        counted["misses"],
        format_bytes(counted["bytes_moved"]),
        counted["stall_ns"] / 1e9,
        format_bytes(counted["peak_bytes"]),
        session.device,
    )
