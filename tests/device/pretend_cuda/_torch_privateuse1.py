"""`torch.pretend`: the module of a device of type PrivateUse1, with the functions of torch.cuda.

It is made as the vendors of such devices make theirs, over torch's own classes of streams and events.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

#: The type of device: ``torch.device("pretend")``.
NAME = "pretend"


def prepare(pretend: Any) -> None:
    """Register the device with torch, which is imported here."""
    import torch

    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(NAME, _module(torch, pretend))
    pretend.register_composites()


def _module(torch: Any, pretend: Any) -> ModuleType:
    module = ModuleType(f"torch.{NAME}", __doc__)
    accelerator = torch.accelerator
    generators = tuple(pretend.default_generator(device) for device in range(2))

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        given = torch.device(NAME if device is None else device)
        return pretend.getDevice() if given.index is None else int(given.index)

    class device(accelerator.device_index):  # type: ignore[misc,name-defined]
        def __init__(self, device: Any) -> None:
            super().__init__(index(device))

    def stream(each: Any) -> AbstractContextManager[Any]:
        return nullcontext() if each is None else each

    def default_stream(device: Any = None) -> Any:
        stream_id, device_index, device_type = pretend.getDefaultStream(index(device))
        return torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    functions: dict[str, Any] = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_sleep": pretend.sleep,
        "current_device": pretend.getDevice,
        "current_stream": lambda device=None: accelerator.current_stream(index(device)),
        "default_generators": generators,
        "default_stream": default_stream,
        "device": device,
        "device_count": pretend.getDeviceCount,
        "empty_cache": pretend.emptyCache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="a pretend device", is_integrated_gpu=bool(pretend.faults().integrated)
        ),
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "initial_seed": lambda: generators[index()].initial_seed(),
        "is_available": lambda: pretend.getDeviceCount() > 0,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: generators[index()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(index(device)),
        "mem_get_info": lambda device=None: pretend.memory_info(index(device)),
        "memory_allocated": lambda device=None: accelerator.memory_allocated(index(device)),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(index(device)),
        "memory_stats": lambda device=None: accelerator.memory_stats(index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(index(device)),
        "set_device": lambda device: pretend.setDevice(index(device)),
        "set_per_process_memory_fraction": lambda fraction, device=None: pretend.setMemoryFraction(
            fraction, index(device)
        ),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "stream": stream,
        "synchronize": lambda device=None: accelerator.synchronize(index(device)),
    }
    for name, value in functions.items():
        setattr(module, name, value)
    sys.modules[module.__name__] = module
    return module
