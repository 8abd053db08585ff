"""A module that reads a weight several times in one call gets its present value each time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import children
from conftest import Provider, dense_alone_is_pretended
from dynswap_ext import testing
from dynswap_ext._swap.state import session_of

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])


class Reads(nn.Module):
    """Reads its weights until as much as possible is kept for the next read, runs `between`, reads again."""

    def __init__(self, between: Callable[[Reads], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4))
        self.other = nn.Parameter(torch.arange(4.0) + 20)
        self.register_buffer("table", torch.arange(4.0) + 40)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        first = [(self.weight + self.other + self.table).detach() for _ in range(4)]
        if x.device.type != "cpu":
            torch.get_device_module(x.device).synchronize()  # limits.md asks for it before writes to masters
        held = self.between(self)  # noqa: F841
        return x * (self.weight + self.other + self.table) * sum(first)


def master(m: Reads, name: str = "weight") -> Tensor:
    found = {**m._parameters, **m._buffers}[name]
    assert found is not None
    return found


def like(m: Reads, *shape: int, value: float = 3) -> Tensor:
    return torch.full(shape, value, dtype=master(m).dtype, device=master(m).device)


def in_place(m: Reads) -> None:
    with torch.no_grad():
        m.weight.add_(1)


def an_alias(m: Reads) -> None:
    with torch.no_grad():
        m.weight[1].fill_(7)
        m.table[:2] = 5


def a_late_alias(m: Reads) -> None:
    with torch.no_grad():
        row = m.weight.detach()[2]
        m.weight  # noqa: B018
        row.fill_(9)


def an_alias_without_a_trace(m: Reads) -> None:
    values = m.weight.data
    values -= 1


def held(m: Reads) -> Tensor:
    weight = m.weight
    with torch.no_grad():
        weight.add_(1)
        m.weight  # noqa: B018
        m.other.add_(master(m)[2].to(m.other))
    return weight


def the_master(m: Reads) -> None:
    with torch.no_grad():
        master(m).mul_(2)
        master(m, "table").mul_(3)


def the_master_without_a_trace(m: Reads) -> None:
    master(m).data[2, 2] = 77
    master(m, "table").data[1] = 55


def its_memory(m: Reads) -> None:
    if master(m).device.type == "cpu":
        ctypes.memset(master(m).data_ptr() + 4 * master(m).element_size(), 0, 4 * master(m).element_size())
    else:
        master(m).data[1] = 0


def in_another_thread(m: Reads) -> None:
    thread = threading.Thread(target=the_master_without_a_trace, args=(m,))
    thread.start()
    thread.join()


def a_call_in_another_thread(m: Reads) -> None:
    """Call the model on another thread. The end of that call drops what is kept for the call on this one."""

    def work() -> None:
        again, m.between = m.between, lambda _: None
        m(like(m, 4, 4).to(m.weight.device, torch.float64))
        m.between = again

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def new_data(m: Reads) -> None:
    master(m).data = like(m, 4, 4)


def new_data_of_another_shape(m: Reads) -> None:
    master(m).data = like(m, 1, 4)


def the_layout(m: Reads) -> None:
    master(m).data = master(m).data.t()


def the_sign(m: Reads) -> None:
    master(m).data = torch._neg_view(master(m).data)


def swapped(m: Reads) -> None:
    torch.utils.swap_tensors(master(m), nn.Parameter(like(m, 4, 4)))


def swapped_within_its_memory(m: Reads) -> None:
    torch.utils.swap_tensors(master(m), nn.Parameter(master(m).data))


def replaced(m: Reads) -> None:
    m.weight = nn.Parameter(like(m, 4, 4))
    m.register_buffer("table", like(m, 4, value=1))


def replaced_and_put_back(m: Reads) -> None:
    old = m._parameters["weight"]
    m._parameters["weight"] = nn.Parameter(like(m, 4, 4))
    m.weight  # noqa: B018
    m._parameters["weight"] = old


def moved_over_another(m: Reads) -> Tensor:
    """Give `other` memory of the weight, which then shares it, and return `other` after a write."""
    master(m, "other").data = master(m).data[0]
    with torch.no_grad():
        return m.other.fill_(13)


def moved_under_another(m: Reads) -> Tensor:
    master(m).data = master(m, "other").data.expand(4, 4).contiguous()
    master(m, "other").data = master(m).data[3]
    m.weight  # noqa: B018
    with torch.no_grad():
        return m.other.fill_(13)


def frozen(m: Reads) -> None:
    master(m).requires_grad_(False)


def thawed(m: Reads) -> None:
    master(m).requires_grad_(False)
    m.weight  # noqa: B018
    master(m).requires_grad_(True)


def hooks_of_others(m: Reads) -> None:
    with torch.autograd.graph.save_on_cpu():
        (m.weight * m.other).sum().backward()


def a_transform(m: Reads) -> None:
    batch = torch.func.vmap(lambda x: x * m.weight)(like(m, 2, 4, 4).to(m.weight.device))
    with torch.no_grad():
        m.weight.add_((batch[1] % 5).to(m.weight.dtype))


def a_tangent(m: Reads) -> None:
    given = torch.ones_like(m.table)
    _, tangent = torch.func.jvp(lambda x: x * m.weight, (given,), (given * 2,))
    with torch.no_grad():
        m.weight.add_(tangent % 5)


def other_modes(m: Reads) -> None:
    with torch.inference_mode():
        m.weight  # noqa: B018
    with torch.no_grad():
        m.weight  # noqa: B018
        with torch.enable_grad():
            (m.weight * 3).sum().backward()


def freed_memory(m: Reads) -> None:
    storage = master(m).untyped_storage()
    size = storage.nbytes()
    values = master(m).detach().clone()
    if storage.device.type == "cpu":  # the plain model's, on a device, stays where it is
        storage.resize_(0)
        storage.resize_(size)
    master(m).data.copy_(values * 2)


SILENT = (the_master_without_a_trace, its_memory, in_another_thread)
#: Of a weight that stays on the device, the native provider sees silent writes to the master only from the
#: next call on, and takes writes to a held tensor to the master later.
LATER = (*SILENT, held)
CHANGES = (
    *LATER,
    *(in_place, an_alias, a_late_alias, an_alias_without_a_trace, the_master),
    *(a_call_in_another_thread, new_data, new_data_of_another_shape, the_layout, the_sign),
    *(
        swapped,
        swapped_within_its_memory,
        replaced,
        replaced_and_put_back,
        moved_over_another,
        moved_under_another,
    ),
    *(frozen, thawed, hooks_of_others, a_transform, a_tangent, other_modes, freed_memory),
)


@BUDGETS
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_happens_between_two_reads(
    provider: Provider, change: Callable[[Reads], object], training: bool, budget: str | None
) -> None:
    if change in LATER and provider.native and budget:
        pytest.skip("not within a call")
    model = Reads(change).train(training)
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(4, 4)
    outputs: list[list[Tensor]] = []
    gradients = []
    for each in (model, moved):
        outputs.append([])
        for _ in range(2):
            output = each(x)
            outputs[-1].append(output.detach())
            output.sum().backward()
        gradients.append([p.grad for p in each.parameters()])
    testing.assert_bit_equal(*outputs)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.to(theirs.device, theirs.dtype), theirs)
    handle.flush()
    for name in ("weight", "other", "table"):
        testing.assert_bit_equal(master(model, name).detach().double(), master(moved, name).detach().cpu())


@BUDGETS
@pytest.mark.parametrize("write", [in_place, an_alias, an_alias_without_a_trace])
def test_what_a_call_writes_after_its_last_read(
    provider: Provider, write: Callable[[Reads], object], budget: str | None
) -> None:
    class Writes(Reads):
        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            self.between(self)
            return y

    model = Writes(write)
    moved, handle = provider.pair(model, budget=budget)
    for each in (model, moved):
        each(provider.randn(4, 4))
    handle.flush()
    testing.assert_bit_equal(master(model).detach().double(), master(moved).detach().cpu())


def test_a_buffer_that_is_no_longer_cast(provider: Provider) -> None:
    if provider.native:
        pytest.skip("from the next plan on")
    seen = []

    def keep(m: Reads) -> None:
        session = session_of(m)
        assert session is not None
        seen.append(m.table.dtype)
        session.keep_dtype(m, "table")
        seen.append(m.table.dtype)

    model = Reads(keep)
    provider.install(model, dtype=torch.float64)
    model(provider.randn(4, 4))
    assert seen == [torch.float64, torch.float32]


def test_a_swap_with_a_tensor_that_has_no_memory(provider: Provider) -> None:
    dense_alone_is_pretended("sparse")

    def sparse(m: Reads) -> None:
        torch.utils.swap_tensors(master(m), nn.Parameter(like(m, 4, 4).to_sparse(), requires_grad=False))

    class ReadsSparse(Reads):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                self.weight  # noqa: B018
            self.between(self)
            return x * self.weight.to_dense()

    model = ReadsSparse(sparse).requires_grad_(False)
    moved, _ = provider.pair(model)
    x = provider.randn(4, 4)
    testing.assert_bit_equal(model(x), moved(x))


class Penalised(nn.Module):
    """Uses several reads of a weight in one graph, and in graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def weight() -> Tensor:
            return self.layer.weight

        norms = [weight().square().sum() for _ in range(3)]
        weight()
        (inner,) = torch.autograd.grad((weight() * x[0]).square().sum(), x, create_graph=True)
        for _ in range(2):
            weight()
        y = torch.utils.checkpoint.checkpoint(lambda t: t @ weight() @ weight(), x, use_reentrant=False)
        return y.square().sum() + inner.square().sum() + torch.stack(norms).sum()


