"""What random programs leave out until the library is mended.

Take an entry out when its mend lands: its rules and its plain programs (test_found.py) run from then on.
DYNSWAP_PROGRAMS_ALSO=name,name (or `all`) runs them before.
"""

from __future__ import annotations

import os

NOT_YET = {
    "graph without a handle": "the graph of a model whose install and handle are gone cannot go backward",
    "mapped neighbour": "what is held of a mapped master and written is lost once its page is written",
    "tuning in functional_call": "a tuning that falls into a functional_call raises",
    "tuning with new buffers": "a tuning of a model whose forward assigns buffers of other shapes raises",
    "frozen swap": "swap_tensors of a resident's master that was frozen while installed is refused",
    "silent part": "a write to a part of a master in RAM that bumps no version is looked for by a sample",
    "fused": "fused optimizers bump no version: a step that changes few elements can be missed",
    "layout": "residents do not see that a master's layout changed (`p.data = p.data.t()`)",
    "statistics": "under a cast, statistics are stale if masters are asked for before backward",
    "held part": "`.data` writes on a part of a handed-out tensor of 64 KiB and more that is held",
    "retune in threads": "retune() while other threads run the model crashes",
    "assign leaks": "load_state_dict(assign=True) keeps the old storages until the uninstall",
    "growing": "a buffer that grows in a forward is planned for again in every call",
    "resize": "resize_ of a resident's master storage crashes",
    "func with a cast": "torch.func.grad and vmap over a model that is cast",
    "lazy norm": "the backward pass of a LazyBatchNorm under a cast",
    "fnuz": "masters of the float8 fnuz types",
}


def waits(name: str | None) -> bool:
    """Whether rules of that name are left out."""
    also = os.environ.get("DYNSWAP_PROGRAMS_ALSO", "").split(",")
    return name in NOT_YET and name not in also and "all" not in also
