"""Ranks of a host that share one copy of their frozen weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import forked_ranks
from dynswap_ext import share_masters
from dynswap_ext.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a file is Linux's")

_MODEL = """
from dynswap_ext import share_masters
from dynswap_ext.errors import ConfigError

class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.first.weight
        self.low = nn.Linear(64, 64).bfloat16()
        self.transposed = nn.Parameter(torch.randn(32, 64).t())
        rows = torch.randn(4, 64)
        self.above, self.below = nn.Parameter(rows[:2]), nn.Parameter(rows[2:])  # of one storage
        self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("quantized", torch.arange(64, dtype=torch.uint8))
        self.requires_grad_(False)
        self.head.requires_grad_()

    def forward(self, x):
        x = self.tied(self.first(x)) + self.low(x.bfloat16()).float()
        x = self.norm(x + self.above.sum(0) - self.below.sum(0)) * (1 + self.quantized.float() / 64)
        return self.head(x + (x @ self.transposed) @ self.transposed.t())

def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}

def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
                                        for name in a)
"""


def test_frozen_weights_are_shared_and_what_is_trained_is_each_ranks_own(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + """
model = Model()
parameters = dict(model.named_parameters())
before, x = state(model), torch.randn(3, 64)
model.eval()
expected = model(x)
summary = share_masters(model, buffers=["quant*"])
assert equal(state(model), before)
assert torch.equal(model(x), expected)
assert dict(model.named_parameters()).keys() == parameters.keys()
assert all(p is parameters[name] for name, p in model.named_parameters())
assert model.tied.weight is model.first.weight
assert not model.transposed.is_contiguous()
assert model.below.data_ptr() == model.above.data_ptr() + model.above.nbytes
dist.barrier()
if rank == 1:
    with torch.no_grad():
        for master in (*model.parameters(), *model.buffers()):
            master.zero_()
dist.barrier()
told["zero"] = sorted(name for name, value in model.state_dict().items() if value.numel() and not value.any())
told["summary"] = [summary.ranks, summary.shared, summary.private, summary.mapped]
""",
        2,
        tmp_path,
    )
    shared = ["above", "below", "first.bias", "first.weight", "low.bias", "low.weight"]
    shared += ["quantized", "tied.weight", "transposed"]
    nbytes = 4 * (64 * 64 + 64 + 32 * 64 + 4 * 64) + 2 * (64 * 64 + 64) + 64
    norm = 4 * 64 * 4 + 8
    assert set(shared) <= set(told[0]["zero"])
    assert not {"head.weight", "norm.running_var"}.intersection(told[0]["zero"])
    # The parameters of the norm are frozen, its statistics are buffers.
    private = 4 * (8 * 64 + 8) + norm - 2 * 64 * 4
    assert told[0]["summary"] == [[0, 1], nbytes + 2 * 64 * 4, private, 0]


def test_a_rank_on_the_meta_device_gets_the_weights_of_the_first(tmp_path: Path) -> None:
    forked_ranks.run(
        _MODEL
        + """
reference = Model()
before = state(reference)
with torch.device("cpu" if rank == 0 else "meta"):
    model = Model()
share_masters(model)
assert equal(state(model), before)
assert model.tied.weight is model.first.weight
assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
x = torch.randn(3, 64)
assert torch.equal(model.train()(x), reference.train()(x))
with torch.no_grad():
    model.head.weight.fill_(rank)  # its own
