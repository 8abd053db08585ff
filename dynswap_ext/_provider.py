"""Chooses the provider that serves accesses, the native extension or pure Python, and says which and why."""

from __future__ import annotations

import functools
import gc
import importlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynswap_ext._python.attribute import Attribute as PythonAttribute
from dynswap_ext._python.session import Session as PythonSession
from dynswap_ext._sources import bindings_of
from dynswap_ext._swap import compile_support
from dynswap_ext._swap.parameter_proxy import handed_out_again, take_to_master, untracked_alias_made
from dynswap_ext._swap.protocol import Hooks, Session
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.devices import listed_devices
from dynswap_ext._util.log import logger
from dynswap_ext._util.numa import place_of
from dynswap_ext._util.reinstall import FROM_SOURCE, for_this_torch
from dynswap_ext._util.warn import warn
from dynswap_ext.config import (
    Budget,
    Options,
    engine_backend_from_environment,
    provider_from_environment,
)
from dynswap_ext.errors import ConfigError, DeviceError
from dynswap_ext.lossless import code as lossless_code

_STAY = "Weights that fit can stay on the device (`budget=`), where nothing waits for them"
_SILENCE = "DYNSWAP_PROVIDER=python takes pure Python without this warning"
_SILENT_STREAMS = "DYNSWAP_ENGINE_BACKEND=torch takes torch's streams without this warning"


#: The keys of what the extension's `host_memory` returns.
_USES_OF_RAM = ("locked", "copies", "staging", "page_cache", "activations")


@dataclass(frozen=True)
class Provider:
    """The implementation that serves an install's accesses: it makes the session and the descriptors."""

    #: "native" or "python".
    name: str
    #: Makes the session of one install.
    session: Callable[[Options, Budget, Hooks], Session]
    #: The class of the descriptors that take the place of parameters and buffers.
    attribute: type
    #: Limits the RAM that engines take in addition to masters, in bytes, as long as the result lives. Has no
    #: effect in pure Python, which takes none.
    limit_host_memory: Callable[..., object]
    #: The engine's backend: "host", "cuda" or "torch" (torch's own streams). "python" for the pure-Python
    #: provider, which has no engine.
    backend: str
    #: Why this is not the native provider with its best backend; empty if it is, or if it was asked for.
    reason: str = ""


@dataclass(frozen=True)
class BackendInfo:
    """The provider and the backends that are active in this process, and why. ``print`` shows it."""

    #: The provider that an install on the default device takes: "native" or "python". Whether the driver can
    #: serve a CUDA device is known only once something has used one.
    provider: str
    #: Whether the extension can be used.
    extension: bool
    #: Why the native provider, or the best backend of its engine, is not used; None if they are.
    reason: str | None
    #: How weights would be copied to the default device: "host", "cuda", "torch" (torch's own streams), or
    #: "python" for the pure-Python provider.
    backend: str
    #: The version of torch that runs.
    torch: str
    #: The version of torch that the extension was built for; None if it is not known.
    built_for_torch: str | None
    #: Whether the extension was built with the CUDA backend.
    cuda: bool
    #: The compiler that built the extension; None if it is not known.
    compiler: str | None
    #: The devices that the system lists: "cpu" and the accelerators, such as "cuda:0". The first accelerator,
    #: or else the CPU, is the default device here.
    devices: tuple[str, ...]
    #: What torch has for the default device: "a stream for copies", "pinned memory", "page-locking". Without
    #: one of these, copies are slower, not wrong. None unless torch's streams serve the device and its driver
    #: was asked.
    offers: tuple[str, ...] | None = None
    #: Why weights that stay on the default device (residents) would not give way if memory runs out there,
    #: and what to do; empty if they would. None for the CPU, and unless the driver was asked.
    giving_way: str | None = None
    #: Whether the default device computes in the host's own memory, where streaming saves none. None unless
    #: the driver was asked.
    one_memory: bool | None = None
    #: The NUMA node of the default device, and those on which this process may run; empty on a machine with
    #: one node. None unless the driver was asked.
    numa: str | None = None

    def __str__(self) -> str:
        """Return one line for each fact."""
        return "\n".join(f"{name:<16} {value}" for name, value in self.facts().items())

    def facts(self) -> dict[str, str]:
        """Return the facts that `str()` prints, as texts by their names."""
        why = f" ({self.reason})" if self.reason else ""
        facts = {
            "provider": self.provider + (why if self.provider == "python" else ""),
            "engine backend": self.backend + (why if self.provider == "native" else ""),
            "extension": "built" if self.extension else "not available",
            "built for torch": self.built_for_torch or "-",
            "running torch": self.torch,
            "CUDA backend": "compiled" if self.cuda else "not compiled",
            "compiler": self.compiler or "-",
            "devices": ", ".join(self.devices),
        }
        if self.offers is not None:
            facts["torch offers"] = ", ".join(self.offers) or "neither a stream for copies nor pinned memory"
        if self.giving_way is not None:
            facts["residents"] = self.giving_way or "give way to whatever runs out of memory (budget='auto')"
        if self.one_memory:
            facts["device memory"] = "one memory for host and device: model.to() is faster than an install"
        if self.numa:
            facts["NUMA"] = self.numa
        return facts


