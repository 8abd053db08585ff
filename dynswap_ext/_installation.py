"""`Installation`: one install, with its options, its session and its modules, and how it begins and ends."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from dynswap_ext import _provider, config
from dynswap_ext._host_memory import HostBound, recount
from dynswap_ext._rounds import Rounds
from dynswap_ext._saved_plan import SavedPlan, made_for
from dynswap_ext._swap.choices import Choices
from dynswap_ext._swap.class_swap import ClassNaming, swap_class, take_pending
from dynswap_ext._swap.models import Models
from dynswap_ext._swap.module_registry import ServedModules, model_of, served_by, serves_any
from dynswap_ext._swap.optimizers import add_step_listener, keep_scales_on_host, remove_step_listener
from dynswap_ext._swap.parametrized import apply_to_originals, rebase_on_originals
from dynswap_ext._swap.protocol import Hooks, Session
from dynswap_ext._swap.state import is_scripted, modules_of, served_of, session_of, sessions_of
from dynswap_ext._swap.torch_modules import put_masters_back
from dynswap_ext._tuning import Tuner, smaller_budget
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import show_budget, show_seconds
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import BudgetError, ConfigError, OutOfMemoryError
from dynswap_ext.profile.first_pass import FirstPass

#: Held by each install and uninstall: they change classes, and a tree may belong to several installs.
lock: Final = threading.RLock()


class Installation(ServedModules):
    """One install. It does not keep the model alive.

    `naming` gives the subclasses that replace the modules' classes another name and more attributes.
    """

    def __init__(
        self,
        options: config.Options,
        provider: _provider.Provider,
        choices: Choices,
        hooks: Hooks,
        naming: ClassNaming | None = None,
        *,
        begun: float,
    ) -> None:
        super().__init__(choices)
        self.options = options
        #: The present budget, with which each new plan is made. A session knows only that of its own plan.
        self.budget = options.budget
        #: The saved plan that the first plan follows. None once that is made, or if it cannot be followed.
        self.saved_plan = options.plan
        self.provider = provider
        self._hooks = hooks
        self._naming = naming
        #: Finds the rounds of the install if it has several models.
        self.rounds = Rounds()
        self._first_pass: FirstPass | None = None
        self._replaced = False
        self._host_bound = HostBound(options, provider)
        #: Whether the install has served modules before. If so, it is not refused for the host's RAM again.
        self._begun = False
        #: Whether `release` has given the device memory back, and it was not taken again.
        self.released = False
        #: The latest `Handle` of this install.
        self.handle: weakref.ref[object] | None = None
        #: The time on the monotonic clock from which the counters count.
        self.counted_since = begun
        self._open()

    def _open(self) -> None:
        self.session = self.provider.session(self.options, self.budget, self._hooks)
        self.tuner = Tuner(self)
        add_step_listener(self.session)

    @property
    def active(self) -> bool:
        """Whether any module is served by this install."""
        return self.session.modules > 0 and self.serving()

    @property
    def state(self) -> str:
        """Whether the install is active, and if not, whether a later install has replaced it, in words."""
        if self.active:
            return "active"
        return "replaced by a later install" if self._replaced else "inactive"

    def __str__(self) -> str:
        dtype = self.options.dtype
        return (
            f"{self.session.provider}/{self.session.backend} on {self.session.device}, "
            f"dtype {'of the masters' if dtype is None else str(dtype).removeprefix('torch.')}, "
            f"budget {show_budget(self.budget.bytes, automatic=self.budget.automatic)}"
        )

    def draft(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Plan for the modules of a tree without changing them, even if other installs serve them now.

        An automatic budget shrinks if it has to. All errors of an install are raised here, except for a lack
        of device memory, and for warnings about the plan that the user has turned into errors.
        """
        refused: dict[type, None] = {}

        def swap(cls: type) -> type | None:
            if cls is Models:
                return None
            made = swap_class(cls, self.provider.attribute, self._naming)
            if made is None and not is_scripted(cls):
                refused[cls] = None
            return made

        earlier = sessions_of(modules)
        replaced = [install._host_bound for one in earlier if (install := installation_of(one)) is not None]
        self._host_bound.begin(model, in_place_of=replaced, refuses=not self._begun)
        take_pending()
        apply_to_originals(modules, earlier)
        for session in earlier:
            session.flush()
        try:
            self._draft_plan(model, swap)
        except (BudgetError, OutOfMemoryError) as error:
            self._shrink(error)
            return self.draft(model, modules)
        if refused:
            names = ", ".join(cls.__qualname__ for cls in refused)
            warn(f"these classes cannot be subclassed, so their modules are not installed: {names}")

    def _draft_plan(self, model: nn.Module, swap: Callable[[type], type | None]) -> None:
        """Plan for a tree, by the saved plan if there is one. Raise ConfigError if that does not apply."""
        saved = self.saved_plan
        if saved is None:
            self.session.draft(model, swap)
            return
        if self.session.provider != "native":
            raise saved.refused("pure Python makes no plans")
        saved.check(self._made_for())
        try:
            difference = self.session.draft(model, swap, saved.plan)
        except BudgetError:
            raise
        except ValueError as error:
            raise saved.refused(f"is damaged: {error}") from error
        if difference:
            raise saved.refused(f"it was made for other weights: {difference}")

    def _made_for(self) -> dict[str, str]:
        return made_for(self.options.device, self.session.backend, self.options.dtype, self.options.keep)

    def begin(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Serve the modules that `draft` has planned for, all at once, in place of other installs.

        An automatic budget shrinks until the device has memory for it.
        """
        served = served_of(modules)
        classes = apply_to_originals(modules, sessions_of(served))
        self.serve(model, modules)
        no_room: OutOfMemoryError | None = None
        try:
            self.session.begin()
        except OutOfMemoryError as error:
            # The modules are served by now, and each access copies its weight. The traceback is dropped, as
            # it refers to this frame.
            no_room = error.with_traceback(None)
        rebase_on_originals(classes)
        for module in served:
            if session_of(module) is None:
                put_masters_back(module)
        if no_room is not None:
            return self._begin_with_less(model, modules, no_room)
        self._begun = True
        if self.saved_plan is not None:
            self.session.bring_residents()  # now, and not one after the other in the first pass
            self.saved_plan = None
        if self.options.progress:
            serving = functools.partial(serves_any, self.session)
            self._first_pass = FirstPass(self.session, serving, self.options.progress)
        if self.options.device.type != "cpu":
            keep_scales_on_host(_computes_on)

    def _begin_with_less(
        self, model: nn.Module, modules: Sequence[nn.Module], no_room: OutOfMemoryError
    ) -> None:
        """Begin again with a smaller budget, after a session that serves the modules found no memory.

        If that fails, `self.session` is again that session, so that `give_up` can detach the modules.
        """
        serving = self.session
        try:
            self._shrink(no_room)
            self.draft(model, modules)
            self.begin(model, modules)
        except BaseException:
            if serving.modules > 0 and self.session is not serving:
                self.close_session()
                self.session = serving
            raise
        served_by.pop(serving, None)

    def _shrink(self, error: BudgetError | OutOfMemoryError) -> None:
        """Open a new session with a smaller budget if the budget is automatic; else raise the error."""
        self._lower_budget(error)
        self.close_session()
        self._open()

    def _lower_budget(self, error: BudgetError | OutOfMemoryError) -> None:
        """Lower an automatic budget that does not work. Raise the error if the budget cannot be lowered."""
        budget = self.budget.bytes
        if not self.budget.automatic or budget is None:
            raise error
        logger.info("a budget of %s does not work: %s", format_bytes(budget), error)
        smaller = smaller_budget(budget) if isinstance(error, OutOfMemoryError) else None
        self.budget = replace(self.budget, bytes=smaller)
        self.saved_plan = None

    def begin_again(self, model: nn.Module | None) -> None:
        """Serve the tree of this install again, after another install has failed to replace it.

        If the masters have grown since, the budget may be too small for them. Then it becomes the smallest
        that works, with a warning.
        """
        if model is None:
            return
        self.end()
        before, modules = self.tuner, modules_of(model)
        too_small = ""
        self._open()
        try:
            self.draft(model, modules)
        except BudgetError as error:
            self.close_session()
            self.budget = replace(self.budget, bytes=error.smallest_bytes)
            self._open()
            self.draft(model, modules)
            too_small = str(error)
        self.begin(model, modules)
        self.tuner.follow(before)
        if too_small:
            warn(f"the model's weights have changed since it was installed: {too_small}, and that it has now")

    def _model(self) -> nn.Module:
        """Return the model that this install serves. Raise ConfigError if it serves none any more."""
        model = model_of(self.session) if self.active else None
        if model is None:
            raise ConfigError(
                "this install was replaced by a later install, whose handle can plan"
                if self._replaced
                else "the model has been uninstalled, or is gone: there is nothing to plan for"
            )
        return model

    def release(self) -> None:
        with lock:
            self.session.release_memory(self._model())
            self.released = True
        DeviceMemory(self.options.device).empty_cache()

    def resume(self) -> None:
        with lock:
            model = self._model()
            if self.released:
                self.plan_again(model)
            self.session.bring_residents()

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        with lock:
            self._model()
            if self.session.provider != "native":
                raise ConfigError("pure Python makes no plans to save: reinstall it with its extension")
            if self.released:
                raise ConfigError(
                    "the device memory was given back, and the plan with it: call resume() first"
                )
            if self.tuner.measuring:
                raise ConfigError(
                    "passes are being measured for a new plan: call the model until that is made (four passes"
                    " after the install, or after retune), and save it then"
                )
            try:
                plan = self.session.saved_plan()
            except ValueError as error:
                raise ConfigError(f"this plan cannot be saved: {error}") from error
            SavedPlan(
                budget=self.budget.bytes,
                automatic=self.budget.automatic,
                prefetch=self.options.prefetch,
                tuning=self.tuner.latest,
                plan=plan,
                made_for=self._made_for(),
                activations=self.budget.activations if self.options.measures_activations else None,
            ).write(path)

    def plan_again(self, model: nn.Module) -> None:
        """Plan for the masters that the model has now. After `release`, take device memory again.

        Raises BudgetError or OutOfMemoryError if there is no such plan; the old plan, if any, stays. After
        `release`, an automatic budget shrinks first.
        """
        recount(model)
        try:
            self.session.replan(model, self.budget)
        except (BudgetError, OutOfMemoryError) as error:
            if not self.released:
                raise
            self._lower_budget(error)
            return self.plan_again(model)
        self.released = False

    def retune(self, budget: int | float | str | None) -> None:
        with lock:
            self._model()
            automatic = self.budget.automatic if budget is None else config.is_automatic(budget)
            if automatic:
                if self.options.mesh is not None:
                    config.refuse_automatic_of_ranks()
                config.check_measurable(self.options.device)
            if budget is None or automatic:
                self.tuner.measure(replace(self.budget, automatic=automatic))
            else:
                self.tuner.measure(config.Budget(config.resolve_budget(budget, self.options.device)))

    def undo(self) -> None:
        """Give every module that this install serves its own class back, and end the install.

        Modules that have left the model are among them.
        """
        with lock:
            if not self.active:
                return
            for find in (self.tree, self.rest):
                if self.session.modules > 0 and (found := find()) is not None:
                    detach(self.session, found)
            self.end()

    def give_up(self) -> None:
        """End an install that has failed, after the installs that it had replaced serve again."""
        self.undo()
        if self._first_pass is not None:
            self._first_pass.stop()
        self.close_session()
        self.forget()
        recount()

    def end_if_over(self, *, replaced_by: Installation | None = None) -> None:
        """End the install if it serves no module any more. `replaced_by` may have taken its modules over."""
        if replaced_by is not None:
            part = " for a part of its modules" if self.active else ""
            logger.info("an install (%s) replaces an earlier one (%s)%s", replaced_by, self, part)
        if not self.active:
            self._replaced = replaced_by is not None
            self.end()

    def end(self) -> None:
        """End the install, after its modules have their own classes back: close and forget its session."""
        if self._first_pass is not None:
            self._first_pass.stop()
            self._first_pass = None
        self.close_session()
        counted = self.session.stats()
        logger.info(
            "%s: %d hits (%d late), %d misses, %s moved, %s stalled, at most %s on %s",
            "replaced by a later install" if self._replaced else "uninstalled",
            *(counted[name] for name in ("hits", "late_hits", "misses")),
            format_bytes(counted["bytes_moved"]),
            show_seconds(counted["stall_ns"] / 1e9),
            format_bytes(counted["peak_bytes"]),
            self.session.device,
        )
        self.forget()
        recount()

    def _one_is_gone(self) -> None:
        super()._one_is_gone()
        if self.session not in served_by:
            self._host_bound.end()

    def close_session(self) -> None:
        self._host_bound.end()
        self.session.close()
        remove_step_listener(self.session)


def installation_of(session: Session) -> Installation | None:
    """Return the install of a session; None if the install has ended, or has another session by now."""
    install = served_by.get(session)
    return install if isinstance(install, Installation) and install.session is session else None


def _computes_on(device: torch.device) -> bool:
    return any(session.device == device for session in list(served_by))


def detach(session: Session, model: nn.Module) -> None:
    """Give those modules of a tree that a session serves their own classes back."""
    take_pending()
    modules = modules_of(model)
    rebase_on_originals(apply_to_originals(modules, {session}))
    for module in modules:
        if session_of(module) is session:
            put_masters_back(module)
    session.detach(model)


def log_plan(what: str, install: Installation, of: str) -> None:
    plan = install.session.stats()
    logger.info(
        "%s %s: %d modules, %s, %d groups of %s, %d of them resident (%s), arena %s, %d ahead%s",
        what,
        of,
        install.session.modules,
        install,
        plan["groups"],
        format_bytes(plan["weight_bytes"]),
        plan["resident_groups"],
        format_bytes(plan["resident_bytes"]),
        format_bytes(plan["arena_bytes"]),
        plan["depth"],
        "" if plan["resident_groups"] < plan["groups"] or not plan["groups"] else ": all weights stay there",
    )
