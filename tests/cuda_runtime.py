"""The CUDA runtime, called by number and address: torch's own on a GPU, otherwise that of the pretend device.

Tests on the pretend device prove something only if its rules are CUDA's. `tests/cuda/test_cuda_rules*.py`
check those rules on either device, so a run on a GPU shows where the pretend one is wrong.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import pretend_cuda

SUCCESS, INVALID_VALUE, NOT_READY, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 600, 712, 713
INVALID_HANDLE, INVALID_DIRECTION, NOT_PERMITTED = 400, 21, 800
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_IMPLICIT = 900, 901, 906
UNREGISTERED, HOST, DEVICE = 0, 1, 2
DEFAULT = 4  # cudaMemcpyDefault
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
PAGE = 4096
_CYCLES_A_MILLISECOND = 2_000_000

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Attributes(ctypes.Structure):
    """The struct cudaPointerAttributes."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    ]


class _BatchAttributes(ctypes.Structure):
    """The struct cudaMemcpyAttributes. Its hints stay zero."""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


class Runtime:
    """The functions of the CUDA runtime. Most methods return a cudaError_t."""

    def __init__(self) -> None:
        if pretend_cuda.active():
            self._library = pretend_cuda.runtime()
        else:
            major = str(torch.version.cuda).split(".")[0]
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        torch.zeros(1, device="cuda")  # this thread has a context from here on

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function of the runtime; return its cudaError_t.

        Integers are passed as addresses or sizes. Narrower arguments have to be ctypes objects.
        """
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        wide = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        code = function(*wide)
        if code:
            self._library.cudaGetLastError()  # else torch's next call would find it
        return code

    # Host memory ----------------------------------------------------------------------------------------

    def register(self, address: int, size: int) -> int:
        return self.call("cudaHostRegister", address, size, ctypes.c_uint(0))

    def unregister(self, address: int) -> int:
        return self.call("cudaHostUnregister", address)

    @contextmanager
    def registered(self, address: int, size: int) -> Iterator[None]:
        assert self.register(address, size) == SUCCESS
        try:
            yield
        finally:
            torch.cuda.synchronize()
            assert self.unregister(address) == SUCCESS

    def kind_of(self, address: int) -> int:
        attributes = Attributes()
        assert self.call("cudaPointerGetAttributes", ctypes.byref(attributes), address) == SUCCESS
        return attributes.type

    def range_of(self, address: int) -> tuple[int, int]:
        """Return the first byte and size of the registration or allocation at an address; (0, 0) if none."""
        driver = self._library if pretend_cuda.active() else ctypes.CDLL("libcuda.so.1")
        begin, size = ctypes.c_size_t(), ctypes.c_size_t()
        for value, attribute in ((begin, 11), (size, 12)):  # CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, _SIZE
            if driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_size_t(address)):
                return 0, 0
        return begin.value, size.value

    def host_alloc(self, size: int) -> int:
        block = ctypes.c_void_p()
        assert self.call("cudaHostAlloc", ctypes.byref(block), size, ctypes.c_uint(0)) == SUCCESS
        return block.value or 0

    def free_host(self, address: int) -> int:
        return self.call("cudaFreeHost", address)

    # Streams and events ---------------------------------------------------------------------------------

    def copy(self, to: int, source: int, size: int, stream: torch.cuda.Stream, kind: int = DEFAULT) -> int:
        return self.call("cudaMemcpyAsync", to, source, size, ctypes.c_int(kind), stream.cuda_stream)

    def batch(self, copies: list[tuple[int, int, int]], stream: int, order: int = 1) -> int:
        """Copy each (to, from, bytes) with one call of cudaMemcpyBatchAsync, as CUDA 13 declares it."""
        array = ctypes.c_size_t * len(copies)
        to, source, sizes = (array(*(copy[which] for copy in copies)) for which in range(3))
        attributes, first = _BatchAttributes(order=order), (ctypes.c_size_t * 1)(0)
        arguments = (to, source, sizes, len(copies), ctypes.byref(attributes), first, 1, stream)
        return self.call("cudaMemcpyBatchAsync", *arguments)

    def event(self, timed: bool = True) -> int:
        event = ctypes.c_void_p()
        flags = ctypes.c_uint(0 if timed else 2)
        assert self.call("cudaEventCreateWithFlags", ctypes.byref(event), flags) == SUCCESS
        return event.value or 0

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        arguments = (ctypes.byref(stream), ctypes.c_uint(1), ctypes.c_int(0))
        assert self.call("cudaStreamCreateWithPriority", *arguments) == SUCCESS
        return stream.value or 0

    def is_capturing(self, stream: int) -> tuple[int, int]:
        """Return the error code of cudaStreamIsCapturing, and the status of the capture."""
        status = ctypes.c_int(-1)
        return self.call("cudaStreamIsCapturing", stream, ctypes.byref(status)), status.value

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread call functions that a capture forbids."""
        mode = ctypes.c_int(2)
        assert self.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == SUCCESS
        try:
            yield
        finally:
            assert self.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode)) == SUCCESS


def busy(stream: torch.cuda.Stream, milliseconds: float) -> None:
    """Let a stream idle for a while, without a wait of the host."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * _CYCLES_A_MILLISECOND))


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def pages(count: int) -> tuple[torch.Tensor, int]:
    """Return `count` pages of ordinary memory: a tensor that owns them, and their address."""
    block = torch.zeros((count + 1) * PAGE, dtype=torch.uint8)
    begin = -block.data_ptr() % PAGE
    return block[begin : begin + count * PAGE], block.data_ptr() + begin
