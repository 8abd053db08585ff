"""Training, casting and loading models of coded weights gives what plain weights give, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynswap_ext.lossless.tensor import LosslessTensor, encoded, of_plain
from dynswap_ext.testing import assert_bit_equal
from sample_lossless import counted


def network(*, coded: bool) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(40, 64),
        nn.Linear(64, 128),
        nn.GELU(),
        nn.LayerNorm(128),
        nn.Linear(128, 128),
        nn.Linear(128, 8),
    )
    model[5].bias = nn.Parameter(torch.zeros(8))
    if coded:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(encoded(parameter.detach())))
        assert isinstance(model[1].weight, LosslessTensor) and isinstance(model[0].weight, LosslessTensor)
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_plain_weights(name: str) -> None:
    models = network(coded=True), network(coded=False)
    inputs, losses = torch.randint(40, (6, 5)), []
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            losses.append(loss.detach())
            optimizer.step()
        for (key, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert type(one.grad) is torch.Tensor
            assert_bit_equal(one.grad, two.grad, key)
            assert torch.equal(one, two), key
    assert losses[0] == losses[1] and losses[4] == losses[5] != losses[0]
    assert models[0][1].weight.coded is None  # type: ignore[index, union-attr]


def test_frozen_weights_stay_coded_in_backward() -> None:
    model = network(coded=True).requires_grad_(False)
    model[5].bias.requires_grad_(True)  # type: ignore[index, union-attr]
    inputs = torch.randn(6, 64, requires_grad=True)
    plain = network(coded=False)
    with counted() as decoded:
        for each in (model, plain):
            each[1:](inputs).sum().backward()  # type: ignore[index]
    assert torch.equal(model[5].bias.grad, plain[5].bias.grad)  # type: ignore[index]
    assert all(getattr(weight, "coded", 1) is not None for weight in model.parameters())
    assert sum(decoded) == 2 * (64 * 128 + 128 * 128 + 8 * 128), "once forward, and once backward"


def test_state_dicts() -> None:
    model, plain = network(coded=True), network(coded=False)
    state = model.state_dict()
    assert state["1.weight"].coded is not None
    plain.load_state_dict({key: value * 2 for key, value in plain.state_dict().items()})
    plain.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())
    parameter = model[1].weight  # type: ignore[index]
    model.load_state_dict({key: torch.ones_like(value) for key, value in state.items()})
    assert model[1].weight is parameter and parameter.coded is None and (parameter == 1).all()  # type: ignore[index]
    model.load_state_dict(plain.state_dict(), assign=True)
    assert type(model[1].weight) is nn.Parameter  # type: ignore[index]


def test_casts_and_moves_keep_the_parameter_objects() -> None:
    model = network(coded=True)
    weight: Any = model[1].weight  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = weight.detach().decoded()
    assert model.to("cpu") is model and weight.coded is not None
    model.bfloat16()
    assert model[1].weight is weight and weight.dtype == torch.bfloat16  # type: ignore[index]
    assert_bit_equal(weight.detach().decoded(), values.bfloat16())
    model.float()(torch.randint(40, (6, 5))).sum().backward()
    before = (
        weight.detach().clone().decoded() if weight.coded is not None else weight.detach().decoded().clone()
    )
    optimizer.step()
    assert not torch.equal(weight, before)
    assert of_plain(torch.ones(3)).to("meta").is_meta and network(coded=True).to("meta")[1].weight.is_meta


@pytest.mark.parametrize("dynamic", [None, False])
def test_compiled_models(dynamic: bool | None) -> None:
    model, plain = network(coded=True), network(coded=False)
    inputs = torch.randint(40, (6, 5))
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        assert torch.equal(compiled(inputs), plain(inputs))
        assert model[1].weight.coded is not None  # type: ignore[index, union-attr]
        for each in (model, plain):
            each[1].weight.mul_(2)  # type: ignore[index, operator]
        assert torch.equal(compiled(inputs), plain(inputs))
    torch._dynamo.reset()
    exported = torch.export.export(network(coded=True), (inputs,)).module()
    assert torch.equal(exported(inputs), network(coded=False)(inputs))


def test_versions() -> None:
    weight: Any = network(coded=True)[1].weight  # type: ignore[index]
    version = weight._version
    weight.data.mul_(2)
    assert weight._version == version and weight.coded is None, "as for any tensor, .data has its own"
    with torch.no_grad():
        weight.mul_(2)
    assert weight._version == version + 1
