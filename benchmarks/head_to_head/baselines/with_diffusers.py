"""diffusers' group offloading: single layers, or the blocks of lists, are moved before their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from head_to_head.baselines.base import FILE, PEER, RAM, Baseline, Prepared, Setting


def _group_offload(level: str, *, stream: bool) -> Callable[[Setting], Prepared]:
    def prepare(setting: Setting) -> Prepared:
        from diffusers.hooks import apply_group_offloading

        options: dict[str, Any] = {"num_blocks_per_group": 1} if level == "block_level" else {}
        if setting.placement == FILE:
            options["offload_to_disk_path"] = str(setting.scratch)
        model = setting.in_ram()
        apply_group_offloading(
            model,
            onload_device=setting.device,
            offload_device="cpu",
            offload_type=level,
            use_stream=stream,
            **options,
        )
        return Prepared(model)

    return prepare


def _baseline(level: str, *, stream: bool) -> Baseline:
    name = level.removesuffix("_level")
    unit = "leaf" if name == "leaf" else "block of a list"
    return Baseline(
        f"diffusers group offload, {name}" + (", stream" if stream else ""),
        PEER,
        _group_offload(level, stream=stream),
        {
            RAM: "nothing moves: hooks around each forward",
            "bus": f"copies each {unit} on a stream of its own while the one before computes"
            if stream
            else f"copies each {unit} before its forward, pageable, and back to what it was",
            FILE: f"reads each {unit} from a file of its own, which it wrote, before each forward",
        },
        package="diffusers",
        accelerator="its streams are an accelerator's; this runs on the CPU" if stream else "",
    )


BASELINES = [
    _baseline(level, stream=stream) for level in ("leaf_level", "block_level") for stream in (False, True)
]
