"""Recurrent modules: torch keeps their weights a second time, in `_flat_weights`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_moved, assert_same_training_step, state_copy
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from conftest import Provider
from dynswap_ext import testing

Make = Callable[[], nn.RNNBase]

CASES: dict[str, Make] = {
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2),
    "lstm bidirectional": lambda: nn.LSTM(5, 7, bidirectional=True, batch_first=True),
    "lstm proj_size": lambda: nn.LSTM(5, 7, num_layers=2, proj_size=3),
    "lstm proj_size bidirectional": lambda: nn.LSTM(5, 7, proj_size=3, bidirectional=True),
    "lstm without bias": lambda: nn.LSTM(5, 7, bias=False),
    "gru": lambda: nn.GRU(5, 7, num_layers=2, bidirectional=True),
    "gru without bias": lambda: nn.GRU(5, 7, bias=False, batch_first=True),
    "rnn tanh": lambda: nn.RNN(5, 7, num_layers=2),
    "rnn relu": lambda: nn.RNN(5, 7, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_gradients(provider: Provider, case: str) -> None:
    model = CASES[case]()
    moved, handle = provider.pair(model)
    x = provider.randn(4, 3, 5)
    with torch.no_grad():
        y, state = model(x)
        expected = moved(x)
        testing.assert_bit_equal((y, state), expected, "output")
        testing.assert_bit_equal(model(x, state), moved(x, expected[1]), "output from a state")
    assert_moved(handle, model)
    assert_same_training_step(model, moved, lambda m: m(x)[0])


@pytest.mark.parametrize("case", ["lstm proj_size", "gru", "rnn relu"])
def test_flat_weights_are_handed_out(provider: Provider, case: str) -> None:
    model = CASES[case]()
    masters = dict(model.named_parameters())
    moved, handle = provider.pair(model)
    flat = model._flat_weights
    assert [w.dtype for w in flat] == [torch.float64] * len(flat)
    assert [w.device for w in flat] == [provider.device] * len(flat)
    testing.assert_bit_equal([w.detach() for w in flat], [w.detach() for w in moved._flat_weights])
    testing.assert_bit_equal(
        [[w.detach() for w in layer] for layer in model.all_weights],
        [[w.detach() for w in layer] for layer in moved.all_weights],
    )
    del flat
    handle.uninstall()
    assert all(w is masters[name] for w, name in zip(model._flat_weights, masters, strict=True))


def test_uninstall_leaves_masters_and_list_as_they_were(provider: Provider) -> None:
    model = nn.LSTM(5, 7, num_layers=2, proj_size=3)
    state, ids = state_copy(model), [id(w) for w in model._flat_weights]
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        expected = model(x)
    handle = provider.install(model, dtype=torch.float64)
    model(x.to(provider.device, torch.float64))[0].sum().backward()
    model.flatten_parameters()
    handle.uninstall()
    assert [id(w) for w in model._flat_weights] == ids
    assert [id(p) for p in model.parameters()] == ids
    testing.assert_bit_equal(model.state_dict(), state, "state")
    with torch.no_grad():
        testing.assert_bit_equal(model(x), expected, "output after the uninstall")


@pytest.mark.parametrize("case", ["lstm bidirectional", "lstm proj_size", "gru"])
def test_packed_sequences(provider: Provider, case: str) -> None:
    model = CASES[case]()
    batch_first = model.batch_first
    moved, handle = provider.pair(model)
    sequences = [provider.randn(length, 5, seed=length) for length in (2, 5, 3)]
    padded = pad_sequence(sequences, batch_first=batch_first)
    packed = pack_padded_sequence(padded, [2, 5, 3], batch_first, enforce_sorted=False)

    def run(m: nn.Module) -> list[torch.Tensor]:
        y, _ = m(packed)
        assert isinstance(y, PackedSequence)
        out, lengths = pad_packed_sequence(y, batch_first)
        assert lengths.tolist() == [2, 5, 3]
        return [y.data, out]

    assert_same_training_step(model, moved, run)
    assert_moved(handle, model)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda c: c.__name__)
def test_cells(provider: Provider, make: type[nn.RNNCellBase]) -> None:
    model = make(5, 7)
    moved, handle = provider.pair(model)
    steps = provider.randn(4, 3, 5)

    def run(m: nn.Module) -> list[torch.Tensor]:
        state, outputs = None, []
        for x in steps:
            state = m(x, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return outputs

    assert_same_training_step(model, moved, run, close=True)  # each weight is used at every step
    assert_moved(handle, model)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_hold_their_own_masters_in_both_places(
    provider: Provider, copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = nn.Sequential(nn.LSTM(5, 7, num_layers=2))
    x = torch.randn(4, 3, 5)
    with torch.no_grad():
        expected = model(x)
    provider.install(model, dtype=torch.float64)
    model(x.to(provider.device, torch.float64))
    plain = copied(model)
    lstm = plain[0]
    assert type(lstm) is nn.LSTM
    assert all(w is p for w, p in zip(lstm._flat_weights, lstm.parameters(), strict=True))
    assert not {id(p) for p in plain.parameters()} & {id(p) for p in model.parameters()}
    with torch.no_grad():
        testing.assert_bit_equal(plain(x), expected, "output of the copy")
    plain(x)[0].sum().backward()
    assert all(p.grad is not None for p in plain.parameters())
    assert all(p.grad is None for p in model.parameters())
    provider.install(plain, dtype=torch.float64)
    x = x.to(provider.device, torch.float64)
    testing.assert_bit_equal(plain(x), model(x), "output of the installed copy")


def test_training_steps(provider: Provider) -> None:
    model = nn.LSTM(5, 7)
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, moved)]
    for step in range(3):
        x = provider.randn(4, 3, 5, seed=step)
        for m, optimizer in zip((model, moved), optimizers, strict=True):
            optimizer.zero_grad()
            m(x.to(torch.float64 if m is model else torch.float32))[0].square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    # Three steps moved every master thrice: the optimizer had changed it.
    assert handle.stats().bytes_moved >= 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_weight_replaced_while_installed_is_used(provider: Provider) -> None:
    model = nn.GRU(5, 7)
    moved, _ = provider.pair(model)
    new = torch.randn(21, 5)
    model.weight_ih_l0 = nn.Parameter(new.clone())
    moved.weight_ih_l0 = nn.Parameter(new.to(provider.device, torch.float64))
    x = provider.randn(4, 3, 5)
    testing.assert_bit_equal(model(x), moved(x), "output")
    total = [m(x)[0].square().sum() for m in (model, moved)]
    for loss in total:
        loss.backward()
    assert_gradients_as_moved(model, moved)
    provider.handles[-1].uninstall()
    assert model._flat_weights[0] is model.weight_ih_l0


def test_dropout_between_layers_draws_the_same(provider: Provider) -> None:
    model = nn.LSTM(5, 7, num_layers=3, dropout=0.5).train()
    moved, _ = provider.pair(model)
    x = provider.randn(4, 3, 5)

    def run(m: nn.Module) -> torch.Tensor:
        torch.manual_seed(3)
        return m(x)[0]

    assert_same_training_step(model, moved, run)


def test_the_list_of_weights_after_a_functional_call(provider: Provider) -> None:
    model = nn.LSTM(4, 4)
    handle = provider.install(model, dtype=torch.float64)
    others = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    x = provider.randn(3, 1, 4)
    torch.func.functional_call(model, others, (x,))
    handle.uninstall()
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    model(torch.randn(3, 1, 4))