dist.barrier()
assert (model.head.weight == rank).all()
""",
        3,
        tmp_path,
    )


_REFUSED = (
    (
        "extra",
        "if rank == 1: model.other = nn.Linear(2, 2)",
        "rank 0 has no 'other.bias' (and 1 more), which rank 1",
    ),
    (
        "shape",
        "if rank == 1: model.head = nn.Linear(64, 9)",
        "'head.bias' is a Parameter of torch.float32 [9]",
    ),
    (
        "dtype",
        "if rank == 1: model.low.float()",
        "'low.bias' is a Parameter of torch.float32 [64] on rank 1",
    ),
    ("trained", "if rank == 0: model.head.requires_grad_(False)", "that requires a gradient on rank 1 and"),
    (
        "value",
        "if rank == 1: model.below.data[1, 3] = 7",
        "'below' has other values on rank 1 than on rank 0",
    ),
    (
        "meta",
        "if rank == 0: model.to('meta')",
        "rank 0, whose weights the others are to share, has 'above' (and",
    ),
    (
        "installed",
        "if rank == 1: dynswap_ext.install(model, device='cpu')",
        "is installed; expected a model that",
    ),
    ("pattern", "buffers = ['nothing.*']", "buffers='nothing.*' names no buffer of the model"),
)


def test_ranks_that_differ_are_all_told_which_and_nothing_has_changed(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + f"""
for name, change, _ in {_REFUSED!r}:
    model, buffers = Model(), []
    exec(change)
    places = [(p, p.data_ptr()) for p in (*model.parameters(), *model.buffers())]
    try:
        share_masters(model, buffers=buffers)
    except ConfigError as error:
        told[name] = str(error)
    assert all(p.data_ptr() == place for p, place in places)
    if dynswap_ext.is_installed(model):
        dynswap_ext.uninstall(model)
""",
        2,
        tmp_path,
    )
    for name, _, message in _REFUSED:
        assert told[0][name] == told[1][name]
        assert message in str(told[0][name]), told[0][name]
        assert str(told[0][name]).startswith("share_masters has shared nothing: ")


def test_an_optimizer_steps_on_a_copy_of_a_shared_weight(tmp_path: Path) -> None:
    forked_ranks.run(
        _MODEL
        + """
