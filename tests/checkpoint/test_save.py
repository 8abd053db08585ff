"""checkpoint.save writes the masters, each once, whatever they are and wherever they are."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import children
import dynswap_ext
from conftest import Provider
from dynswap_ext import checkpoint
from dynswap_ext.checkpoint.formats.safetensors_file import DTYPES
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.testing import assert_bit_equal


class Net(nn.Module):
    """Two layers, and a norm with statistics."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.first = nn.Linear(40, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.norm(self.first(x)).relu())
        return hidden


class Holder(nn.Module):
    """A module that only has buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def _written(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the library of the format reads from the path."""
    if path.suffix == ".json":
        names = set(json.loads(path.read_text())["weight_map"].values())
        return {key: value for name in names for key, value in load_file(path.parent / name).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", ["model.safetensors", "folder", "model.pt", "model.bin"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = Net()
    path = checkpoint.save(model, tmp_path / name)
    assert_bit_equal(_written(path), dict(model.state_dict()))
    assert_bit_equal(dict(checkpoint.load(Net, path).state_dict()), dict(model.state_dict()))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = Net()
    path = checkpoint.save(model, tmp_path / "model.safetensors", max_shard_size="50KB")
    assert path.name == "model.safetensors.index.json"
    index = json.loads(path.read_text())
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert index["metadata"]["total_size"] == total and list(index["weight_map"]) == sorted(
        model.state_dict()
    )
    shards = sorted(tmp_path.glob("*.safetensors"))
    count = len(shards)
    assert [shard.name for shard in shards] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    assert count >= 2 and all(sum(t.nbytes for t in load_file(s).values()) <= 50_000 for s in shards)
    assert_bit_equal(_written(path), dict(model.state_dict()))


def test_one_shard_is_one_file(tmp_path: Path) -> None:
    assert checkpoint.save(Net(), tmp_path / "m.safetensors", max_shard_size="1GB").name == "m.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    # Any bits, also those of NaN.
    bits = torch.arange(960, dtype=torch.int64).mul(0x9E3779B97F4A7C15 - 2**64).view(torch.uint8)
    values = (bits % 2 if dtype is torch.bool else bits).view(dtype).reshape(2, 3, -1)
    model = Holder({"a": torch.zeros(3, dtype=torch.int8), "values": values, "one": values[0, 0, 0].clone()})
    written = checkpoint.save(model, tmp_path / "w.safetensors")
    assert_bit_equal(
        dict(checkpoint.load(Holder(dict(model.state_dict())), written).state_dict()),
        dict(model.state_dict()),
    )


def test_strides_and_overlaps(tmp_path: Path) -> None:
    base = torch.randn(70, 50, 30)
    tensors = {
        "base": base,
        "part": base[10:30],
        "permuted": base.permute(2, 0, 1),
        "step": base[::3, :, ::2],
        "row": torch.randn(1, 200, 300).transpose(1, 2),
        "expanded": torch.randn(1).expand(40, 50),
        "conjugate": torch.randn(30, 40, dtype=torch.complex64).conj(),
        "empty": base[:0],
        "scalar": torch.tensor(3.0),
    }
    path = checkpoint.save(Holder(tensors), tmp_path / "w.safetensors")
    assert_bit_equal(
        load_file(path), {name: tensor.contiguous().resolve_conj() for name, tensor in tensors.items()}
    )


def test_strided_tensors_over_many_blocks(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(1500, 2500).t(), "b": torch.randn(3, 700, 900).transpose(0, 2)}
    path = checkpoint.save(Holder(tensors), tmp_path / "w.safetensors")
    assert_bit_equal(load_file(path), {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert checkpoint.verify(path) == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_are_aligned_and_without_gaps(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.randn(5), "c": torch.randn(3).bfloat16()}
    raw = checkpoint.save(Holder(tensors), tmp_path / "w.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    listed = json.loads(raw[8 : 8 + length])
    listed.pop("__metadata__")
    assert (8 + length) % 4096 == 0 and len(raw) == 8 + length + 29
    for name, entry in listed.items():
        assert entry["data_offsets"][0] % tensors[name].element_size() == 0


class TestTies:
    def _model(self) -> nn.Module:
        model = nn.ModuleDict({"z": nn.Linear(50, 60), "a": nn.Linear(50, 60), "m": nn.Linear(50, 60)})
        model["m"].weight = model["a"].weight = model["z"].weight
        return model

    def test_stored_once_and_read_by_safetensors(self, tmp_path: Path) -> None:
        model = self._model()
        path = checkpoint.save(model, tmp_path / "w.safetensors", metadata={"epoch": "3"})
        assert set(load_file(path)) == {"a.weight", "z.bias", "a.bias", "m.bias"}
        with safe_open(path, "pt") as file:
            said = file.metadata()
        assert said["z.weight"] == said["m.weight"] == "a.weight" and said["epoch"] == "3"
        other = self._model()
        assert load_model(other, path) == (set(), [])
        assert_bit_equal(dict(other.state_dict()), dict(model.state_dict()))

    def test_load_keeps_them(self, tmp_path: Path) -> None:
        model = checkpoint.load(self._model, checkpoint.save(self._model(), tmp_path / "w.safetensors"))
        assert model.get_parameter("a.weight") is model.get_parameter("z.weight")

    def test_another_view_of_the_memory_is_no_tie(self, tmp_path: Path) -> None:
        base = torch.randn(6, 6)
        path = checkpoint.save(
            Holder({"a": base, "b": base.t(), "c": base.view(36)}), tmp_path / "w.safetensors"
        )
        assert_bit_equal(load_file(path), {"a": base, "b": base.t().contiguous(), "c": base.view(36)})


class TestInstalled:
    @pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
    def test_masters_with_what_forwards_wrote(
        self, name: str, provider: Provider, mapped: Callable[[nn.Module], nn.Module], tmp_path: Path
    ) -> None:
        model = mapped(Net())
        plain = dynswap_ext.testing.moved(model, provider.device, torch.float64)
        provider.install(model, dtype=torch.float64, budget="150KB")
        x = provider.randn(8, 40)
        model(x)
        plain(x)
        written = _written(checkpoint.save(model, tmp_path / name))
        assert_bit_equal(written, dict(model.state_dict()))
        assert written["norm.running_mean"].dtype == torch.float32 and written["norm.running_mean"].any()
        assert torch.allclose(written["norm.running_mean"].double(), plain.norm.running_mean.cpu(), atol=1e-6)

    def test_over_the_very_file(self, provider: Provider, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file(Net().state_dict(), path)
        model = checkpoint.load(Net, path).eval()
        provider.install(model, budget="100KB")
        x = provider.randn(4, 40, dtype=torch.float32)
        for step in range(3):  # after the first, the mapped file has no name
            with torch.no_grad():
                model.get_parameter("first.weight").add_(1)
            expected = model(x)
            assert checkpoint.save(model, path) == path
            assert_bit_equal(load_file(path), dict(model.state_dict()), f"step {step}")
            assert_bit_equal(model(x), expected)


def test_private_pages_of_mapped_masters_are_saved(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3_000_000), "b": torch.randn(1001)}, tmp_path / "w")
    model = checkpoint.load(Holder({"a": torch.empty(3_000_000), "b": torch.empty(1001)}), tmp_path / "w")
    a, b = model.get_buffer("a"), model.get_buffer("b")
    a.data[5:7] = 1.5
    a.data[1_500_000:1_600_000] *= 2
    a.data[-1] = 9
    b.data[1000] = 7
    path = checkpoint.save(model, tmp_path / "new.safetensors")
    assert_bit_equal(load_file(path), {"a": a, "b": b})


_MEMORY = """
import sys, torch
from pathlib import Path
from dynswap_ext import checkpoint
from dynswap_ext._util.peak_memory import PeakMemory
path = Path(sys.argv[1])
if not path.exists():
    torch.manual_seed(0)
    checkpoint.save(torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(16)), path)
make = lambda: torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(16))
model = checkpoint.load(make, path)
checkpoint.save(torch.nn.Linear(1000, 1000), path.with_name("small.safetensors"))  # loads torch's code
meter = PeakMemory()
for _ in range(int(sys.argv[3])):
    checkpoint.save(model, sys.argv[2])
print(meter.more())
"""


@pytest.mark.parametrize(("over", "times"), [(False, 1), (True, 2)])
def test_memory_stays_within_a_few_windows(over: bool, times: int, tmp_path: Path) -> None:
    model, copy = tmp_path / "model.safetensors", tmp_path / "copy.safetensors"  # 256 MiB
    for _ in range(2):  # the first process makes the file
        done = children.run(_MEMORY, model, model if over else copy, times)
        assert done.returncode == 0, done.stderr
        grown = int(done.stdout)
    assert grown < 64 << 20


class _WithState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"step": 3}


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


class _Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _WithState(2, 2), r"_extra_state.*ends in \.pt"),
        (_meta, r"meta device.*weight, bias.*load"),
        (lambda: Holder({"w": torch.zeros(2).as_subclass(_Wrapped)}), r"w is a _Wrapped.*\.pt"),
        (lambda: Holder({"w": torch.eye(2).to_sparse()}), r"w is a Tensor of layout torch\.sparse_coo"),
        (lambda: Holder({"w": torch.zeros(2, dtype=torch.complex128)}), r"w is torch\.complex128.*\.pt"),
    ],
)
def test_what_safetensors_cannot_hold(make: Callable[[], nn.Module], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint.save(make(), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_torch_files_hold_extra_state_and_no_meta_tensors(tmp_path: Path) -> None:
    path = checkpoint.save(_WithState(2, 2), tmp_path / "w.pt")
    assert torch.load(path, weights_only=True)["_extra_state"] == {"step": 3}
    with pytest.raises(ConfigError, match="meta device"):
        checkpoint.save(_meta(), path)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("w.pt", {"max_shard_size": "5MB"}, "neither shards nor metadata"),
        ("w.safetensors", {"max_shard_size": "many"}, "'many'; expected bytes"),
        ("w.safetensors", {"max_shard_size": 0}, "expected bytes"),
        ("w.safetensors", {"max_shard_size": 0.5}, "expected bytes"),
        ("w.safetensors", {"max_shard_size": 5}, "a number without a unit; .* '5GB', or '5B'"),
        ("w.safetensors", {"max_shard_size": " 1e3 "}, "a number without a unit; .* or '1000B'"),
        ("w.safetensors", {"metadata": {"epoch": 3}}, "'epoch'; safetensors keeps only text"),
        ("w.gguf", {}, r"ends in \.gguf"),
    ],
)
def test_arguments(name: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint.save(Net(), tmp_path / name, **options)
    with pytest.raises(ConfigError, match=r"takes a torch\.nn\.Module, not a dict"):
        checkpoint.save({}, tmp_path / "w.safetensors")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nowhere/w.safetensors.*no folder"):
        checkpoint.save(Net(), tmp_path / "nowhere" / "w.safetensors")


def test_masters_are_mapped_from_what_was_saved_once_it_is_loaded(provider: Provider, tmp_path: Path) -> None:
    model, path = Net().eval(), tmp_path / "saved.safetensors"
    provider.install(model).uninstall()
    checkpoint.save(model, path)
    moved, handle = provider.pair(model)
    x = provider.randn(2, 40)
    assert_bit_equal(model(x), moved(x))
    assert handle.stats().mapped_bytes == 0
    handle.uninstall()
    checkpoint.load(model, path)
    handle = provider.install(model, dtype=torch.float64)
    assert_bit_equal(model(x), moved(x))
    assert handle.stats().mapped_bytes > 0
