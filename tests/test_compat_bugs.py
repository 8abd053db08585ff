"""What goes wrong with the classic installer must not with the one that takes its place."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.compat import DynamicSwapInstaller
from sample_models import ConvNet, Recurrent, mlp, trace
from test_compat import install


def pair(provider: Provider, model: nn.Module) -> Any:
    moved = testing.moved(model, provider.device, torch.float64)
    install(provider, model, dtype=torch.float64)
    return moved


def test_one_object_while_it_is_alive(provider: Provider) -> None:
    model = nn.Linear(4, 4)
    pair(provider, model)
    assert model.weight is model.weight


def test_gradients_reach_the_masters(provider: Provider) -> None:
    model = mlp()
    moved = pair(provider, model)
    x = provider.randn(3, 16)
    for m in (model, moved):
        m(x).square().sum().backward()
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert expected.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.cpu().float())


def test_writes_on_data_and_in_place_are_kept(provider: Provider) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(3))
    pair(provider, model)
    model.weight.data.fill_(2.0)
    model.seen += 1
    model.seen[1] = 7
    state = model.state_dict()
    assert state["weight"].unique().tolist() == [2]
    assert state["seen"].tolist() == [1, 7, 1]


def test_batch_norm_statistics_are_kept(provider: Provider) -> None:
    model = ConvNet().train()
    moved = pair(provider, model)
    for seed in range(3):
        x = provider.randn(4, 3, 6, 6, seed=seed)
        model(x), moved(x)
    state, expected = model.state_dict(), moved.state_dict()
    assert state["norm.num_batches_tracked"].item() == 3
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(state[name], expected[name].cpu().float())


def test_none_and_integer_entries(provider: Provider) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("nothing", None)
    model.register_buffer("counts", torch.arange(3))
    model.register_buffer("mask", torch.tensor([True, False]))
    pair(provider, model)
    assert model.bias is None and model.nothing is None
    assert model.counts.dtype == torch.int64 and model.mask.dtype == torch.bool
    assert model.weight.dtype == torch.float64


def test_a_double_install_is_undone_by_one_uninstall(provider: Provider) -> None:
    model = Recurrent()
    before = trace(model)
    for _ in range(3):
        install(provider, model, dtype=torch.float64)
    DynamicSwapInstaller.uninstall_model(model)
    assert trace(model) == before


class Wrapper(nn.Module):
    """As PEFT's: what it does not have is the wrapped module's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.randn(16))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def test_a_class_with_getattr_of_its_own(provider: Provider) -> None:
    model = Wrapper(nn.Linear(16, 16))
    moved = pair(provider, model)
    assert "DynamicSwap" in type(model).__name__
    assert model.scale.dtype == model.weight.dtype == torch.float64
    assert model.in_features == 16 and not hasattr(model, "missing")
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))


def test_a_bare_container(provider: Provider) -> None:
    model = nn.Module()
    model.inner = nn.Linear(4, 4)
    pair(provider, model)
    assert model.inner.weight.dtype == torch.float64
    assert not hasattr(model, "weight")


def test_recurrent_weights_are_converted_and_given_back(provider: Provider) -> None:
    model = Recurrent()
    moved = pair(provider, model)
    x = provider.randn(2, 5, 6)
    testing.assert_bit_equal(model(x), moved(x))
    DynamicSwapInstaller.uninstall_model(model)
    for module in (model.lstm, model.gru):
        masters = [module._parameters[name] for name in module._flat_weights_names]
        assert all(w is master for w, master in zip(module._flat_weights, masters, strict=True))
    model(x.cpu().float())


def test_pickle_and_deepcopy(provider: Provider) -> None:
    model = mlp()
    pair(provider, model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)):
        assert [type(m) for m in other] == [nn.Linear, nn.GELU] * 3 or other[0] is model[0]
        assert type(other) is nn.Sequential
        testing.assert_bit_equal(other.state_dict(), model.state_dict())


def test_compile_in_one_graph(provider: Provider) -> None:
    model = mlp().eval()
    moved = pair(provider, model)
    x = provider.randn(2, 16)
    try:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            for _ in range(2):
                testing.assert_bit_equal(compiled(x), moved(x))
    finally:
        torch._dynamo.reset()


