"""Outlines: what headers and shapes tell a plan about a checkpoint or a module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dynswap_ext import checkpoint, planning
from dynswap_ext.errors import SourceError


class Model(nn.Module):
    """A lookup, matrices with biases, a norm, a tie and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.register_buffer("positions", torch.arange(6).reshape(2, 3))


def as_safetensors(folder: Path) -> Path:
    save_file(Model().state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def as_torch(folder: Path) -> Path:
    torch.save(Model().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def as_shards(folder: Path) -> Path:
    import json

    names: dict[str, str] = {}
    for number, (name, tensor) in enumerate(sorted(Model().state_dict().items())):
        file = f"model-{number % 2}.safetensors"
        names[name] = file
        held = {n: Model().state_dict()[n] for n, f in names.items() if f == file}
        save_file({**held, name: tensor}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def as_distributed(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(Model().state_dict(), checkpoint_id=folder / "dcp")
    return folder / "dcp"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [as_safetensors, as_torch, as_shards, as_distributed])
def test_every_format_gives_the_weights_in_the_order_of_use(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    found = planning.outline(make(tmp_path))
    state = Model().state_dict()
    assert {w.name: w.nbytes for w in found.weights} == {name: t.nbytes for name, t in state.items()}
    assert found.nbytes == sum(t.nbytes for t in state.values())
    layers = [w.name for w in found.weights if w.name.startswith("layers") and w.name.endswith("weight")]
    assert layers == [f"layers.{i}.weight" for i in range(12)]
    kinds = {w.name: w.kind for w in found.weights}
    assert kinds["embed_tokens.weight"] == "lookup" and kinds["positions"] == "lookup"
    assert kinds["layers.3.weight"] == "matrix" and kinds["layers.3.bias"] == "vector"
    assert kinds["norm.weight"] == kinds["norm.bias"] == "norm"
    units = [w.unit for w in found.weights]
    assert units == sorted(units)
    for index, weight in enumerate(found.weights):  # a bias is behind its weight, in its module
        if weight.kind == "vector":
            assert found.weights[index - 1].unit == weight.unit and found.weights[index - 1].kind == "matrix"


def test_an_order_that_is_not_by_name_is_kept(tmp_path: Path) -> None:
    torch.save({f"{name}.weight": torch.ones(2, 2) for name in ("out", "a10", "a2")}, tmp_path / "w.pt")
    found = planning.outline(tmp_path / "w.pt")
    assert [w.name for w in found.weights] == ["out.weight", "a10.weight", "a2.weight"]
    assert found.order == "as in the file"


def test_ties_are_one_weight(tmp_path: Path) -> None:
    tensor = torch.ones(4, 4)
    torch.save({"a.weight": tensor, "b.weight": tensor}, tmp_path / "w.pt")
    assert [w.name for w in planning.outline(tmp_path / "w.pt").weights] == ["a.weight"]


def test_dtype_is_the_devices_and_the_bus_carries_the_smaller(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.ones(4, 4), "b": torch.ones(4, dtype=torch.int64)}, tmp_path / "w.safetensors"
    )
    path = tmp_path / "w.safetensors"

    def sizes(dtype: torch.dtype, *, disk: bool) -> dict[str, tuple[int, int]]:
        weights = planning.outline(path, dtype=dtype, disk=disk).weights
        return {w.name: (w.nbytes, w.moved_bytes) for w in weights}

    assert sizes(torch.bfloat16, disk=False) == {"a.weight": (32, 32), "b": (32, 32)}
    assert sizes(torch.bfloat16, disk=True) == {"a.weight": (32, 64), "b": (32, 32)}
    assert sizes(torch.float64, disk=False) == {"a.weight": (128, 64), "b": (32, 32)}


def test_coded_weights_move_as_they_are_stored(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(96 + 8 * i, 96 + 8 * (i + 1)) for i in range(12)]).bfloat16()

    path = checkpoint.save(make(), tmp_path / "coded.safetensors", lossless=True)
    entries = checkpoint.summary(path).entries
    model = checkpoint.load(make, path)
    for found in (
        planning.outline(path, dtype=torch.float32, disk=True),
        planning.outline_of_model(model, dtype=torch.float32, disk=True),
    ):
        weights = {weight.name: weight for weight in found.weights}
        assert {name: weight.nbytes for name, weight in weights.items()} == {
            name: 2 * parameter.nbytes for name, parameter in model.named_parameters()
        }
        assert {name: weight.moved_bytes for name, weight in weights.items()} == {
            name: entry.nbytes for name, entry in entries.items()
        }
        assert {name: weight.place for name, weight in weights.items()} == {
            name: (str(path), entry.offset, True) for name, entry in entries.items()
        }
        assert {name for name in weights if weights[name].coded} == {f"{i}.weight" for i in range(12)}
        matrices = [name for name in weights if name.endswith("weight")]
        assert matrices == [f"{i}.weight" for i in range(12)]  # whatever their sizes in the file


def test_blocks_of_gguf_stream_as_they_are(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "w.gguf"), "llama")
    blocks = torch.zeros(2, 34, dtype=torch.uint8).numpy()  # a row of 32 values in Q8_0: 34 bytes
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (weight,) = planning.outline(tmp_path / "w.gguf", dtype=torch.float32).weights
    assert weight.nbytes == weight.moved_bytes == 68 and weight.elements == 64 and weight.kind == "matrix"


def test_names_of_diffusion_models_mean_an_image_and_of_experts_a_note(tmp_path: Path) -> None:
    names = ("transformer_blocks.0.attn.weight", "transformer_blocks.0.norm1.linear.weight")
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "a.safetensors")
    found = planning.outline(tmp_path / "a.safetensors")
    assert found.rows == 4096 and [w.kind for w in found.weights] == ["matrix", "once"]
    save_file({"layers.0.experts.1.w": torch.ones(2, 2)}, tmp_path / "b.safetensors")
    found = planning.outline(tmp_path / "b.safetensors")
    assert found.rows == 1 and "mixture of experts" in found.notes[0]


def test_a_module(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    model.head.weight = model.embed_tokens.weight
    found = planning.outline_of_model(model, dtype=torch.bfloat16)
    assert [w.name for w in found.weights][:3] == ["positions", "embed_tokens.weight", "layers.0.weight"]
    assert [w.name for w in found.weights][-2:] == ["norm.weight", "norm.bias"]
    kinds = {w.name: w.kind for w in found.weights}
    assert kinds["embed_tokens.weight"] == "matrix"  # the head multiplies by it
    assert kinds["positions"] == "lookup" and kinds["norm.bias"] == "norm"
    assert sum(w.nbytes for w in found.weights) == 2 * sum(p.numel() for p in model.parameters()) + 48


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        planning.outline(tmp_path / "w.safetensors")
    save_file({}, tmp_path / "w.safetensors")
    with pytest.raises(SourceError, match="no tensors"):
        planning.outline(tmp_path / "w.safetensors")
