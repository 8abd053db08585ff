"""Measures the memory that each call of a module takes and leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dynswap_ext._swap.state import modules_of, session_of
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.modes import SeesInstalls
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.places import storages_of
from dynswap_ext._util.tables import Printable, facts_grid, plain_table
from dynswap_ext.inspect._forward import Call, isolated_forward, tensors_in, watched
from dynswap_ext.inspect._inputs import Inputs, Sizes
from dynswap_ext.inspect._model import Node, computes_on, root_of, walk, weights_of


@dataclass(frozen=True, repr=False)
class MemoryProfile(Printable):
    """The result of `memory_profile`. ``print`` shows a table, rich a coloured one."""

    #: The calls of modules, in the order in which they began.
    calls: tuple[Call, ...]
    #: The device whose memory was measured.
    device: torch.device
    #: How it was measured: "torch.cuda", "torch.xpu" and so on stand for the statistics of torch's allocator
    #: there, "storages" for the sizes of the tensors that operations made.
    measured: str
    #: Bytes on the device before the forward: all that torch's allocator had given out or, for "storages",
    #: the inputs and the weights (of an install: the device memory of its plan, and weights that are used
    #: where they are).
    base_bytes: int
    #: Paths of the modules that were not called, and in which no module was called.
    not_called: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device during the forward, over `base_bytes`."""
        return max((call.peak for call in self.calls), default=0)

    def largest(self, count: int = 10) -> tuple[Call, ...]:
        """Return the calls that needed most memory for themselves, largest first.

        Calls inside which other modules were called are left out.
        """
        next_depths = [*(call.depth for call in self.calls[1:]), 0]
        pairs = zip(self.calls, next_depths, strict=True)
        leaves = [call for call, next_depth in pairs if next_depth <= call.depth]
        return tuple(sorted(leaves, key=lambda call: -call.extra)[:count])

    def __repr__(self) -> str:
        return f"<MemoryProfile on {self.device}: {len(self.calls)} calls, peak {self._peak()}>"

    def _peak(self) -> str:
        return f"{format_bytes(self.peak_bytes)} over {format_bytes(self.base_bytes)}"

    def _parts(self) -> tuple[Any, ...]:
        numbers = ("before", "after", "kept", "peak")
        rows = []
        for call in self.calls:
            name = f"{call.path}: {call.class_name}" if call.path else call.class_name
            rows.append(
                ["  " * call.depth + name, *(format_bytes(getattr(call, number)) for number in numbers)]
            )
        facts = [("peak", f"{self._peak()} on {self.device}"), ("measured by", self.measured)]
        if self.not_called:
            facts.append(("not called", listed(self.not_called, 10)))
        return plain_table(["call", *numbers], rows, right=numbers), facts_grid(facts)


@check_option_names
def memory_profile(
    model: nn.Module,
    input_size: Sizes | None = None,
    *,
    input_data: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | Mapping[str, torch.dtype] | None = None,
    device: torch.device | str | None = None,
) -> MemoryProfile:
    """Run one forward, and measure the live memory before, in and after each call of a module.

    The forward runs in the modes that the model and the caller are in: train or eval, with gradients or
    without (then nothing is saved for backward). Random numbers and hooks are as before when this returns or
    raises. The statistics of an installed model count the forward.

    Parameters
    ----------
    model : torch.nn.Module
        The model, plain or installed. For a result of `torch.compile`, the model that was compiled is run.
    input_size, input_data, kwargs, dtypes : optional
        The inputs of the forward, as for `summary`. A batch of keyword arguments is ``input_data=batch``.
    device : torch.device or str, optional
        The device whose memory is measured. Default: the device on which the model computes. With a model and
        inputs on the meta device, this tells the memory that the forward would take, and takes none.

    Returns
    -------
    MemoryProfile
        It has one row for each call, so several for a module that is called several times.

    Raises
    ------
    ConfigError
        `model` is no module, or another argument has a value that cannot be used.

    Notes
    -----
    Errors of the forward are passed on.

    On an accelerator the figures are those of torch's allocator. Temporary memory inside operations and
    allocations of other threads are in them, and sizes are rounded up to 512 bytes. The allocator's peak
    statistics are reset. Elsewhere the figures are the exact bytes of the storages that operations make,
    without temporary memory inside an operation. Note [What is measured on a CPU] says why.

    Weights that are streamed to an installed model pass through memory that is in `base_bytes`. The
    pure-Python provider makes a tensor for each of them, and on the CPU it counts in the call that uses it.
    """
    root = root_of(model)
    inputs = Inputs.of(root, input_size=input_size, input_data=input_data, kwargs=kwargs, dtypes=dtypes)
    where = computes_on(root) if device is None else _device(device)
    nodes = walk(root)
    on_accelerator = where.type not in ("cpu", "meta")
    with isolated_forward(root), ExitStack() as stack:
        if on_accelerator:
            base = DeviceMemory(where).allocated()
            live = _allocated_over(base, where)
        else:
            base = _bytes_before(nodes, (inputs.args, inputs.kwargs), where)
            live = stack.enter_context(_LiveBytes(where)).read
        calls = stack.enter_context(watched(nodes, live))
        inputs.run(root)
    called = {call.path for call in calls}
    paths = {id(node.module): node.path for node in nodes if node.same_as is None}
    return MemoryProfile(
        calls=tuple(calls),
        device=where,
        measured=f"torch.{where.type}" if on_accelerator else "storages",
        base_bytes=base,
        not_called=tuple(
            path
            for path, _, module, same_as in nodes
            if same_as is None and not any(paths[id(part)] in called for part in modules_of(module))
        ),
    )


