"""Installed models in torch's wrappers for data-parallel and sharded training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import assert_gradients_as_moved, assert_moved, assert_same_training_step, total
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, testing
from sample_models import ConvNet, mlp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a process group of this process alone."""
    file = tmp_path_factory.mktemp("group") / "init"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _on_the_cpu(provider: Provider) -> None:
    if provider.device.type != "cpu":
        pytest.skip("gloo averages the gradients of masters in RAM")


class Branches(nn.Module):
    """A model of two branches, of which one is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.taken(x)


OPTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (mlp, {}),
    "unused parameters": (Branches, {"find_unused_parameters": True}),
    "static graph": (mlp, {"static_graph": True}),
    "gradients as views": (mlp, {"gradient_as_bucket_view": True}),
    "small buckets": (mlp, {"bucket_cap_mb": 0.0005}),
}


@pytest.mark.parametrize("first", ["install", "wrap", "wrap, install the wrapper"])
@pytest.mark.parametrize("case", OPTIONS)
def test_ddp(provider: Provider, case: str, first: str) -> None:
    make, options = OPTIONS[case]
    model = make()
    moved = testing.moved(model, provider.device, torch.float64)
    if first == "install":
        handle = provider.install(model, dtype=torch.float64)
        wrapped = DistributedDataParallel(model, **options)
    else:
        wrapped = DistributedDataParallel(model, **options)
        handle = provider.install(model if first == "wrap" else wrapped, dtype=torch.float64)
    plain = DistributedDataParallel(moved, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, moved)]
    for step in range(3):
        x = provider.randn(3, 16, seed=step)
        outputs = [m(x) for m in (wrapped, plain)]
        testing.assert_bit_equal(outputs[0], outputs[1], f"output of step {step}")
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            total(output).backward()
        assert_gradients_as_moved(model, moved)
        for optimizer in optimizers:
            optimizer.step()
        moved.load_state_dict(model.state_dict())  # the masters were rounded
    if case != "unused parameters":
        assert_moved(handle, model)
    assert handle.stats().bytes_moved > 0


def test_ddp_accumulates_without_synchronisation(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    wrapped, plain = DistributedDataParallel(model), DistributedDataParallel(moved)
    xs = [provider.randn(3, 16, seed=i) for i in range(2)]
    for m in (wrapped, plain):
        with m.no_sync():
            total(m(xs[0])).backward()
        total(m(xs[1])).backward()
    assert_gradients_as_moved(model, moved, close=True)


def test_ddp_broadcasts_buffers(provider: Provider) -> None:
    model = ConvNet().train()
    moved, handle = provider.pair(model)
    wrapped = DistributedDataParallel(model, broadcast_buffers=True)
    plain = DistributedDataParallel(moved, broadcast_buffers=True)
    for step in range(2):
        x = provider.randn(2, 3, 8, 8, seed=step)
        testing.assert_bit_equal(wrapped(x).detach(), plain(x).detach(), f"output of step {step}")
        moved.load_state_dict(model.state_dict())
    assert model.state_dict()["norm.num_batches_tracked"].item() == 2
    assert_moved(handle, model)


def test_ddp_outlives_the_uninstall(provider: Provider) -> None:
    model = mlp(layers=2)
    plain = testing.moved(model)
    handle = provider.install(model, dtype=torch.float64)
    wrapped = DistributedDataParallel(model)
    total(wrapped(provider.randn(3, 16))).backward()
    handle.uninstall()
    x = torch.randn(3, 16)
    model.zero_grad()
    outputs = [m(x) for m in (wrapped, plain)]
    testing.assert_bit_equal(outputs[0], outputs[1], "output")
    for output in outputs:
        total(output).backward()
    assert_gradients_as_moved(model, plain)


def replicated(model: nn.Module) -> nn.Module:
    """Return one replica, made as nn.parallel.replicate makes it for a device."""
    modules = list(model.modules())
    index = {module: i for i, module in enumerate(modules)}
    copies = {id(t): t.double() for t in (*model.parameters(), *model.buffers())}
    replicas = [module._replicate_for_data_parallel() for module in modules]
    for module, replica in zip(modules, replicas, strict=True):
        for name, child in module._modules.items():
            setattr(replica, name, replicas[index[child]])
        for name, master in module._parameters.items():
            setattr(replica, name, copies[id(master)])
        for name, master in module._buffers.items():
            setattr(replica, name, copies[id(master)].detach())
    return replicas[0]


def test_replicas(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    replica = replicated(model)
    x = provider.randn(3, 16)
    outputs = [replica(x), moved(x)]
    testing.assert_bit_equal(outputs[0], outputs[1], "output of the replica")
    for output in outputs:
        total(output).backward()
    assert_gradients_as_moved(model, moved)
    assert handle.stats().bytes_moved == 0  # a replica has tensors of its own
    assert_same_training_step(model, moved, lambda m: m(x))
    assert_moved(handle, model)
    assert not any(dynswap_ext.is_installed(m) for m in replica.modules())
    dynswap_ext.uninstall(replica)
    assert all(dynswap_ext.is_installed(m) for m in model.modules())
    testing.assert_bit_equal(model(x), moved(x), "output of the model")
    assert handle.active


def assert_trains(model: nn.Module, moved: nn.Module, x: torch.Tensor) -> None:
    """Assert that outputs stay those of the moved model during steps of an optimizer."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, moved)]
    for _ in range(3):
        outputs = [m(x) for m in (model, moved)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("part", [False, True], ids=["whole", "leaf"])
def test_fully_shard_of_an_installed_model_works_or_is_refused(provider: Provider, part: bool) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    masters = [id(p) for p in model.parameters()]
    classes = [type(m) for m in model.modules()]
    x = provider.randn(3, 16)
    model(x)
    try:
        fsdp.fully_shard(model[0] if part else model)
    except ConfigError as error:
        assert "fully_shard" in str(error)
        assert [id(p) for p in model.parameters()] == masters
        assert [type(m) for m in model.modules()] == classes
        assert_same_training_step(model, moved, lambda m: m(x))
        handle.uninstall()
        fsdp.fully_shard(model)
        assert_trains(model, testing.moved(moved, "cpu", torch.float32), x.float())
        return
    assert_trains(model, moved, x)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_moved(handle, model)


@pytest.mark.parametrize("around", [False, True], ids=["itself", "around it"])
@pytest.mark.filterwarnings("ignore:.*FSDP")
def test_fsdp_of_an_installed_model_is_refused(provider: Provider, around: bool) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    masters = [id(p) for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel.*dynswap_ext.uninstall\(model\)"):
        fsdp.FullyShardedDataParallel(
            nn.Sequential(model, nn.ReLU()) if around else model, device_id=torch.device("cpu")
        )
    assert [id(p) for p in model.parameters()] == masters
    assert_same_training_step(model, moved, lambda m: m(provider.randn(3, 16)))
    assert handle.active


@pytest.mark.filterwarnings("ignore:.*FSDP")
def test_install_of_an_fsdp_model_is_refused(provider: Provider) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = fsdp.FullyShardedDataParallel(mlp(layers=2), device_id=torch.device("cpu"))
    x = torch.randn(3, 16)
    before = model(x)
    for part in (model, nn.Sequential(model)):
        with pytest.raises(ConfigError, match="FullyShardedDataParallel"):
            provider.install(part)
    testing.assert_bit_equal(model(x), before)


def test_install_of_a_sharded_model_works_or_is_refused(provider: Provider) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = mlp(layers=2)
    plain = testing.moved(model)
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer)
    masters = [id(p) for p in model.parameters()]
    x = torch.randn(3, 16)
    try:
        provider.install(model, dtype=torch.float64)
    except ConfigError as error:
        assert "fully_shard" in str(error)
        assert [id(p) for p in model.parameters()] == masters
        assert_trains(model, plain, x)
        return
    assert_trains(model, plain.to(torch.float64), x.double())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [id(p) for p in model.parameters()] == masters