class _Obstacle(NamedTuple):
    """Why the native provider, or its best backend, cannot serve a device, and what to do about it.

    Both texts are without a full stop.
    """

    reason: str
    remedy: str


class _Extension(NamedTuple):
    """The native extension, or why it cannot be used."""

    #: None if it cannot be used.
    module: Any
    #: Why it cannot be used; empty if it can.
    reason: str
    #: What it was built with (torch, CUDA, a compiler), by name; empty if it could not be imported.
    build: dict[str, Any]


def select(asked: str, device: torch.device) -> Provider:
    """Choose the provider for an install on the device: `asked` is "auto", "native" or "python".

    "auto" takes the native extension if it can serve the device, else pure Python. Warns, once each, of what
    makes copies slower than they could be, unless it was asked for.

    Raises
    ------
    ConfigError
        "native" was asked for and cannot serve the device. Says why.
    """
    if asked == "python":
        logger.debug("the python provider serves %s, as asked for", device)
        return _python()
    extension = _extension()
    backend, obstacle = _engine(extension, device)
    if backend:
        if obstacle is not None:
            _warn_once(
                f"dynswap_ext copies weights to '{device}' through torch's own streams: {obstacle.reason}. "
                f"Each weight is then a call of its own to the driver. {obstacle.remedy}; {_SILENT_STREAMS}."
            )
        if backend == "torch" and not extension.module.capabilities(device)["copy_stream"]:
            _warn_once(
                f"torch has one stream only for '{device}': copies and operators take turns there, so the "
                f"model waits for each weight. {_STAY}."
            )
        logger.debug("the native provider serves %s by its backend %s", device, backend)
        reason = obstacle.reason if obstacle else ""
        session = functools.partial(extension.module.Session, backend=backend)
        limit = extension.module.limit_host_memory
        return Provider("native", session, extension.module.Attribute, limit, backend, reason)
    assert obstacle is not None
    if asked == "native":
        raise ConfigError(
            f"the native provider was asked for, but {obstacle.reason}. {obstacle.remedy}, or pass "
            "provider='auto'"
        )
    _warn_once(
        f"dynswap_ext runs in pure Python on '{device}' and fetches nothing ahead (the model waits for each "
        "weight): "
        f"{obstacle.reason}. {obstacle.remedy}; {_SILENCE}."
    )
    return _python(obstacle.reason)


def warn_of_one_memory(device: torch.device) -> None:
    """Warn if the device computes in the host's own memory, so that streaming saves none; once per device."""
    if device.type != "cpu" and DeviceMemory(device).is_the_hosts():
        _warn_once(
            f"'{device}' computes in the host's own memory, so streaming weights to it saves no memory and "
            f"takes time: each is copied from RAM to RAM. If the model fits, use model.to('{device}') and no "
            "install; an install is of use for weights that are mapped from files larger than the RAM."
        )


def backend_info(*, ask_driver: bool | None = None) -> BackendInfo:
    """Return which provider is active, and why. Gives no warnings.

    By default, CUDA's driver is not initialised here, because children of a fork could not use CUDA then.
    CUDA devices are those that NVML lists. (With a driver and no NVML, torch itself asks the driver.)

    Parameters
    ----------
    ask_driver
        Whether to ask the driver if the extension can use the device. Default: if CUDA is in use already.
    """
    extension = _extension()
    asked = provider_from_environment()
    devices = listed_devices()
    if ask_driver is None:
        ask_driver = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    device = torch.device(devices[:2][-1])
    backend, obstacle = _engine(extension, device, ask_driver=ask_driver)
    reason = None
    if asked == "python":
        backend, reason = "", "DYNSWAP_PROVIDER=python"
    elif obstacle:
        reason = obstacle.reason
    return BackendInfo(
        provider="native" if backend else "python",
        backend=backend or "python",
        extension=extension.module is not None,
        reason=reason,
        torch=torch.__version__,
        built_for_torch=extension.build.get("torch") or None,
        cuda=bool(extension.build.get("cuda")),
        compiler=extension.build.get("compiler") or None,
        devices=devices,
        offers=_offered(extension, device) if backend == "torch" and ask_driver else None,
        giving_way=obstacle_to_giving_way("native" if backend else "python", device) if ask_driver else None,
        one_memory=device.type != "cpu" and DeviceMemory(device).is_the_hosts() if ask_driver else None,
        numa=place_of(device) if ask_driver else None,
    )


