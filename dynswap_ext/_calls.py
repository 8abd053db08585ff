"""What the front end does when a call of an installed model begins or fails.

A pass may begin with the call, which may be measured. Masters that were added or have grown get a new plan.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from dynswap_ext import _provider
from dynswap_ext._installation import Installation, installation_of, log_plan
from dynswap_ext._swap.choices import Choices
from dynswap_ext._swap.module_registry import masters_of, model_of
from dynswap_ext._swap.plan_request import PlanRequest
from dynswap_ext._swap.protocol import Hooks, Session
from dynswap_ext._swap.state import is_scripted, modules_of, name_in
from dynswap_ext._util.listing import listed
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.untraced import untraced
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import BudgetError, ConfigError, OutOfMemoryError


def hooks(choices: Choices, dtype: torch.dtype | None) -> Hooks:
    """Return the functions that the sessions of an install call."""
    return Hooks(
        warn=warn,
        call_begins=_call_begins,
        call_failed=_call_failed,
        plan_request=functools.partial(PlanRequest, choices=choices, dtype=dtype),
        masters=masters_of,
    )


@untraced
def _call_begins(session: Session, module: nn.Module | None) -> int:
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(
            "an installed model was called by torch.jit.trace, or by an export that traces "
            "(torch.onnx.export with dynamo=False); the trace would keep every weight on the device, as a "
            "constant. Call dynswap_ext.uninstall(model) first, or use torch.compile or torch.export"
        )
    if session.outdated:
        _replan(session)
    install = installation_of(session)
    return 0 if install is None else _number_of_call(install, module)


def _number_of_call(install: Installation, module: nn.Module | None) -> int:
    """Note that a call of a model begins, and return its number for the schedule; 0 for a single model.

    A pass begins with it: always if one model is installed, and at the beginning of a round (`Rounds`) if
    several are. `module` is None if graphs of `torch.compile` are called, which do not tell the module.
    With several models, such a call begins no pass.
    """
    session, tuner = install.session, install.tuner
    if install.budget.automatic and session.provider == "native" and session.device.type == "cuda":
        _provider.update_memory_history_recorded()
    if install.several():
        if module is None:
            return 0
        name = install.model_with(module)
        call = install.rounds.call(name)
        if call.begins_round:
            session.note_pass()
        if call.is_new:
            tuner.begin_again()
        elif call.begins_round:
            tuner()
        tuner.step(name, 0 if call.begins_round else call.in_a_row)
        return call.number
    session.note_pass()
    tuner()
    return 0


def _replan(session: Session) -> None:
    """Plan again for the masters that a session's model has now.

    If there is no plan within the budget, this warns, and the old plan stays. Masters that are not in it are
    copied at each access.
    """
    model, install = model_of(session), installation_of(session)
    if model is None or install is None:
        return
    try:
        install.plan_again(model)
        log_plan("planned again", install, type(model).__name__)
    except (BudgetError, OutOfMemoryError) as error:
        if install.released:
            warn(
                f"the memory that was given back cannot be taken again: {error}; each read copies its weight"
            )
        else:
            warn(f"the model's weights have changed, and no new plan fits: {error}; the old plan stays")


@untraced
def _call_failed(session: Session, error: BaseException) -> None:
    install = installation_of(session)
    if install is not None:
        install.tuner.call_failed(error)
        _name_unloaded_weights(session, error)


def _name_unloaded_weights(session: Session, error: BaseException) -> None:
    """Add the names of weights on the meta device to an error of torch, which names only the device.

    Libraries register such weights and load them later, so they are no error until a forward reads them.
    """
    model = model_of(session)
    if model is None or not isinstance(error, RuntimeError) or "meta" not in str(error):
        return
    plain = [module for module in modules_of(model) if not is_scripted(type(module))]
    meta = [
        name_in(model, master) for module in plain for _, master, _ in own_masters(module) if master.is_meta
    ]
    if meta:
        error.args = (f"{error} These weights have not been loaded yet: {listed(meta)}",)
