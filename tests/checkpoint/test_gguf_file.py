"""checkpoint.load of GGUF files: blocks are the masters, which are mapped and not read."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_gguf import array_of_strings, random_weight, raw_header, reference, write_gguf
from sample_loads import is_mapped
from torch import nn

from dynswap_ext import checkpoint
from dynswap_ext._util.peak_memory import resident_bytes
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.gguf import GGUFTensor
from dynswap_ext.checkpoint.gguf_tensors.encodings import ENCODINGS
from dynswap_ext.errors import ConfigError
from dynswap_ext.testing import assert_bit_equal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 256)
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 4, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(self.embedding(indices)).relu())
        return hidden


def tensors() -> dict[str, torch.Tensor]:
    return {
        "embedding.weight": random_weight("Q6_K", 10, 256),
        "first.weight": random_weight("Q4_K", 512, 256),
        "first.bias": torch.randn(512),
        "second.weight": random_weight("Q8_0", 4, 512),
    }


def test_quantised_masters_are_mapped_and_computed_with(tmp_path: Path) -> None:
    given = tensors()
    path = write_gguf(tmp_path / "w.gguf", given)
    model = checkpoint.load(Net, path)
    for name, parameter in model.named_parameters():
        assert is_mapped(parameter, path), name
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, GGUFTensor) == (name != "first.bias")
        assert parameter.requires_grad == (name == "first.bias")
    plain = Net()
    plain.load_state_dict({name: (given[name] + 0).detach() for name in given})
    indices = torch.tensor([[1, 9, 0]])
    assert_bit_equal(model(indices), plain(indices))


def test_an_error_leaves_what_is_trained(tmp_path: Path) -> None:
    given = tensors()
    del given["first.bias"]
    model = Net()
    with pytest.raises(ConfigError, match=r"first\.bias"):
        checkpoint.load(model, write_gguf(tmp_path / "w.gguf", given))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_is_said_of_each_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "w.gguf", tensors())
    opened = open_checkpoint(path)
    assert opened.format == "gguf" and opened.files == (path,)
    assert list(opened.entries) == list(tensors())
    entry = opened.entries["first.weight"]
    assert (entry.dtype, entry.shape, entry.encoding) == (torch.float32, (512, 256), "Q4_K")
    assert entry.nbytes == 512 * 144 and entry.file == path and entry.offset is not None
    blocks = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    assert blocks == opened["first.weight"].blocks.numpy().tobytes()
    assert opened.entries["first.bias"].encoding == ""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding(encoding: str, tmp_path: Path) -> None:
    weight = random_weight(encoding, 2, 3, 512)
    loaded = open_checkpoint(write_gguf(tmp_path / "w.gguf", {"w": weight}))["w"]
    assert isinstance(loaded, GGUFTensor)
    assert_bit_equal(loaded.dequantize(), reference(weight.blocks, encoding).reshape(2, 3, 512))


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    values = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    path = write_gguf(tmp_path / "w.gguf", {"a": torch.zeros(3), "w": values})
    loaded = open_checkpoint(path)["w"]
    assert is_mapped(loaded, path)
    assert_bit_equal(loaded, values)


def test_key_values_as_text(tmp_path: Path) -> None:
    values = {
        "x.text": "héllo",
        "x.count": 7,
        "x.few": ["a", "b"],
        "x.many": list(range(1000)),
        "x.one": [5000],
    }
    values["x.words"] = [f"word {i}" for i in range(20)]
    metadata = open_checkpoint(write_gguf(tmp_path / "w.gguf", {"w": torch.ones(1)}, values=values)).metadata
    assert metadata == {
        "general.architecture": "llama",
        "x.text": "héllo",
        "x.count": "7",
        "x.few": '["a", "b"]',
        "x.many": "1,000 x int32",
        "x.one": "[5000]",
        "x.words": "20 x string",
    }


def test_a_file_larger_than_what_opening_it_takes(tmp_path: Path) -> None:
    """A file of 4 GiB, all of it a hole, with a vocabulary in the header, opens in little memory."""
    rows, columns = 62_000, 1 << 16
    vocabulary = array_of_strings("tokenizer.ggml.tokens", [f"token {i}" for i in range(100_000)])
    header = raw_header([("w", (columns, rows), 8, 0)], [vocabulary])
    path = tmp_path / "w.gguf"
    path.write_bytes(header)
    os.truncate(path, len(header) + columns // 32 * 34 * rows)
    open_checkpoint(
        write_gguf(tmp_path / "small", tensors())
    )  # the package's own code is not the file's memory
    before = resident_bytes()
    tracemalloc.start()
    opened = open_checkpoint(path)
    weight = opened["w"]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20, "an object for each token"
    assert resident_bytes() - before < 32 << 20
    assert weight.shape == (rows, columns) and weight.blocks.nbytes > 4e9
    assert opened.metadata["tokenizer.ggml.tokens"] == "100,000 x string"


class TestSplit:
    @pytest.fixture
    def files(self, tmp_path: Path) -> list[Path]:
        given, files = tensors(), []
        for i, names in enumerate((["embedding.weight", "first.bias"], ["first.weight"], ["second.weight"])):
            values: dict[str, Any] = {"split.no": i, "split.count": 3}
            values.update({"general.name": "whole"} if i == 0 else {})
            part = {name: given[name] for name in names}
            files.append(write_gguf(tmp_path / f"w-{i + 1:05}-of-00003.gguf", part, values=values))
        return files

    @pytest.mark.parametrize("named", [0, 2])
    def test_any_of_the_files_stands_for_all(self, named: int, files: list[Path]) -> None:
        model = checkpoint.load(Net, files[named])
        assert is_mapped(model.first.weight, files[1]) and is_mapped(model.second.weight, files[2])
        opened = open_checkpoint(files[named])
        assert opened.files == tuple(files) and opened.metadata["general.name"] == "whole"

    def test_one_that_is_missing_is_named(self, files: list[Path]) -> None:
        files[1].unlink()
        with pytest.raises(
            OSError, match=r"1 of them are not in its folder \(w-00002-of-00003\.gguf\); download"
        ):
            checkpoint.load(Net, files[0])

    def test_another_name(self, files: list[Path]) -> None:
        other = files[0].rename(files[0].with_name("model.gguf"))
        with pytest.raises(OSError, match=r"one of 3 files.*llama-gguf-split --merge"):
            checkpoint.load(Net, other)

    def test_one_name_in_two_files(self, files: list[Path]) -> None:
        write_gguf(files[2], {"first.bias": torch.ones(1)}, values={"split.no": 2, "split.count": 3})
        with pytest.raises(OSError, match=r"00003-of-00003\.gguf lists first\.bias, and so does .*00001-of"):
            checkpoint.load(Net, files[0])
