"""`load_state_dict` changes what a plain model's would, and calls the hooks that it would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, mlp


@pytest.fixture(params=[False, True], ids=["copies", "swaps"])
def conversion(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Set each of torch's two ways to change a module's tensors: writing into them, or swapping them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(before)


def other_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return a state of the same shapes in which each value differs."""
    state = {}
    for index, (name, value) in enumerate(model.state_dict().items()):
        new = torch.linspace(-1, 1, value.numel()).reshape(value.shape) * (index + 1)
        floating = value.is_floating_point()
        state[name] = new.abs().to(dtype if floating and dtype else value.dtype).clone()
    return state


@pytest.mark.parametrize("assign", [False, True], ids=["copying", "assigning"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_loaded_values_are_seen_by_the_next_pass(
    provider: Provider, conversion: bool, assign: bool, dtype: torch.dtype | None, budget: str | None
) -> None:
    model, plain = ConvNet().eval(), ConvNet().eval()
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 3, 8, 8)
    state = other_state(model, dtype)
    with torch.no_grad():
        model(x)
        for m in (model, plain):
            m.load_state_dict(copy.deepcopy(state), assign=assign)
        after = model(x)
        testing.assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()), "state")
        moved = testing.moved(plain, provider.device, torch.float64)
        testing.assert_bit_equal(after, moved(x), "output")
    assert [(n, type(p), p.requires_grad) for n, p in model.named_parameters()] == [
        (n, type(p), p.requires_grad) for n, p in plain.named_parameters()
    ]


@pytest.mark.parametrize("assign", [False, True], ids=["copying", "assigning"])
def test_what_the_masters_are_after_a_load(provider: Provider, conversion: bool, assign: bool) -> None:
    model, plain = mlp(), mlp()
    provider.pair(model)
    kept = []
    for m in (model, plain):
        before = [(id(p), p.data_ptr()) for p in m.parameters()]
        state = other_state(m)
        m.load_state_dict(state, assign=assign)
        masters = list(m.parameters())
        kept.append(
            (
                [(id(p), p.data_ptr()) == old for p, old in zip(masters, before, strict=True)],
                [id(p) == old[0] for p, old in zip(masters, before, strict=True)],
                [p.data_ptr() == value.data_ptr() for p, value in zip(masters, state.values(), strict=True)],
            )
        )
    assert kept[0] == kept[1]


def test_weights_are_streamed_again_after_a_load_of_another_dtype(provider: Provider) -> None:
    model = mlp(features=64, layers=6).eval()  # more than the ring holds
    _, handle = provider.pair(model)
    x = provider.randn(2, 64)
    with torch.no_grad():
        model(x)
        state = other_state(model, torch.bfloat16)
        model.load_state_dict(state, assign=True)
        model(x)
        handle.reset_stats()
        model(x)
    # Within a pass of slack, for what is read ahead.
    total = sum(value.nbytes for value in state.values())
    assert total <= handle.stats().bytes_moved <= 2 * total


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to the CPU": lambda m: m.cpu(),
}


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_conversion_of_the_masters(
    provider: Provider, conversion: bool, convert: str, budget: str | None
) -> None:
    model = mlp(layers=2).eval()
    plain = testing.moved(model)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 16)
    with torch.no_grad():
        model(x)
        for m in (model, plain):
            CONVERSIONS[convert](m)
        testing.assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()), "state")
        moved = testing.moved(plain, provider.device, torch.float64)
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))


def messages(model: nn.Module, state: dict[str, torch.Tensor], **options: Any) -> Any:
    """Return the missing and unexpected keys that a load returns, or the text of its error."""
    try:
        result = model.load_state_dict(state, **options)
    except RuntimeError as error:
        return str(error)
    return result.missing_keys, result.unexpected_keys


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [False, True], ids=["copying", "assigning"])
def test_a_state_that_does_not_fit(provider: Provider, strict: bool, assign: bool) -> None:
    model, plain = mlp(layers=2), mlp(layers=2)
    plain.load_state_dict(model.state_dict())
    provider.pair(model)
    partial = {"0.weight": torch.ones(16, 16), "extra": torch.ones(1)}
    misshapen = {**model.state_dict(), "2.bias": torch.ones(3)}
    for state in (partial, misshapen):
        said = [messages(m, dict(state), strict=strict, assign=assign) for m in (model, plain)]
        assert said[0] == said[1]
        testing.assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()), "state")
    x = provider.randn(2, 16)
    moved = testing.moved(plain, provider.device, torch.float64)
    testing.assert_bit_equal(model(x), moved(x))


def test_a_module_of_its_own_way_to_load(provider: Provider) -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "w")
            super()._load_from_state_dict(state_dict, prefix, *rest)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "w"] = destination.pop(prefix + "weight")

    model = nn.Sequential(Renamed(4, 4))
    provider.pair(model)
    assert set(model.state_dict()) == {"0.w", "0.bias"}
    model.load_state_dict({"0.w": torch.ones(4, 4), "0.bias": torch.zeros(4)})
    assert model[0].weight.unique().tolist() == [1]