def _offered(extension: _Extension, device: torch.device) -> tuple[str, ...]:
    """Return what torch has for copies to a device, in the words of `BackendInfo.offers`."""
    has = extension.module.capabilities(device)
    words = {
        "copy_stream": "a stream for copies",
        "pinned_memory": "pinned memory",
        "page_locking": "page-locking",
    }
    return tuple(word for name, word in words.items() if has[name])


def obstacle_to_giving_way(provider: str, device: torch.device) -> str | None:
    """Return why weights on the device (residents) do not give way if memory runs out, and what to do.

    The text is empty if they give way. None for the CPU, where the system can swap memory out.
    """
    if device.type == "cpu":
        return None
    if provider == "python":
        return f"do not give way in pure Python; reinstall it for this torch ({for_this_torch()})"
    if device.type == "cuda" and update_memory_history_recorded():
        return (
            "do not give way while torch records the history of its memory, whose stack traces need Python's "
            "lock; torch.cuda.memory._record_memory_history(None) ends that"
        )
    obstacle = _extension().module.capabilities(device)["free_memory_callback_obstacle"]
    return f"give way to other weights only: {obstacle}" if obstacle else ""


def update_memory_history_recorded() -> bool:
    """Return whether torch records CUDA's allocations, and tell the extension.

    While it does, residents do not give way: Note [When torch's allocator asks].
    """
    ask: Callable[[], bool] | None = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    recorded = begun and ask is not None and ask()
    _extension().module.set_memory_history_recorded(recorded)
    return recorded


def host_memory_beside_masters() -> dict[str, int]:
    """Return the bytes of RAM that engines take in addition to masters, by use, named as in `HostMemory`."""
    module = _extension().module
    return dict.fromkeys(_USES_OF_RAM, 0) if module is None else module.host_memory()


