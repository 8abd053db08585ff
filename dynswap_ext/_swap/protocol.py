"""What the front end and a provider's sessions know of each other: `Session` and `Hooks`."""

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

#: Kept on the device; copied when it is needed; converted by torch at each access; the master itself, because
#: it already is where it should be; the master itself, because `ignore` names it.
Service = Literal["resident", "streamed", "converted", "in place", "ignored"]


class Session(Protocol):
    """One install, of either provider. Thread-safe.

    Modules keep the session alive through their state (``module.__dict__["_dynswap"].session``); it keeps
    no module and no master alive, and lets go of device memory and threads when the last of its modules is
    given back or dies. ``stats()`` still answers then.
    """

    #: Either "native" or "python".
    provider: str
    #: "host", "cuda", "torch", or "python".
    backend: str
    #: Where the model computes.
    device: torch.device
    #: What floating weights are cast into; None if they are not.
    dtype: torch.dtype | None
    #: Whether there are masters that the plan does not know, by their identity, size or dtype.
    outdated: bool
    #: Bytes of residents whose memory went to others inside a call.
    given_way_bytes: int
    #: Whether a CUDA graph has captured weights of the plan: a new one would put them elsewhere.
    captured: bool

    @property
    def modules(self) -> int:
        """How many modules it serves."""

    def check(self, module: nn.Module) -> None:
        """Look whether masters of this module are others than planned for; then `outdated` is True."""

    def dtype_of(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype in which a module's master is handed out; the session's for what is no master."""

    def keep_dtype(self, module: nn.Module, name: str) -> None:
        """From now on hand a master out in its own dtype, which a forward has chosen for the buffer."""

    def inside_call(self) -> bool:
        """Whether the calling thread is inside the call of an installed module."""

    def replan(self, root: nn.Module, budget: Budget) -> None:
        """Plan within a budget for the masters that the modules of the tree have now.

        If that fails, the old plan stays.
        """

    def release_memory(self, root: nn.Module) -> None:
        """Free all device memory, and serve the modules of the tree without a plan until the next call."""

    def bring_residents(self) -> None:
        """Copy the residents that are not on the device, without waiting for them."""

    def draft(
        self,
        root: nn.Module,
        swap_class: Callable[[type], type | None],
        plan: Mapping[str, Any] | None = None,
    ) -> str:
        """Plan for the modules of the tree, and change none of them, whichever sessions serve them.

        `plan` is what `saved_plan` returned in another process. Returns why it does not apply to these
        modules, in words; empty if it does, or if there is none.

        `swap_class` is called once per class; None leaves its modules alone. For each name that the modules
        of a class hold, the swap class's ``_dynswap_ensure(name)`` is called once.
        """

    def begin(self) -> None:
        """Serve the modules of the draft, all of them at once; on an error, none.

        Other threads may be in a forward: a module that another session serves is that one's before, and
        this one's after, and what was handed out stays the weight's. Memory is taken last: if there is none,
        the modules are served, and each access copies.
        """

    def attach(self, root: nn.Module, swap_class: Callable[[type], type | None]) -> int:
        """Begin to serve the modules of the tree that no session serves yet, and return their number.

        They were added to the tree after `begin` (Note [What dtype= casts]). After an error none of them is
        served.
        """

    def detach(self, root: nn.Module) -> None:
        """Give the modules of the tree that this session serves their class and `__dict__` back."""

    def adopt(self, module: nn.Module, name: str) -> None:
        """Serve a parameter or buffer that was registered after the install (Note [What dtype= casts])."""

    def flush(self) -> None:
        """Take what was written on handed-out tensors to the masters."""

    def flush_module(self, module: nn.Module) -> None:
        """Flush what was written on tensors handed out from this module."""

    def release(self, module: nn.Module) -> None:
        """Flush a module, and drop the session's references to its tensors.

        With those, `torch.utils.swap_tensors` would refuse its masters.
        """

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        """An optimizer is about to write to these masters, of which some may be another session's.

        What was written on tensors handed out of them is in them when this returns.
        """

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        """An optimizer has written to these masters, or to some of them, and may have bumped no version."""

    @property
    def sampled_bytes(self) -> int:
        """Bytes of masters that are sampled: a small write to them that bumps no version may go unseen."""

    def stats(self) -> dict[str, int]:
        """Counters and plan, named as in `Stats`."""

    def reset_stats(self) -> None:
        """Set the counters to zero."""

    def groups(self) -> list[dict[str, Any]]:
        """Figures of each group in the order of use, named as in `GroupFigures`."""

    def services(self, module: nn.Module) -> dict[str, Service]:
        """How each of the module's masters is served, by its name."""

    def fetch_buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return a buffer as a forward gets it, for a graph of torch.compile, which may write it."""

    def note_pass(self) -> None:
        """For a recording: a pass ends here, and the next one begins."""

    def saved_plan(self) -> dict[str, Any]:
        """Return the plan and the order that was learned, for a file; the native provider's alone."""

    def retune(self, root: nn.Module, budget: Budget) -> dict[str, Any]:
        """Plan anew by what was recorded; returns that, as `Tuning` has it."""

    def record(self, on: bool) -> None:
        """Begin to record, dropping what was recorded, or end."""

    def timeline(self) -> dict[str, Any]:
        """What was recorded: "spans", each the fields of `Span`, "dropped", and the "clock"."""

    def close(self) -> None:
        """Let go of the device memory and the threads. Idempotent."""


@dataclass(frozen=True)
class Hooks:
    """What a session calls of the front end. It imports nothing of it."""

    #: Warns the user.
    warn: Callable[[str], None]
    #: Called at the beginning of each of the model's calls, with the module that is called (None: a graph of
    #: torch.compile is run). Plans again if the session is outdated, and notes the pass if one begins.
    #: Returns the call's number for the schedule; 0: it has none.
    call_begins: Callable[[Session, nn.Module | None], int]
    #: Called if one of them ends with an error.
    call_failed: Callable[[Session, BaseException], None]
    #: Returns how the weights of a tree's modules are to be planned.
    plan_request: Callable[[Sequence[nn.Module]], PlanRequest]
    #: Returns what the modules that a session serves have as masters now.
    masters: Callable[[Session], Iterable[torch.Tensor]]
    #: Says of the weight of a name that what was written on a tensor handed out of it is dropped.
    warn_lost: Callable[[str], None] = warn_lost
    #: Returns what a forward gets for a parameter that is served by its slices.
    slices_of: Callable[..., torch.Tensor] = slices_of
    #: Returns what a forward gets for a master that torch converts, on a device and in a dtype.
    convert: Callable[[torch.Tensor, torch.device, torch.dtype], torch.Tensor] = lifted_masters.convert
    #: Gives other data to a tensor that a forward was handed out, and to its master.
    give_data: Callable[..., torch.Tensor | None] = give_data
    #: The class of what an access from outside a forward gets, if a forward would get a plain tensor.
    proxy_class: type[torch.Tensor] = ParameterProxy
    # See Note [Subclasses are taken apart].
    inner_names_or_streams: Callable[[torch.Tensor, bool], list[str] | bool] = (
        subclasses.inner_names_or_streams
    )
    rebuild_subclass: Callable[..., tuple[torch.Tensor, bool]] = subclasses.rebuild_subclass
