"""`install(mesh=)`: ranks that share out their copies.

On a pretend device, a stand-in for NCCL gathers on a stream; on the CPU it is gloo, on a thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dynswap_ext
import forked_ranks
import pretend_cuda
from conftest import Provider
from dynswap_ext import ConfigError

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forks"),
]

_MODEL = """
import copy, time
from dynswap_ext import testing
from torch.nn.parallel import DistributedDataParallel

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def made(depth=8, width=192):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)]).requires_grad_(False)

def held_by_device():
    if device == "cpu":
        return 0
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()

def moved_by(handle, call):
    before = handle.stats().bytes_moved
    call()
    return handle.stats().bytes_moved - before
"""


@pytest.fixture
def device_type(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of device on which ranks share out copies, even if that is slower."""
    if not provider.native:
        pytest.skip("in pure Python, each rank copies all bytes")
    if provider.device.type != "cpu" and not pretend_cuda.active() and torch.accelerator.device_count() < 2:
        pytest.skip("it needs two GPUs")
    monkeypatch.setenv("DYNSWAP_MESH", "always")
    return provider.device.type


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("masters", ["in RAM", "in a file"])
def test_each_rank_reads_its_part(device_type: str, tmp_path: Path, masters: str, count: int) -> None:
    code = (
        _MODEL
        + """
folder, masters = arguments
model = made()
if masters == "in RAM":
    dynswap_ext.share_masters(model)
else:
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/masters")
    dist.barrier()
    model.load_state_dict(torch.load(f"{folder}/masters", mmap=True), assign=True)
plain = copy.deepcopy(model).to(device, torch.float64)
options = dict(device=device, dtype=torch.float64, budget="minimum")
x = torch.randn(3, 192, dtype=torch.float64, device=device)
with dynswap_ext.install(model, **options) as handle:
    for _ in range(2):
        model(x)
        alone = moved_by(handle, lambda: model(x))
    peak, held = handle.stats().peak_bytes, held_by_device()
with dynswap_ext.install(model, mesh=dist.group.WORLD, **options) as handle:
    told["shares"] = [moved_by(handle, lambda: testing.assert_bit_equal(model(x), plain(x))) / alone
                      for _ in range(5)]
    assert handle.stats().peak_bytes == peak
    begun = time.monotonic()
    while held_by_device() > held and time.monotonic() < begun + 10:  # another thread frees
        time.sleep(0.01)
    assert held_by_device() <= held
    assert handle.stats().host_synchronisations == 0
    handle.check()
    report = handle.report()
    assert report.shared_out.order == 8 and report.shared_out.received_bytes > 2 * alone * (1 - 1 / world)
    assert f"mesh: {world} ranks share out 8 groups in a call; " in str(report)
    assert report.as_dict()["shared_out"]["unused"] == report.shared_out.unused
testing.assert_bit_equal(model.double()(x.cpu()), plain.cpu()(x.cpu()))
"""
    )
    told = forked_ranks.run(code, count, tmp_path, tmp_path, masters, device_type=device_type)
    for rank in told:
        assert rank["shares"][-1] <= 1 / count + 0.02, rank
    assert sum(rank["shares"][-1] for rank in told) >= 1


def test_backward_too_and_adapters_that_ddp_trains(device_type: str, tmp_path: Path) -> None:
    if device_type != "cpu":
        pytest.skip("gloo averages the gradients of masters in RAM")
    code = (
        _MODEL
        + """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapters = made(), nn.ModuleList(nn.Linear(192, 192) for _ in range(8))

    def forward(self, x):
        for block, adapter in zip(self.base, self.adapters):
            x = block(x) + adapter(x)
        return x

alone, model = Adapted(), Adapted()
dynswap_ext.share_masters(model)
options = dict(device="cpu", dtype=torch.float64, budget="minimum")
handles = dynswap_ext.install(alone, **options), dynswap_ext.install(model, mesh=dist.group.WORLD, **options)
outputs = [], []
for installed, seen in zip((alone, model), outputs):
    wrapped = DistributedDataParallel(installed)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    for step in range(6):
        drawn = torch.Generator().manual_seed(world * step + rank)
        output = wrapped(torch.randn(3, 192, dtype=torch.float64, generator=drawn))
        output.square().mean().backward()
        seen += [output.detach(), *(p.grad.clone() for p in wrapped.parameters() if p.requires_grad)]
        optimizer.step()
        optimizer.zero_grad()
for a, b in zip(*outputs, strict=True):
    testing.assert_bit_equal(a, b)
moved = [handle.stats().bytes_moved for handle in handles]
received = handles[1].report().shared_out.received_bytes
assert moved[0] <= moved[1] + received <= 1.1 * moved[0]
told.update(received=received, frozen=sum(p.nbytes for p in model.base.parameters()))
for handle in handles:
    handle.uninstall()
"""
    )
    for rank in forked_ranks.run(code, 2, tmp_path):
        assert rank["received"] > 3 * 2 * 0.4 * rank["frozen"]  # in forward and in backward of three steps


