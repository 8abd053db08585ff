"""RamTorch and block-streamer: modules in a list, each of which takes the output of the one before it."""

from __future__ import annotations

from torch import nn

from head_to_head.baselines.base import PEER, RAM, Baseline, Prepared, Setting


def _ramtorch(setting: Setting) -> Prepared:
    from ramtorch import OffloadModel

    modules = _chain(setting.in_ram())
    # Room for a quarter of the modules: two slots for streamed ones, and the others for those that stay.
    stay = max(0, len(modules) // 4 - 2)
    return Prepared(OffloadModel(modules, device=str(setting.device), window=2, pin=stay))


def _block_streamer(setting: Setting) -> Prepared:
    from block_streamer import StreamedModel

    budget = setting.weight_bytes // 4
    modules = _chain(setting.in_ram())
    return Prepared(StreamedModel(modules, device=setting.device, buffer_budget_bytes=budget))


def _chain(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a Sequential, each activation joined to the layer before it."""
    if not isinstance(model, nn.Sequential):
        raise NotImplementedError("it takes a list of modules that follow each other; this model is not one")
    chain: list[nn.Module] = []
    for module in model:
        if chain and not any(True for _ in module.parameters()):
            chain[-1] = nn.Sequential(chain[-1], module)
        else:
            chain.append(module)
    return chain


BASELINES = [
    Baseline(
        "RamTorch OffloadModel",
        PEER,
        _ramtorch,
        {RAM: "hands out weights where they are", "bus": "copies the next module ahead; some stay"},
        package="ramtorch",
    ),
    Baseline(
        "block-streamer",
        PEER,
        _block_streamer,
        {RAM: "-", "bus": "copies the next module ahead; budget a quarter"},
        package="block_streamer",
        accelerator="it runs on CUDA alone",
    ),
]
