"""CUDA's rules for calls during a capture, tested by calls of its own functions."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import pretend_cuda
from conftest import PRETEND, needs_cuda_runtime
from cuda_runtime import CAPTURE_UNSUPPORTED, PAGE, SUCCESS, HostFunction, Runtime, pages

pytestmark = pytest.mark.device


class Calls:
    """One call of each kind, on a stream that captures nothing."""

    def __init__(self) -> None:
        self.cuda = cuda = Runtime()
        self.stream = torch.cuda.Stream()
        self._other = torch.cuda.Stream()
        self._block, self.at = pages(8)
        assert cuda.register(self.at, 4 * PAGE) == SUCCESS
        self._pinned = cuda.host_alloc(PAGE)
        self._there = torch.zeros(8 * PAGE, dtype=torch.uint8, device="cuda")
        self._events = [cuda.event(), cuda.event()]
        self._stream_to_destroy = cuda.stream()
        self._function = HostFunction(lambda _: None)
        for event in self._events:
            cuda.call("cudaEventRecord", event, self.stream.cuda_stream)
        torch.cuda.synchronize()
        stream, there = self.stream.cuda_stream, self._there.data_ptr()
        first, second = self._events
        out = ctypes.c_size_t()
        found, time = ctypes.byref(out), ctypes.byref(ctypes.c_float())
        none = ctypes.c_uint(0)
        pageable = self.at + 4 * PAGE
        self.actions: dict[str, Callable[[], int]] = {
            "cudaEventQuery": lambda: cuda.call("cudaEventQuery", first),
            "cudaEventSynchronize": lambda: cuda.call("cudaEventSynchronize", first),
            "cudaEventCreate": lambda: cuda.call("cudaEventCreateWithFlags", found, none),
            "cudaEventDestroy": lambda: cuda.call("cudaEventDestroy", second),
            "cudaEventRecord": lambda: cuda.call("cudaEventRecord", first, stream),
            "cudaEventElapsedTime": lambda: cuda.call("cudaEventElapsedTime", time, first, second),
            "cudaStreamQuery": lambda: cuda.call("cudaStreamQuery", stream),
            "cudaStreamSynchronize": lambda: cuda.call("cudaStreamSynchronize", stream),
            "cudaStreamWaitEvent": lambda: cuda.call("cudaStreamWaitEvent", stream, first, none),
            "cudaStreamCreate": lambda: cuda.call(
                "cudaStreamCreateWithPriority", found, ctypes.c_uint(1), ctypes.c_int(0)
            ),
            "cudaStreamDestroy": lambda: cuda.call("cudaStreamDestroy", self._stream_to_destroy),
            "cudaStreamIsCapturing": lambda: cuda.is_capturing(stream)[0],
            "cudaDeviceSynchronize": lambda: cuda.call("cudaDeviceSynchronize"),
            "cudaMemcpyAsync, registered": lambda: cuda.copy(there, self.at, PAGE, self.stream),
            "cudaMemcpyAsync, pageable": lambda: cuda.copy(there, pageable, PAGE, self.stream),
            "cudaMemcpyBatchAsync": lambda: cuda.batch([(there, self.at, PAGE)], stream),
            "cudaLaunchHostFunc": lambda: cuda.call("cudaLaunchHostFunc", stream, self._function, 0),
            "cudaHostRegister": lambda: cuda.register(pageable, PAGE),
            "cudaHostUnregister": lambda: cuda.unregister(self.at),
            "cudaHostAlloc": lambda: cuda.call("cudaHostAlloc", found, PAGE, none),
            "cudaFreeHost": lambda: cuda.free_host(self._pinned),
            "cudaPointerGetAttributes": lambda: int(cuda.kind_of(self.at) < 0),
            "cudaGetDeviceCount": lambda: cuda.call("cudaGetDeviceCount", ctypes.byref(ctypes.c_int())),
        }

    def close(self) -> None:
        """Unregister what is still registered, as the next test may get the same pages."""
        torch.cuda.synchronize()
        for at in (self.at, self.at + 4 * PAGE):
            self.cuda.unregister(at)

    def during_a_capture(self, name: str, mode: str = "global", elsewhere: bool = False) -> tuple[int, bool]:
        """Make a call while another stream captures; return its code, and whether the capture survives."""
        graph, found = torch.cuda.CUDAGraph(), [-1]
        x = torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(self._other):
            graph.capture_begin(capture_error_mode=mode)
            x.add_(1)

            def act() -> None:
                found[0] = self.actions[name]()

            if elsewhere:
                thread = threading.Thread(target=act)
                thread.start()
                thread.join()
            else:
                act()
            try:
                graph.capture_end()
            except Exception:
                return found[0], False
        return found[0], True


@pytest.fixture
def calls() -> Iterator[Calls]:
    needs_cuda_runtime()
    calls = Calls()
    yield calls
    calls.close()
    if PRETEND:
        pretend_cuda.reset()  # a forbidden call is a violation there


NAMES = (
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaEventCreate",
    "cudaEventDestroy",
    "cudaEventRecord",
    "cudaEventElapsedTime",
    "cudaStreamQuery",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "cudaStreamCreate",
    "cudaStreamDestroy",
    "cudaStreamIsCapturing",
    "cudaDeviceSynchronize",
    "cudaMemcpyAsync, registered",
    "cudaMemcpyAsync, pageable",
    "cudaMemcpyBatchAsync",
    "cudaLaunchHostFunc",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaPointerGetAttributes",
    "cudaGetDeviceCount",
)
#: Calls that could wait for the capture itself.
ALWAYS_FORBIDDEN = {"cudaDeviceSynchronize"}
FORBIDDEN = ALWAYS_FORBIDDEN | {
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaStreamQuery",
    "cudaStreamSynchronize",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaHostAlloc",
    "cudaFreeHost",
}


def answer(name: str, forbidden: set[str] = ALWAYS_FORBIDDEN) -> tuple[int, bool]:
    """Return the expected code of a call, and whether the capture survives. `forbidden` calls are refused."""
    return (CAPTURE_UNSUPPORTED, False) if name in forbidden else (SUCCESS, True)


@pytest.mark.parametrize("name", NAMES)
def test_during_a_capture_in_global_mode(calls: Calls, name: str) -> None:
    assert calls.during_a_capture(name) == answer(name, FORBIDDEN)


@pytest.mark.parametrize("name", NAMES)
def test_in_another_thread(calls: Calls, name: str) -> None:
    """The global mode holds for all threads."""
    assert calls.during_a_capture(name, elsewhere=True) == answer(name, FORBIDDEN)


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_during_a_capture_of_one_thread(calls: Calls, name: str) -> None:
    """In thread-local mode, other threads may make all calls that do not wait for the whole device."""
    assert calls.during_a_capture(name, "thread_local", elsewhere=True) == answer(name)


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_a_thread_that_is_relaxed(calls: Calls, name: str) -> None:
    with calls.cuda.relaxed():
        assert calls.during_a_capture(name) == answer(name)


def test_the_legacy_stream_may_be_asked(calls: Calls) -> None:
    """The legacy stream may be asked for a capture, since torch's streams do not wait for it.

    If a capturing stream waited for it, the code would be 906.
    """
    calls.actions["ask"] = lambda: calls.cuda.is_capturing(0)[0]
    assert calls.during_a_capture("ask") == (SUCCESS, True)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
def test_torch_takes_a_segment_during_a_capture(calls: Calls, elsewhere: bool) -> None:
    """torch cannot get a segment for another stream during a capture, as cudaMalloc is unsafe then."""

    def allocate() -> int:
        try:
            with torch.cuda.stream(calls.stream):
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        except Exception:
            return CAPTURE_UNSUPPORTED
        return SUCCESS

    torch.cuda.empty_cache()
    calls.actions["allocate"] = allocate
    assert calls.during_a_capture("allocate", elsewhere=elsewhere) == (CAPTURE_UNSUPPORTED, False)
