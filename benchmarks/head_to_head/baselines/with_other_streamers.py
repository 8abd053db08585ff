"""FlexTensor, piper-offload and TrainStream, written from their documentation. They need a GPU; never run."""

from __future__ import annotations

import torch

from head_to_head.baselines.base import PEER, RAM, Baseline, Prepared, Setting


def _flextensor(setting: Setting) -> Prepared:
    import flextensor

    whole = torch.cuda.get_device_properties(setting.device).total_memory
    config = flextensor.OffloadConfig(max_gpu_mem_fraction=setting.weight_bytes / 4 / whole)
    return Prepared(flextensor.offload(setting.in_ram(), config=config))


def _piper(setting: Setting) -> Prepared:
    from piper_offload import ModelCache, ModelSpec

    lease = ModelCache().use(ModelSpec(key="model", factory=setting.in_ram), device=setting.device)
    return Prepared(lease.__enter__(), handle=None, note="its lease is held for the whole run")


def _trainstream(setting: Setting) -> Prepared:
    raise NotImplementedError("it wraps a model and its optimizer for training; these calls are inference")


_ON_CUDA = "it runs on CUDA alone"
BASELINES = [
    Baseline(
        "FlexTensor",
        PEER,
        _flextensor,
        {RAM: "-", "bus": "copies what its profile places in RAM; budget a quarter"},
        package="flextensor",
        accelerator=_ON_CUDA,
    ),
    Baseline(
        "piper-offload",
        PEER,
        _piper,
        {RAM: "-", "bus": "copies what its cache does not hold"},
        package="piper_offload",
        accelerator=_ON_CUDA,
        python=(3, 14),
    ),
    Baseline(
        "TrainStream",
        PEER,
        _trainstream,
        {RAM: "-", "bus": "-"},
        accelerator="it trains, and runs on CUDA alone",
    ),
]