def _device(given: torch.device | str) -> torch.device:
    return torch.device("meta") if str(given) == "meta" else resolve_device(given)


def _bytes_before(nodes: Sequence[Node], given: Any, device: torch.device) -> int:
    """Return the bytes of the weights, the inputs and the plans of installs that are on the device."""
    sessions = {session for node in nodes if (session := session_of(node.module))}
    plans = [session.stats() for session in sessions if session.device == device]
    masters = [
        weight.nbytes
        for weights in weights_of(nodes).values()
        for weight in weights
        if weight.device == device
        and weight.tied_to is None
        and weight.served in (None, "in place", "ignored")
    ]
    inputs = [storage.nbytes() for storage in _storages_in(given, device).values()]
    arenas: int = sum(plan["resident_bytes"] + plan["arena_bytes"] for plan in plans)
    return sum(masters) + sum(inputs) + arenas


def _storages_in(value: Any, device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Return the storages of those tensors in a value that are on the device, by the storage's identity."""
    tensors = [tensor for tensor in tensors_in(value) if tensor.device == device]
    return {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}


def _allocated_over(base: int, device: torch.device) -> Callable[[], tuple[int, int]]:
    """Return a function that reads the bytes that torch's allocator has given out, and their peak.

    Both are counted over `base`. The peak is that since the last reading. Memory of all threads counts.
    """
    memory = DeviceMemory(device)

    def read() -> tuple[int, int]:
        peak = memory.peak()
        memory.reset_peak()
        return memory.allocated() - base, peak - base

    memory.reset_peak()
    return read


# Note [What is measured on a CPU]: the resident size of the process says little about a layer. The heap keeps
# freed pages and hands them out again, and other threads, mapped checkpoints and the pools of libraries are
# in it. So the storages of tensors are counted. Every operation passes torch's dispatcher, where a mode sees
# each storage that an operation makes. A weak reference to the storage tells when its last user, be it
# Python, a view or an autograd graph, has released it. This is exact to the byte, the same on every run, and
# works on any device, the meta device too. It does not see memory that an operation takes and gives back
# itself, such as temporary memory of a convolution, nor memory that is not allocated through torch.


class _LiveBytes(SeesInstalls):
    """Counts bytes of the live storages on a device that operations of this thread have made."""

    # Flex attention and other higher-order operators are single operations for this mode.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes: dict[int, int] = {}
        # Weak references, so that storages end as without the mode: a handed-out tensor's storage keeps its
        # place on the device.
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current = 0
        self._peak = 0

    def read(self) -> tuple[int, int]:
        """Return the live bytes now, and the most since this was called last."""
        peak, self._peak = self._peak, self._current
        return self._current, peak

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count the storages that are new in its result."""
        keywords = kwargs or {}
        output = func(*args, **keywords)
        # Storages of arguments were there before. Among them are those of weights of an install.
        given = _storages_in((args, keywords), self._device)
        for key, storage in _storages_in(output, self._device).items():
            if key not in self._sizes:
                if key in given:
                    continue
                self._watched[key] = weakref.ref(storage, partial(self._forget, key))
            size = storage.nbytes()  # which `resize_` and `out=` may change
            self._current += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._peak = max(self._peak, self._current)
        return output

    def _forget(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._watched.pop(key, None)
        self._current -= self._sizes.pop(key, 0)