model, reference = Model(), Model()
share_masters(model)
dist.barrier()
before = state(model)
if rank == 1:
    for each in (model, reference):
        each.first.requires_grad_()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9)
        for _ in range(2):
            each.eval()(torch.ones(3, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(state(model), state(reference))
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert model.tied.weight is model.first.weight
dist.barrier()
if rank == 0:
    assert equal(state(model), before)
""",
        2,
        tmp_path,
    )


def test_an_installed_model_streams_what_is_shared_and_one_rank_counts_it(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + """
import copy
model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).requires_grad_(False), torch.ones(2, 256)
if rank == 1:
    model.to("meta")
share_masters(model)
dist.barrier()
expected, plain = model(x), copy.deepcopy(model).double()
weights = sum(p.nbytes for p in model.parameters())
for provider in ("native", "python"):
    with dynswap_ext.install(model, device="cpu", dtype=torch.float64, provider=provider) as handle:
        assert torch.equal(model(x.double()), plain(x.double()))
        host = handle.report().host
        told[provider] = [host.masters, host.weights == weights, handle.stats().bytes_moved > 0]
assert torch.equal(model(x), expected)
told["weights"] = weights
""",
        2,
        tmp_path,
    )
    for provider in ("native", "python"):
        assert told[0][provider] == [told[0]["weights"], True, True]
        assert told[1][provider] == [0, True, True]


_MEMORY = """
from pathlib import Path
import signal

def pss():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

def touch(model):
    return sum(float(p.sum()) for p in model.parameters())
"""


@pytest.mark.parametrize("place", ["RAM", "file"])
def test_a_host_has_one_copy(tmp_path: Path, place: str) -> None:
    size = 96 << 20
    if place == "file":
        weights = {f"{layer}.weight": torch.rand(512, 1024) for layer in range(48)}
        torch.save(weights, tmp_path / "model.pt")
    told = forked_ranks.run(
        _MODEL
        + _MEMORY
        + """
from dynswap_ext import checkpoint
place, path = arguments
# The code and the threads that it takes do not count.
small = lambda: nn.Linear(8, 8).requires_grad_(False)
torch.manual_seed(1)
torch.save(small().state_dict(), f"{store}.{rank}.small")
share_masters(checkpoint.load(small, f"{store}.{rank}.small").requires_grad_(False))
dist.barrier()
empty = pss()
make = lambda: nn.Sequential(*(nn.Linear(1024, 512, bias=False) for _ in range(48)))
torch.manual_seed(0)
model = (make() if place == "RAM" else checkpoint.load(make, path)).requires_grad_(False)
for p in model.parameters() if place == "RAM" else ():
    p.data = p.data.clone()  # in the C library's heap, which keeps what is freed
summary = share_masters(model)
total = touch(model)
dist.barrier()
told["took"] = pss() - empty
told["bytes"] = [summary.shared, summary.mapped]
dist.barrier()
assert total == touch(model)
""",
        3,
        tmp_path,
        place,
        tmp_path / "model.pt",
    )
    assert told[0]["bytes"] == ([size, 0] if place == "RAM" else [0, size])
    assert sum(int(str(each["took"])) for each in told) <= 1.3 * size


def test_nothing_is_left_when_ranks_are_killed(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + """
import signal, time
def segments(pid):
    with open(f"/proc/{pid}/maps") as file:
        return {line.split()[4] for line in file if "/memfd:dynswap_ext" in line}
def descriptors(pid):
    folder = f"/proc/{pid}/fd"
    links = [f"{folder}/{name}" for name in os.listdir(folder)]  # and one that lists them, closed by now
    return [link for link in links if os.path.lexists(link) and "memfd" in os.readlink(link)]
before = set(os.listdir("/dev/shm"))
child = os.fork() if rank == 1 else None  # it has the memory, too
model = Model()
if child == 0:
    time.sleep(600)
share_masters(model)
assert len(segments("self")) == 1 and not descriptors("self")
assert set(os.listdir("/dev/shm")) <= before
expected = model.eval()(torch.ones(2, 64))
dist.barrier()
if rank == 0:
    told["inode"] = list(segments("self"))
    with open(f"{store}.0", "w") as file:
        json.dump(told, file)
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
time.sleep(0.2)
assert torch.equal(model(torch.ones(2, 64)), expected)  # rank 0 is gone, and the memory is there
del model
assert not segments("self")
with open(f"{store}.1", "w") as file:
    json.dump(told, file)
os._exit(0)
""",
        2,
        tmp_path,
        killed={0},
    )
    assert told[0]["inode"]


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match="without a process group; expected one of several ranks"):
        share_masters(nn.Linear(2, 2))


def test_a_pipeline_is_refused_and_a_buffer_may_be_given_as_a_text(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + """
try:
    share_masters([Model()])
except ConfigError as error:
    told["list"] = str(error)
told["shared"] = share_masters(nn.BatchNorm1d(8, affine=False), buffers="running_*").shared
""",
        2,
        tmp_path,
    )
    for of_rank in told:
        assert "model is a list; expected a torch.nn.Module" in of_rank["list"]
        assert of_rank["list"].endswith("(rank 0, looking for the weights)")
        assert of_rank["shared"] == 2 * 8 * 4


def test_a_model_that_is_not_frozen_is_warned_of_once(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _MODEL
        + """
import warnings
for name, model in (("trained", Model().requires_grad_()), ("frozen", Model()), ("none", nn.ReLU())):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(share_masters(model))
    told[name] = [str(each.message) for each in caught if each.category is dynswap_ext.DynswapWarning]
""",
        2,
        tmp_path,
    )
    (message,) = told[0].pop("trained")
    assert "requires_grad_(False) before share_masters" in message
    assert told[0] == {"frozen": [], "none": []}
    assert told[1] == {"trained": [], "frozen": [], "none": []}


def test_a_rank_that_is_alone_on_its_host_says_so(tmp_path: Path) -> None:
    (told,) = forked_ranks.run(
        _MODEL + "told['says'] = str(share_masters(nn.Linear(4, 4, bias=False).requires_grad_(False)))",
        1,
        tmp_path,
    )
    assert told["says"] == "rank 0 is alone on its host: 64 bytes of weights in RAM and 0 bytes in files"