def test_private_weights_keep_no_others_from_being_shared_out(device_type: str, tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.base.bias.requires_grad_(True)  # in one module with a weight that is shared
        self.a, self.b = nn.Linear(base.in_features, 16), nn.Linear(16, base.out_features)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))

model = made(depth=24)
for block in model:
    block.up, block.down = LoRA(block.up), LoRA(block.down)
dynswap_ext.share_masters(model)
plain = copy.deepcopy(model).to(device, torch.float64)
sizes = [p.numel() * 4 for p in model.parameters() if not p.requires_grad]
private = [p.numel() * 4 for p in model.parameters() if p.requires_grad]
x = torch.randn(3, 192, dtype=torch.float64, device=device)
options = dict(device=device, dtype=torch.float64, budget="minimum")
with dynswap_ext.install(model, mesh=dist.group.WORLD, **options) as handle, torch.no_grad():
    for _ in range(5):
        moved = moved_by(handle, lambda: testing.assert_bit_equal(model(x), plain(x)))
    assert handle.report().shared_out.received_bytes > 0
told.update(moved=moved, most=sum(sizes) * (1 / world + 0.02) + sum(private))
"""
    )
    for rank in forked_ranks.run(code, 2, tmp_path, device_type=device_type):
        assert rank["moved"] <= rank["most"]


def test_weights_that_are_not_shared_are_copied_whole(device_type: str, tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
import warnings
model = made()
plain = copy.deepcopy(model).to(device, torch.float64)
with torch.no_grad():
    for other in (model, plain):
        other[0].up.weight[0] = rank  # other weights on each rank
x = torch.randn(3, 192, dtype=torch.float64, device=device)
options = dict(device=device, dtype=torch.float64, budget="minimum")
handle = dynswap_ext.install(model, mesh=dist.group.WORLD, **options)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(5):
        testing.assert_bit_equal(model(x), plain(x))
told["warnings"] = [str(each.message) for each in caught]
assert handle.report().shared_out.received_bytes == 0
try:
    handle.check()
except dynswap_ext.ShortfallError as error:
    told["error"] = str(error)
handle.uninstall()
"""
    )
    for rank in forked_ranks.run(code, 2, tmp_path, device_type=device_type):
        said = "each rank has its weights to itself. Call share_masters(model) before the install"
        assert f"share out no copies now, as {said}" in rank["error"]
        assert len(rank["warnings"]) == 1 and f"share out no copies: {said}" in rank["warnings"][0]


_CALLS = (
    _MODEL
    + """
import time, warnings
model = made()
dynswap_ext.share_masters(model)
plain = copy.deepcopy(model).to(device, torch.float64)
options = dict(device=device, dtype=torch.float64, budget="minimum")
handle = dynswap_ext.install(model, mesh=dist.group.WORLD, **options)
x = torch.randn(3, 192, dtype=torch.float64, device=device)
for _ in range(4):
    model(x)
"""
)


def test_a_rank_may_call_the_model_more_often(device_type: str, tmp_path: Path) -> None:
    code = (
        _CALLS
        + """
if rank == 0:
    for _ in range(80):
        testing.assert_bit_equal(model(x), plain(x))
    assert handle.report().shared_out.why_not == ""
dist.barrier()
for _ in range(3):
    testing.assert_bit_equal(model(x), plain(x))
told.update(handle.report().as_dict()["shared_out"])
handle.uninstall()
"""
    )
    first, second = forked_ranks.run(code, 2, tmp_path, device_type=device_type)
    assert first["for_others"] == 0 and second["for_others"] == 80
    assert first["passes"] == second["passes"] == 87
    assert first["gathered"] >= 81 * 8


