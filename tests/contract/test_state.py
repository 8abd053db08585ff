"""State: names, order, identity and storage of masters are as without an install; optimizers work on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp

MODELS = [mlp, ConvNet, Recurrent, TinyTransformer]

Use = Callable[[nn.Module, Provider], None]


def forward(model: nn.Module, provider: Provider) -> None:
    shapes = {nn.Sequential: (2, 16), ConvNet: (2, 3, 8, 8), Recurrent: (2, 5, 6)}
    for cls, shape in shapes.items():
        if isinstance(model, cls):
            model(provider.randn(*shape)).sum().backward()
            return
    model(torch.arange(12).reshape(2, 6).to(provider.device)).sum().backward()


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage().data_ptr()
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset(), storage


def state_of(model: nn.Module, **options: Any) -> list[tuple[Any, ...]]:
    return [(name, type(value), *identity(value)) for name, value in model.state_dict(**options).items()]


@pytest.mark.parametrize("make", MODELS)
def test_state_dict_is_the_plain_one(provider: Provider, make: Callable[[], nn.Module]) -> None:
    model = make()
    plain = state_of(model), state_of(model, prefix="a.", keep_vars=True), model.state_dict()._metadata
    provider.pair(model)
    for _ in range(2):
        assert (state_of(model), state_of(model, prefix="a.", keep_vars=True)) == plain[:2]
        assert model.state_dict()._metadata == plain[2]
        forward(model, provider)


def test_state_dict_with_keep_vars_holds_the_masters_themselves(provider: Provider) -> None:
    model = ConvNet()
    provider.pair(model)
    state = model.state_dict(keep_vars=True)
    assert state["conv.weight"] is model.conv._parameters["weight"]
    assert state["norm.running_mean"] is model.norm._buffers["running_mean"]
    assert not model.state_dict()["conv.weight"].requires_grad


def test_a_state_dict_goes_into_the_one_that_is_given(provider: Provider) -> None:
    model = mlp()
    expected = {f"model.{name}": value for name, value in model.state_dict().items()}
    provider.pair(model)
    given: dict[str, Any] = {"other": 1}
    assert model.state_dict(destination=given, prefix="model.") is given
    assert given.pop("other") == 1
    testing.assert_bit_equal(given, expected)


LISTINGS: dict[str, Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]]] = {
    "named_parameters": lambda m: m.named_parameters(),
    "named_buffers": lambda m: m.named_buffers(),
    "with duplicates": lambda m: m.named_parameters(remove_duplicate=False),
    "not recursive": lambda m: next(iter(m.children())).named_parameters(recurse=False),
    "prefixed": lambda m: m.named_parameters(prefix="a"),
    "parameters": lambda m: ((str(i), p) for i, p in enumerate(m.parameters())),
    "buffers": lambda m: ((str(i), b) for i, b in enumerate(m.buffers())),
}


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize("make", MODELS)
def test_listings_give_the_masters_in_order(
    provider: Provider, make: Callable[[], nn.Module], listing: str
) -> None:
    model = make()
    listed = LISTINGS[listing]
    plain = [(name, id(master)) for name, master in listed(model)]
    handle = provider.install(model, dtype=torch.float64)
    for _ in range(2):
        assert [(name, id(master)) for name, master in listed(model)] == plain
        forward(model, provider)
    handle.uninstall()
    assert [(name, id(master)) for name, master in listed(model)] == plain


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["mapped", "to float64"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_made_before_or_after_the_install(
    provider: Provider,
    make: str,
    budget: str | None,
    dtype: torch.dtype | None,
    mapped: Callable[[nn.Module], nn.Module],
) -> None:
    """An optimizer may be made before or after the install. Its steps are those of a plain model.

    Without a cast they are equal to the bit. Masters that are mapped from a file are streamed on the CPU,
    too.
    """
    model = mlp(layers=2)
    if dtype is None:
        model = mapped(model)
    plain = testing.moved(model)
    before = OPTIMIZERS[make](model[0].parameters())
    handle = provider.install(model, dtype=dtype, budget=budget)
    optimizers = [before, OPTIMIZERS[make](model[2].parameters())]
    expected = [OPTIMIZERS[make](plain[i].parameters()) for i in (0, 2)]

    def steps(m: nn.Module, opts: list[torch.optim.Optimizer], seed: int) -> None:
        device = provider.device if m is model else torch.device("cpu")
        x = provider.randn(4, 16, dtype=torch.float32, seed=seed)
        x = x.to(device, dtype if m is model else None)

        def closure() -> torch.Tensor:
            m.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            return loss

        for opt in opts:
            closure()
            opt.step(closure)

    for seed in range(3):
        steps(model, optimizers, seed)
        steps(plain, expected, seed)
        if provider.device.type == "cpu" and dtype is None:  # elsewhere it is the kernels that differ
            testing.assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()), f"step {seed}")
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    if dtype is not None or provider.name != "python":  # pure Python hands the mapping itself out on the CPU
        assert handle.stats().bytes_moved > 0


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda p, new: p.copy_(new),
    "data assigned": lambda p, new: setattr(p, "data", new.clone()),
    "through a view": lambda p, new: p.view(-1).copy_(new.view(-1)),
    "set_": lambda p, new: p.set_(new.clone()),
    "through detach": lambda p, new: p.detach().copy_(new),
    "_foreach_copy_": lambda p, new: torch._foreach_copy_([p], [new]),
}


@pytest.mark.parametrize("is_mapped", [False, True], ids=["in RAM", "mapped"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_master_is_seen_by_the_next_pass(
    provider: Provider,
    write: str,
    budget: str | None,
    is_mapped: bool,
    mapped: Callable[[nn.Module], nn.Module],
) -> None:
    model = mlp(layers=2).eval()
    if is_mapped:
        model = mapped(model)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 16)
    new = [torch.randn(16, 16) for _ in range(2)]
    with torch.no_grad():
        for _ in range(2):
            model(x)
        for index, value in zip((0, 2), new, strict=True):
            # The master itself, as in an optimizer's list: a call of `parameters()` would show the writes.
            WRITES[write](model[index]._parameters["weight"], value)
        after = model(x)
        moved = testing.moved(model, provider.device, torch.float64)
        testing.assert_bit_equal(after, moved(x), "output after the write")
    for index, value in zip((0, 2), new, strict=True):
        testing.assert_bit_equal(model.get_parameter(f"{index}.weight").detach(), value, "master")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["weight", "table"])
def test_a_write_that_bumps_no_version_is_not_undone(provider: Provider, name: str, training: bool) -> None:
    """A write to a master that bumps no version is kept, even while an alias of a handed-out tensor lives.

    The step of a fused optimizer is such a write.
    """
    model = nn.Linear(8, 8).train(training)
    model.register_buffer("table", torch.ones(8))
    handle = provider.install(model, dtype=torch.float64)
    master = {**model._parameters, **model._buffers}[name]
    alias = getattr(model, name).detach()[1:]
    master.data.fill_(3)
    del alias
    handle.flush()
    assert master.unique().tolist() == [3]
    assert getattr(model, name).unique().tolist() == [3]


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_master_swapped_with_another_tensor(provider: Provider, budget: str | None) -> None:
    """`torch.utils.swap_tensors`, which refuses tensors with weak references, works on a master."""
    model = mlp(layers=1).eval()
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 16)
    with torch.no_grad():
        model(x)
        torch.utils.swap_tensors(model[0]._parameters["weight"], nn.Parameter(torch.ones(16, 16)))
        after = model(x)
    testing.assert_bit_equal(after, testing.moved(model, provider.device, torch.float64)(x).detach())


class WithExtraState(nn.Linear):
    """Has an extra state that is no tensor, and reads weights to make it."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"sum": float(self._parameters["weight"].detach().sum()), "shape": tuple(self.weight.shape)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_extra_state(provider: Provider) -> None:
    model = nn.Sequential(WithExtraState(4, 4), WithExtraState(4, 4))
    expected = model.state_dict()
    provider.pair(model)
    state = model.state_dict()
    assert list(state) == list(expected)
    assert state["1._extra_state"] == expected["1._extra_state"]
    state["1._extra_state"] = {"sum": 3.0}
    result = model.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    assert model[1].loaded == {"sum": 3.0}


def test_non_persistent_buffers(provider: Provider) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.ones(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    provider.pair(model)
    model.register_buffer("late", torch.ones(3), persistent=False)
    model.register_buffer("late_kept", torch.ones(3))
    assert model.scratch.dtype == model.late.dtype == torch.float64
    assert list(model.state_dict()) == ["kept", "late_kept"]
    assert [name for name, _ in model.named_buffers()] == ["kept", "scratch", "late", "late_kept"]
    model.scratch = torch.zeros(3)  # stays what it was
    model.register_buffer("kept", torch.zeros(3), persistent=False)
    assert list(model.state_dict()) == ["late_kept"]
    result = model.load_state_dict({"late_kept": torch.zeros(3)})
    assert result.missing_keys == result.unexpected_keys == []
