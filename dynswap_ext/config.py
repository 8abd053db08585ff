"""Every option and every environment variable of the package, checked in one place.

Environment variables
---------------------
DYNSWAP_PROVIDER : {"auto", "native", "python"}
    The provider for installs that do not name one themselves. ``auto`` (the default) takes the native
    extension where it can serve the device, else pure Python. ``native`` raises where it cannot.
DYNSWAP_ENGINE_BACKEND : {"auto", "cuda", "torch", "host"}
    How the native provider copies to an accelerator. ``cuda`` calls the CUDA runtime, where the extension was
    built with it; ``torch`` uses torch's own streams. ``auto`` (the default) takes ``cuda`` where it can.
    ``host`` is for the CPU alone.
DYNSWAP_LOG : {"debug", "info", "warning", "error", "off"}
    Logs to stderr from that level on. Default: the logger "dynswap_ext" is silent, unless the program
    configures it.
DYNSWAP_LIGHTNING : a budget, such as "auto" or "6GiB"
    Every `Trainer` of Lightning installs its module with this budget. Default: none does.

Other variables control the build of the extension (docs/reference/environment.md). They are not read here.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from dynswap_ext._saved_plan import SavedPlan
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.memory import (
    AUTO,
    MINIMUM,
    all_bytes,
    first_budget,
    format_bytes,
    free_bytes,
    is_named,
    parse_bytes,
    ram_limit,
)
from dynswap_ext._util.option_names import did_you_mean, is_amount
from dynswap_ext._util.progress import ProgressOption, check_progress
from dynswap_ext._util.units import parse_dtype
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import ConfigError

#: Of the free RAM, what the page cache may take: the rest is left for other memory that may grow.
_AUTO_PAGE_CACHE: Final = 0.8
#: Of the free RAM, what page-locked copies may take.
_PINNED_COPIES: Final = 0.5
#: Of all RAM that the process may use, what may be page-locked, masters themselves included.
_AUTO_PINNED: Final = 0.8

#: A budget of fewer bytes is probably a mistake: 1 is a byte, and 1.0 is all of the free memory.
_HARDLY_MEANT: Final = 1024

#: Groups of weights to fetch ahead: more saves little time (docs/decisions/005).
DEFAULT_PREFETCH: Final = 2

#: Variables that turn torch's caching allocator off, on NVIDIA's and AMD's devices.
_WITHOUT_CACHE: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")

PROVIDERS: Final = ("auto", "native", "python")
ENGINE_BACKENDS: Final = ("auto", "cuda", "torch", "host")
_LOG_LEVELS: Final = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Budget:
    """What the weights of one plan may take on the device."""

    #: Bytes for arena and residents together; None is only what `prefetch` needs.
    bytes: int | None
    #: Whether measured passes say how many bytes. Then residents give way to whatever runs out of memory.
    automatic: bool = False


class HostBudget(NamedTuple):
    """The RAM that the weights of all installs may take together, in bytes."""

    #: The most in all, with the masters that are in RAM; None: the user has named no amount.
    total: int | None = None
    #: Whether masters are page-locked, or have copies that are.
    page_locks: bool = True
    #: Whether what is read of checkpoint files may enter the page cache.
    caches: bool = True
    #: The most that may be page-locked, as masters where they lie and as copies.
    locked: int = sys.maxsize
    #: How much of `locked` may be copies, on devices for which torch locks nothing in place.
    copies: int = sys.maxsize
    #: The most that reads of checkpoint files may take of the page cache.
    page_cache: int = sys.maxsize


@dataclass(frozen=True)
class Options:
    """What one install was asked for, checked and complete. A session is given the object whole."""

    device: torch.device
    #: None leaves every master's dtype as it is.
    dtype: torch.dtype | None
    prefetch: int
    #: The budget of the first plan. `Installation.budget` is the present one.
    budget: Budget
    #: The saved plan that the first plan takes over; None: it makes its own.
    plan: SavedPlan | None
    host_budget: HostBudget
    #: One of `PROVIDERS`.
    provider: str
    strict_budget: bool
    #: Bytes of the device that an automatic budget leaves to others, checked at each pass; None: a small
    #: part, checked only when a plan is made.
    headroom: int | None
    #: Patterns of the weights that stay on the device, and of those that are left alone.
    keep: tuple[str, ...]
    ignore: tuple[str, ...]
    #: What shows the progress of the first pass.
    progress: ProgressOption


def resolve(
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    prefetch: int = DEFAULT_PREFETCH,
    budget: int | float | str | None = None,
    plan: str | os.PathLike[str] | None = None,
    host_budget: int | float | str = "auto",
    provider: str = "auto",
    strict_budget: bool = False,
    headroom: int | float | str | None = None,
    keep: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    progress: ProgressOption = False,
) -> Options:
    """Check the arguments of `dynswap_ext.install`.

    Raises
    ------
    ConfigError
        An argument has a value that cannot be used. The message has the value and what is expected.
    """
    where = resolve_device(device)
    saved = None if plan is None else SavedPlan.read(plan)
    automatic = is_automatic(budget) if saved is None else saved.automatic
    if automatic:
        check_measurable(where)
    room = None
    if headroom is not None:
        room = _headroom(headroom, where)
        if not automatic:
            given = f"budget is {budget!r}" if saved is None else "the plan that is given has a fixed budget"
            raise ConfigError(
                f"headroom is {headroom!r}, and {given}: headroom is what budget='auto' leaves to others. "
                "Pass budget='auto', or a smaller budget alone"
            )
    planned = None if saved is None else _budget_of(saved, budget, prefetch, where, room)
    chosen = _one_of(PROVIDERS, "provider", provider)
    return Options(
        device=where,
        dtype=_dtype(dtype),
        prefetch=_prefetch(prefetch) if saved is None else saved.prefetch,
        budget=planned
        or Budget(first_budget(where, room) if automatic else resolve_budget(budget, where), automatic),
        plan=saved if planned is not None else None,
        host_budget=_host_budget(host_budget, where),
        provider=provider_from_environment() if chosen == "auto" else chosen,
        strict_budget=_flag("strict_budget", strict_budget),
        headroom=room,
        keep=_patterns("keep", keep),
        ignore=_patterns("ignore", ignore),
        progress=check_progress(progress),
    )


#: The names of all options of `dynswap_ext.install`.
OPTION_NAMES: Final = tuple(inspect.signature(resolve).parameters)


def provider_from_environment() -> str:
    """Return ``DYNSWAP_PROVIDER``, or "auto"."""
    return _one_of(PROVIDERS, "DYNSWAP_PROVIDER", _environment("DYNSWAP_PROVIDER") or "auto")


def engine_backend_from_environment() -> str:
    """Return ``DYNSWAP_ENGINE_BACKEND``, or "auto": how the native provider copies to an accelerator."""
    value = _environment("DYNSWAP_ENGINE_BACKEND") or "auto"
    return _one_of(ENGINE_BACKENDS, "DYNSWAP_ENGINE_BACKEND", value)


def log_level() -> int | None:
    """Return ``DYNSWAP_LOG`` as a level of `logging`; None if it is not set, or "off"."""
    value = _one_of(_LOG_LEVELS, "DYNSWAP_LOG", _environment("DYNSWAP_LOG") or "off")
    return None if value == "off" else int(getattr(logging, value.upper()))


def lightning_budget() -> str | None:
    """Return ``DYNSWAP_LIGHTNING``: the budget of each `Trainer` of Lightning; None if it is not set."""
    return _environment("DYNSWAP_LIGHTNING") or None


def available_devices() -> tuple[str, ...]:
    """Devices on which an install can compute. Initialises the driver: on CUDA, torch asks the runtime."""
    return listed_devices() if torch.accelerator.is_available() else ("cpu",)


def listed_devices() -> tuple[str, ...]:
    """Devices that the system lists; on CUDA those that NVML lists, so that no driver is initialised."""
    accelerator = torch.accelerator.current_accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return ("cpu", *(f"{accelerator}:{index}" for index in range(count)))


def _environment(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _one_of(choices: tuple[str, ...], name: str, given: str) -> str:
    if given not in choices:
        hint = did_you_mean(given, choices)
        raise ConfigError(f"{name} is {given!r}; expected one of {', '.join(choices)}{hint}")
    return given


def resolve_device(given: torch.device | str | int | None) -> torch.device:
    """Return the device with an index, so that it compares equal to the device of a tensor."""
    if given is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        given = accelerator or "cpu"
    try:
        if isinstance(given, bool):
            raise TypeError("a bool is no device")
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device is {given!r}, unknown to torch; available here: {', '.join(available_devices())}"
            + (f". An amount of memory is a budget: budget={given!r}" if is_amount(given) else "")
        ) from error
    if isinstance(given, str) and ":" in given and str(device) != given:  # torch keeps 8 bits of the index
        raise ConfigError(
            f"device is {given!r}, whose index is too large: torch would use {str(device)!r}; available "
            f"here: {', '.join(available_devices())}"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and f"{device.type}:0" in available_devices():
        return torch.device(device.type, torch.accelerator.current_device_index())
    if str(device) not in available_devices():
        here = ", ".join(available_devices())
        raise ConfigError(f"device is '{device}'; available here: {here}{_why_not(device)}")
    return device


def _why_not(device: torch.device) -> str:
    """Return why nothing computes there and what to do, as the end of a message; empty if not known."""
    if device.type == "meta":
        return (
            ". Nothing is computed on the meta device; for shapes, call an installed model under "
            "FakeTensorMode(allow_non_fake_inputs=True)"
        )
    if device.type != "cuda" or torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return (
            f". This torch ({torch.__version__}) is built without CUDA; install one that has it "
            "(https://pytorch.org/get-started/locally)"
        )
    return f". This torch ({torch.__version__}) has CUDA, but finds no driver or no GPU; see `nvidia-smi`"


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(given, str):
        given = parse_dtype(given, "dtype")
    if given is None:
        return None
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise ConfigError(
            f"dtype is {given!r}; expected a floating dtype such as torch.bfloat16, or None to keep each "
            "master's own (integer and complex masters are never cast)"
        )
    if given.itemsize < 2:
        raise ConfigError(
            f"dtype is {given}, in which torch's layers cannot compute; expected a dtype to compute in, such "
            "as torch.bfloat16. Masters may be stored in fewer bits, as "
            f"checkpoint.convert(path, new_path, dtype={given}) stores them, and are cast on the way"
        )
    return given


def _prefetch(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ConfigError(f"prefetch is {given!r}; expected the number of groups to read ahead, 0 or more")
    return given


def is_automatic(budget: int | float | str | None) -> bool:
    """Return whether the budget is "auto", which is measured."""
    return is_named(budget, AUTO)


def check_measurable(device: torch.device) -> None:
    """Raise if the memory of activations cannot be measured on the device, as "auto" needs."""
    if device.type != "cuda":
        return
    # Whatever their values are.
    variables = [name for name in _WITHOUT_CACHE if name in os.environ]
    enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)  # from torch 2.13 on
    if variables or (enabled is not None and not enabled()):
        remedy = f"unset {variables[0]}" if variables else "call torch.cuda.caching_allocator_enable()"
        raise ConfigError(
            "budget is 'auto', and torch's caching allocator is turned off, which alone can tell how much "
            f"memory activations take; {remedy}, or give the budget in bytes"
        )


def resolve_budget(given: int | float | str | None, device: torch.device) -> int | None:
    """Return the bytes of an amount, or of a fraction of what the device has free; None for "minimum".

    Warns of an amount for the CPU that is larger than the process's RAM.
    """
    if given is None or is_named(given, MINIMUM):
        return None
    amount = parse_bytes(given, names=(AUTO, MINIMUM), of="the device's free memory")
    if not isinstance(amount, int):
        return max(1, int(amount * free_bytes(device)))
    if amount < _HARDLY_MEANT:
        warn(
            f"the budget is {given!r}, which is {format_bytes(amount)}. Write a size with "
            "its unit ('6GiB'), or a fraction of the device's free memory as a float or a percentage (0.5; "
            "1.0 or '100%' is all of it)"
        )
    if device.type == "cpu" and amount > (ram := _part_of_all_ram(1)):
        warn(
            f"the budget is {format_bytes(amount)}, and this process may use {format_bytes(ram)} of RAM: if "
            "the weights fill it, the system swaps or ends the process. Pass a smaller budget, or "
            'budget="auto"'
        )
    return amount


def _budget_of(
    saved: SavedPlan,
    budget: int | float | str | None,
    prefetch: int,
    device: torch.device,
    headroom: int | None,
) -> Budget | None:
    """Return the budget that was saved; None if others would have too little of the device with it.

    Raises if another budget, or another prefetch, is asked for.
    """
    if budget is not None or prefetch not in (DEFAULT_PREFETCH, saved.prefetch):
        given = f"budget={budget!r}" if budget is not None else f"prefetch={prefetch!r}"
        raise saved.refused(f"{given} is given with it, which a plan has already: leave it out")
    if headroom is not None and saved.budget is not None and free_bytes(device) - headroom < saved.budget:
        warn(
            f"the plan {saved.path!r} has a budget of {format_bytes(saved.budget)}, and with "
            f"headroom={format_bytes(headroom)} '{device}' has less for it now: a new plan is measured"
        )
        return None
    return Budget(saved.budget, saved.automatic)


def _headroom(given: int | float | str, device: torch.device) -> int:
    """Return the bytes of an amount, or of a fraction of all memory of the device. 0 is allowed."""
    if given == 0 and not isinstance(given, bool):
        return 0
    amount = parse_bytes(given, "headroom", of="the device's memory")
    return amount if isinstance(amount, int) else int(amount * all_bytes(device))


def _free_ram() -> int:
    """Return the bytes of the free RAM; 0 where they are not known."""
    try:
        return free_bytes(torch.device("cpu"))
    except ConfigError:
        return 0


def _part_of_all_ram(fraction: float) -> int:
    """Return a fraction of the RAM that this process may use, in bytes; no bound if that is not known."""
    try:
        return int(fraction * ram_limit())
    except (OSError, ValueError):
        return sys.maxsize


def _host_budget(given: int | float | str, device: torch.device) -> HostBudget:
    """Return the RAM for weights: an amount, or a fraction of what this process may use of it."""
    if given == AUTO or is_named(given, AUTO):
        free = _free_ram()
        return HostBudget(
            # Page-locked copies would take the memory that the device computes in.
            page_locks=device.type in ("cpu", "cuda") or not DeviceMemory(device).is_the_hosts(),
            locked=_part_of_all_ram(_AUTO_PINNED),
            copies=int(_PINNED_COPIES * free),
            page_cache=int(_AUTO_PAGE_CACHE * free),
        )
    if is_named(given, MINIMUM):
        return HostBudget(page_locks=False, caches=False)
    amount = parse_bytes(given, "host_budget", names=(AUTO, MINIMUM), of="the RAM")
    if amount < _HARDLY_MEANT and not isinstance(amount, float):
        raise ConfigError(
            f"host_budget is {given!r}, which is {format_bytes(amount)}; expected a size with its unit "
            "('48GiB'), or a fraction of the RAM"
        )
    return HostBudget(min(sys.maxsize, amount if isinstance(amount, int) else _part_of_all_ram(amount)))


def _patterns(option: str, given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Iterable) or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigError(
            f"{option} is {given!r}; expected a name of a weight or of a module, a pattern of them "
            "('*.norm*'), or a sequence of these"
        )
    return tuple(patterns)


def _flag(name: str, given: bool) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"{name} is {given!r}; expected True or False")
    return given