def test_a_rank_that_uninstalls_leaves_the_others_alone(device_type: str, tmp_path: Path) -> None:
    code = (
        _CALLS
        + """
if rank == 1:
    begun = time.monotonic()
    handle.uninstall()
    told["seconds"] = time.monotonic() - begun
else:
    for _ in range(4):
        testing.assert_bit_equal(model(x), plain(x))
    told["moved"] = moved_by(handle, lambda: model(x)) / sum(p.nbytes for p in model.parameters())
    told["why_not"] = handle.report().shared_out.why_not
    handle.uninstall()
testing.assert_bit_equal(model.double()(x.cpu()), plain.cpu()(x.cpu()))
"""
    )
    others = forked_ranks.run(code, 3, tmp_path, device_type=device_type)
    assert others.pop(1)["seconds"] < 5
    for rank in others:
        assert rank["moved"] > 0.9 and rank["why_not"] == "rank 1 has uninstalled the model"


def test_a_rank_of_some_of_the_ranks_has_its_number_in_the_program(device_type: str, tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
mesh = dist.new_group([0, 2], backend=backend)
if rank != 1:
    model = made()
    handle = dynswap_ext.install(model, device=device, dtype=torch.float64, budget="minimum", mesh=mesh)
    if rank == 0:
        x = torch.randn(3, 192, dtype=torch.float64, device=device)
        for _ in range(4):
            model(x)
        told["why_not"] = handle.report().shared_out.why_not
    handle.uninstall()
"""
    )
    first = forked_ranks.run(code, 3, tmp_path, device_type=device_type)[0]
    assert first["why_not"] == "rank 2 has uninstalled the model"


def test_what_a_rank_writes_to_its_mapping_stays_its_own(device_type: str, tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
folder, = arguments
model = made()
if rank == 0:
    torch.save(model.state_dict(), f"{folder}/masters")
dist.barrier()
masters = torch.load(f"{folder}/masters", mmap=True)
model.load_state_dict(masters, assign=True)
plain = copy.deepcopy(model).to(device, torch.float64)
x = torch.randn(3, 192, dtype=torch.float64, device=device)
options = dict(device=device, dtype=torch.float64, budget="minimum")
with dynswap_ext.install(model, mesh=dist.group.WORLD, **options) as handle:
    for _ in range(4):
        testing.assert_bit_equal(model(x), plain(x))
    assert handle.report().shared_out.order == 8
    dist.barrier()
    if rank == 1:
        for index, block in enumerate(plain):
            masters[f"{index}.up.weight"].mul_(2)
            block.up.weight.mul_(2)
    dist.barrier()
    if rank == 0:  # the other one brings its parts, and does not call the model
        for _ in range(3):
            testing.assert_bit_equal(model(x), plain(x))
    dist.barrier()
    for _ in range(4):
        testing.assert_bit_equal(model(x), plain(x))
    dist.barrier()
"""
    )
    forked_ranks.run(code, 2, tmp_path, tmp_path, device_type=device_type)


def test_a_rank_that_dies_is_named(device_type: str, tmp_path: Path) -> None:
    if device_type != "cpu":
        pytest.skip("NCCL ends the process")
    code = (
        _CALLS
        + """
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
begun = time.monotonic()
try:
    for _ in range(3):
        testing.assert_bit_equal(model(x), plain(x))
except dynswap_ext.SourceError as error:
    told.update(error=str(error), seconds=time.monotonic() - begun)
told["moved"] = moved_by(handle, lambda: testing.assert_bit_equal(model(x), plain(x)))
told["bytes"] = sum(p.nbytes for p in model.parameters())
told["report"] = str(handle.report())
handle.uninstall()
with open(f"{store}.{rank}", "w") as file:
    json.dump(told, file)
os._exit(0)
"""
    )
    first, _ = forked_ranks.run(code, 2, tmp_path, killed=[1])
    assert "rank 1 is in call 4 of the model" in first["error"]
    assert first["seconds"] < 6 and first["moved"] > 0.9 * first["bytes"]
    assert "share out no copies now, as " in first["report"]


