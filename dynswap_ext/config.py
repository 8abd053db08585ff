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
DYNSWAP_MESH : {"auto", "always"}
    Where ranks share out copies (`mesh=`): where that is faster (``auto``, the default), or ``always``.
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import torch

from dynswap_ext._saved_plan import SavedPlan
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.memory import (
    AUTO,
    MINIMUM,
    all_bytes,
    exact_bytes,
    first_activations,
    first_budget,
    format_bytes,
    free_bytes,
    is_named,
    parse_bytes,
    ram_limit,
)
from dynswap_ext._util.mesh import Mesh
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext._util.progress import ProgressOption, check_progress
from dynswap_ext._util.units import parse_dtype
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The share of the free RAM into which reads of checkpoint files may be cached. The rest is left for other
#: memory that may grow.
_AUTO_PAGE_CACHE: Final = 0.8
#: The share of the free RAM that page-locked copies may take.
_PINNED_COPIES: Final = 0.5
#: The share of all RAM of the process that may be page-locked, as masters in place and as copies.
_AUTO_PINNED: Final = 0.8

#: A budget of fewer bytes is probably a mistake: 1 is a byte, and 1.0 is all of the free memory.
_HARDLY_MEANT: Final = 1024

#: Groups of weights to fetch ahead: more saves little time (docs/decisions/005).
DEFAULT_PREFETCH: Final = 2

#: Variables that turn torch's caching allocator off on GPUs of NVIDIA and AMD, whatever their values are.
_WITHOUT_CACHE: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")

PROVIDERS: Final = ("auto", "native", "python")
ENGINE_BACKENDS: Final = ("auto", "cuda", "torch", "host")
_LOG_LEVELS: Final = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Budget:
    """The device memory that one plan may take."""

    #: Bytes for streamed weights and those that stay on the device (residents); None: what `prefetch` needs.
    bytes: int | None
    #: Whether measured passes decide how many bytes. If so, residents give way where memory runs out.
    automatic: bool = False
    #: Bytes for tensors that are saved for backward; None: all of them stay on the device.
    activations: int | None = None


class HostBudget(NamedTuple):
    """The RAM that the weights of all installs may take together, in bytes."""

    #: The sum of all uses, masters in RAM included; None if the user has named no amount.
    total: int | None = None
    #: Whether masters, or copies of them, are page-locked.
    page_locks: bool = True
    #: Whether checkpoint files that are read, and files of saved tensors, may enter the page cache.
    caches: bool = True
    #: The most that may be page-locked, as masters in place and as copies.
    locked: int = sys.maxsize
    #: How much of `locked` may be copies, which devices need for which torch locks nothing in place.
    copies: int = sys.maxsize
    #: The most that they may take of the page cache.
    page_cache: int = sys.maxsize


