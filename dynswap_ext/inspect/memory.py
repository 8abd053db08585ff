"""What each layer's call takes and leaves in memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynswap_ext._swap.state import modules_of, session_of
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.tables import Printable, facts_grid, first_names, plain_table
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._hooks import arguments, computes_on, isolated_forward, watching
from dynswap_ext.inspect._tensors import shapes_in, storages_of, tensors_in
from dynswap_ext.inspect._tree import Node, class_name, root_of, walk
from dynswap_ext.inspect._where import weights_of

__all__ = ["Call", "MemoryProfile", "memory_profile"]


@dataclass(frozen=True)
class Call:
    """One call of one module. Bytes are live bytes over those at the start of the profile."""

    #: Dotted, "" for the model itself.
    path: str
    class_name: str
    #: How many calls of other modules it was made in.
    depth: int
    #: Counted from 0 for each module.
    index: int
    before: int
    after: int
    #: The most while it ran, calls inside it included.
    peak: int
    output_shapes: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> int:
        """What it has left: outputs, and what autograd saves. Less than zero if it let more go."""
        return self.after - self.before

    @property
    def extra(self) -> int:
        """What it needed for itself at its peak, over what was there before it."""
        return self.peak - self.before


@dataclass(frozen=True, repr=False)
class MemoryProfile(Printable):
    """The result of `memory_profile`. ``print`` it; rich prints it in colour."""

    #: In the order in which they began.
    calls: tuple[Call, ...]
    device: torch.device
    #: "torch.cuda", or "storages".
    measured: str
    #: Bytes on the device before the forward. Measured by torch.cuda: all that its allocator had given out.
    #: Else: the inputs, and the weights (of an install: the arena, residents, and masters that are in place).
    base_bytes: int
    #: Paths of modules that were not called, and nothing in them.
    not_called: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most over `base_bytes`."""
        return max((call.peak for call in self.calls), default=0)

    def largest(self, count: int = 10) -> tuple[Call, ...]:
        """The calls that needed most for themselves, of modules that called none inside, largest first."""
        leaves = [
            call
            for call, following in zip(self.calls, (*self.calls[1:], None), strict=True)
            if following is None or following.depth <= call.depth
        ]
        return tuple(sorted(leaves, key=lambda call: -call.extra)[:count])

    def __repr__(self) -> str:
        return (
            f"<MemoryProfile on {self.device}: {len(self.calls)} calls, "
            f"peak {_amount(self.peak_bytes)} over {_amount(self.base_bytes)}>"
        )

    def _parts(self) -> tuple[Any, ...]:
        numbers = ("before", "after", "kept", "peak")
        rows = [
            [
                "  " * call.depth + (f"{call.path}: {call.class_name}" if call.path else call.class_name),
                *(_amount(size) for size in (call.before, call.after, call.kept, call.peak)),
            ]
            for call in self.calls
        ]
        facts = [
            (
                "peak",
                f"{_amount(self.peak_bytes)} over {_amount(self.base_bytes)} on {self.device}",
            ),
            ("measured by", self.measured),
        ]
        if self.not_called:
            facts.append(("not called", first_names(self.not_called)))
        return plain_table(["call", *numbers], rows, right=numbers), facts_grid(facts)


def memory_profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> MemoryProfile:
    """Run one forward, and measure live memory around each module's call.

    The forward runs in the modes that the model and the caller are in: train or eval, with gradients or
    without (then nothing is saved for backward). Random numbers and every hook are as before when this
    returns or raises. An installed model counts that forward as any other.

    Parameters
    ----------
    model : torch.nn.Module
        Plain or installed. One that `torch.compile` made is run as the model that it was made from.
    inputs : optional
        A tuple or list: the positional arguments; a mapping: keyword arguments; anything else: the only one.
    kwargs : mapping, optional
        More keyword arguments.
    device : torch.device or str, optional
        What to measure. Default: where the model computes. With a model and inputs on the meta device, what
        it would take is told without memory, by the operations that torch has for that device.

    Returns
    -------
    MemoryProfile
        A row for each call, so several for a module that is called again.

    Raises
    ------
    ConfigError
        `model` is no module, or one of the others has a value that cannot be used.

    Notes
    -----
    Whatever the forward raises is passed on.

    On CUDA these are the statistics of torch's allocator: scratch inside operations is in them, sizes are
    rounded up to 512 bytes, and so is what other threads allocate; its peak statistics are reset. Elsewhere
    they are exact bytes of the storages that operations make, without scratch inside an operation; the
    resident size of the process would be neither exact nor a layer's (see Note [What is measured on a CPU]).

    Of an installed model, streamed weights pass through the arena, which is in `base_bytes`. The pure-Python
    provider makes a tensor for each, and on the CPU they count in the layer that they are made for.
    """
    root = root_of(model)
    args, keywords = arguments(inputs, kwargs, "inputs")
    where = _device(device, root)
    nodes = [node for node in walk(root) if node.same_as is None]
    paths = {id(node.module): node.path for node in nodes}
    with isolated_forward(root):
        base = _base(root, (args, keywords), where)
        with _meter_for(where) as meter:
            frames = _Frames(meter, paths)
            with watching([node.module for node in nodes], frames.enter, frames.leave):
                root(*args, **keywords)
    return MemoryProfile(
        calls=frames.calls(),
        device=where,
        measured="torch.cuda" if where.type == "cuda" else "storages",
        base_bytes=base,
        not_called=tuple(node.path for node in nodes if not _called(node, frames.counts)),
    )