def test_a_rank_that_does_not_install_is_told_of(tmp_path: Path) -> None:
    """The error has what to do, and not gloo's text about sockets, which is its cause."""
    code = """
import datetime
group = dist.new_group(timeout=datetime.timedelta(seconds=1))
model = nn.Linear(4, 4)
if rank == 0:
    try:
        dynswap_ext.install(model, device="cpu", provider="native", mesh=group)
    except dynswap_ext.ConfigError as error:
        told.update(error=str(error), cause=str(error.__cause__))
    assert not dynswap_ext.is_installed(model)
"""
    first, _ = forked_ranks.run(code, 2, tmp_path)
    assert "nothing is installed: another rank does not answer" in first["error"]
    assert "expected all ranks to call install(mesh=)" in first["error"]
    assert "gloo" in first["cause"] and "gloo" not in first["error"]


def test_what_cannot_be_a_mesh_is_refused(tmp_path: Path) -> None:
    code = """
import pytest
from torch.distributed.device_mesh import init_device_mesh
model = nn.Linear(4, 4)
def refused(message, **options):
    with pytest.raises(dynswap_ext.ConfigError, match=message):
        dynswap_ext.install(model, device="cpu", provider=arguments[0], **options)
    assert not dynswap_ext.is_installed(model)

refused("budget is 'auto', with which each rank would choose", mesh=dist.group.WORLD, budget="auto")
refused("mesh is 2; expected a DeviceMesh of one dimension, .* such as torch.*group.WORLD", mesh=2)
square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("host", "rank"))
refused(r"mesh has 2 dimensions \\(host, rank\\); .* such as mesh\\['rank'\\]", mesh=square)
unnamed = init_device_mesh("cpu", (1, 2))
refused(r"2 dimensions \\(without names\\); .* such as init_device_mesh", mesh=unnamed)
groups = [dist.new_group([0]), dist.new_group([1])]
refused(f"mesh is a group that rank {rank} is not in; .*, with this one", mesh=groups[1 - rank])
for name, values in {"budget": ["1MiB", "2MiB"], "dtype": [None, "bf16"], "keep": [(), "weight"]}.items():
    refused(f"rank 0 installs with {name}=.* and rank 1 with {name}=.*; expected the same options",
            mesh=dist.group.WORLD, **{name: values[rank]})
with pytest.warns(dynswap_ext.DynswapWarning, match="mesh= has this rank alone"):
    dynswap_ext.install(model, device="cpu", provider=arguments[0], mesh=groups[rank]).uninstall()
with dynswap_ext.install(model, device="cpu", provider=arguments[0], mesh=square["rank"]) as handle:
    for _ in range(5):
        model(torch.ones(4))
    told = str(handle.report().shared_out)
    assert "no copies now, as the calls copy no weights, or only small ones" in told
    with pytest.raises(dynswap_ext.ConfigError, match="mesh is given, and budget is 'auto'"):
        handle.retune("auto")
"""
    forked_ranks.run(code, 2, tmp_path, "native")
    with pytest.raises(ConfigError, match="there is no process group; start the program with torchrun"):
        dynswap_ext.install(nn.Linear(2, 2), device="cpu", mesh=object())  # type: ignore[arg-type]


def test_pure_python_says_that_it_has_no_effect(tmp_path: Path) -> None:
    code = """
import warnings
model = nn.Linear(4, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    handle = dynswap_ext.install(model, device="cpu", provider="python", mesh=dist.group.WORLD)
told["warnings"] = [str(each.message) for each in caught]
assert handle.report().shared_out is None
handle.uninstall()
"""
    for rank in forked_ranks.run(code, 2, tmp_path):
        assert any("mesh= has no effect in pure Python" in each for each in rank["warnings"])


def test_without_it_torch_distributed_is_not_imported() -> None:
    code = """
import sys, torch
before = "torch.distributed.device_mesh" in sys.modules
import dynswap_ext
model = torch.nn.Linear(2, 2)
with dynswap_ext.install(model, device="cpu", dtype=torch.float64):
    model(torch.ones(2, dtype=torch.float64))
assert before or "torch.distributed.device_mesh" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
