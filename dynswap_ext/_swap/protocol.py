"""The interface between the front end and a provider's sessions: `Session`, and the `Hooks` that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from dynswap_ext._swap import lifted_masters, subclasses
from dynswap_ext._swap.expert_slices import slices_of
from dynswap_ext._swap.lost_writes import warn_lost
from dynswap_ext._swap.parameter_proxy import ParameterProxy, give_data
from dynswap_ext._swap.plan_request import PlanRequest
from dynswap_ext.config import Budget

#: How a master is served. Resident: a copy stays on the device. Streamed: it is copied when it is needed.
#: Converted: torch converts it at each access. In place: the master itself is handed out, because its device
#: and dtype are right already. Ignored: the master itself is handed out, because `ignore` names it.
Service = Literal["resident", "streamed", "converted", "in place", "ignored"]


class Session(Protocol):
    """One install, of either provider. Thread-safe.

    Modules keep the session alive through their state (``module.__dict__["_dynswap"].session``). The session
    keeps no module and no master alive. It frees device memory and ends its threads when the last of its
    modules is uninstalled or dies. ``stats()`` still works then.
    """

    #: Either "native" or "python".
    provider: str
    #: "host", "cuda", "torch", or "python".
    backend: str
    #: Where the model computes.
    device: torch.device
    #: What floating weights are cast into; None if they are not.
    dtype: torch.dtype | None
    #: Whether a new plan is due, for instance because of masters that are new or have another size or dtype.
    outdated: bool
    #: Bytes of residents that have given their memory to other allocations inside a call.
    given_way_bytes: int
    #: Whether a CUDA graph has captured weights of the plan, which a new plan would put elsewhere.
    captured: bool

    @property
    def modules(self) -> int:
        """The number of modules that the session serves."""

    def check(self, module: nn.Module) -> None:
        """Set `outdated` if the module now has other masters than the plan was made for."""

    def dtype_of(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype in which a module's master is handed out; `dtype` if there is no such master."""

    def keep_dtype(self, module: nn.Module, name: str) -> None:
        """Hand a buffer out in its master's dtype from now on, because a forward has chosen that dtype."""

    def inside_call(self) -> bool:
        """Return whether the calling thread is inside the call of an installed module."""

    def replan(self, root: nn.Module, budget: Budget) -> None:
        """Make a new plan within a budget, for the masters that the modules of the tree have now.

        If that fails, the old plan stays.
        """

    def release_memory(self, root: nn.Module) -> None:
        """Free all device memory, and serve the modules of the tree without a plan until the next call."""

    def bring_residents(self) -> None:
        """Copy the residents that are not on the device. The native provider does not wait for the copies."""

    def draft(
        self,
        root: nn.Module,
        swap_class: Callable[[type], type | None],
        plan: Mapping[str, Any] | None = None,
    ) -> str:
        """Plan for the modules of the tree, and leave them as they are, whichever sessions serve them now.

        `plan` is what `saved_plan` has returned, perhaps in another process. Returns in words why it does not
        apply to these modules; empty if it applies, or if there is none.

        `swap_class` is called once for each class; if it returns None, modules of the class are left alone.
        ``_dynswap_ensure(name)`` of a swap class is called for each name of its modules' masters.
        """

    def begin(self) -> None:
        """Serve the modules of the draft, all of them at once.

        Other threads may be in a forward. A module that another session serves goes to this one in one step,
        and tensors that were handed out still belong to their weights.

        Device memory is taken last. After an OutOfMemoryError the modules are served, and each access copies.
        After any other error, none is served.
        """

    def attach(self, root: nn.Module, swap_class: Callable[[type], type | None]) -> int:
        """Begin to serve the modules of the tree that no session serves yet, and return their number.

        They were added to the tree after `begin` (Note [What dtype= casts]). After an error none of them is
        served.
        """

    def detach(self, root: nn.Module) -> None:
        """Give the modules of the tree that this session serves their own class and `__dict__` back."""

    def adopt(self, module: nn.Module, name: str) -> None:
        """Serve a parameter or buffer that was registered after the install (Note [What dtype= casts])."""

    def flush(self) -> None:
        """Take what was written on handed-out tensors to the masters."""

    def flush_module(self, module: nn.Module) -> None:
        """Take what was written on tensors handed out from this module to its masters."""

    def release(self, module: nn.Module) -> None:
        """Flush a module, and drop the session's references to its tensors.

        Because of such references, `torch.utils.swap_tensors` would refuse the module's masters.
        """

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        """Note that an optimizer is about to write to these masters; those of other sessions are ignored.

        When this returns, what was written on tensors handed out from them is in the masters.
        """

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        """Note that an optimizer has written to some of these masters, and may have bumped no version."""

    @property
    def sampled_bytes(self) -> int:
        """Bytes of masters compared by samples alone: a small write that bumps no version may be missed."""

    def stats(self) -> dict[str, int]:
        """Return the counters and the figures of the plan, named as in `Stats`."""

    def shared_out(self) -> dict[str, Any] | None:
        """Return what ranks have shared out, named as in `SharedOut`; None if nobody asked for it."""

    def reset_stats(self) -> None:
        """Set the counters to zero."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the figures of each group, in the order of use, named as in `GroupFigures`."""

    def services(self, module: nn.Module) -> dict[str, Service]:
        """Return how each of the module's masters is served, by its name."""

    def fetch_buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return a buffer as a forward gets it, for a graph of torch.compile, which may write it."""

    def note_pass(self) -> None:
        """Note for a recording that a pass ends here, and the next one begins."""

    def saved_plan(self) -> dict[str, Any]:
        """Return the plan and the learned order of use, for a file; empty for the pure-Python provider."""

    def retune(self, root: nn.Module, budget: Budget) -> dict[str, Any]:
        """Make a new plan from what was recorded, and return the measurements, named as in `Tuning`."""

    def record(self, on: bool) -> None:
        """Begin a recording, which drops the one before, or end it."""

    def timeline(self) -> dict[str, Any]:
        """Return the recording: "spans" (the fields of `Span`), how many were "dropped", and the "clock"."""

    def close(self) -> None:
        """Free the device memory and end the threads. A second call has no effect."""


@dataclass(frozen=True)
class Hooks:
    """What a session uses of the front end, passed to it so that it need not import the front end."""

    #: Warns the user.
    warn: Callable[[str], None]
    #: Called at the beginning of each call of the model, with the module that is called (None: a graph of
    #: torch.compile runs). Makes a new plan if the session is outdated, and notes the pass if one begins.
    #: Returns the call's number for the schedule; 0: it has none.
    call_begins: Callable[[Session, nn.Module | None], int]
    #: Called if a call of the model ends with an error.
    call_failed: Callable[[Session, BaseException], None]
    #: Returns how the weights of a tree's modules are to be planned.
    plan_request: Callable[[Sequence[nn.Module]], PlanRequest]
    #: Returns the masters that the modules of a session have now.
    masters: Callable[[Session], Iterable[torch.Tensor]]
    #: Warns that what was written on a tensor handed out from the weight of this name is dropped.
    warn_lost: Callable[[str], None] = warn_lost
    #: Returns what a forward gets for a parameter that is served by its slices.
    slices_of: Callable[..., torch.Tensor] = slices_of
    #: Returns what a forward gets for a master that torch converts to a device and a dtype.
    convert: Callable[[torch.Tensor, torch.device, torch.dtype], torch.Tensor] = lifted_masters.convert
    #: Assigns to the `.data` of a tensor that a forward was handed out, and of its master.
    give_data: Callable[..., torch.Tensor | None] = give_data
    #: The class of what code outside a forward gets for a weight, if a forward gets a plain tensor.
    proxy_class: type[torch.Tensor] = ParameterProxy
    # See Note [Subclasses are taken apart].
    inner_names_or_streams: Callable[[torch.Tensor, bool], list[str] | subclasses.HeldContent | bool] = (
        subclasses.inner_names_or_streams
    )
    rebuild_subclass: Callable[..., tuple[torch.Tensor, bool]] = subclasses.rebuild_subclass
