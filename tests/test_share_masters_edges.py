"""Weights that ranks cannot share as they are, and ranks that have them in different forms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import forked_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a file is Linux's")

_START = """
from dynswap_ext import share_masters
from dynswap_ext.errors import ConfigError

def error_of(model, **options):
    try:
        share_masters(model, **options)
    except ConfigError as error:
        return str(error)

def module(**tensors):
    made = nn.Module()
    for name, tensor in tensors.items():
        setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return made

def segments():
    with open("/proc/self/maps") as maps:
        return sum("/memfd:dynswap_ext" in line for line in maps)
"""


@pytest.mark.parametrize("optimizer", ["SGD", "LBFGS"])
def test_a_step_with_a_closure_is_on_a_copy(tmp_path: Path, optimizer: str) -> None:
    forked_ranks.run(
        _START
        + f"""
torch.manual_seed(0)
model = nn.Linear(8, 8).requires_grad_(False)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
share_masters(model)
before = model.weight.clone()
dist.barrier()

def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 8)).square().sum()
    loss.backward()
    return loss

if rank == 1:
    model.requires_grad_()
    optimizer.step(closure)
dist.barrier()
assert torch.equal(model.weight, before) == (rank == 0)
""",
        2,
        tmp_path,
    )


def test_what_is_trained_by_the_second_call_is_no_longer_shared(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
model[1].view = nn.Parameter(model[1].weight.detach().t(), requires_grad=False)
share_masters(model)
model[1].requires_grad_()
dist.barrier()
summary = share_masters(model)
told["bytes"] = [summary.shared, summary.private]
expected = model(torch.ones(1, 8))
dist.barrier()
if rank == 1:
    with torch.no_grad():
        model[1].weight.zero_()
    assert not model[1].view.any()
dist.barrier()
if rank == 0:
    assert torch.equal(model(torch.ones(1, 8)), expected)
""",
        2,
        tmp_path,
    )
    assert told[0]["bytes"] == [4 * (64 + 8), 4 * (2 * 64 + 8)]


def test_a_rank_on_the_meta_device_may_not_tie_what_the_first_has_twice(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
for tied in (0, 1):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    if rank == 1:
        model.to("meta")
    if rank == tied:
        model[1].weight = model[0].weight
    told[str(tied)] = error_of(model)
    if tied == 0:
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr()
""",
        2,
        tmp_path,
    )
    for each in told:
        assert each["0"] is None
        assert "'0.weight' and '1.weight' are one weight on rank 1 and two on rank 0" in str(each["1"])


def test_what_is_conjugated_when_it_is_read_is_refused(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
torch.manual_seed(0)
value = torch.randn(4, 4, dtype=torch.complex64).conj()
told["error"] = error_of(module(weight=value if rank == 0 else value.resolve_conj()))
model = module(weight=value.resolve_conj())
share_masters(model)
assert torch.equal(model.weight, value)
""",
        2,
        tmp_path,
    )
    assert "'weight' is conjugated or negated when it is read" in str(told[1]["error"])


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_made_in_inference_mode(tmp_path: Path, rank: int) -> None:
    forked_ranks.run(
        _START
        + f"""
torch.manual_seed(0)
with torch.inference_mode(rank == {rank}):
    model = nn.Linear(8, 8).requires_grad_(False)
expected = model(torch.ones(1, 8))
share_masters(model)
assert segments()
assert torch.equal(model(torch.ones(1, 8)), expected)
if rank == 1:
    model.to("meta")
with torch.inference_mode():
    share_masters(model)
assert torch.equal(model(torch.ones(1, 8)), expected)
if rank == 1:
    assert not model.weight.is_inference()
""",
        2,
        tmp_path,
    )


def test_sparse_weights_and_unknown_wrappers_stay_private(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Opaque(args[0].inner)

values = torch.eye(8)
model = module(
    coo=values.to_sparse(), csr=values.to_sparse_csr(), opaque=Opaque(values), plain=values[:4].clone()
)
summary = share_masters(model)
told["bytes"] = [summary.shared, summary.private]
dist.barrier()
if rank == 1:
    model.coo._values().zero_()
    model.csr.values().zero_()
    model.opaque.inner.zero_()
dist.barrier()
if rank == 0:
    assert torch.equal(model.coo.to_dense(), torch.eye(8))
    assert torch.equal(model.csr.to_dense(), torch.eye(8))
""",
        2,
        tmp_path,
    )
    assert told[0]["bytes"][0] == 4 * 4 * 8


@pytest.mark.parametrize("same", [True, False])
def test_weights_that_ranks_have_mapped_from_two_files_are_compared(tmp_path: Path, same: bool) -> None:
    told = forked_ranks.run(
        _START
        + f"""
from dynswap_ext import checkpoint
path = f"{{store}}.model.{{rank}}"
torch.save({{"weight": torch.full((64, 64), 1.0 if {same} else float(rank))}}, path)
model = checkpoint.load(lambda: nn.Linear(64, 64, bias=False), path).requires_grad_(False)
told["error"] = error_of(model)
told["segments"] = segments()
""",
        2,
        tmp_path,
    )
    for each in told:
        assert each["segments"] == int(same)
        if not same:
            assert "'weight' has other values on rank 1 than on rank 0" in str(each["error"])


@pytest.mark.parametrize("native", [True, False])
def test_thousands_of_weights_take_few_mappings_and_descriptors(tmp_path: Path, native: bool) -> None:
    forked_ranks.run(
        _START
        + f"""
from dynswap_ext import _provider
if not {native}:
    class Missing:
        module = None
    _provider._extension = lambda: Missing
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
model = nn.ParameterList(
    nn.Parameter(torch.full((4,), float(i)), requires_grad=False) for i in range(2000)
)
share_masters(model)
assert 0 < segments() < 200, segments()
assert all(weight.tolist() == [i] * 4 for i, weight in enumerate(model))
""",
        2,
        tmp_path,
    )


def test_weights_are_not_read_if_no_other_rank_has_loaded_them(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
from dynswap_ext.sharing import outline
digest = outline._digest
outline._digest = lambda master: told.setdefault("read", []).append(master is not None) or digest(master)
model = nn.Linear(8, 8).requires_grad_(False)
if rank > 0:
    model.to("meta")
share_masters(model)
""",
        3,
        tmp_path,
    )
    for each in told:
        assert not any(each["read"])


def test_an_error_that_is_over_keeps_no_memory(tmp_path: Path) -> None:
    forked_ranks.run(
        _START
        + """
import gc
from dynswap_ext.sharing.segment import Segment
mapped = Segment.map
def fail(segment, offer):
    mapped(segment, offer)
    if rank == 1:
        raise MemoryError
Segment.map = fail
gc.disable()
model = nn.Linear(8, 8).requires_grad_(False)
assert "MemoryError (rank 1, mapping the shared memory)" in error_of(model)
assert not segments()
""",
        2,
        tmp_path,
    )


def test_one_pattern_of_buffers_and_what_is_no_model(tmp_path: Path) -> None:
    told = forked_ranks.run(
        _START
        + """
model = nn.BatchNorm1d(8)
told["mean"] = error_of(model, buffers="running_*")
told["list"] = error_of([model] if rank == 1 else model)
told["segments"] = segments()
""",
        2,
        tmp_path,
    )
    for each in told:
        assert each["mean"] is None
        assert each["segments"]
        assert "model is a list; expected a torch.nn.Module. " in str(each["list"])
