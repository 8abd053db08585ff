"""accelerate's hooks: each module's weights are put in place before its forward and taken away after it."""

from __future__ import annotations

from typing import Any

from torch import nn

from head_to_head.baselines.base import FILE, PEER, RAM, Baseline, Prepared, Setting


def _cpu_offload(setting: Setting) -> Prepared:
    from accelerate import cpu_offload

    model = setting.in_ram()
    return Prepared(cpu_offload(model, execution_device=setting.device, offload_buffers=True))


def _disk_offload(setting: Setting) -> Prepared:
    from accelerate import disk_offload

    # accelerate writes a file for each weight, unless the folder has them already.
    model = setting.in_ram()
    disk_offload(model, str(setting.scratch), execution_device=setting.device, offload_buffers=True)
    return Prepared(model)


def _dispatch(setting: Setting) -> Prepared:
    from accelerate import dispatch_model, infer_auto_device_map

    model = setting.in_ram()
    if setting.device.type == "cpu":
        return Prepared(dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True))
    room: dict[int | str, int] = {setting.device.index or 0: setting.weight_bytes // 4, "cpu": 1 << 50}
    places = infer_auto_device_map(model, max_memory=room)
    if setting.device.type not in {str(place).split(":")[0] for place in places.values()} | {
        "cuda" if isinstance(place, int) else "" for place in places.values()
    }:
        return Prepared(
            dispatch_model(model, places, main_device=setting.device, offload_buffers=True, force_hooks=True),
            note="no module of its map fits a quarter of the weights: all are offloaded",
        )
    return Prepared(dispatch_model(model, places, main_device=setting.device, offload_buffers=True))


def _load_and_dispatch(setting: Setting) -> Prepared:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = setting.build()
    model = load_checkpoint_and_dispatch(
        model,
        str(setting.checkpoint),
        device_map=_disk_map(model),
        offload_folder=str(setting.scratch),
        offload_buffers=True,
    )
    return Prepared(model)


def _disk_map(model: nn.Module) -> dict[str, Any]:
    """Return a map with everything on the disk except the smallest part.

    accelerate refuses a map that puts nothing on a device.
    """
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for name, module in model.named_modules()
        if module._parameters or module._buffers
    }
    if "" in sizes and len(sizes) == 1:
        return {"": "disk"}
    places: dict[str, Any] = dict.fromkeys(sizes, "disk")
    places[min(sizes, key=sizes.__getitem__)] = "cpu"
    return places


BASELINES = [
    Baseline(
        "accelerate cpu_offload",
        PEER,
        _cpu_offload,
        {
            RAM: "nothing moves: hooks put each weight in place and take it away",
            "bus": "copies each module's weights before its forward, pageable, waiting for them",
        },
        package="accelerate",
    ),
    Baseline(
        "accelerate dispatch_model",
        PEER,
        _dispatch,
        {
            RAM: "nothing moves: hooks around each forward, weights stay",
            "bus": "a quarter of the weights stays on the device; copies the rest as cpu_offload does",
        },
        package="accelerate",
    ),
    Baseline(
        "accelerate disk_offload",
        PEER,
        _disk_offload,
        {FILE: "reads each weight from a file of its own, which it wrote, before each forward"},
        package="accelerate",
    ),
    Baseline(
        "accelerate load_checkpoint_and_dispatch",
        PEER,
        _load_and_dispatch,
        {FILE: "dispatch_model over the checkpoint itself: reads each weight before each forward"},
        package="accelerate",
    ),
]
