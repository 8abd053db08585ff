"""Installed models in what torch.distributed offers, on two and four ranks of a host.

Each rank has the same model twice, and does with the installed one what it does with the plain one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import forked_ranks
from conftest import Provider

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forks"),
]

_PAIR = """
import itertools
from torch.nn.parallel import DistributedDataParallel
from dynswap_ext import testing
provider, *arguments = arguments

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make():
    torch.manual_seed(0)
    return Model()

def tokens(step, rows=3):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(32, (rows, 5), generator=generator)

numbers = itertools.count()

def mapped(model):
    # Parameters in a file: the CPU would compute with those in RAM where they are.
    path = f"{store}.{os.getpid()}.{next(numbers)}"
    torch.save({name: local(p.detach()) for name, p in model.named_parameters()}, path)
    values = torch.load(path, mmap=True)
    for prefix, module in model.named_modules():
        for key, p in module._parameters.items():
            value = values[f"{prefix}.{key}" if prefix else key]
            if hasattr(p, "to_local"):
                value = type(p).from_local(value, p.device_mesh, p.placements)
            module._parameters[key] = nn.Parameter(value)
    return model

def install(model, **options):
    return dynswap_ext.install(model, device="cpu", provider=provider, **options)

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def same(installed, plain, what):
    for (name, a), b in zip(installed.named_parameters(), plain.parameters(), strict=True):
        testing.assert_bit_equal(local(a.detach()), local(b.detach()), f"{what}: {name}")
        assert (a.grad is None) == (b.grad is None), f"{what}: gradient of {name}"
        if a.grad is not None:
            testing.assert_bit_equal(local(a.grad), local(b.grad), f"{what}: gradient of {name}")

def train(installed, plain, steps=3, what="step"):
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (installed, plain)]
    for step in range(steps):
        outputs = [m(tokens(step)) for m in (installed, plain)]
        testing.assert_bit_equal(*(local(y.detach()) for y in outputs), f"output of {what} {step}")
        for optimizer, output in zip(optimizers, outputs):
            optimizer.zero_grad()
            output.square().mean().backward()
        same(installed, plain, f"{what} {step}")
        for optimizer in optimizers:
            optimizer.step()
        same(installed, plain, f"{what} {step}, afterwards")
"""


def run(provider: Provider, folder: Path, code: str, world: int = 2) -> list[dict[str, Any]]:
    if provider.device.type != "cpu":
        pytest.skip("gloo takes tensors in RAM")
    told = forked_ranks.run(_PAIR + code, world, folder, "native" if provider.native else "python")
    if provider.native:  # pure Python computes with mapped masters where they are
        assert all(moved > 0 for each in told for moved in each.get("moved", ()))
    return told


@pytest.mark.parametrize("first", ["install", "wrap"])
def test_ddp(provider: Provider, tmp_path: Path, first: str) -> None:
    told = run(
        provider,
        tmp_path,
        f"""
model, plain = mapped(make()), make()
if {first == "install"}:
    handle = install(model, budget="minimum")
    wrapped = DistributedDataParallel(model)
else:
    wrapped = DistributedDataParallel(model)
    handle = install(model, budget="minimum")
plain = DistributedDataParallel(plain)
train(wrapped, plain)

# Gradients that are summed without a synchronisation.
for m in (wrapped, plain):
    m.zero_grad()
    with m.no_sync():
        m(tokens(7)).sum().backward()
    m(tokens(8)).sum().backward()
same(wrapped, plain, "no_sync")

# The ranks have different numbers of batches.
for m in (wrapped, plain):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    with m.join():
        for step in range(2 + rank):
            optimizer.zero_grad()
            m(tokens(step)).sum().backward()
            optimizer.step()
same(wrapped, plain, "join")
told["moved"] = [handle.stats().bytes_moved]
told["sum"] = float(sum(p.double().sum() for p in model.parameters()))
""",
    )
    assert told[0]["sum"] == told[1]["sum"]


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_trains_saves_and_loads(provider: Provider, tmp_path: Path, world: int) -> None:
    told = run(
        provider,
        tmp_path,
        """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (world,))

def split():
    model = make()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model

tokens_of_all = tokens
tokens = lambda step: tokens_of_all(step, rows=2)
rank = 0  # each rank has the same batch
model, plain = mapped(split()), split()
handle = install(model)
assert isinstance(model.layers[0].up.weight, DTensor)
train(model, plain)
state = {"model": model.state_dict()}
folder = store + ".saved"
dcp.save(state, checkpoint_id=folder)
handle.uninstall()
train(model, plain, what="uninstalled step")

loaded, plain = mapped(split()), split()
handle = install(loaded)
for each in (loaded, plain):
    with torch.no_grad():
        for p in each.parameters():
            p.zero_()
    state = {"model": each.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    each.load_state_dict(state["model"])
assert float(local(plain.layers[0].up.weight).abs().sum()) > 0
same(loaded, plain, "loaded")
train(loaded, plain, what="loaded step")
told["moved"] = [handle.stats().bytes_moved]
told["local"] = list(loaded.layers[0].up.weight.to_local().shape)
""",
        world,
    )
    assert all(each["local"] == [32 // world, 16] for each in told)


@pytest.mark.parametrize("first", ["install", "shard"])
def test_fully_shard_of_some_modules_and_an_install_of_others(
    provider: Provider, tmp_path: Path, first: str
) -> None:
    run(
        provider,
        tmp_path,
        f"""
from torch.distributed.fsdp import fully_shard

def shard(model):
    for layer in model.layers:
        fully_shard(layer)

def stream(model):
    return [install(model.embed), install(model.head)]

model, plain = mapped(make()), make()
shard(plain)
if {first == "install"}:
    handles = stream(model)
    shard(model)
else:
    shard(model)
    handles = stream(model)
# Those that are not sharded have different gradients on each rank, as they have in the plain model.
train(model, plain)
told["moved"] = [handle.stats().bytes_moved for handle in handles]
for handle in handles:
    handle.uninstall()
train(model, plain, what="uninstalled step")
""",
    )


def test_an_install_leaves_out_what_fully_shard_has(provider: Provider, tmp_path: Path) -> None:
    told = run(
        provider,
        tmp_path,
        """
from torch.distributed.fsdp import fully_shard
model = make()
for layer in model.layers:
    fully_shard(layer)
try:
    install(model)
except dynswap_ext.ConfigError as error:
    told["error"] = str(error)
assert not any(dynswap_ext.is_installed(m) for m in model.modules())
model(tokens(0)).sum().backward()
""",
    )
    for each in told:
        assert "fully_shard" in each["error"]
        assert "install(model.embed)" in each["error"]


def test_pipeline_stages(provider: Provider, tmp_path: Path) -> None:
    run(
        provider,
        tmp_path,
        """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

class Stage(nn.Module):
    def __init__(self, model):
        super().__init__()
        if rank == 0:
            self.embed, self.layers = model.embed, model.layers[:1]
        else:
            self.layers, self.head = model.layers[1:], model.head

    def forward(self, x):
        x = self.embed(x) if rank == 0 else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if rank == 1 else x

modules = [Stage(mapped(make())), Stage(make())]
handle = install(modules[0], budget="minimum")
results = []
for module in modules:
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean())
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randint(32, (4, 5), generator=generator), torch.rand(4, 5, 32, generator=generator)
    for _ in range(2):
        module.zero_grad()
        losses = []
        output = schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
        results.append((output, losses))
if rank == 1:
    testing.assert_bit_equal(results[1][0].detach(), results[3][0].detach(), "output")
same(*modules, "pipeline")
told["moved"] = [handle.stats().bytes_moved]
""",
    )
