"""Install and uninstall: the front door."""

from __future__ import annotations

import functools
import logging
import threading
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from . import _provider, config
from ._class_swap import Dress, swap_class
from ._distributed import refuse_to_install
from ._first_pass import FirstPass
from ._grad_scaler import keep_scales_on_host
from ._logging import follow_environment, logger
from ._memory import format_bytes
from ._optimizers import add_step_listener, remove_step_listener
from ._parametrized import give_back
from ._progress import ProgressOption
from ._served import Served
from ._special import put_masters_back
from ._state import STATE_KEY, is_scripted, modules_of, name_in, session_of
from ._traced import let_go
from ._tuning import Tuner, smaller_budget
from ._untraced import untraced
from ._warn import warn
from .errors import BudgetError, ConfigError, OutOfMemoryError
from .handle import Handle

__all__ = ["Handle", "install", "is_installed", "uninstall"]

# One install or uninstall at a time: they change classes, and a tree may belong to several installs.
_lock = threading.RLock()


def install(
    model: nn.Module,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    prefetch: int = 2,
    budget: int | float | str | None = None,
    pin: bool | str = "auto",
    page_cache: bool | int | float | str = "auto",
    backend: str = "auto",
    strict_budget: bool = False,
    progress: ProgressOption = False,
) -> Handle:
    """Make attribute access of every parameter and buffer hand out a tensor on the compute device.

    The model keeps owning its masters: `parameters()`, `state_dict()` and optimizers see them as before.
    A second install of the model, of a part of it or of a larger tree replaces the settings of the first
    for the modules that both cover; installs never nest.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters and buffers, wherever they are (RAM, a file mapping, the device itself).
    device : torch.device, str or int, optional
        Where the model computes. Default: the accelerator if there is one, else the CPU.
    dtype : torch.dtype, optional
        A floating dtype into which floating weights are cast on the way. Default: each master's own.
        Integer, boolean and complex weights are never cast.
    prefetch : int
        Groups of weights to have on the device, or on their way there, ahead of the one in use.
    budget : int, float or str, optional
        Device memory for streamed and resident weights together: bytes (``6_000_000_000``), a string
        (``"6GiB"``, ``"512 MB"``), or a fraction of what the device has free (a float in (0, 1]).
        ``"auto"``: half of what is free at first; the second and third call of the model are measured, and
        from the fourth on it is what they leave, with those weights resident that save the most time. If
        memory runs out in a call, it shrinks (the error is raised all the same). See `Handle.retune`.
        Default: just what `prefetch` needs, no residents.
    pin : bool or "auto"
        Whether to page-lock masters in RAM, so that an accelerator can read them by itself.
    page_cache : bool, int, float, str or "auto"
        How much of checkpoint files may enter the page cache of the system, from which they come at the
        speed of memory: all (True), nothing (False: the cache does not grow by what the engine reads), or
        an amount as for `budget`. It is memory that the system takes back as it needs it. What is read once
        never enters; what is read a second time does. Default: up to four fifths of the RAM that is free,
        and where it pays: on the CPU, copying from there takes time from the compute, so while no weight is
        waited for, the disk brings them. The pure-Python provider reads through mappings, and leaves all
        this to the system.
    backend : {"auto", "native", "python"}
        Which provider answers; "auto" follows ``DYNSWAP_BACKEND``, else prefers the native extension.
    strict_budget : bool
        Raise :class:`BudgetError` where handed-out tensors that somebody keeps leave no room within the
        budget. Default: allocate outside it, count it (``overflow_bytes``, the most at one time) and warn
        once.
    progress : bool or callable
        True shows how far the first pass is, in bytes of weights that have come, where stderr is a terminal
        or a notebook. A function is called with the bytes so far and the whole, by another thread. Ends with
        the pass.

    Returns
    -------
    Handle
        Figures and the way back. Usable as a context manager. It does not keep the model alive.

    Raises
    ------
    ConfigError
        An option has a value that cannot be used, a master is on the meta device, or the model is sharded
        with `fully_shard`.
    BudgetError
        The budget cannot hold the largest group; ``smallest_bytes`` would do.

    After any error the model is as it was.
    """
    options = config.resolve(
        device=device,
        dtype=dtype,
        prefetch=prefetch,
        budget=budget,
        pin=pin,
        page_cache=page_cache,
        backend=backend,
        strict_budget=strict_budget,
        progress=progress,
    )
    return install_with(model, options)