# ------------------------------------------------------------------------------------------------- hooks


def put_hooks(model: nn.Module, log: list[Any]) -> list[Any]:
    """Add hooks of every kind to an inner module and the root, each of which logs what it is given."""
    handles = []
    for path in ("0", ""):
        module = model.get_submodule(path)

        def saving(m: nn.Module, prefix: str, keep_vars: bool, at: str = path) -> None:
            log.append(("before a save", at, m is model.get_submodule(at), prefix, keep_vars))

        def saved(m: nn.Module, state: Any, prefix: str, metadata: Any, at: str = path) -> None:
            log.append(("after a save", at, list(state), prefix, sorted(metadata)))
            state[f"{prefix}added"] = state[f"{prefix or '0.'}weight"] * 2

        def saved_privately(m: nn.Module, state: Any, prefix: str, metadata: Any, at: str = path) -> None:
            log.append(("private", at, list(state), prefix, sorted(metadata)))

        def loading(m: nn.Module, state: Any, prefix: str, *rest: Any, at: str = path) -> None:
            value = m.get_parameter("bias" if at else "0.bias")[0].item()  # torch is about to overwrite it
            log.append(("before a load", at, prefix, sorted(state), value))
            state.pop(f"{prefix}added", None)

        def loaded(m: nn.Module, keys: Any, at: str = path) -> None:
            value = m.get_parameter("bias" if at else "0.bias")[0].item()
            log.append(("after a load", at, list(keys.missing_keys), list(keys.unexpected_keys), value))

        handles += [
            module.register_state_dict_pre_hook(saving),
            module.register_state_dict_post_hook(saved),
            module._register_state_dict_hook(saved_privately),
            module.register_load_state_dict_pre_hook(loading),
            module.register_load_state_dict_post_hook(loaded),
        ]
    return handles


@pytest.mark.parametrize("when", ["before the install", "after the install"])
def test_hooks_of_every_kind(provider: Provider, when: str) -> None:
    logs: list[list[Any]] = []
    states = []
    weights = mlp(layers=1).state_dict()
    for installed in (False, True):
        log: list[Any] = []
        model = mlp(layers=1)
        model.load_state_dict(weights)
        if when == "before the install":
            hooks = put_hooks(model, log)
        if installed:
            handle = provider.install(model, dtype=torch.float64)
        if when == "after the install":
            hooks = put_hooks(model, log)
        state = model.state_dict()
        assert {"added", "0.added"} <= set(state)
        model.load_state_dict(state)
        log.append("hooks removed")
        for hook in hooks:
            hook.remove()
        model.load_state_dict({name: value for name, value in state.items() if "added" not in name})
        states.append(dict(model.state_dict()))
        if installed:
            handle.uninstall()
            assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10
    testing.assert_bit_equal(states[1], states[0], "state")


def test_a_private_hook_that_replaces_the_state(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    model._register_state_dict_hook(lambda m, state, prefix, metadata: {"all": torch.ones(1)})
    assert list(model.state_dict()) == ["all"]


def test_hooks_see_what_was_written_on_handed_out_tensors(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    seen: list[float] = []
    model[0].register_state_dict_post_hook(
        lambda m, state, prefix, metadata: seen.append(state[f"{prefix}bias"][0].item())
    )
    model[0].register_load_state_dict_post_hook(lambda m, keys: seen.append(m._parameters["bias"][0].item()))
    bias = model[0].bias
    with torch.no_grad():
        bias.fill_(2)
    state = model.state_dict()
    del bias
    model.load_state_dict({**state, "0.bias": torch.full((16,), 3.0)})
    assert seen == [2, 3]


def test_a_hook_that_writes_through_the_attribute_before_a_load(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)

    def spoil(m: nn.Module, *rest: Any) -> None:
        with torch.no_grad():
            m.bias.fill_(9)

    model[0].register_load_state_dict_pre_hook(spoil)
    result = model.load_state_dict({"0.bias": torch.full((16,), 3.0)}, strict=False)
    assert result.missing_keys == ["0.weight"]
    assert model.state_dict()["0.bias"].unique().tolist() == [3]
    assert model[0].bias.unique().tolist() == [3]


def test_a_hook_that_reads_through_the_attribute_after_a_load(provider: Provider) -> None:
    """A hook after a load reads and writes the loaded values through the attribute, as quantisers do."""
    model = mlp(layers=1)
    provider.pair(model)

    def double(m: nn.Module, keys: Any) -> None:
        m.weight.data.mul_(2)

    model[0].register_load_state_dict_post_hook(double)
    model.load_state_dict({"0.weight": torch.ones(16, 16), "0.bias": torch.ones(16)})
    assert model[0].weight.unique().tolist() == [2]
    assert model.state_dict()["0.weight"].unique().tolist() == [2]