def map_shared(descriptor: int, pieces: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return pieces of a shared segment, given by offset and size, as tensors of bytes.

    Each has a storage of its own, which the native provider can page-lock.
    """
    module = _extension().module
    whole = memoryview(b"")
    if module is None and any(nbytes for _, nbytes in pieces):
        whole = memoryview(mmap.mmap(descriptor, 0))  # one for all, because each keeps a descriptor open

    def piece(offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if module is None:
            return torch.frombuffer(whole[offset : offset + nbytes], dtype=torch.uint8)
        mapped: torch.Tensor = module.map_shared(descriptor, offset, nbytes)
        return mapped

    # Linux puts a mapping below the one before. From last to first, neighbours become one mapping for it, and
    # a process may have 65530.
    return [piece(*each) for each in reversed(pieces)][::-1]


def native_unavailable(device: torch.device) -> str:
    """Return why the native provider cannot serve the device; empty if it can. Wakes the device's driver."""
    backend, obstacle = _engine(_extension(), device)
    return obstacle.reason if obstacle and not backend else ""


def native_extension() -> Any:
    """Return the native extension, for computations without an install. Raise ConfigError without it."""
    extension = _extension()
    if extension.module is None:
        raise ConfigError(
            f"this needs the native extension, and {extension.reason}; `dynswap info` says what is active. "
            f"Reinstall it for this torch ({for_this_torch()})"
        )
    return extension.module


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


def _python(reason: str = "") -> Provider:
    return Provider("python", PythonSession, PythonAttribute, lambda **limits: None, "python", reason)


def _engine(
    extension: _Extension, device: torch.device, *, ask_driver: bool = True
) -> tuple[str, _Obstacle | None]:
    """Return the engine's backend for a device, and why there is no better one, or None.

    The backend is empty if the engine cannot serve the device.
    """
    if extension.module is None:
        return "", _Obstacle(extension.reason, f"Reinstall it for this torch ({for_this_torch()})")
    wanted = engine_backend_from_environment()
    if device.type == "cpu":
        return "host", None
    obstacle = None
    if wanted in ("auto", "cuda") and device.type == "cuda" and not torch.version.hip:
        obstacle = _without_cuda(extension, device, ask_driver)
        if obstacle is None:
            return "cuda", None
    if wanted in ("cuda", "host"):
        served = "not an NVIDIA GPU" if wanted == "cuda" else "not the CPU"
        other = _Obstacle(
            f"DYNSWAP_ENGINE_BACKEND is '{wanted}', and '{device}' is {served}", "Unset the variable"
        )
        return "", obstacle or other
    streams = extension.module.capabilities(device)["obstacle"] if ask_driver else ""
    if not streams:
        return "torch", obstacle
    unusable = f"torch's own streams cannot serve '{device}' ({next(iter(streams.splitlines()))})"
    if obstacle is None:
        return "", _Obstacle(unusable, _STAY)
    return "", _Obstacle(f"{obstacle.reason}, and {unusable}", obstacle.remedy)


def _without_cuda(extension: _Extension, device: torch.device, ask_driver: bool) -> _Obstacle | None:
    """Return why the CUDA backend cannot serve an NVIDIA device; None if it can."""
    if not extension.build.get("cuda"):
        return _Obstacle(
            "the extension was built without CUDA",
            "Reinstall it with CUDA (`DYNSWAP_CUDA=1 pip install --no-deps --force-reinstall .` in a "
            "checkout; where there is no CUDA toolkit, pip downloads one for the build)",
        )
    return _without_driver(extension, device) if ask_driver else None


def _without_driver(extension: _Extension, device: torch.device) -> _Obstacle | None:
    """Return why the CUDA runtime in the extension cannot use a device; None if it can. Wakes the driver."""
    built = f"the extension, built with CUDA {extension.build.get('cuda')},"
    older = (
        "Update the NVIDIA driver, or reinstall the extension with a toolkit that is as old as the driver "
        f"(`CUDA_HOME`, then {FROM_SOURCE})"
    )
    try:
        count = int(extension.module.cuda_device_count())
    except DeviceError as error:
        name = str(error).split(" ", 1)[0]
        remedy = {
            "cudaErrorInsufficientDriver": older,
            "CUDA": "Start the process with the 'spawn' method",  # this process is a forked child
            "cudaErrorSystemNotReady": "Start what the driver needs (with NVSwitch, nvidia-fabricmanager)",
        }.get(name, "See whether `nvidia-smi` works: after an update of the driver it takes a restart")
        return _Obstacle(f"{built} cannot use the driver: {error}", remedy)
    if (device.index or 0) < count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}')"
    among = f"Use one of cuda:0 to cuda:{count - 1}, or look" if count else "Look"
    found = f"{built} finds {count} CUDA device(s), and not '{device}'{shown}"
    return _Obstacle(found, f"{among} at CUDA_VISIBLE_DEVICES")


def _in_a_checkout() -> str:
    """Return words that say that the package was imported from its source folder; empty if it was not."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "build_backend").is_dir():
        return ""
    return f" in the checkout {checkout} (which hides an installed package from Python that is started there)"


@functools.cache
def _extension() -> _Extension:
    """Import the extension, once, and connect it to the front end."""
    try:
        module = importlib.import_module("._C", __package__)
        build = dict(module.build_info())
    except Exception as error:  # not only ImportError: a library of another ABI may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name == f"{__package__}._C":
            return _Extension(None, f"the extension is not built{_in_a_checkout()}", {})
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        reason = f"the extension cannot be imported ({type(error).__name__}: {first_line})"
        return _Extension(None, reason, {})
    built, runs = str(build.get("torch", "")), torch.__version__
    if built.split("+")[0].split(".")[:2] != runs.split("+")[0].split(".")[:2]:  # patch releases share an ABI
        return _Extension(None, f"the extension was built for torch {built}, and torch {runs} runs", build)
    now = bindings_of(Path(__file__).parents[1])
    if now and build.get("bindings") not in ("", now):
        reason = "the compiled extension is older than its sources: run `make build`, or `pip install .`"
        return _Extension(None, reason, build)
    # In front of the functions of pure Python, which ask a tensor for its storage and so make it shared for
    # good.
    untracked_alias_made.insert(0, module.note_untracked_alias)
    take_to_master.insert(0, module.take_to_master)
    handed_out_again.insert(0, lambda _: lambda master: module.fetch(master, True))
    compile_support.fetch_master = module.fetch
    compile_support.copied = module.copied

    if hasattr(module, "release_idle_nodes"):
        # Idle autograd nodes refer to masters, whose hooks may refer to the model. The collector cannot see
        # this cycle.
        gc.callbacks.append(lambda phase, _: module.release_idle_nodes() if phase == "start" else None)
    return _Extension(module, "", build)


lossless_code.extension = lambda: _extension().module
