"""One install: its options, its session, the modules that it serves, and how it begins and ends."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from dynswap_ext import _provider, config
from dynswap_ext._swap.class_swap import ClassNaming, swap_class
from dynswap_ext._swap.compile_support import release_inputs
from dynswap_ext._swap.module_registry import ServedModules, model_of, served_by, serves_any
from dynswap_ext._swap.optimizers import add_step_listener, keep_scales_on_host, remove_step_listener
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

#: One install or uninstall at a time: they change classes, and a tree may belong to several installs.
lock: Final = threading.RLock()


class Install(ServedModules):
    """One install. Does not keep the model alive. `naming` is what its swap classes show (`compat`)."""

    def __init__(
        self, options: config.Options, provider: _provider.Provider, naming: ClassNaming | None = None
    ) -> None:
        super().__init__()
        self.options = options
        self.provider = provider
        self._naming = naming
        self._first_pass: FirstPass | None = None
        self._open()

    def _open(self) -> None:
        options = self.options
        self.session = self.provider.session(
            options.device,
            options.dtype,
            prefetch=options.prefetch,
            budget=options.budget,
            strict_budget=options.strict_budget,
            pin=options.pin,
            pinned_copies=options.pinned_copies,
            page_cache=options.page_cache,
            page_cache_always=options.page_cache_always,
            backend=self.provider.backend,
            hooks=_HOOKS,
        )
        self.tuner = Tuner(self.session, options.budget, automatic=options.automatic)
        add_step_listener(self.session)

    @property
    def active(self) -> bool:
        """Whether any module is served by this install."""
        return self.session.modules > 0 and self.serving()

    def begin(self, model: nn.Module) -> None:
        """Swap the tree, or nothing on an error. An automatic budget shrinks until there is memory."""
        refused: dict[type, None] = {}

        def swap(cls: type) -> type | None:
            made = swap_class(cls, self.provider.attribute, self._naming)
            if made is None and not is_scripted(cls):
                refused[cls] = None
            return made

        try:
            self.session.attach(model, swap)
        except (BudgetError, OutOfMemoryError) as error:
            budget = self.options.budget
            if not self.options.automatic or budget is None:
                raise
            logger.info("a budget of %s does not work: %s", format_bytes(budget), error)
            self.close_session()
            smaller = smaller_budget(budget) if isinstance(error, OutOfMemoryError) else None
            self.options = replace(self.options, budget=smaller)
            self._open()
            return self.begin(model)
        self.serve(model)
        if self.options.progress:
            serving = functools.partial(serves_any, self.session)
            self._first_pass = FirstPass(self.session, serving, self.options.progress)
        if self.options.device.type != "cpu":
            keep_scales_on_host(_computes_on)
        if refused:
            names = ", ".join(cls.__qualname__ for cls in refused)
            warn(f"these classes cannot be subclassed, so their modules are not installed: {names}")

    def begin_again(self, model: nn.Module | None) -> None:
        """Put an install back, over the tree that it served, after another one failed to replace it."""
        if model is not None:
            detach(self.session, model)
            self.end()
            self._open()
            self.begin(model)

    def retune(self, budget: int | float | str | None) -> None:
        with lock:
            if not self.active:
                raise ConfigError("the model has been uninstalled, or is gone: there is nothing to plan for")
            if budget is None:
                self.tuner.measure(self.tuner.budget)
            elif config.is_automatic(budget):
                self.tuner.measure(self.tuner.budget, automatic=True)
            else:
                self.tuner.measure(config.resolve_budget(budget, self.options.device), automatic=False)

    def undo(self) -> None:
        """Give back every module that this install serves, wherever it is. No effect if there is none."""
        with lock:
            if not self.active:
                return
            for find in (self.tree, self.rest):
                if self.session.modules > 0 and (found := find()) is not None:
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
        counted = self.session.stats()
        logger.info(
            "uninstalled: %d hits (%d late), %d misses, %s moved, %.3f s stalled, at most %s on %s",
            *(counted[name] for name in ("hits", "late_hits", "misses")),
            format_bytes(counted["bytes_moved"]),
            counted["stall_ns"] / 1e9,
            format_bytes(counted["peak_bytes"]),
            self.session.device,
        )
        self.forget()

    def close_session(self) -> None:
        self.session.close()
        remove_step_listener(self.session)


def install_of(session: Session) -> Install | None:
    """Return the install that a session belongs to; None if it has ended."""
    install = served_by.get(session)
    return install if isinstance(install, Install) else None


def _computes_on(device: torch.device) -> bool:
    return any(session.device == device for session in list(served_by))


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
    install = install_of(session)
    if install is not None:
        install.tuner()


@untraced
def _call_failed(session: Session, error: BaseException) -> None:
    install = install_of(session)
    if install is not None:
        install.tuner.call_failed(error)


_HOOKS: Final = Hooks(warn=warn, replan=_replan, call_begins=_call_begins, call_failed=_call_failed)


def log_plan(what: str, session: Session, of: str) -> None:
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
