"""`torch.compile(mode="reduce-overhead")`: the operator that fetches weights stays outside CUDA graphs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pretend_cuda
from conftest import Provider, needs_inductor, skip_or_fail
from dynswap_ext import testing

LAYERS, WIDTH = 4, 512


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def layers(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).requires_grad_(False)


def test_inductor_takes_it_out_of_graphs_wherever_it_runs(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor keeps the fetch out of CUDA graphs even if it takes the operator to run on a GPU.

    Its result is on the GPU, so Inductor might come to that conclusion.
    """
    if provider.device.type != "cpu":
        pytest.skip("what is lowered is the same on every device; here it is on the CPU")
    from torch._inductor import config
    from torch._inductor.scheduler import Scheduler

    ask, reasons = Scheduler.should_partition, {}

    def noting(self: Scheduler, node: Any, *arguments: Any, **options: Any) -> str | None:
        with mock.patch.object(type(node), "is_gpu", lambda node: True):
            reason = ask(self, node, *arguments, **options)
        of = getattr(getattr(node, "node", None), "op_overload", None)
        if of is not None:
            reasons.setdefault(str(of), set()).add(reason)
        return reason

    monkeypatch.setattr(Scheduler, "should_partition", noting)
    settings = {"triton.cudagraphs": True, "graph_partition": True, "force_disable_caches": True}
    model, x = layers(16), torch.ones(2, 16)
    expected = model(x)
    provider.install(model, dtype=torch.float64)
    with torch.no_grad(), config.patch(settings):
        found = torch.compile(model)(x.double())
    assert torch.allclose(found.float(), expected)
    assert reasons["dynswap_ext.fetch.default"] == {"CUDAGraph-unsafe custom ops"}


def test_a_streamed_model_is_right_and_moves_each_weight_once_a_call(provider: Provider) -> None:
    if provider.device.type != "cuda":
        pytest.skip("CUDA graphs of torch.compile need a GPU")
    if pretend_cuda.active():
        skip_or_fail("CUDA graphs of torch.compile need a GPU, not the pretend one", cuda=True)
    needs_inductor(provider)
    from torch._inductor.utils import run_and_get_code

    model = layers(WIDTH)
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, budget="minimum")
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        found, code = run_and_get_code(compiled, torch.ones(2, WIDTH, device=provider.device))
        torch.testing.assert_close(found, moved(torch.ones(2, WIDTH, device=provider.device)))
        # The operations between two fetches are captured in a partition.
        partitions = "\n".join(code).count("def partition_")
        assert 0 < partitions <= LAYERS + 1
        for value in range(5):  # the graphs are recorded in the second call, and replayed in later ones
            x = torch.full((2, WIDTH), float(value), device=provider.device)
            before = handle.stats().bytes_moved
            torch.testing.assert_close(compiled(x).clone(), moved(x))
            assert handle.stats().bytes_moved - before <= handle.stats().weight_bytes
    assert handle.stats().bytes_moved > handle.stats().weight_bytes
