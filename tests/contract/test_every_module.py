"""Every module class of torch.nn: installed, it computes and learns as a plain one, and is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.class_swap import is_swap_class
from sample_models import trace

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

# Importing it forbids every other test of this process to set a flag of `torch.backends`.
torch.backends.__allow_nonbracketed_mutation_flag = True

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning"),
]

#: How many of torch's sets of arguments are tried for each class, spread evenly.
AT_MOST = 4

CASES = [
    pytest.param(info, training, id=f"{info.name.removeprefix('nn.')}-{'train' if training else 'eval'}")
    for info in module_db
    for training in (True, False)
]


def samples(info: ModuleInfo, training: bool, dtype: torch.dtype) -> list[ModuleInput]:
    torch.manual_seed(1)
    found = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    count = min(AT_MOST, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def copied(arguments: Any, device: torch.device) -> Any:
    """Return a copy of the arguments whose tensors are leaves, to get gradients of their own."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, leaf, arguments)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def step(model: nn.Module, sample: ModuleInput, device: torch.device) -> dict[str, Any]:
    """Run a forward and backward; return the outputs and the gradients of the inputs."""
    arguments = copied((sample.forward_input.args, sample.forward_input.kwargs), device)
    torch.manual_seed(2)  # for dropout and the like
    output = model(*arguments[0], **arguments[1])
    differentiable = [y for y in tensors(output) if y.requires_grad]
    if differentiable:
        generator = torch.Generator().manual_seed(3)
        directions = [torch.randn(y.shape, generator=generator).to(y) for y in differentiable]
        torch.autograd.backward(differentiable, directions)
    return {
        "output": [y.detach() for y in tensors(output)],
        "input gradients": [None if x.grad is None else x.grad for x in tensors(arguments)],
    }


def in_masters_precision(model: nn.Module, plain: nn.Module) -> dict[str, torch.Tensor]:
    state = plain.state_dict()
    return {name: state[name].to(m.device, m.dtype) for name, m in model.state_dict().items()}


def assert_masters_as(model: nn.Module, plain: nn.Module) -> None:
    """Assert that state and gradients equal those of the plain model, rounded to the masters' dtypes."""
    testing.assert_bit_equal(dict(model.state_dict()), in_masters_precision(model, plain), "state")
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        grad = expected[name].grad
        wanted = None if grad is None else grad.to(p.device, p.dtype)
        testing.assert_bit_equal(p.grad, wanted, f"gradient of {name}")


def read_by_a_pass(model: nn.Module, training: bool) -> int:
    """Return the number of elements that a pass has to move. A training module may keep small buffers."""
    held = [*model.parameters(), *(() if training else model.buffers())]
    return sum(t.numel() for t in held)


def materialised(model: nn.Module, plain: nn.Module, sample: ModuleInput, device: torch.device) -> None:
    """Run the first pass of a lazy module, which makes its weights, and give the plain one the same."""
    first, expected = step(model, sample, device), step(plain, sample, device)
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert not any(is_lazy(p) for p in model.parameters())
    if all(p.dtype == q.dtype for p, q in zip(model.parameters(), plain.parameters(), strict=True)):
        testing.assert_bit_equal(first, expected, "the first pass")
    # With two dtypes the weights differ, as torch draws float32 and float64 differently.
    plain.load_state_dict(model.state_dict())
    for module in (model, plain):
        module.zero_grad()


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32", marks=pytest.mark.slow),
        pytest.param(torch.float64, id="float32 to float64"),
    ],
)
@pytest.mark.parametrize(("info", "training"), CASES)
def test_a_module(
    provider: Provider, info: ModuleInfo, training: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    if dtype not in info.dtypes:
        pytest.skip(f"torch knows {info.name} not to work in {dtype}")
    for index, sample in enumerate(samples(info, training, dtype)):
        made = sample.constructor_input
        torch.manual_seed(0)
        model = info.module_cls(*made.args, **made.kwargs).train(training).float()
        lazy = info.is_lazy
        plain = testing.moved(model, provider.device, dtype)
        if lazy:  # on some devices, moving lazy parameters makes them ordinary ones
            there = {**made.kwargs, "device": provider.device, "dtype": dtype}
            plain = info.module_cls(*made.args, **there).train(training)
        if dtype is torch.float32 and not lazy and model.state_dict():
            # On the CPU, weights that are not cast are streamed only if they are mapped from a file.
            testing.map_from_file(model, tmp_path / f"{index}.pt")
        before = trace(model)
        original = type(model)
        handle = provider.install(model, dtype=dtype)
        assert is_swap_class(type(model))
        if lazy:
            materialised(model, plain, sample, provider.device)
            handle.reset_stats()
            original = info.module_cls.cls_to_become
        what = f"{info.name} #{index} ({sample.desc})"

        testing.assert_bit_equal(
            step(model, sample, provider.device), step(plain, sample, provider.device), what
        )
        moved = handle.stats().bytes_moved
        assert_masters_as(model, plain)

        with torch.no_grad():  # the order of use is known by now
            for _ in range(2):
                plain.load_state_dict(model.state_dict())  # rounded to the masters' dtypes
                testing.assert_bit_equal(
                    step(model, sample, provider.device),
                    step(plain, sample, provider.device),
                    f"{what}, again",
                )
                assert_masters_as(model, plain)
        streams = dtype is not torch.float32 or (provider.native and not lazy)
        if streams and read_by_a_pass(model, training):
            assert moved > 0, what

        handle.uninstall()
        assert type(model) is original
        assert not any(is_swap_class(type(module)) for module in model.modules())
        if not lazy:  # a lazy module gets its weights, and loses its hooks, during the install
            assert trace(model) == before
        assert_masters_as(model, plain)
