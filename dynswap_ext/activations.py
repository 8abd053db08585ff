"""`offload_activations`: what any code saves for backward leaves the device, without an install."""

from __future__ import annotations

import os
import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dynswap_ext._swap.state import session_of
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.memory import AUTO, is_named, parse_bytes
from dynswap_ext.errors import ConfigError
from dynswap_ext.install import install

if TYPE_CHECKING:
    from dynswap_ext._C import OffloadingScope
    from dynswap_ext._swap.protocol import Session
    from dynswap_ext.profile.report import Report
    from dynswap_ext.profile.stats import Stats


class ActivationOffloading(ContextDecorator):
    """A context manager and decorator; `offload_activations` makes it. It may be entered again and again.

    Several threads may be in it at the same time. It ends when this object and the graphs are gone.
    """

    def __init__(self, device: torch.device, options: dict[str, Any]) -> None:
        self._install = nn.Module()  # of no weights, which offloads what is saved in its calls
        self._handle = install(self._install, device=device, **options)
        self._entered = threading.local()

    def __enter__(self) -> ActivationOffloading:
        stack: list[OffloadingScope] = self._entered.__dict__.setdefault("stack", [])
        session: Any = session_of(self._install)
        stack.append(session.enclose())
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.stack.pop().end()

    def stats(self) -> Stats:
        """Return the counters: `Stats.offloaded_bytes`, `restored_bytes`, `saved_bytes` and the others."""
        return self._handle.stats()

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._handle.reset_stats()

    def report(self) -> Report:
        """Return what has left, where it is, and how long backward waited for it."""
        return self._handle.report()

    def __repr__(self) -> str:
        stats = self.stats()
        moved = f"{stats.offloaded_bytes:,} bytes copied to the host, {stats.restored_bytes:,} back"
        return f"<ActivationOffloading on {self._handle.device}: {moved}>"


def offload_activations(
    model: nn.Module | torch.device | str,
    activations: int | float | str,
    *,
    activations_folder: str | os.PathLike[str] | None = None,
    host_budget: int | float | str = "auto",
) -> ActivationOffloading:
    """Bound the device memory of tensors that are saved for backward, in any code.

    It is ``install(model, activations=...)`` without streamed weights, for models that no install serves
    (FSDP, DDP, plain ones) and for code outside a model, such as a loss. Parameters stay where they are.
    Backward may run outside the block.

    Parameters
    ----------
    model : torch.nn.Module, torch.device or str
        Where the code computes: a model stands for the device of its install, or else of its parameters.
        If these lie elsewhere than it computes, pass the device.
    activations, activations_folder, host_budget
        As for `dynswap_ext.install`; ``"auto"`` is not possible, as no weights are planned for. Around a
        model that is installed with `activations=`, both bounds hold, each for what it offloads.

    Returns
    -------
    ActivationOffloading
        A context manager and decorator. Make one and use it in each step: it learns the order in which
        backward needs what was saved.

    Raises
    ------
    ConfigError
        An option has a value that cannot be used, the native provider does not serve the device, or the
        device's memory is the host's.
    SourceError
        In a step: `activations_folder` has no room, or an earlier write there has failed.

    Examples
    --------
    >>> offloading = dynswap_ext.offload_activations(model, "4GiB")  # doctest: +SKIP
    >>> for batch in batches:                                        # doctest: +SKIP
    ...     with offloading:
    ...         loss = criterion(model(batch), batch.labels)
    ...     loss.backward()
    """
    if activations is None or is_named(activations, AUTO):
        raise ConfigError(
            f"activations is {activations!r}; expected bytes ('4GiB'), or a fraction of the free memory "
            "(0.5): offload_activations measures nothing"
        )
    parse_bytes(activations, "activations")  # its error offers no "auto"
    if not isinstance(model, (nn.Module, torch.device, str)):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, a torch.device or a device's "
            "name"
        )
    options = {
        "activations": activations,
        "activations_folder": activations_folder,
        "host_budget": host_budget,
    }
    return ActivationOffloading(_device_of(model), options)


def _device_of(model: nn.Module | torch.device | str) -> torch.device:
    if not isinstance(model, nn.Module):
        return resolve_device(model)
    for module in model.modules():
        session: Session | None = session_of(module)
        if session is not None:
            return session.device
    masters = (tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    found = next((master.device for master in masters), None)
    return resolve_device(None) if found is None else found