@BUDGETS
@pytest.mark.parametrize("autocast", [False, True], ids=["as it is", "autocast"])
def test_gradients_of_all_reads_through_checkpoints_and_second_derivatives(
    provider: Provider, budget: str | None, autocast: bool
) -> None:
    model = Penalised()
    moved, _ = provider.pair(model, budget=budget)
    for each in (model, moved):
        x = provider.randn(4, 8).requires_grad_()
        with torch.autocast(provider.device.type, torch.bfloat16, enabled=autocast):
            loss = each(x)
        loss.backward()
    ours, theirs = model.layer.get_parameter("weight"), moved.layer.get_parameter("weight")
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad.cpu(), rtol=1e-5, atol=1e-5)


def test_nothing_of_a_graph_stays_when_the_call_is_over(provider: Provider) -> None:
    """After a call, no graph keeps the master's AccumulateGrad, which would have its old shape."""

    def leave(_: Reads) -> None:
        raise KeyboardInterrupt

    for between in (lambda _: None, leave):
        model = Reads(between)
        provider.install(model, dtype=torch.float64)
        with contextlib.suppress(KeyboardInterrupt):
            model(provider.randn(4, 4))
        ours = model._parameters["weight"]
        assert ours is not None
        ours.data = torch.ones(2, 4)
        (ours * 3).sum().backward()
        assert ours.grad is not None
        assert torch.equal(ours.grad, torch.full((2, 4), 3.0))