def install_with(model: nn.Module, options: config.Options, dress: Dress | None = None) -> Handle:
    """`install`, with options that are resolved, and with what the swap classes show (`compat`)."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    follow_environment()
    begun = time.monotonic()
    with _lock:
        provider = _provider.select(options.backend, options.device)
        scripted, serving = _survey(model)
        record = _Record(options, _new_session(provider, options), dress, provider.reason)
        before = [(other, other.everything()) for other in map(_record_of, serving) if other is not None]
        replaced = _take_out(model, serving)
        try:
            record.begin_fitting(model, provider)
        except BaseException:
            record.session.close()
            remove_step_listener(record.session)
            for other, what in before:
                other.begin_again(what)
            raise
        for other in replaced:
            other.end_if_over()
    _log_plan("installed", record.session, f"{type(model).__name__} in {time.monotonic() - begun:.3f} s")
    logger.debug("the install's options: %s", options)
    if record.session.sampled_bytes:
        _warn_of_sampling()
    if scripted:
        warn(
            f"{scripted} TorchScript module(s) are left as they are: their weights are not streamed, "
            "and have to be on the compute device"
        )
    return Handle(record)


@functools.cache
def _warn_of_sampling() -> None:
    warn(
        "the kernel does not track writes to some masters, so writes that bump no version (`p.data[i] = x`, "
        "NumPy) are looked for in a sample of their bytes: optimizers' steps are seen, but a write to a few "
        "elements can be missed. Write in a way that bumps it (`with torch.no_grad(): p[i] = x`), or use "
        "Linux 6.7 or later with userfaultfd allowed, and masters that are not in shared memory"
    )


def uninstall(model: nn.Module) -> nn.Module:
    """Give every module of the tree its own class back, and let go of the device memory.

    Writes on handed-out tensors reach the masters first. Works on a part of an installed tree; the rest
    stays installed. A model that is not installed is left as it is.

    Returns
    -------
    torch.nn.Module
        The model itself.
    """
    with _lock:
        serving = {session for module in modules_of(model) if (session := session_of(module)) is not None}
        for record in _take_out(model, serving):
            record.end_if_over()
    return model


def is_installed(module: nn.Module) -> bool:
    """Whether this very module is installed (a tree may be so in part)."""
    return session_of(module) is not None


@dataclass
class _Record:
    """What the front end knows of one install. Does not keep the model alive."""

    options: config.Options
    session: _provider.Session
    #: What its swap classes show.
    dress: Dress | None
    #: Why its provider is not the native one; empty if it is, or if pure Python was asked for.
    reason: str
    _served: Served | None = None
    tuner: Tuner | None = None
    _first_pass: FirstPass | None = None

    @property
    def installed(self) -> int:
        """How many modules were swapped, or have joined since, and have not been given back."""
        return self.session.modules

    @property
    def active(self) -> bool:
        """Whether any module is served by this install."""
        return self.installed > 0 and self._served is not None and self._served.serving()

    def root(self) -> nn.Module | None:
        """Return the model, or what is left of it (Note [Modules outlive their container])."""
        return None if self._served is None else self._served.tree()

    def begin_fitting(self, model: nn.Module, provider: _provider.Provider) -> None:
        """`begin`; an automatic budget shrinks until there is memory for it."""
        try:
            self.begin(model, provider.attribute)
        except (BudgetError, OutOfMemoryError) as error:
            budget = self.options.budget
            if not self.options.automatic or budget is None:
                raise
            logger.info("a budget of %s does not work: %s", format_bytes(budget), error)
            self.session.close()
            smaller = smaller_budget(budget) if isinstance(error, OutOfMemoryError) else None
            self.options = replace(self.options, budget=smaller)
            self.session = _new_session(provider, self.options)
            self.begin_fitting(model, provider)

    def begin(self, model: nn.Module, attribute: type) -> None:
        """Swap the tree. On an error the tree is as it was."""
        refused: list[type] = []

        def swap(cls: type) -> type | None:
            made = swap_class(cls, attribute, self.dress)
            if made is None and not is_scripted(cls):
                refused.append(cls)
            return made

        self.session.attach(model, swap)
        _records[id(self.session)] = self
        self._served = Served(model, self.session, partial(_records.pop, id(self.session), None))
        if self.options.automatic:
            self._tuner()
        if self.options.progress:
            self._first_pass = FirstPass(self.session, self._served.serving, self.options.progress)
        if self.options.device.type != "cpu":
            keep_scales_on_host(_computes_on)
        if refused:
            names = ", ".join(cls.__qualname__ for cls in refused)
            warn(f"modules of classes that refuse to be swapped are left as they are: {names}")

    def everything(self) -> nn.Module | None:
        """Return all that this install serves, as one tree; None if it serves nothing."""
        return None if self._served is None else self._served.everything()

    def begin_again(self, model: nn.Module | None) -> None:
        """Put an install back, over the tree that it served, after another one failed to replace it."""
        if model is None:
            return
        _detach(self.session, model)
        self.end()
        provider = _provider.select(self.options.backend, self.options.device)
        self.session = _new_session(provider, self.options)
        self.begin(model, provider.attribute)

    def _tuner(self) -> Tuner:
        assert self._served is not None
        options = self.options
        self.tuner = Tuner(self.session, self._served.tree, options.budget, automatic=options.automatic)
        return self.tuner

    def retune(self, budget: int | float | str | None) -> None:
        """See `Handle.retune`."""
        with _lock:
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
        with _lock:
            served = self._served
            if served is None or not self.active:
                return
            for find in (served.tree, served.rest):
                if self.installed > 0 and (found := find()) is not None:
                    _detach(self.session, found)
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
        self.session.on_pass = None
        self.session.close()
        remove_step_listener(self.session)
        _log_end(self.session)
        if self._served is not None:
            self._served.forget()
            _records.pop(id(self.session), None)


# By the id of the session, which the record keeps. An entry goes with its install, or with its last module.
_records: dict[int, _Record] = {}


def _computes_on(device: torch.device) -> bool:
    return any(record.options.device == device for record in list(_records.values()))


def _survey(model: nn.Module) -> tuple[int, set[_provider.Session]]:
    """Look at a tree before an install.

    Returns how many TorchScript modules it has, and which sessions serve its modules. Raises
    ConfigError if a master holds no data, or if the tree is sharded.
    """
    scripted = 0
    serving: set[_provider.Session] = set()
    meta: list[torch.Tensor] = []
    classes: dict[type, bool] = {}
    for module in modules_of(model):
        cls, held = type(module), module.__dict__
        if cls not in classes:
            classes[cls] = is_scripted(cls)
        if classes[cls]:
            scripted += 1
            continue
        refuse_to_install(module)
        if STATE_KEY in held:
            serving.add(session_of(module))
        for members in (held["_parameters"], held["_buffers"]):
            if members:
                meta += [master for master in members.values() if master is not None and master.is_meta]
    if meta:
        names = ", ".join(name_in(model, master) for master in meta[:5])
        more = f" and {len(meta) - 5} more" if len(meta) > 5 else ""
        raise ConfigError(
            f"{len(meta)} master(s) are on the meta device and hold no data: {names}{more}. Load them before "
            "the install, for instance with dynswap_ext.checkpoint.load(model, path)"
        )
    return scripted, serving


def _detach(session: _provider.Session, model: nn.Module) -> None:
    let_go()
    give_back(model, session)
    for module in modules_of(model):
        if session_of(module) is session:
            put_masters_back(module)
    session.detach(model)


def _take_out(model: nn.Module, serving: set[_provider.Session]) -> list[_Record]:
    """Give the modules of a tree back, whichever installs serve them, and return those installs' records."""
    taken = []
    for session in serving:
        _detach(session, model)
        record = _record_of(session)
        if record is not None:  # else the install has ended
            taken.append(record)
    return taken


@untraced
def plan_again(session: _provider.Session) -> None:
    """Plan an install again for the masters that its model has by now.

    The native provider asks for it at the beginning of a model's call. If the new masters do not fit the
    budget, the old plan stays, and what it does not know is moved at each access.
    """
    model = root_of(session)
    if model is None:
        return
    try:
        session.plan_again(model)
        _log_plan("planned again", session, type(model).__name__)
    except (BudgetError, OutOfMemoryError) as error:
        warn(f"the model's masters have changed and cannot be planned for again: {error}")


def root_of(session: _provider.Session) -> nn.Module | None:
    """Return the model that a session was made for, or what is left of it; None if the install has ended."""
    record = _record_of(session)
    return None if record is None else record.root()


def _record_of(session: _provider.Session) -> _Record | None:
    return _records.get(id(session))


def _new_session(provider: _provider.Provider, options: config.Options) -> _provider.Session:
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
        warn=warn,
    )
    add_step_listener(session)
    return session


def _log_plan(what: str, session: _provider.Session, of: str) -> None:
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


def _log_end(session: _provider.Session) -> None:
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
