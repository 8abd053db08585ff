"""checkpoint.convert and `dynswap convert`: values, names, ties, files, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from sample_checkpoints import save_distributed
from torch import nn

from dynswap_ext import checkpoint, cli
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.testing import assert_bit_equal

# The public functions of `checkpoint` hide the modules of the same names.
layout: Any = sys.modules["dynswap_ext.checkpoint.writing.layout"]


def _state() -> dict[str, torch.Tensor]:
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4e38, 65504.0, 1 / 3]
    )
    return {
        "model.layers.0.weight": torch.randn(1300, 1700),
        "model.layers.1.weight": torch.randn(1300, 1700) * 1e3,
        "model.special": special,
        "model.half": torch.randn(1001).half(),
        "model.double": torch.randn(7, 11, dtype=torch.float64),
        "model.complex": torch.randn(33, dtype=torch.complex64),
        "model.steps": torch.tensor(7),
        "model.mask": torch.rand(1001) > 0.5,
        "model.byte": torch.arange(255, dtype=torch.uint8),
        "model.empty": torch.empty(0, 5),
    }


@pytest.fixture(params=["safetensors", "torch"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / ("source.safetensors" if request.param == "safetensors" else "source.pt")
    if request.param == "safetensors":
        save_file(_state(), path, {"format": "pt", "author": "me"})
    else:
        torch.save(_state(), path)
    return path


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".json":
        return load_file(path)
    index = json.loads(path.read_text())["weight_map"]
    return {key: load_file(path.parent / name)[key] for key, name in index.items()}


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(
    "dtype",
    [
        None,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
@pytest.mark.parametrize("shard", [None, "5MB"])
def test_values_are_those_of_to(
    source: Path, dtype: torch.dtype | None, shard: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    expected = _cast(_state(), dtype)
    result = checkpoint.convert(source, tmp_path / "new.safetensors", dtype=dtype, max_shard_size=shard)
    assert_bit_equal(_loaded(result.path), expected)
    assert result.tensors == len(expected) and result.resumed_bytes == 0
    assert result.written_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert (len(result.files) > 1) == (shard is not None and result.written_bytes > 5_000_000)
    assert checkpoint.verify(result.path if not shard else result.files[0])
    wanted = {source.name, *(path.name for path in result.files), result.path.name}
    assert {path.name for path in tmp_path.iterdir()} == wanted


def test_a_source_that_is_not_aligned(tmp_path: Path) -> None:
    values = torch.randn(2_500_001)
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2_500_001], "data_offsets": [0, 10_000_004]}}
    ).encode()
    header += b" " * ((1 - len(header)) % 4)  # one byte past a multiple of an element
    path = tmp_path / "odd.safetensors"
    path.write_bytes((len(header)).to_bytes(8, "little") + header + values.numpy().tobytes())
    result = checkpoint.convert(path, tmp_path / "new.safetensors", dtype=torch.bfloat16)
    assert_bit_equal(load_file(result.path), {"w": values.bfloat16()})


def test_tensors_whose_bytes_in_the_file_are_not_their_values_in_order(tmp_path: Path) -> None:
    state = {
        "conjugate": torch.randn(5, 3, dtype=torch.complex64).conj(),
        "turned": torch.randn(400, 60).t(),
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "column": torch.randn(50, 4)[:, 1],
    }
    torch.save(state, tmp_path / "a.pt")
    result = checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    found = load_file(result.path)
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name


def test_metadata_is_kept(tmp_path: Path) -> None:
    save_file(_state(), tmp_path / "a.safetensors", {"format": "pt", "author": "me"})
    result = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert checkpoint.summary(result.path).metadata == {"format": "pt", "author": "me"}


def test_rename(source: Path, tmp_path: Path) -> None:
    rules = [(r"^model\.", ""), (r"layers\.(\d+)", r"blocks.\1")]
    result = checkpoint.convert(source, tmp_path / "a.safetensors", rename=rules)
    assert {"blocks.0.weight", "blocks.1.weight", "special"} < set(load_file(result.path))
    only = checkpoint.convert(
        source, tmp_path / "b.safetensors", rename=lambda name: name if "layers" in name else None
    )
    assert set(load_file(only.path)) == {"model.layers.0.weight", "model.layers.1.weight"}
    with pytest.raises(ConfigError, match="one name, 'x'"):
        checkpoint.convert(source, tmp_path / "c.safetensors", rename=lambda _: "x")


class TestTies:
    def _model(self) -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(600, 70), "head": nn.Linear(70, 600, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    @pytest.mark.parametrize("kind", ["torch", "save_model", "save"])
    def test_stored_once(self, kind: str, tmp_path: Path) -> None:
        model, source = self._model(), tmp_path / ("a.pt" if kind == "torch" else "a.safetensors")
        if kind == "torch":
            torch.save(model.state_dict(), source)
        elif kind == "save_model":
            save_model(model, str(source))
        else:
            checkpoint.save(model, source)
        result = checkpoint.convert(source, tmp_path / "b.safetensors", rename={"^head": "lm_head"})
        assert result.tensors == 1 and result.written_bytes == 600 * 70 * 4
        assert checkpoint.summary(result.path).ties == (("embed.weight", "lm_head.weight"),)
        again = checkpoint.convert(result.path, tmp_path / "c.safetensors", rename={"^lm_head": "head"})
        other = self._model()
        load_model(other, again.path)
        assert_bit_equal(dict(other.state_dict()), dict(model.state_dict()))

    def test_a_tie_whose_first_name_is_left_out(self, tmp_path: Path) -> None:
        model = self._model()
        checkpoint.save(model, tmp_path / "a.safetensors")
        result = checkpoint.convert(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            rename=lambda name: None if name == "embed.weight" else name,
        )
        assert_bit_equal(load_file(result.path), {"head.weight": model.get_parameter("head.weight").detach()})


class TestRefused:
    def test_destination_that_exists(self, source: Path, tmp_path: Path) -> None:
        for destination, shard in (("new.safetensors", None), ("folder", "5MB"), ("folder2", None)):
            first = checkpoint.convert(source, tmp_path / destination, max_shard_size=shard)
            before = first.path.read_bytes()
            with pytest.raises(ConfigError, match=rf"{first.path.name} exists; overwrite"):
                checkpoint.convert(source, tmp_path / destination, dtype=torch.bfloat16)
            assert first.path.read_bytes() == before
            checkpoint.convert(source, tmp_path / destination, dtype=torch.bfloat16, overwrite=True)

    def test_the_source_as_destination(self, tmp_path: Path) -> None:
        source = tmp_path / "model.safetensors"
        save_file(_state(), source)
        (tmp_path / "link.safetensors").symlink_to(source)
        for destination in (source, tmp_path / "link.safetensors", tmp_path):
            with pytest.raises(ConfigError, match="is the source itself"):
                checkpoint.convert(source, destination, overwrite=True)
        assert_bit_equal(set(load_file(source)), set(_state()))

    def test_other_suffixes_and_dtypes(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"ends in \.pt; expected"):
            checkpoint.convert(source, tmp_path / "new.pt")
        with pytest.raises(ConfigError, match=r"dtype is torch\.int8; expected a floating"):
            checkpoint.convert(source, tmp_path / "new.safetensors", dtype=torch.int8)
        with pytest.raises(ConfigError, match="max_shard_size is '5 apples'"):
            checkpoint.convert(source, tmp_path / "new.safetensors", max_shard_size="5 apples")
        assert [path.name for path in tmp_path.iterdir()] == [source.name]

    def test_extra_state_and_dtypes_that_safetensors_has_not(self, tmp_path: Path) -> None:
        torch.save({"w": torch.zeros(2), "m._extra_state": {"a": 1}}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"no tensor \(m\._extra_state\).*rename function"):
            checkpoint.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
        checkpoint.convert(
            tmp_path / "a.pt", tmp_path / "b.safetensors", rename=lambda name: name if name == "w" else None
        )
        torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "c.pt")
        with pytest.raises(ConfigError, match=r"w is torch\.complex128"):
            checkpoint.convert(tmp_path / "c.pt", tmp_path / "d.safetensors")

    def test_no_folder_and_no_source(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="there is no folder"):
            checkpoint.convert(source, tmp_path / "nowhere" / "new.safetensors")
        with pytest.raises(SourceError, match="no such file"):
            checkpoint.convert(tmp_path / "nothing", tmp_path / "new.safetensors")


class TestVerify:
    def test_damage_is_found_and_named(self, tmp_path: Path) -> None:
        tensors = {"a": torch.zeros(3 << 20), "b": torch.ones(3 << 20), "c": torch.ones(5)}
        save_file(tensors, tmp_path / "a.safetensors")
        path = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors").path
        seen: list[tuple[int, int]] = []
        assert checkpoint.verify(path, progress=lambda *at: seen.append(at)) == (24 << 20) + 20
        assert seen[-1] == ((24 << 20) + 20,) * 2
        with path.open("rb+") as file:
            file.seek(-25, 2)  # the last element of b
            file.write(b"\1")
        with pytest.raises(SourceError, match=r"1 of 7 checksums differ, in the bytes of b; copy or"):
            checkpoint.verify(path)

    def test_without_checksums(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
        with pytest.raises(SourceError, match="no checksums to compare"):
            checkpoint.verify(tmp_path / "a.safetensors")
        for kept in ("4194304", "many", "4194304 00000000 00000000", "0 00000000", "-1 0"):
            save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors", {layout.CHECKSUMS: kept})
            with pytest.raises(SourceError, match="checksums that do not fit"):
                checkpoint.verify(tmp_path / "a.safetensors")

    def test_a_folder_of_another_format_has_none(self, tmp_path: Path) -> None:
        folder = save_distributed({"a": torch.zeros(3)}, tmp_path / "parts")
        with pytest.raises(SourceError, match="parts has no checksums to compare"):
            checkpoint.verify(folder)


class TestCommand:
    def test_converts_and_says_so(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "out"
        arguments = [
            "--dtype",
            "bf16",
            "--shard",
            "5MB",
            "--rename",
            r"^model\.=",
            "--rename",
            "layers=blocks",
        ]
        assert cli.main(["convert", str(source), str(folder), *arguments]) == 0
        printed = capsys.readouterr()
        assert (
            f"{folder}/model.safetensors.index.json: 10 tensors" in printed.out and "verified" in printed.out
        )
        assert printed.err == ""  # no bar without a terminal
        written = _loaded(folder / "model.safetensors.index.json")
        assert written["blocks.0.weight"].dtype is torch.bfloat16
        assert cli.main(["convert", str(source), str(folder)]) == 2
        assert "exists; overwrite it (--overwrite" in capsys.readouterr().err
        assert cli.main(["convert", str(source), str(folder), "--overwrite"]) == 0

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--dtype", "int8"], "--dtype is 'int8'; expected bf16"),
            (["--dtype", "zeros"], "--dtype is 'zeros'"),
            (["--shard", "much"], "max_shard_size is 'much'"),
            (["--shard", "5"], "max_shard_size is '5', a number without a unit"),
            (["--rename", "abc"], "--rename is 'abc'; expected PATTERN=REPLACEMENT"),
            (["--rename", "(=b"], "expected a function, or rules"),
        ],
    )
    def test_bad_options(
        self, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_file(_state(), tmp_path / "a.safetensors")
        assert (
            cli.main(
                ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), *arguments]
            )
            == 2
        )
        printed = capsys.readouterr().err
        assert printed.startswith("dynswap: ") and said in printed
        assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
