"""Comparisons of an installed model with a copy of it that was moved to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dynswap_ext
from coded_masters import stored_bytes
from dynswap_ext import testing

Run = Callable[[nn.Module], Any]


def master_bytes(*modules: nn.Module) -> int:
    """Return the bytes of all parameters, each once: what a pass through the models moves at least."""
    masters = {id(p): p for module in modules for p in module.parameters()}
    return sum(stored_bytes(p) for p in masters.values())


def assert_moved(handle: dynswap_ext.Handle, *modules: nn.Module) -> None:
    """Assert that the weights were streamed; otherwise a right output proves nothing."""
    moved, expected = handle.stats().bytes_moved, master_bytes(*modules)
    assert moved >= expected > 0, f"{moved} bytes moved, at least {expected} expected"


def total(value: Any) -> torch.Tensor:
    """Return a scalar that depends on every floating tensor of an output."""
    if isinstance(value, torch.Tensor):
        return value.square().sum() if value.is_floating_point() else torch.zeros(())
    if isinstance(value, (tuple, list)):
        return torch.stack([total(v).double() for v in value if v is not None]).sum()
    raise TypeError(f"no total of a {type(value).__name__}")


def assert_gradients_as_moved(model: nn.Module, moved: nn.Module, *, close: bool = False) -> None:
    """Assert that masters have the gradients of a moved model, rounded to each master's dtype.

    `close` allows for rounding errors: if a weight is used more than once, its gradients may be summed in the
    master's dtype.
    """
    expected = dict(moved.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, p in found.items():
        wanted = expected[name].grad
        if wanted is None:
            assert p.grad is None, f"{name} has a gradient"
            continue
        assert p.grad is not None, f"{name} has no gradient"
        wanted = wanted.to(p.device, p.dtype)
        if close:
            torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=1e-5, msg=f"gradient of {name}")
        else:
            testing.assert_bit_equal(p.grad, wanted, f"gradient of {name}")


def assert_same_training_step(
    model: nn.Module, moved: nn.Module, run: Run = lambda m: m(), *, close: bool = False
) -> None:
    """Assert that one forward and backward give the same outputs and gradients in both models."""
    outputs = [run(m) for m in (model, moved)]
    testing.assert_bit_equal(outputs[0], outputs[1], "output")
    for m, output in zip((model, moved), outputs, strict=True):
        m.zero_grad()
        with torch.enable_grad():
            total(output).backward()
    assert_gradients_as_moved(model, moved, close=close)


def state_copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