@dataclass(frozen=True)
class Options:
    """The options of one install, checked, with defaults filled in. Sessions receive the whole object."""

    #: The device on which the model computes, with an index unless it is the CPU.
    device: torch.device
    #: The dtype into which floating weights are cast; None leaves every master's dtype as it is.
    dtype: torch.dtype | None
    #: Groups of weights to fetch ahead of the one in use.
    prefetch: int
    #: The budget of the first plan. `Installation.budget` is the present one.
    budget: Budget
    #: The saved plan that the first plan takes over; None if there is none.
    plan: SavedPlan | None
    host_budget: HostBudget
    #: One of `PROVIDERS`.
    provider: str
    #: Whether to raise, not to allocate outside the budget, if tensors that the program keeps fill it.
    strict_budget: bool
    #: The ranks among which copies are shared out; None: this process copies for itself.
    mesh: Mesh | None
    #: Bytes of the device that an automatic budget leaves to others, checked at each pass; None: a small
    #: part, checked only when a plan is made.
    headroom: int | None
    #: Whether measured passes decide how much of the device's memory tensors that are saved for backward may
    #: take. The bound itself is in `Budget.activations`.
    measures_activations: bool
    #: The folder of the file to which they go on the CPU, and elsewhere if no page-locked memory takes them;
    #: None: there is none.
    activations_folder: str | None
    #: Patterns of names of the weights that stay on the device.
    keep: tuple[str, ...]
    #: Patterns of names of the weights that are left alone.
    ignore: tuple[str, ...]
    #: Whether, or to which function, the progress of the first pass is shown.
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
    mesh: DeviceMesh | ProcessGroup | None = None,
    headroom: int | float | str | None = None,
    activations: int | float | str | None = None,
    activations_folder: str | os.PathLike[str] | None = None,
    keep: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    progress: ProgressOption = False,
) -> Options:
    """Return the arguments of `dynswap_ext.install`, checked, with defaults filled in.

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
    trades = activations is not None and is_automatic(activations)
    if trades and not automatic:
        given = f"budget is {budget!r}" if saved is None else "the plan that is given has a fixed budget"
        raise ConfigError(
            f"activations is {activations!r}, and {given}: measured passes choose both or neither. Pass "
            "budget='auto' with it, or activations in bytes"
        )
    saves = _activations(activations, activations_folder, where)
    if trades and saved is not None and saved.activations is not None:
        saves = saved.activations
    first = planned or Budget(
        first_budget(where, room) if automatic else resolve_budget(budget, where), automatic
    )
    chosen = _one_of(PROVIDERS, "provider", provider)
    options = Options(
        device=where,
        dtype=_dtype(dtype),
        prefetch=_prefetch(prefetch) if saved is None else saved.prefetch,
        budget=replace(first, activations=saves),
        plan=saved if planned is not None else None,
        host_budget=_host_budget(host_budget, where),
        provider=provider_from_environment() if chosen == "auto" else chosen,
        strict_budget=_flag("strict_budget", strict_budget),
        mesh=None,
        headroom=room,
        measures_activations=trades,
        activations_folder=None if activations_folder is None else os.fspath(activations_folder),
        keep=_patterns("keep", keep),
        ignore=_patterns("ignore", ignore),
        progress=check_progress(progress),
    )
    return options if mesh is None else replace(options, mesh=_mesh(mesh, options))


#: The names of all options of `dynswap_ext.install`.
OPTION_NAMES: Final = tuple(inspect.signature(resolve).parameters)


def provider_from_environment() -> str:
    """Return the provider that ``DYNSWAP_PROVIDER`` names; "auto" if it is not set."""
    return _one_of(PROVIDERS, "DYNSWAP_PROVIDER", _environment("DYNSWAP_PROVIDER") or "auto")


def engine_backend_from_environment() -> str:
    """Return ``DYNSWAP_ENGINE_BACKEND``, or "auto": how the native provider copies to an accelerator."""
    value = _environment("DYNSWAP_ENGINE_BACKEND") or "auto"
    return _one_of(ENGINE_BACKENDS, "DYNSWAP_ENGINE_BACKEND", value)


def log_level() -> int | None:
    """Return ``DYNSWAP_LOG`` as a level of `logging`; None if it is not set or is "off"."""
    value = _one_of(_LOG_LEVELS, "DYNSWAP_LOG", _environment("DYNSWAP_LOG") or "off")
    return None if value == "off" else int(getattr(logging, value.upper()))


def lightning_budget() -> str | None:
    """Return ``DYNSWAP_LIGHTNING``, the budget for every `Trainer` of Lightning; None if it is not set."""
    return _environment("DYNSWAP_LIGHTNING") or None


def _environment(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _one_of(choices: tuple[str, ...], name: str, given: str) -> str:
    if given not in choices:
        hint = did_you_mean(given, choices)
        raise ConfigError(f"{name} is {given!r}; expected one of {', '.join(choices)}{hint}")
    return given


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
    """Return whether the budget is "auto", in any case of the letters."""
    return is_named(budget, AUTO)


def check_measurable(device: torch.device) -> None:
    """Raise ConfigError if the memory of activations cannot be measured on the device, as "auto" needs."""
    if device.type != "cuda":
        return
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

    Warns of an amount below 1 KiB, and of one for the CPU that is larger than the process's RAM.
    """
    if given is None or is_named(given, MINIMUM):
        return None
    amount = parse_bytes(given, names=(AUTO, MINIMUM), of="the device's free memory")
    if not isinstance(amount, int):
        return max(1, int(amount * free_bytes(device)))
    _warn_if_hardly_meant("the budget", given, amount)
    if device.type == "cpu" and amount > (ram := _part_of_all_ram(1)):
        warn(
            f"the budget is {format_bytes(amount)}, and this process may use {format_bytes(ram)} of RAM: if "
            "the weights fill it, the system swaps or ends the process. Pass a smaller budget, or "
            'budget="auto"'
        )
    return amount


