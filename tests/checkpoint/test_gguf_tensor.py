"""A GGUF weight is a floating tensor to the outside, and keeps blocks as long as rows are whole."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from sample_gguf import random_blocks, random_weight
from torch import nn
from torch.nn import functional

from dynswap_ext.checkpoint.gguf import GGUFTensor
from dynswap_ext.checkpoint.gguf_tensors import tensor as under_test
from dynswap_ext.errors import ConfigError
from dynswap_ext.testing import assert_bit_equal


@pytest.fixture
def weight() -> GGUFTensor:
    return random_weight("Q4_K", 8, 512)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return a list that gets the shape of each tensor of blocks that is decoded."""
    shapes: list[torch.Size] = []

    def decode(blocks: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(blocks.shape)
        return original(blocks, *rest)

    original = under_test.decode
    monkeypatch.setattr(under_test, "decode", decode)
    return shapes


def test_it_looks_like_its_values(weight: GGUFTensor, decoded: list[torch.Size]) -> None:
    assert weight.shape == (8, 512) and weight.stride() == (512, 1) and weight.dtype == torch.float32
    assert weight.is_contiguous() and not weight.requires_grad and weight.blocks.shape == (8, 288)
    assert repr(weight) == "GGUFTensor(Q4_K, [8, 512], torch.float32, cpu)"
    assert not decoded


def test_what_it_cannot_be() -> None:
    blocks = random_blocks("Q4_K", 8, 512)
    with pytest.raises(ConfigError, match=r"floating-point dtype, not to torch\.int8"):
        GGUFTensor(blocks, "Q4_K", torch.int8)
    with pytest.raises(
        ConfigError, match=r"whole blocks \(144 bytes each\), not torch.uint8 of shape \[8, 287\]"
    ):
        GGUFTensor(blocks[:, :-1], "Q4_K")
    with pytest.raises(ConfigError, match=r"not torch\.int8"):
        GGUFTensor(blocks.view(torch.int8), "Q4_K")
    with pytest.raises(ConfigError, match="Q9_9"):
        GGUFTensor(blocks, "Q9_9")


class TestKeepsItsBlocks:
    def test_detached(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        for same in (weight.detach(), weight.data, weight.to(torch.float32), weight.contiguous()):
            assert isinstance(same, GGUFTensor) and same.data_ptr() == weight.data_ptr()
        assert not decoded

    def test_copied(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        parameter = nn.Parameter(weight, requires_grad=False)
        for same in (weight.clone(), copy.deepcopy(weight), copy.deepcopy(parameter)):
            assert isinstance(same, GGUFTensor) and same.data_ptr() != weight.data_ptr()
            assert torch.equal(same.blocks, weight.blocks)
        assert isinstance(copy.deepcopy(parameter), nn.Parameter)
        one, other = copy.deepcopy([parameter, parameter])
        assert one is other
        assert not decoded

    def test_cast(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        half: Any = weight.to(torch.bfloat16)
        assert isinstance(half, GGUFTensor) and half.dtype == torch.bfloat16
        assert half.data_ptr() == weight.data_ptr() and not decoded
        assert_bit_equal(half.dequantize(), weight.dequantize().bfloat16())

    def test_moved(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        there = weight.to("meta")
        assert isinstance(there, GGUFTensor) and there.is_meta and there.blocks.is_meta and not decoded

    def test_rows(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        rows = torch.tensor([5, 0, 5])
        parts = [
            weight[2:7:2],
            weight[3],
            weight.index_select(0, rows),
            *weight.chunk(2),
            *weight.split([1, 7]),
        ]
        assert all(isinstance(part, GGUFTensor) for part in parts) and not decoded
        values = weight.dequantize()
        expected = [
            values[2:7:2],
            values[3],
            values.index_select(0, rows),
            *values.chunk(2),
            *values.split([1, 7]),
        ]
        for part, other in zip(parts, expected, strict=True):
            assert_bit_equal(part.dequantize(), other)

    def test_as_a_parameter_of_a_module(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        module: Any = nn.Linear(512, 8)
        module.weight = nn.Parameter(weight, requires_grad=False)
        module.to(torch.bfloat16)
        assert isinstance(module.weight, GGUFTensor) and isinstance(module.weight, nn.Parameter)
        assert module.weight.dtype == module.bias.dtype == torch.bfloat16
        other = random_weight("Q4_K", 8, 512, seed=1)
        module.load_state_dict({"weight": other, "bias": torch.zeros(8)})
        assert torch.equal(module.weight.blocks, other.blocks) and not decoded

    def test_shape_alone(self, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        for made in (torch.empty_like(weight), torch.zeros_like(weight), weight.new_zeros(8, 512)):
            assert type(made) is torch.Tensor and made.shape == (8, 512) and made.is_contiguous()
        assert not decoded

    @pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
    def test_saved(self, parameter: bool, weight: GGUFTensor, decoded: list[torch.Size]) -> None:
        given = nn.Parameter(weight, requires_grad=False) if parameter else weight
        file = io.BytesIO()
        torch.save({"weight": given}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        for same in (loaded, pickle.loads(pickle.dumps(given))):
            assert isinstance(same, GGUFTensor) and same.encoding == "Q4_K"
            assert isinstance(same, nn.Parameter) == parameter
            assert torch.equal(same.blocks, weight.blocks)
        assert not decoded


class TestComputes:
    def test_operations_are_those_of_the_values(self, weight: GGUFTensor) -> None:
        values = weight.dequantize()
        assert type(values) is torch.Tensor
        pairs = [(weight + 1, values + 1), (weight.t(), values.t()), (weight[:, 3:5], values[:, 3:5])]
        pairs += [(weight.view(-1), values.view(-1)), (torch.cat([weight, values]), torch.cat([values] * 2))]
        pairs += [(weight.int(), values.int()), (torch.empty(8, 512).copy_(weight), values)]
        for made, expected in pairs:
            assert type(made) is torch.Tensor
            assert_bit_equal(made, expected)
        assert torch.equal(weight, values) and torch.equal(weight, weight.clone())

    def test_an_embedding_decodes_the_rows_that_are_looked_up(
        self, weight: GGUFTensor, decoded: list[torch.Size]
    ) -> None:
        indices = torch.tensor([[1, 7, 1]])
        made = functional.embedding(indices, weight, padding_idx=1)
        assert decoded == [(3, 288)]
        assert_bit_equal(made, functional.embedding(indices, weight.dequantize()))
        with pytest.raises(IndexError):
            functional.embedding(torch.tensor([8]), weight)

    @pytest.mark.parametrize("shape", [(512,), (3, 512), (2, 3, 512)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_linear(self, shape: tuple[int, ...], dtype: torch.dtype, weight: GGUFTensor) -> None:
        weight = weight.to(dtype)  # type: ignore[assignment]
        inputs = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(2)]
        inputs[1].data.copy_(inputs[0])
        biases = [torch.ones(8, dtype=dtype, requires_grad=True) for _ in range(2)]
        made = functional.linear(inputs[0], weight, biases[0])
        expected = functional.linear(inputs[1], weight.dequantize(), biases[1])
        assert_bit_equal(made, expected)
        made.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        torch.testing.assert_close(biases[0].grad, biases[1].grad)
        with torch.no_grad():
            assert_bit_equal(
                functional.linear(inputs[0], weight), functional.linear(inputs[0], weight.dequantize())
            )

    def test_a_graph_keeps_blocks_and_no_values(self, weight: GGUFTensor) -> None:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        x = torch.randn(3, 512, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            functional.linear(x, weight).sum().backward()
        assert [type(tensor) for tensor in saved] == [GGUFTensor]
        assert x.grad is not None

    def test_second_derivatives(self) -> None:
        weight = random_weight("Q8_0", 4, 32, dtype=torch.float64)
        x = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x: functional.linear(x, weight).sin(), (x,))

    def test_autocast(self, weight: GGUFTensor) -> None:
        x = torch.randn(3, 512, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            made, expected = functional.linear(x, weight), functional.linear(x, weight.dequantize())
        assert_bit_equal(made, expected)
        made.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32

    def test_compiled(self, weight: GGUFTensor) -> None:
        module: Any = nn.Sequential(nn.Embedding(8, 512), nn.Linear(512, 8, bias=False))
        module[0].weight = module[1].weight = nn.Parameter(weight, requires_grad=False)
        indices = torch.tensor([[0, 3]])
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        assert_bit_equal(compiled(indices), module(indices))


class TestRefuses:
    def test_to_be_trained(self, weight: GGUFTensor) -> None:
        for ask in (
            lambda: nn.Parameter(weight),
            weight.requires_grad_,
            lambda: weight.requires_grad_(requires_grad=True),
            lambda: setattr(weight, "requires_grad", True),
        ):
            with pytest.raises(ConfigError, match=r"cannot be trained.*requires_grad_\(False\)"):
                ask()
        assert weight.requires_grad_(False) is weight and not weight.requires_grad

    def test_to_be_written(self, weight: GGUFTensor) -> None:
        values, before = torch.ones(8, 512), weight.blocks.clone()
        for write in (
            weight.zero_,
            lambda: weight.mul_(2),
            lambda: weight.copy_(values),
            lambda: weight.copy_(random_weight("Q8_0", 8, 512)),
            lambda: torch.add(values, 1, out=weight),
            lambda: weight.__setitem__(0, 1.0),
        ):
            with pytest.raises(ConfigError, match=r"values cannot be written.*w\.dequantize\(\)"):
                write()
        assert torch.equal(weight.blocks, before)
