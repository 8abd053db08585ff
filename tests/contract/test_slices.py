"""Masters that are slices of one tensor: each keeps what is written on it, and sees what overlaps it.

Views of one tensor share a version counter, and the elements of one may lie between those of another.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.changed_elements import bits

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
DTYPES = pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
#: Two slices of equal length, without an element in common.
APART: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "halves": lambda flat: (flat[: len(flat) // 2], flat[len(flat) // 2 :]),
    "ends": lambda flat: (flat[:6], flat[-6:]),
    "interleaved": lambda flat: (flat[::2], flat[1::2]),
    "columns": lambda flat: (flat.view(-1, 2)[:, 0], flat.view(-1, 2)[:, 1]),
}
#: Views share a version counter. The results of `p.data = flat[...]` and of checkpoints do not.
HOW: dict[str, Callable[[Tensor], Tensor]] = {"views": lambda t: t, "data": lambda t: t.data}


def norm(slices: tuple[Tensor, ...], how: str) -> nn.Sequential:
    layer = nn.BatchNorm1d(len(slices[0]))
    layer.running_mean, layer.running_var = (HOW[how](each) for each in slices)
    return nn.Sequential(layer)


class Expected:
    """A moved copy of a model: after a call, it gives the values that the masters must have."""

    def __init__(self, provider: Provider, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.model, self.moved = model, testing.moved(model, provider.device, dtype)
        self.masters, self.copies = (
            {name: value.clone() for name, value in each.state_dict().items()} for each in (model, self.moved)
        )

    def check(self) -> None:
        """Assert that masters have the elements that changed in the copy. Others keep their precision."""
        now = self.moved.state_dict()
        for name, master in self.model.state_dict().items():
            changed = (bits(now[name]) != bits(self.copies[name])).cpu()
            expected = torch.where(changed, now[name].to("cpu", master.dtype), self.masters[name])
            testing.assert_bit_equal(master, expected, name)


@BUDGETS
@DTYPES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("apart", APART)
def test_statistics_that_share_a_tensor(
    provider: Provider, apart: str, how: str, dtype: torch.dtype | None, budget: str | None
) -> None:
    model = norm(APART[apart](torch.linspace(1, 2, 24)), how)
    provider.install(model, dtype=dtype, budget=budget)
    for step in range(1 if dtype is torch.float64 else 3):  # a resident may keep more digits than the master
        width = len(model[0]._buffers["running_mean"])
        expected = Expected(provider, model, dtype)
        x = provider.randn(5, width, dtype=dtype or torch.float32, seed=step)
        testing.assert_bit_equal(model(x), expected.moved(x), "output")
        expected.check()


@BUDGETS
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("apart", ["halves", "interleaved", "columns"])
def test_large_statistics_that_share_a_tensor(
    provider: Provider, apart: str, how: str, budget: str | None
) -> None:
    # The pages of large masters are watched, and two masters may share a page.
    model = norm(APART[apart](torch.linspace(1, 2, 60_000)), how)
    provider.install(model, dtype=torch.float64, budget=budget)
    expected = Expected(provider, model, torch.float64)
    x = provider.randn(3, 30_000)
    testing.assert_bit_equal(model(x), expected.moved(x), "output")
    expected.check()


class Parts(nn.Module):
    """Parameters that are slices of a tensor. A forward adds to those that it is told to."""

    def __init__(self, slices: tuple[Tensor, ...], how: str) -> None:
        super().__init__()
        for index, each in enumerate(slices):
            parameter = nn.Parameter(each)
            if how == "data":
                parameter.data = each
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *indices: int) -> None:
        held = [getattr(self, f"p{index}") for index in indices]
        with torch.no_grad():
            for parameter in held:
                parameter.add_(1)


@BUDGETS
@pytest.mark.parametrize("length", [24, 60_000])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("apart", APART)
def test_parameters_of_a_flat_tensor_that_a_forward_writes(
    provider: Provider, apart: str, how: str, length: int, budget: str | None
) -> None:
    flat = torch.arange(length).remainder(8).float()
    model = Parts(APART[apart](flat), how)
    provider.install(model, dtype=torch.float64, budget=budget)
    for indices in ((0, 1), (1, 0), (1,), (0,)):
        expected = Expected(provider, model, torch.float64)
        expected.moved(*indices)
        model(*indices)
        expected.check()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("apart", APART)
def test_a_write_to_one_master_leaves_what_waits_for_the_other(
    provider: Provider, apart: str, how: str
) -> None:
    flat = torch.linspace(0, 1, 24)
    model = Parts(APART[apart](flat), how)
    handle = provider.install(model, dtype=torch.float64)
    held = model.p0
    with torch.no_grad():
        held.add_(1)
        expected = flat.new_tensor(held.tolist())
        model._parameters["p1"].fill_(7)
        testing.assert_bit_equal(model.p1.detach().cpu(), torch.full_like(expected, 7).double(), "p1")
    del held
    handle.uninstall()
    testing.assert_bit_equal(model.p0.detach(), expected, "p0")
    assert model.p1.unique().tolist() == [7]


GIVEN_AWAY: dict[str, Callable[[nn.Module], Tensor]] = {
    "deepcopy": lambda model: copy.deepcopy(model)[0].weight,
    "pickle": lambda model: pickle.loads(pickle.dumps(model))[0].weight,
    "get_parameter": lambda model: model.get_parameter("0.weight").clone(),
    "state_dict of a layer": lambda model: model[0].state_dict()["weight"].clone(),
    "parameters of a layer": lambda model: next(model[0].parameters()).clone(),
}


@BUDGETS
@DTYPES
@pytest.mark.parametrize("given", GIVEN_AWAY)
@pytest.mark.parametrize("apart", ["same", "overlapping"])
def test_a_master_is_given_away_with_what_was_written_on_the_other(
    provider: Provider, apart: str, given: str, dtype: torch.dtype | None, budget: str | None
) -> None:
    flat = torch.zeros(30, 4)
    model = nn.Sequential(nn.Linear(4, 20), nn.Linear(4, 20))
    first = 0 if apart == "same" else 10  # two names of one range of a file are loaded as "same"
    model[0].weight.data, model[1].weight.data = flat[:20], flat[first : first + 20]
    provider.install(model, dtype=dtype, budget=budget)
    held = model[1].weight
    with torch.no_grad():
        held.fill_(2.0)
    assert (GIVEN_AWAY[given](model)[first:] == 2).all()


def test_backward_after_statistics_of_the_same_tensor(provider: Provider) -> None:
    # Statistics that are written back do not count as a change of the weights that autograd has saved.
    flat = torch.linspace(0.5, 1, 6 + 6 + 36)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
    model[0].weight = nn.Parameter(flat[12:].view(6, 6))
    model[1].running_mean, model[1].running_var = flat[:6], flat[6:12]
    provider.install(model, dtype=torch.float64)
    expected = Expected(provider, model, torch.float64)
    for each in (model, expected.moved):
        each(provider.randn(5, 6)).square().sum().backward()
    for name, parameter in model.named_parameters():
        grad = expected.moved.get_parameter(name).grad
        assert grad is not None
        testing.assert_bit_equal(parameter.grad, grad.to("cpu", torch.float32), name)
    expected.check()


# Random slices, random writes -------------------------------------------------------------------------


class Write(NamedTuple):
    """A write to the slice `index`; `where` names the way in which it is made."""

    index: int
    where: str
    value: float

    def on(self, tensor: Tensor) -> None:
        """Add the value to the first half of the tensor's elements, or of its rows."""
        part = tensor.reshape(-1) if tensor.is_contiguous() else tensor
        part[: max(1, len(part) // 2)].add_(self.value)


def random_slices(draw: random.Random, flat: Tensor) -> list[Tensor]:
    """Return contiguous and strided slices, some of two dimensions, some overlapping."""
    found = []
    for _ in range(draw.randint(2, 5)):
        begin = draw.randrange(len(flat) - 8)
        end = draw.randint(begin + 8, len(flat))
        part = flat[begin : end : draw.choice((1, 1, 1, 2, 3))]
        if draw.random() < 0.3 and len(part) >= 8:
            rows = part[: len(part) // 4 * 4].unflatten(0, (-1, 4))
            part = rows[:, : draw.choice((2, 4))]
        found.append(part if draw.random() < 0.5 else part.data)
    return found


class Scripted(nn.Module):
    """Buffers and parameters that are slices of tensors. A call makes the writes of a script in order."""

    def __init__(self, slices: list[Tensor], parameters: list[bool]) -> None:
        super().__init__()
        for index, (each, is_parameter) in enumerate(zip(slices, parameters, strict=True)):
            if is_parameter:
                self.register_parameter(f"w{index}", nn.Parameter(each))
            else:
                self.register_buffer(f"w{index}", each)

    def master(self, index: int) -> Tensor:
        name = f"w{index}"
        found = self._parameters.get(name, self._buffers.get(name))
        assert found is not None
        return found

    def forward(self, script: list[Write]) -> list[Tensor]:
        read = []
        with torch.no_grad():
            for write in script:
                made = getattr(self, f"w{write.index}")
                write.on(made.data if write.where == "handed out, no version" else made)
                del made
                read.append(getattr(self, f"w{write.index}").detach().clone())
        return read


def write_master(master: Tensor, write: Write) -> None:
    """Write to a master in the way that `write.where` names."""
    with torch.no_grad():
        if write.where == "data":
            write.on(master.data)
        elif write.where == "numpy":
            write.on(torch.from_numpy(master.detach().numpy()))
        elif write.where == "optimizer" and isinstance(master, nn.Parameter):
            master.grad = torch.full_like(master, write.value)
            torch.optim.SGD([master], lr=0.5).step()
            master.grad = None
        else:
            write.on(master)


def as_handed_out(master: Tensor, write: Write, dtype: torch.dtype) -> Tensor:
    """Write to a copy of the master, and take changed elements to the master. Return the copy."""
    with torch.no_grad():
        copied = master.detach().to(dtype, copy=True)
        before = copied.clone()
        write.on(copied)
        changed = bits(before) != bits(copied)
        master[changed] = copied.to(master.dtype)[changed]
        return copied


@pytest.mark.parametrize("seed", range(12))
@BUDGETS
def test_random_slices_of_one_tensor(provider: Provider, budget: str | None, seed: int) -> None:
    draw = random.Random(seed)
    length = draw.choice((40, 40, 400, 30_000))
    layout = draw.getrandbits(32)
    flats = [torch.arange(length).remainder(8).float() for _ in range(2)]  # exact in every dtype
    slices = [random_slices(random.Random(layout), flat) for flat in flats]
    kinds = [draw.random() < 0.5 for _ in slices[0]]
    dtype = draw.choice((torch.bfloat16, torch.float64))
    model, plain = (Scripted(each, kinds) for each in slices)
    provider.install(model, dtype=dtype, budget=budget)
    for step in range(8):
        script = [
            Write(
                draw.randrange(len(kinds)),
                draw.choice(("handed out", "handed out, no version")),
                draw.choice((1.0, 3.0, -2.0)),
            )
            for _ in range(draw.randint(0, 4))
        ]
        for write, read in zip(script, model(script), strict=True):
            expected = as_handed_out(plain.master(write.index), write, dtype)
            testing.assert_bit_equal(read.cpu(), expected, f"read in call {step}")
        where = draw.choice(("version", "data", "numpy", "optimizer", "none"))
        model.state_dict()  # what was handed out is in the masters
        if where != "none":
            write = Write(draw.randrange(len(kinds)), where, 2.0)
            for each in (model, plain):
                write_master(each.master(write.index), write)
        testing.assert_bit_equal(flats[0], flats[1], f"the tensor after call {step}")
        for index in range(len(kinds)):
            found = getattr(model, f"w{index}").detach().cpu()
            testing.assert_bit_equal(found, plain.master(index).detach().to(dtype), f"w{index}, {step}")


def test_large_overlapping_slices_keep_what_both_wrote_in_a_narrower_dtype(provider: Provider) -> None:
    """Overlapping slices keep both writes, also if masters are large (1.5 MiB) but their copies are not."""
    flat = torch.zeros(600_000)
    model = nn.Module()
    model.register_buffer("first", flat[:400_000])
    model.register_buffer("second", flat[200_000:])
    provider.install(model, dtype=torch.bfloat16)
    with torch.no_grad():
        first, second = model.first, model.second
        first[300_000] = 1.0
        second[200_000] = 2.0
        del first, second
    model.state_dict()
    assert flat[300_000] == 1 and flat[400_000] == 2 and flat.count_nonzero() == 2


@pytest.mark.parametrize("pure", [False, True], ids=["provider", "pure Python"])
def test_overlapping_complex_slices_keep_what_both_wrote(provider: Provider, pure: bool) -> None:
    """Overlapping slices of a complex tensor, which is not cast, keep both writes.

    Pure Python hands out copies of them on a device, but not on the CPU.
    """
    flat = torch.zeros(60, dtype=torch.complex64)
    model = nn.Module()
    model.register_buffer("first", flat[:40])
    model.register_buffer("second", flat[20:])
    dynswap_ext.install(model, device=provider.device, provider="python" if pure else provider.backend)
    with torch.no_grad():
        first, second = model.first, model.second
        first[30] = 1j
        second[20] = 2.0
        del first, second
    model.state_dict()
    assert flat[30] == 1j and flat[40] == 2 and flat.count_nonzero() == 2
