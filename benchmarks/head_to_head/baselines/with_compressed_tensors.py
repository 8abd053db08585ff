"""compressed-tensors' offload: a module's dictionary of weights is a cache that fetches at each read."""

from __future__ import annotations

from head_to_head.baselines.base import FILE, PEER, RAM, Baseline, Prepared, Setting


def _offload(setting: Setting) -> Prepared:
    from compressed_tensors.offload import dispatch_with_map, set_onload_device

    model = setting.in_ram()
    if setting.placement == FILE:
        places = {name: (setting.device, "disk") for name, _ in model.named_modules()}
        dispatch_with_map(model, places, offload_dir=str(setting.scratch), show_progress=False)
    else:
        set_onload_device(model, setting.device)
    return Prepared(model)


BASELINES = [
    Baseline(
        "compressed-tensors offload",
        PEER,
        _offload,
        {
            RAM: "nothing moves: a Python mapping answers each read",
            "bus": "copies each weight at each read, waiting for it",
            FILE: "reads each weight from a file of its own, which it wrote, at each read",
        },
        package="compressed_tensors",
        rewrites=True,
    )
]