class Attentions(nn.Module):
    """Larger than what a ring of two groups ahead holds."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.MultiheadAttention(512, 2, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_attention_moves_each_weight_once(provider: Provider, training: bool) -> None:
    model = Attentions().train(training)
    moved = testing.moved(model, provider.device, torch.float64)
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(1, 2, 512)
    with torch.no_grad():
        model(x)
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0 < handle.stats().bytes_moved <= size


class Recorded(nn.Module):
    """As models of transformers 5: what a class can record stands in a registry under ``str(cls)``."""

    registry: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.registry[str(self.__class__)] = "hidden_states"

    def forward(self, x: torch.Tensor) -> tuple[str | None, torch.Tensor]:
        return self.registry.get(str(self.__class__)), self.inner(x)


def test_a_registry_of_classes_still_finds_them(provider: Provider) -> None:
    model = Recorded()
    pair(provider, model)
    assert model(provider.randn(1, 4))[0] == "hidden_states"


def test_what_is_set_through_the_attribute_is_kept(provider: Provider) -> None:
    model: Any = nn.Linear(4, 4)
    pair(provider, model)
    model.weight.requires_grad_(False)
    model.bias.requires_grad = False
    model.weight.tag = "mine"
    assert [p.requires_grad for p in model.parameters()] == [False, False]
    assert model.weight.tag == model._parameters["weight"].tag == "mine"
    model.weight.requires_grad_()
    assert model._parameters["weight"].requires_grad and model.weight.requires_grad
    DynamicSwapInstaller.uninstall_model(model)
    assert model.weight.tag == "mine"


def test_a_lazy_module_turns_real(provider: Provider) -> None:
    model: Any = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2))
    install(provider, model, dtype=torch.float64)
    model(provider.randn(2, 16))
    assert type(model[0]).__name__ == "DynamicSwap_Linear"
    assert model[0].forge_backup_original_class is nn.Linear
    assert model[0].weight.dtype == torch.float64
    DynamicSwapInstaller.uninstall_model(model)
    assert type(model[0]) is nn.Linear and model[0].weight.shape == (8, 16)


class Language(nn.Module):
    """Input and output embeddings, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_embeddings_are_resized(provider: Provider) -> None:
    """As `resize_token_embeddings` does: new data for the old module, and the tie again."""
    model: Any = Language()
    old_values = model.embed.weight.detach().clone()
    install(provider, model, dtype=torch.float64)
    old = model.embed
    new = nn.Embedding(13, 8, device=old.weight.device, dtype=old.weight.dtype)
    with torch.no_grad():
        new.weight.data[:11] = old.weight.data[:11]
    old.weight.data = new.weight.data
    old.num_embeddings = 13
    model.head.weight = old.weight
    model.head.out_features = 13
    assert model.head._parameters["weight"] is old._parameters["weight"]
    moved = testing.moved(model, provider.device, torch.float64)
    tokens = torch.arange(13, device=provider.device)
    testing.assert_bit_equal(model(tokens), moved(tokens))
    assert model(tokens).shape == (13, 13)
    DynamicSwapInstaller.uninstall_model(model)
    assert model.embed.weight is model.head.weight
    testing.assert_bit_equal(model.embed.weight[:11].detach(), old_values)


def test_an_embedding_module_is_replaced(provider: Provider) -> None:
    model: Any = Language()
    install(provider, model, dtype=torch.float64)
    model.embed = nn.Embedding.from_pretrained(model.embed.weight.detach().repeat(2, 1), freeze=False)
    assert type(model.embed).__name__ == "DynamicSwap_Embedding"  # it joins the install
    model.head.weight = model.embed.weight
    assert model(torch.arange(22, device=provider.device)).shape == (22, 22)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


def test_the_state_of_several_models_is_stacked(provider: Provider) -> None:
    models = [mlp() for _ in range(3)]
    plain = [copy.deepcopy(model) for model in models]
    for model in models:
        install(provider, model, dtype=torch.float64)
    actual, expected = torch.func.stack_module_state(models), torch.func.stack_module_state(plain)
    testing.assert_bit_equal(actual[0], expected[0])

    x = provider.randn(2, 16)

    def run(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    at_home = [{k: v.to(provider.device) for k, v in part.items()} for part in actual]
    outputs = torch.func.vmap(run)(*at_home)
    for output, model in zip(outputs, plain, strict=True):
        torch.testing.assert_close(output.cpu(), model.double()(x.cpu()))
