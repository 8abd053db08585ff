"""mmgp: the blocks of lists are moved before their forward, within a budget."""

from __future__ import annotations

import torch

from head_to_head.baselines.base import PEER, RAM, Baseline, Prepared, Setting


def _all(setting: Setting) -> Prepared:
    from mmgp import offload

    model = setting.in_ram()
    megabytes = max(1, setting.weight_bytes // 4 >> 20)
    # A plain number for `budgets` is accepted and ignored, a dictionary is not. No quantisation, no cast.
    offload.all(
        {"transformer": model},
        pinnedMemory=True,
        quantizeTransformer=False,
        convertWeightsFloatTo=None,
        budgets={"*": megabytes},
        verboseLevel=0,
    )
    torch.set_default_device("cpu")  # mmgp changes the default device
    return Prepared(model)


BASELINES = [
    Baseline(
        "mmgp",
        PEER,
        _all,
        {
            RAM: "-",
            "bus": "copies blocks from pinned memory, the next one ahead; budget a quarter",
        },
        package="mmgp",
        accelerator="it runs on CUDA alone",
    )
]