def test_one_read_of_a_call_keeps_nothing_of_a_graph(provider: Provider) -> None:
    def other_shape(m: Reads) -> None:
        ours: Any = m._parameters["weight"]
        ours.data = torch.ones(2, 4)
        (ours * 3).sum().backward()
        assert torch.equal(ours.grad, torch.full((2, 4), 3.0))
        ours.data = torch.ones(4, 4)
        ours.grad = None

    class ReadsOnce(Reads):
        def forward(self, x: Tensor) -> Tensor:
            shape = self.weight.shape
            self.between(self)
            return x.expand(shape)

    model = ReadsOnce(other_shape)
    provider.install(model, dtype=torch.float64)
    model(provider.randn(4, 4))


FORKED = """
import os, signal, torch, dynswap_ext
from torch import nn

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones({size}))

    def forward(self):
        for _ in range(4):
            self.weight
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            {in_child}
            seen = self.weight[5].item(), self.weight[6].item(), self._parameters["weight"][5].item()
            os._exit(0 if seen == {child_sees} else 1)
        assert os.waitpid(child, 0)[1] == 0
        seen = self.weight[5].item(), self.weight[6].item()
        assert seen == {parent_sees}, seen

model = Reads()
{before}
dynswap_ext.install(model, device="cpu", dtype=torch.float64, provider={provider!r})
model()
"""
SILENTLY = "self._parameters['weight'].data[5] = 3"
HANDED_OUT = "torch._C._set_grad_enabled(False); self.weight[5] = 3"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("size", [100, 4000])
@pytest.mark.parametrize(
    ("before", "in_child", "child_sees", "parent_sees"),
    [
        ("", SILENTLY, (3, 1, 3), (1, 1)),
        ("", HANDED_OUT, (3, 1, 3), (1, 1)),
        ("model.share_memory()", SILENTLY, (3, 1, 3), (3, 1)),
    ],
    ids=["silently", "on what is handed out", "in memory that is shared"],
)
def test_a_child_forked_between_two_reads_writes(
    provider: Provider,
    size: int,
    before: str,
    in_child: str,
    child_sees: tuple[float, ...],
    parent_sees: tuple[float, ...],
) -> None:
    if provider.name != "python":
        pytest.skip("a forked child has no device, and the engine's threads stay in the parent")
    script = FORKED.format(
        size=size,
        before=before,
        in_child=in_child,
        child_sees=child_sees,
        parent_sees=parent_sees,
        provider=provider.backend,
    )
    done = children.run(textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
