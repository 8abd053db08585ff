"""A LosslessTensor is the plain tensor in everything, to the bit, and coded until it is written to."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.lossless import tensor as under_test
from dynswap_ext.lossless.code import CODABLE
from dynswap_ext.lossless.tensor import LosslessTensor
from dynswap_ext.testing import assert_bit_equal
from sample_lossless import counted, make

Write = Callable[[torch.Tensor], object]


@pytest.fixture
def decoded() -> Iterator[list[int]]:
    with counted() as lengths:
        yield lengths


# ---- reading -----------------------------------------------------------------------------------------------


def test_it_looks_like_the_plain_tensor(decoded: list[int]) -> None:
    weight, plain = make(7, 30, 50)
    assert weight.shape == plain.shape and weight.stride() == plain.stride() and weight.is_contiguous()
    assert weight.dtype == plain.dtype and weight.device == plain.device and weight.nbytes == plain.nbytes
    assert weight.is_leaf and not weight.requires_grad and weight.plain is None and len(weight) == 7
    assert repr(weight).startswith("LosslessTensor([7, 30, 50], torch.float32, cpu, coded in ")
    for made in (
        torch.empty_like(weight),
        weight.new_zeros(3),
        torch.zeros_like(weight.mT),
        torch.rand_like(weight),
    ):
        assert type(made) is torch.Tensor
    assert torch.zeros_like(weight.mT).stride() == torch.zeros_like(plain.mT).stride()
    assert torch.full_like(weight, 3, dtype=torch.int8).dtype == torch.int8
    assert not decoded


@pytest.mark.parametrize("dtype", CODABLE, ids=str)
def test_operations_give_what_the_plain_tensor_gives(dtype: torch.dtype) -> None:
    weight, plain = make(64, 96, dtype=dtype)
    inputs = torch.randn(5, 96).to(dtype)
    operations: list[Callable[[torch.Tensor], Any]] = [
        lambda w: w + 1,
        lambda w: functional.linear(inputs, w),
        lambda w: functional.embedding(torch.tensor([[3, 0], [63, 5]]), w),
        lambda w: inputs @ w.t(),
        lambda w: torch.cat([w, w]),
        lambda w: w.to(torch.float64),
        lambda w: w.clone(),
        lambda w: w[3:7, ::2],
        lambda w: w[torch.tensor([1, 5])],
        lambda w: w[..., -1],
        lambda w: w.view(-1)[1::3],
        lambda w: w.permute(1, 0).reshape(-1),
        lambda w: w.unfold(1, 4, 2),
        lambda w: w.view(torch.uint8),
        lambda w: w.view(-1).view(torch.uint8)[: len(getattr(weight, "coded", w))],
        lambda w: w.split(10)[2],
        lambda w: w.unbind(1)[5],
        lambda w: w.diagonal(),
        lambda w: w.expand(2, 64, 96),
        lambda w: w[5, 6],
        lambda w: w[:0],
        lambda w: torch.stack(list(w)),
        lambda w: torch.where(w.isnan(), 0, w).sum(),
        lambda w: torch.func.functional_call(nn.Linear(96, 64, bias=False), {"weight": w}, inputs),
    ]
    for number, operation in enumerate(operations):
        result = operation(weight)
        result = result.decoded() if isinstance(result, LosslessTensor) else result
        assert_bit_equal(result.contiguous(), operation(plain).contiguous(), f"operation {number}")
    assert np.array_equal(weight.float().tolist(), plain.float().tolist(), equal_nan=True)
    assert weight[2, 3].item() == plain[2, 3].item() and not torch.equal(weight, plain)  # has a NaN
    assert torch.equal(weight[1:], plain[1:]) and weight.coded is not None


def test_copies_have_the_strides_that_are_asked_for() -> None:
    weight, plain = make(8, 16, 5, 5)
    last = torch.channels_last
    for change in (
        lambda w: w.to(memory_format=last),
        lambda w: w.clone(memory_format=last),
        lambda w: w.clone(memory_format=torch.contiguous_format),
        lambda w: w.to(torch.float64, memory_format=last),
        lambda w: w.to("cpu", copy=True),
        lambda w: w.permute(1, 0, 3, 2).contiguous(),
    ):
        changed, expected = change(weight), change(plain)
        assert changed.stride() == expected.stride() and changed.dtype == expected.dtype
        changed = changed.decoded() if isinstance(changed, LosslessTensor) else changed
        assert_bit_equal(changed.contiguous(), expected.contiguous())
    assert weight.to("cpu", copy=True).coded is not None


def test_a_view_decodes_what_it_shows(decoded: list[int]) -> None:
    weight, plain = make(100, 200)
    assert torch.equal(weight[40:42] + 0, plain[40:42]) and decoded == [400]
    assert torch.equal(weight.view(torch.int16)[3] + 0, plain.view(torch.int16)[3]) and decoded[1:] == [200]
    assert weight[50, 7] == plain[50, 7] and decoded[2:] == [1]
    assert weight[9:9].sum() == 0 and decoded[3:] == [0]


def test_threads_may_write_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    for _ in range(5):
        weight, _ = make(64, 512)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda row, weight=weight: weight[row].fill_(row), range(64)))  # type: ignore[misc]
        assert torch.equal(weight, torch.arange(64.0)[:, None].expand(64, 512))


# ---- writing -----------------------------------------------------------------------------------------------


WRITES: dict[str, Write] = {
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "mul_": lambda w: w.mul_(2),
    "data": lambda w: w.data.mul_(2),
    "row": lambda w: w[3].fill_(4),
    "setitem": lambda w: w.__setitem__((slice(1, 3), slice(None, None, 2)), 5),
    "index": lambda w: w.__setitem__(torch.tensor([1, 2]), 5),
    "transposed": lambda w: w.t()[2:4].zero_(),
    "bits": lambda w: w.view(torch.int32)[0].bitwise_xor_(1),
    "out": lambda w: torch.add(torch.ones(70, 300), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w, torch.ones(3)], 3.0),
    "init": lambda w: nn.init.constant_(w, 2.5),
    "numpy": lambda w: w.detach().numpy().fill(7),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).fill_(7),
    "storage": lambda w: w.detach().storage().fill_(7),
    "assigned": lambda w: setattr(w, "data", torch.full((70, 300), 9.0)),
    "set_": lambda w: w.set_(torch.full((70, 300), 9.0)),
    "keyword": lambda w: torch.ops.aten.copy_.default(self=w, src=torch.ones(70, 300)),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_makes_it_plain(name: str) -> None:
    weight, plain = make()
    alias, row = weight.detach(), weight[3]
    with torch.no_grad():
        WRITES[name](weight)
        WRITES[name](plain)
    assert weight.coded is None and weight.plain is not None
    assert_bit_equal(weight.decoded(), plain, name)
    if name not in ("assigned", "set_"):  # as with plain tensors, the others keep the bytes that they show
        assert alias.coded is None
        assert_bit_equal(alias.decoded(), plain, name)
        assert_bit_equal(row.decoded(), plain[3], name)
    before = weight.plain
    weight.add_(1)
    assert weight.plain.data_ptr() == before.data_ptr(), "a plain one is written in place"


def test_writes_return_the_tensor_and_bump_its_version() -> None:
    weight, _ = make()
    alias, version = weight.detach(), weight._version
    assert weight.mul_(2) is weight and weight._version == version + 1 == alias._version
    assert weight.set_(torch.ones(3)) is weight and weight.shape == (3,) and weight._version == version + 2
    assert alias.shape == (70, 300) and type(weight) is type(alias)


def test_a_copy_has_bytes_of_its_own() -> None:
    for copied in (torch.clone, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))):
        weight, plain = make()
        other = copied(weight)
        other.zero_()
        assert weight.coded is not None and not other.any()
        assert_bit_equal(weight.decoded(), plain)
    weight, plain = make()
    weight.clone().zero_()
    assert_bit_equal(weight.decoded(), plain)


def test_data_of_another_shape_dtype_and_strides() -> None:
    parameter = nn.Parameter(make()[0])
    parameter.data = torch.arange(12.0).view(3, 4).t()
    assert parameter.shape == (4, 3) and parameter.stride() == (1, 4) and parameter.coded is None
    parameter.data = torch.ones(5, dtype=torch.float64)
    assert parameter.dtype == torch.float64 and parameter.sum() == 5
    other = make()[0]
    parameter.data = other
    assert parameter.coded is other.coded and isinstance(parameter, nn.Parameter)
    other.zero_()
    assert not parameter.any(), "they share the bytes, as plain tensors would"
    shown = torch.zeros(3, 3)
    parameter.data = shown
    parameter.data.add_(1)
    assert shown.sum() == 9


def test_what_would_change_its_geometry_in_place_is_refused() -> None:
    weight, plain = make()
    for change in (lambda w: w.t_(), lambda w: w.unsqueeze_(0), lambda w: w.resize_(3), lambda w: w.set_()):
        with pytest.raises(ConfigError, match="assign to its `data`"):
            change(weight)
    assert weight.coded is not None
    assert_bit_equal(weight.decoded(), plain)


# ---- memory ------------------------------------------------------------------------------------------------


def test_the_address_of_values_is_of_plain_ones() -> None:
    weight, plain = make()
    stored = weight.coded
    assert stored is not None
    assert weight.untyped_storage().data_ptr() == stored.data_ptr(), "which tells ties, and decodes nothing"
    assert weight.detach().untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert weight.untyped_storage().nbytes() == stored.numel() and not weight.is_shared()
    assert weight.coded is not None
    assert weight.data_ptr() == weight.detach().data_ptr() == weight.untyped_storage().data_ptr()
    assert weight.coded is None
    assert weight.share_memory_().is_shared()
    assert_bit_equal(weight.decoded(), plain)


def test_numpy_asks_for_what_it_asks_of_any_tensor() -> None:
    parameter = nn.Parameter(make()[0])
    with pytest.raises(RuntimeError, match="requires grad"):
        parameter.numpy()
    assert np.asarray(parameter.detach()).shape == (70, 300)
    assert parameter.detach().numpy(force=True).shape == (70, 300)


def test_programs_that_read_by_address_get_the_values(tmp_path: Any) -> None:
    weight, plain = make()
    save_file({"a": weight}, tmp_path / "model.safetensors")
    assert_bit_equal(load_file(tmp_path / "model.safetensors")["a"], plain)


def test_the_coded_bytes_are_freed() -> None:
    weight, _ = make()
    alive = []
    stored = weight.coded
    assert stored is not None
    import weakref

    weakref.finalize(stored.untyped_storage(), alive.append, 1)
    del stored
    weight.zero_()
    gc.collect()
    assert alive == [1]


# ---- copying and pickling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save(weights_only: bool) -> None:
    parameter, plain = nn.Parameter(make()[0]), make()[1]
    plain = parameter.detach().decoded()  # type: ignore[attr-defined]
    parameter.mark = "mine"  # type: ignore[attr-defined]
    file = io.BytesIO()
    torch.save({"w": parameter, "alias": parameter.detach(), "row": parameter.detach()[3]}, file)
    assert file.tell() < 0.9 * plain.nbytes, "it is saved as it is stored"
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    weight = loaded["w"]
    assert isinstance(weight, nn.Parameter) and isinstance(weight, LosslessTensor) and weight.requires_grad
    assert weight.coded is not None and weight.mark == "mine"  # type: ignore[attr-defined]
    assert_bit_equal(weight.decoded(), plain)
    loaded["alias"].zero_()
    assert not weight.any() and not loaded["row"].any()


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_plain_one_is_saved_as_a_plain_tensor(weights_only: bool) -> None:
    parameter = nn.Parameter(make()[0])
    parameter.data.zero_()
    file = io.BytesIO()
    torch.save([parameter, parameter.detach()], file)
    file.seek(0)
    loaded, alias = torch.load(file, weights_only=weights_only)
    assert type(loaded) is nn.Parameter and loaded.requires_grad and type(alias) is torch.Tensor
    assert loaded.data_ptr() == alias.data_ptr() and not alias.any()


def test_deepcopy_keeps_ties_gradients_and_attributes() -> None:
    model = nn.ModuleList([nn.Linear(300, 70, bias=False), nn.Linear(300, 70, bias=False)])
    model[0].weight = model[1].weight = nn.Parameter(make()[0])  # type: ignore[assignment]
    weight: Any = model[0].weight
    weight.grad, weight.mark = torch.ones(70, 300), [1]
    model.register_buffer("shown", weight.detach())
    copied: Any = copy.deepcopy(model)
    other = copied[0].weight
    assert (
        other is copied[1].weight and other is not weight and other.requires_grad and other.coded is not None
    )
    assert torch.equal(other.grad, weight.grad) and other.grad is not weight.grad
    assert other.mark == [1] and other.mark is not weight.mark and isinstance(other, nn.Parameter)
    other.data.zero_()
    assert not copied.shown.any() and weight.coded is not None
    assert not copy.deepcopy(copied)[0].weight.any()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight * 1 + weight.view(70, 300))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(weight.clone())


def test_hostile_pickles_are_refused() -> None:
    weight, _ = make()
    rebuild, (attributes, content, *rest) = weight.__reduce_ex__(2)
    dtype, size, stride, offset, *flags = rest
    for changed in (
        (dtype, (70, 3000), stride, offset),
        (dtype, size, (300, 2), offset),
        (dtype, size, stride, 1),
        (dtype, size, stride, -1),
        (dtype, size, (-300, 1), 70 * 300),
        (torch.complex128, size, stride, offset),
    ):
        with pytest.raises(RuntimeError):
            rebuild(attributes, content, *changed, *flags)
    for wrong in (
        under_test.Content(content.coded, None, torch.float32, 1 << 40, ""),
        under_test.Content(content.coded, None, torch.int8, content.count, ""),
        under_test.Content(torch.ones(3), None, torch.float32, 3, ""),
    ):
        with pytest.raises(ConfigError):
            rebuild(attributes, wrong, *rest)
    with pytest.raises(RuntimeError, match="outside the tensor"):
        weight.as_strided((70, 301), (300, 1)) + 1


def test_taken_apart_and_put_together() -> None:
    for view in (lambda w: w, lambda w: w[3:5].t()):
        weight, plain = make()
        for _ in range(2):  # coded, and then plain
            shown = view(weight)
            names, context = shown.__tensor_flatten__()
            inner = {name: getattr(shown, name) for name in names}
            again = LosslessTensor.__tensor_unflatten__(inner, context, shown.size(), shown.stride())
            assert (
                names == ["plain" if weight.coded is None else "coded"] and again.stride() == shown.stride()
            )
            assert_bit_equal(again.decoded(), view(plain))
            weight.make_plain()


def test_what_cannot_be() -> None:
    stored = make()[0].coded
    assert stored is not None
    with pytest.raises(ConfigError, match="float64"):
        LosslessTensor(stored, torch.float64, (70, 300))
    with pytest.raises(ConfigError, match=r"coded is torch\.float32"):
        LosslessTensor(stored.float(), torch.float32, (70, 300))
    with pytest.raises(ConfigError, match=r"lossless code of \[70, 30000\]"):
        LosslessTensor(stored, torch.float32, (70, 30000))


def test_damaged_bytes_are_named() -> None:
    weight, _ = make(64, 256)
    stored = weight.coded
    assert stored is not None
    stored[16 * 3] = 9  # the kind of the first block
    with pytest.raises(SourceError, match=r"^w in a file cannot be read: .*damaged"):
        weight + 1
    with pytest.raises(SourceError, match="w in a file"):
        weight.mul_(2)
    assert weight.coded is not None


def test_swapped_tensors() -> None:
    weight, plain = make()
    parameter, other = nn.Parameter(weight), nn.Parameter(torch.ones(3))
    del weight
    torch.utils.swap_tensors(parameter, other)
    assert type(parameter) is nn.Parameter and parameter.sum() == 3
    assert isinstance(other, LosslessTensor)
    assert_bit_equal(other.detach().decoded(), plain)


def test_inference_mode() -> None:
    weight, plain = make()
    with torch.inference_mode():
        assert torch.equal(weight[1:], plain[1:])
        weight.mul_(2)
        assert not weight.plain.is_inference()  # type: ignore[union-attr]
    weight.mul_(2)
    assert_bit_equal(weight.decoded(), plain * 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to("cpu", torch.float64),
        lambda w: w.type(torch.float16),
        lambda w: w.t().contiguous(),
        lambda w: w.t().reshape(-1),
        lambda w: w.contiguous(),
        lambda w: w.to(torch.float32),
    ],
)
def test_what_may_copy_in_inference_mode(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """There these arrive whole, as operations that may return an alias."""
    weight, plain = make()
    with torch.inference_mode():
        assert_bit_equal(call(weight).clone(), call(plain))