def _warn_if_hardly_meant(option: str, given: int | float | str, amount: int) -> None:
    if amount < _HARDLY_MEANT:
        warn(
            f"{option} is {given!r}, which is {format_bytes(amount)}. Write a size with its unit ('6GiB'), "
            "or a fraction of the device's free memory as a float or a percentage (0.5; 1.0 or '100%' is all "
            "of it)"
        )


def _budget_of(
    saved: SavedPlan,
    budget: int | float | str | None,
    prefetch: int,
    device: torch.device,
    headroom: int | None,
) -> Budget | None:
    """Return the budget of a saved plan; None, with a warning, if it would leave less than `headroom` free.

    Raises ConfigError if the install is also given a budget, or another `prefetch` than the plan's.
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


def _activations(
    given: int | float | str | None, folder: str | os.PathLike[str] | None, device: torch.device
) -> int | None:
    """Return the bytes that `activations` means; None if all that is saved for backward stays."""
    if given is None:
        if folder is not None:
            raise ConfigError(
                f"activations_folder is {os.fspath(folder)!r}, and activations is not given: pass "
                "activations=, the bytes that may stay in memory, or leave the folder out"
            )
        return None
    if device.type == "cpu" and folder is None:
        raise ConfigError(
            "activations is given for a model that computes on the CPU, whose memory is the host's: what "
            "exceeds it goes to a file there. Pass activations_folder=, a folder on a fast disk"
        )
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"activations_folder is {folder!r}; expected the path of a folder")
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"activations_folder is {os.fspath(folder)!r}; expected a folder that exists")
    if is_automatic(given):
        return first_activations(device)
    amount = parse_bytes(given, "activations", names=(AUTO,), of="the device's free memory")
    if isinstance(amount, int):
        _warn_if_hardly_meant("activations", given, amount)
        return amount
    return max(1, int(amount * free_bytes(device)))


def _headroom(given: int | float | str, device: torch.device) -> int:
    """Return the bytes that `headroom` means: an amount, 0 included, or a fraction of the device's memory."""
    if given == 0 and not isinstance(given, bool):
        return 0
    amount = parse_bytes(given, "headroom", of="the device's memory")
    return amount if isinstance(amount, int) else int(amount * all_bytes(device))


def _free_ram() -> int:
    """Return the bytes of the free RAM; 0 if the system does not tell."""
    try:
        return free_bytes(torch.device("cpu"))
    except ConfigError:
        return 0


def _part_of_all_ram(fraction: float) -> int:
    """Return a fraction of the RAM that this process may use, in bytes; a huge number if that is unknown."""
    try:
        return int(fraction * ram_limit())
    except (OSError, ValueError):
        return sys.maxsize


def _host_budget(given: int | float | str, device: torch.device) -> HostBudget:
    """Return the bounds that `host_budget` means: "auto", "minimum", an amount, or a fraction of the RAM."""
    if given == AUTO or is_named(given, AUTO):  # the default costs no call
        free = _free_ram()
        return HostBudget(
            # Not where the device computes in the host's own memory, which copies would take from it.
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
    return HostBudget(amount if isinstance(amount, int) else _part_of_all_ram(amount))


def refuse_automatic_of_ranks() -> NoReturn:
    """Raise ConfigError for an automatic budget of an install with `mesh=`."""
    raise ConfigError(
        "mesh is given, and budget is 'auto', with which each rank would choose other weights to stay on "
        "its device; expected a budget that is the same for all ranks, such as budget='6GiB'"
    )


def _mesh(given: DeviceMesh | ProcessGroup, options: Options) -> Mesh:
    if options.budget.automatic:
        refuse_automatic_of_ranks()
    asked = _one_of(("auto", "always"), "DYNSWAP_MESH", _environment("DYNSWAP_MESH") or "auto")
    same = {name: getattr(options, name) for name in ("dtype", "prefetch", "keep", "ignore")}
    same["budget"] = MINIMUM if options.budget.bytes is None else exact_bytes(options.budget.bytes)
    return Mesh(given, same, always=asked == "always")


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
