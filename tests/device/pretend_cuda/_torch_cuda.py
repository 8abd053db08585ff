"""The names that torch.cuda, which is Python, finds in torch._C if torch was built with CUDA."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

FUNCTIONS = (
    "canDeviceAccessPeer", "cudaCachingAllocator_enable", "cudaCachingAllocator_is_enabled", "emptyCache",
    "exchangeDevice", "getCurrentRawStream", "getCurrentStream", "getDefaultStream", "getDevice",
    "getDeviceCount", "getMemoryFraction", "get_sync_debug_mode", "isCurrentStreamCapturing",
    "maybeExchangeDevice", "memoryStats", "resetAccumulatedMemoryStats", "resetPeakMemoryStats", "setDevice",
    "setMemoryFraction", "setStream", "set_sync_debug_mode", "sleep", "synchronize",
)  # fmt: skip


class _Properties(SimpleNamespace):
    """The result of torch.cuda.get_device_properties()."""


def prepare(torch_c: Any, pretend: Any) -> None:
    """Put all names into torch._C, while `torch` is being imported."""
    for name in FUNCTIONS:
        setattr(torch_c, f"_cuda_{name}", getattr(pretend, name))
    torch_c._has_cuda = True
    torch_c._cuda_init = lambda: _init(pretend)
    torch_c._cuda_isInBadFork = lambda: False
    torch_c._cuda_getArchFlags = lambda: "sm_90"
    torch_c._cuda_hostMemoryStats = dict
    torch_c._cuda_ipc_collect = lambda: None
    torch_c._cuda_getCompiledVersion = lambda: 13000
    torch_c._cuda_clearCublasWorkspaces = lambda: None
    torch_c._cuda_getAllocatorBackend = lambda: "native"
    torch_c._host_emptyCache = getattr(torch_c, "_host_emptyCache", lambda: None)
    torch_c._CudaDeviceProperties = _Properties
    torch_c._cudart = _runtime(pretend)
    torch_c._CudaStreamBase = _stream_base(torch_c, pretend)
    torch_c._CudaEventBase = _event_base(torch_c, pretend)
    torch_c._CUDAGraph = _graph(pretend)
    torch_c._graph_pool_handle = lambda: (0, 1)
    torch_c._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    pretend.register_composites()


def _init(pretend: Any) -> None:
    cuda, torch = sys.modules["torch.cuda"], sys.modules["torch"]
    _serve_storages(torch)
    pretend.init()
    cuda.default_generators = tuple(pretend.default_generator(device) for device in range(2))
    cuda._get_device_properties = lambda device: _Properties(
        name="a pretend device", major=9, minor=0, total_memory=pretend.memory_info(device)[1],
        multi_processor_count=1, is_integrated=int(pretend.faults().integrated), is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048, gcnArchName="", warp_size=32, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, pci_domain_id=0, pci_bus_id=0x3B + device, pci_device_id=0,
    )  # fmt: skip


def _serve_storages(torch: Any) -> None:
    # torch._C makes no storages for a device that it was not built for.
    make = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda" and len(args) <= 1:
            size = args[0] if args else 0
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        return make(cls, *args, **({} if device is None else {"device": device}), **kwargs)

    torch.UntypedStorage.__new__ = new


def _runtime(pretend: Any) -> Any:
    class Error(int):
        success = 0

    return SimpleNamespace(
        cudaError=Error,
        cudaGetErrorString=lambda error: f"error {int(error)}",
        cudaMemGetInfo=pretend.memory_info,
        cudaHostRegister=lambda address, size, flags=0: Error(pretend.pin(address, size)),
        cudaHostUnregister=lambda address: Error(pretend.unpin(address)),
        cudaProfilerStart=lambda: Error(0),
        cudaProfilerStop=lambda: Error(0),
    )


def _stream_base(torch_c: Any, pretend: Any) -> type:
    class _CudaStreamBase(torch_c.Stream):  # type: ignore[misc]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = stream_ptr, pretend.getDevice(), 1
            elif not device_type:
                stream_id, device_index, device_type = pretend.new_stream(max(-5, min(0, priority)))
            return super().__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return pretend.priority_of(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    return _CudaStreamBase


def _event_base(torch_c: Any, pretend: Any) -> type:
    class _CudaEventBase(torch_c.Event):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end_event: Any) -> float:
            # torch.Event's own takes no instance of a class that is derived from it.
            return pretend.elapsed_time(self.event_id, end_event.event_id)

    return _CudaEventBase


def _graph(pretend: Any) -> type:
    class _CUDAGraph:
        def __new__(cls, keep_graph: bool = False) -> Any:
            self = super().__new__(cls)
            self._graph = pretend.CudaGraph()
            return self

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            self._graph.capture_begin(capture_error_mode)

        def capture_end(self) -> None:
            self._graph.capture_end()

        def replay(self) -> None:
            self._graph.replay()

        def reset(self) -> None:
            self._graph.reset()

        def pool(self) -> tuple[int, int]:
            return 0, 1

        def register_generator_state(self, generator: Any) -> None:
            pass

    return _CUDAGraph
