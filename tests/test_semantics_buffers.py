"""What a forward writes to buffers reaches the masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet


def test_a_training_pass_does_not_round_buffers_that_it_only_reads(provider: Provider) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((8,), 1 / 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scale().train()
    provider.install(model, dtype=torch.bfloat16)
    for _ in range(2):
        model(provider.randn(2, 8, dtype=torch.bfloat16))
    testing.assert_bit_equal(model.state_dict()["scale"], torch.full((8,), 1 / 3))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.last = x.detach()[-1]
        self.calls = self.calls + 1
        return x - self.mean


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_in_place_and_assigned_buffers(provider: Provider, training: bool) -> None:
    model = Counter().train(training)
    moved, _ = provider.pair(model)
    for step in range(3):
        x = provider.randn(5, 4, seed=step)
        torch.testing.assert_close(model(x), moved(x), rtol=1e-6, atol=1e-6)
    assert model.get_buffer("count").item() == 3
    torch.testing.assert_close(model.get_buffer("mean"), moved.mean.float().cpu(), rtol=1e-6, atol=1e-6)
    # A tensor that is assigned to a buffer is kept with the master's dtype and device.
    testing.assert_bit_equal(model.get_buffer("last"), moved.last.float().cpu())
    testing.assert_bit_equal(model.get_buffer("calls"), torch.tensor(3))
    assert set(model.state_dict()) == {"count", "mean"}


def test_a_buffer_written_by_index(provider: Provider) -> None:
    model = Counter()
    provider.pair(model)
    with torch.no_grad():
        model.mean[2] = 5.0
        model.mean[0].fill_(3.0)
    assert model.state_dict()["mean"].tolist() == [3.0, 0.0, 5.0, 0.0]


def test_buffers_written_in_inference_mode(provider: Provider) -> None:
    model = ConvNet().train()
    provider.pair(model)
    with torch.inference_mode():
        model(provider.randn(4, 3, 8, 8))
    assert model.get_buffer("norm.num_batches_tracked").item() == 1
    assert model.get_buffer("norm.running_mean").abs().sum() > 0


def test_uninstall_brings_last_writes_home(provider: Provider) -> None:
    model = Counter()
    handle = provider.install(model, dtype=torch.float64)
    mean = model.mean
    mean.add_(1)
    handle.uninstall()
    assert model.mean.tolist() == [1, 1, 1, 1]
