"""Threads that could wait for each other forever: in a child process, which can be killed then."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import children
from conftest import Provider

# torch has a mutex for the autograd state of each tensor. A thread that holds it may need the GIL.
PROGRAM = textwrap.dedent(
    """
    import sys, warnings
    from functools import partial
    folder, device, provider, kind = sys.argv[1:]
    sys.path.insert(0, folder)
    import torch, torch.fx.traceback
    from torch.autograd import forward_ad
    import dynswap_ext
    from sample_experts import Fused, Mixture, READS, WIDTH
    from sample_models import mlp
    from threads import repeated

    warnings.simplefilter("ignore", dynswap_ext.DynswapWarning)
    if kind == "anomalies":  # an AccumulateGrad then takes the GIL to note where it was made
        torch.fx.traceback.format_stack = list
        torch.autograd.set_detect_anomaly(True)
    model = Mixture(partial(Fused, kind), layers=1) if kind in READS else mlp(WIDTH, layers=6)
    handle = dynswap_ext.install(model, device=device, dtype=torch.float64, provider=provider)
    x = torch.ones(2, WIDTH, dtype=torch.float64, device=device)
    chosen = (torch.tensor([[[0, 1], [2, 3]]], device=device),) if kind in READS else ()

    def train():
        for _ in range(100):
            model(x, *chosen).sum().backward()

    def differentiate():
        with forward_ad.dual_level():
            for _ in range(100):
                model(x, *chosen)

    def look():
        for _ in range(100000):
            model[0].weight

    def penalise(_):
        sum(parameter.pow(2).sum() for parameter in model.parameters())

    def negate(_):
        model[0]._parameters["weight"].neg()

    if kind == "anomalies":
        with repeated(negate, count=1):
            look()
    else:
        with repeated(penalise, count=3):
            differentiate() if kind == "tangents" else train()
    assert handle.stats().bytes_moved > 0
    """
)


@pytest.mark.parametrize(
    "kind", ["layers", "loop", "batched", "tangents", pytest.param("anomalies", marks=pytest.mark.nightly)]
)
def test_penalties_on_masters_beside_forwards(provider: Provider, kind: str) -> None:
    if not provider.native:
        pytest.skip(
            "torch 2.13's own autograd.Function, which pure Python needs, takes the mutex with the GIL"
        )
    tests = Path(__file__).parent
    done = children.run(PROGRAM, tests, provider.device, provider.backend, kind, timeout=120)
    assert done.returncode == 0, done.stderr
