"""The classic installer: `.to()` at each read of an attribute."""

from __future__ import annotations

from dynswap_ext.demo.run import install_hook
from head_to_head.baselines.base import FILE, PEER, RAM, Baseline, Prepared, Setting


def _classic(setting: Setting) -> Prepared:
    model = setting.mapped() if setting.placement == FILE else setting.in_ram()
    install_hook(model, device=setting.device)
    return Prepared(model)


def _pinned(setting: Setting) -> Prepared:
    model = setting.in_ram()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.pin_memory()
    install_hook(model, device=setting.device, non_blocking=True)
    return Prepared(model)


BASELINES = [
    Baseline(
        "classic hook",
        PEER,
        _classic,
        {
            RAM: "nothing moves: .to() hands out what is there; a Python call for each attribute",
            "bus": "copies each weight at each read, pageable, waiting for it",
            FILE: "page faults of the mapping, as .to() hands it out; keeps all that it read",
        },
    ),
    Baseline(
        "classic hook, pinned",
        PEER,
        _pinned,
        {
            RAM: "-",
            "bus": "copies each weight at each read from pinned memory, on the stream that computes",
        },
        accelerator="pinned memory is for an accelerator to read; this runs on the CPU",
    ),
]