class _Frames:
    """Follows the calls, and gives each the peak of its time."""

    def __init__(self, meter: _Meter, paths: Mapping[int, str]) -> None:
        self._meter = meter
        self._paths = paths
        self._running: list[dict[str, Any]] = []
        self._all: list[dict[str, Any]] = []
        #: Calls of each module, by its id.
        self.counts: Counter[int] = Counter()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._settle()
        now = self._meter.current
        frame = {
            "path": self._paths[id(module)],
            "class_name": class_name(module),
            "depth": len(self._running),
            "index": self.counts[id(module)],
            "before": now,
            "after": now,
            "peak": now,
            "output_shapes": (),
        }
        self.counts[id(module)] += 1
        self._all.append(frame)
        self._running.append(frame)

    def leave(self, module: nn.Module, output: Any) -> None:
        self._settle()
        self._running.pop().update(after=self._meter.current, output_shapes=shapes_in(output))

    def _settle(self) -> None:
        peak = self._meter.take_peak()
        for frame in self._running:
            frame["peak"] = max(frame["peak"], peak)

    def calls(self) -> tuple[Call, ...]:
        return tuple(Call(**frame) for frame in self._all)


def _amount(size: int) -> str:
    """Write bytes, which may be fewer than there were before."""
    return f"-{format_bytes(-size)}" if size < 0 else format_bytes(size)


def _called(node: Node, counts: Mapping[int, int]) -> bool:
    return id(node.module) in counts or any(_called(child, counts) for child in node.children)


def _device(given: Any, root: nn.Module) -> torch.device:
    if given is None:
        return computes_on(root)
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {given!r}; expected a device such as 'cuda' or 'cpu'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is '{device}', and torch finds no CUDA device")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _base(root: nn.Module, given: Any, device: torch.device) -> int:
    """Bytes on the device before the forward."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    sessions = {id(session): session for module in modules_of(root) if (session := session_of(module))}
    plans = [session.stats() for session in sessions.values() if session.device == device]
    masters = [
        weight.nbytes
        for weights in weights_of(walk(root)).values()
        for weight in weights
        if weight.device == device and weight.tied_to is None and weight.served in (None, "in place")
    ]
    inputs = {
        storage._cdata: storage.nbytes()
        for tensor in tensors_in(given)
        if tensor.device == device
        for storage in storages_of(tensor)
    }
    arenas: int = sum(plan["resident_bytes"] + plan["arena_bytes"] for plan in plans)
    return sum(masters) + sum(inputs.values()) + arenas


# ---- live memory: the storages that operations make, or what the allocator counts --------------------------

# Note [What is measured on a CPU]: the resident size of the process says little about a layer: the heap keeps
# freed pages and hands them out again, and other threads, mapped checkpoints and the libraries' own pools are
# in it. What can be told exactly is which tensors there are. Every operation passes the dispatcher, so a mode
# there sees each storage that one makes; a weak reference to the storage tells when its last holder, be it
# Python, a view or an autograd graph, lets it go. That is exact to the byte, the same on every run, and works
# on any device, the meta device too. It does not see what an operation takes and gives back inside itself
# (scratch of a convolution), nor what is allocated behind torch's back.


@contextmanager
def _meter_for(device: torch.device) -> Iterator[_Meter]:
    """Measure live bytes on a device while the block runs, counted from its beginning."""
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    with _LiveBytes(device) as live:
        yield live


class _CudaMeter:
    """Measures what torch's caching allocator has given out on a GPU, to any thread. Resets its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def current(self) -> int:
        """Bytes at this moment; below zero if more was freed than made."""
        return torch.cuda.memory_allocated(self._device) - self._base

    def take_peak(self) -> int:
        """The most since this was asked last."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._base
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the live storages on a device that operations of this thread have made."""

    # Flex attention and its like are operations to this mode.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes: dict[int, int] = {}
        # Weak: a handed-out tensor's lease ends with its storage, and a measure must not hold it.
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current = 0
        self._peak = 0

    @property
    def current(self) -> int:
        """Bytes at this moment."""
        return self._current

    def take_peak(self) -> int:
        """The most since this was asked last."""
        peak, self._peak = self._peak, self._current
        return peak

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and look at what it returns."""
        keywords = kwargs or {}
        output = func(*args, **keywords)
        # What an operation was given was there before, and so were weights that an install hands out.
        given = {
            storage._cdata
            for tensor in tensors_in((args, keywords))
            if tensor.device == self._device
            for storage in storages_of(tensor)
        }
        for tensor in tensors_in(output):
            if tensor.device == self._device:
                for storage in storages_of(tensor):
                    self._look(storage, new=storage._cdata not in given)
        return output

    def _look(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        key = storage._cdata
        if key not in self._sizes:
            if not new:
                return
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = 0
        size = storage.nbytes()  # may have changed, as `resize_` and `out=` do
        self._current += size - self._sizes[key]
        self._sizes[key] = size
        self._peak = max(self._peak, self._current)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self._current -= self._sizes.pop(key, 0)


_Meter: TypeAlias = _CudaMeter | _LiveBytes
