"""Norms: one forward writes the statistics, and another reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_moved, assert_same_training_step, state_copy
from torch import nn

from conftest import Provider
from dynswap_ext import testing

#: Norms with statistics that are on, off, or kept in other ways. test_every_module.py has every norm.
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "batch norm 1d of sequences": (lambda: nn.BatchNorm1d(6), (5, 6, 4)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), (3, 6, 4, 4)),
    "momentum None": (lambda: nn.BatchNorm2d(6, momentum=None), (3, 6, 4, 4)),
    "momentum 1": (lambda: nn.BatchNorm1d(6, momentum=1.0), (5, 6)),
    "no running statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (3, 6, 4, 4)),
    "not affine": (lambda: nn.BatchNorm1d(6, affine=False), (5, 6)),
    "instance norm, statistics": (
        lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        (3, 6, 5),
    ),
}


def rounded_to(model: nn.Module, moved: nn.Module) -> None:
    """Give the moved model the masters' statistics, which are rounded to float32."""
    moved.load_state_dict(model.state_dict())


@pytest.mark.parametrize("case", NORMS)
def test_train_and_eval(provider: Provider, case: str) -> None:
    make, shape = NORMS[case]
    model = make()
    for p in model.parameters():
        nn.init.normal_(p)
    moved, handle = provider.pair(model)
    for step in range(3):
        x = provider.randn(*shape, seed=step)
        if any(True for _ in model.parameters()):
            assert_same_training_step(model, moved, lambda m, x=x: m(x))
        else:
            testing.assert_bit_equal(model(x), moved(x), "output")
        state = moved.state_dict()
        for name, master in model.state_dict().items():
            testing.assert_bit_equal(master, state[name].to(master.device, master.dtype), name)
        rounded_to(model, moved)
    model.eval()
    moved.eval()
    before, versions = state_copy(model), [buffer._version for buffer in model.buffers()]
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output in eval")
    testing.assert_bit_equal(model.state_dict(), before, "state after eval")
    assert [buffer._version for buffer in model.buffers()] == versions, "it is only read"
    if model.state_dict():
        assert handle.stats().bytes_moved > 0


def test_reset_running_stats_of_an_installed_module(provider: Provider) -> None:
    model = nn.BatchNorm1d(6)
    provider.pair(model)
    model(provider.randn(5, 6))
    assert model.state_dict()["num_batches_tracked"].item() == 1
    model.reset_running_stats()
    state = model.state_dict()
    assert state["running_mean"].tolist() == [0] * 6
    assert state["running_var"].tolist() == [1] * 6
    assert state["num_batches_tracked"].item() == 0


def test_reset_parameters_of_an_installed_module(provider: Provider) -> None:
    model = nn.BatchNorm1d(6)
    for p in model.parameters():
        nn.init.normal_(p)
    provider.pair(model)
    model(provider.randn(5, 6))
    model.reset_parameters()
    testing.assert_bit_equal(model.state_dict(), nn.BatchNorm1d(6).state_dict(), "state")


def test_statistics_that_are_switched_off_and_on(provider: Provider) -> None:
    model = nn.BatchNorm1d(6)
    moved, _ = provider.pair(model)
    x = provider.randn(5, 6)
    for m in (model, moved):
        m.running_mean = None
        m.running_var = None
        m.eval()
    testing.assert_bit_equal(model(x), moved(x), "output without statistics")
    for m in (model, moved):
        m.running_mean = torch.full((6,), 0.5, dtype=torch.float64 if m is moved else None).to(
            provider.device
        )
        m.running_var = torch.full((6,), 2.0, dtype=torch.float64 if m is moved else None).to(provider.device)
    testing.assert_bit_equal(model(x), moved(x), "output with statistics again")


def sync_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    model(torch.randn(2, 3, 5, 5))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def test_sync_batch_norm_in_eval(provider: Provider) -> None:
    model = sync_batch_norm().eval()
    assert isinstance(model[1], nn.SyncBatchNorm)
    moved, handle = provider.pair(model)
    x = provider.randn(2, 3, 5, 5)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert_moved(handle, model)


def test_a_conversion_while_installed_is_refused(provider: Provider) -> None:
    # A module that is not installed has no way to tell the handed-out weight from any other result.
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)).eval()
    moved, handle = provider.pair(model)
    with pytest.raises(ValueError, match="non-leaf"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    x = provider.randn(2, 3, 5, 5)
    testing.assert_bit_equal(model(x), moved(x), "output")
    handle.uninstall()
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d]
