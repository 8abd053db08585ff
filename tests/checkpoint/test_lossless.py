"""Checkpoints in the lossless code: convert, save, load, summary and verify, and what damaged ones do."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from sample_checkpoints import save_distributed, write_index
from sample_loads import SharedWeight, is_mapped
from torch import nn

import dynswap_ext
from dynswap_ext import checkpoint, cli
from dynswap_ext.checkpoint.formats.safetensors_file import CODED
from dynswap_ext.errors import ConfigError, DynswapWarning, SourceError
from dynswap_ext.lossless.tensor import LosslessTensor
from dynswap_ext.testing import assert_bit_equal

CODES = {"large", "half", "tied", "float16"}


def state() -> dict[str, torch.Tensor]:
    special = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf"), 1e-45, 1 / 3])
    large = torch.randn(700, 900)
    large.view(-1)[: len(special)] = special
    noise = torch.randint(-(1 << 15), 1 << 15, (70, 90)).short().view(torch.bfloat16)
    return {
        "large": large,
        "half": torch.randn(131, 517).bfloat16(),
        "float16": torch.randn(300, 41).half(),
        "tied": torch.randn(40, 50),
        "noise": noise,
        "small": torch.randn(7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "double": torch.randn(300, dtype=torch.float64),
        "numbers": torch.arange(3000),
        "byte": torch.arange(255, dtype=torch.uint8),
    }


def write_source(kind: str, folder: Path) -> Path:
    """Write the state as a checkpoint of one kind, and return its path."""
    tensors = state()
    if kind == "safetensors":
        save_file(tensors, folder / "plain.safetensors", {"format": "pt", "author": "me"})
        return folder / "plain.safetensors"
    if kind == "torch":
        torch.save({"model": tensors}, folder / "plain.pt")
        return folder / "plain.pt"
    if kind == "distributed":
        return save_distributed(tensors, folder / "distributed")
    names = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    return write_index(folder / "model.safetensors.index.json", names)


def assert_holds(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with_names = checkpoint.open_checkpoint(path)
    assert set(with_names) == set(expected)
    for name, tensor in expected.items():
        found, entry = with_names[name], with_names.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        found = found.decoded() if isinstance(found, LosslessTensor) else found
        assert_bit_equal(found, tensor, name)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.safetensors"
    checkpoint.convert(write_source("torch", tmp_path), path)
    return path


@pytest.fixture
def coded(plain: Path) -> Path:
    path = plain.with_name("coded.safetensors")
    checkpoint.convert(plain, path, lossless=True)
    return path


# ---- convert -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [None, "1MB"])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "distributed", "sharded"])
def test_every_format_to_the_code_and_back(kind: str, shard: str | None, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = write_source(kind, tmp_path)
    torch.manual_seed(1)
    expected = state()
    done = checkpoint.convert(source, tmp_path / "coded", lossless=True, max_shard_size=shard)
    assert done.ratios.keys() == CODES and all(1.05 < ratio < 1.5 for ratio in done.ratios.values())
    assert done.ratios["half"] > 1.38 and done.ratios["large"] > 1.15 and done.ratios["float16"] > 1.08
    assert done.decoded_bytes == sum(tensor.nbytes for tensor in expected.values()) > done.written_bytes
    assert (len(done.files) > 1) == (shard is not None)
    assert_holds(done.path, expected)
    checkpoint.verify(done.path)
    checkpoint.convert(done.path, tmp_path / "back.safetensors")
    assert load_file(tmp_path / "back.safetensors").keys() == expected.keys()
    assert_holds(tmp_path / "back.safetensors", expected)
    again = checkpoint.convert(done.path, tmp_path / "again.safetensors", lossless=True)
    assert again.ratios == done.ratios and again.written_bytes == done.written_bytes
    assert_holds(again.path, expected)


@pytest.mark.parametrize("lossless", [False, True])
def test_casts(coded: Path, lossless: bool) -> None:
    expected = checkpoint.open_checkpoint(coded.with_name("plain.safetensors"))
    path = coded.with_name("cast.safetensors")
    done = checkpoint.convert(coded, path, dtype=torch.bfloat16, lossless=lossless)
    assert bool(done.ratios) == lossless
    assert_holds(
        path,
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in ((k, expected[k]) for k in expected)},
    )


def test_a_file_is_a_safetensors_file_to_others(coded: Path) -> None:
    stored = load_file(coded)
    for name, tensor in stored.items():
        assert (tensor.dtype == torch.uint8) == (name in CODES | {"byte"})
    with safe_open(coded, "pt") as file:
        described = json.loads(file.metadata()[CODED])
    assert described["version"] == 1 and described["tensors"].keys() == CODES
    assert described["tensors"]["half"] == {"dtype": "BF16", "shape": [131, 517]}
    entries = checkpoint.open_checkpoint(coded).entries
    assert all((entries[name].offset or 0) % 16 == 0 for name in CODES)


def test_names_and_ties(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Linear(60, 70)
    model.b = nn.Linear(60, 70)
    model.b.weight = model.a.weight
    save_model(model, str(tmp_path / "tied.safetensors"))
    done = checkpoint.convert(
        tmp_path / "tied.safetensors", tmp_path / "out.safetensors", lossless=True, rename={"^": "x."}
    )
    assert done.ratios.keys() == {"x.a.weight"}
    found = checkpoint.summary(done.path)
    assert found.ties == (("x.a.weight", "x.b.weight"),) and CODED not in found.metadata


def test_an_interrupted_conversion_goes_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynswap_ext.checkpoint.writing import target

    def fail(*_: Any) -> None:
        raise OSError(5, "a disk that fails")

    with monkeypatch.context() as patch:
        patch.setattr(target.Target, "place", fail)
        with pytest.raises(SourceError, match="same call continues"):
            checkpoint.convert(plain, tmp_path / "out.safetensors", lossless=True)
    done = checkpoint.convert(plain, tmp_path / "out.safetensors", lossless=True)
    assert done.resumed_bytes == done.written_bytes
    assert_holds(done.path, dict(checkpoint.open_checkpoint(plain).items()))


def test_a_source_that_changes_meanwhile(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynswap_ext.checkpoint.writing import lossless

    sizes = iter(range(1000, 100_000, 16))
    monkeypatch.setattr(lossless, "encode", lambda _: torch.zeros(next(sizes), dtype=torch.uint8))
    with pytest.raises(SourceError, match="has changed while it was written"):
        checkpoint.convert(plain, tmp_path / "out.safetensors", lossless=True)


def test_the_command_says_the_ratio(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plain.with_name("out.safetensors")
    assert cli.main(["convert", "--lossless", str(plain), str(out)]) == 0
    assert re.search(r" \(1\.1\d times smaller\), verified", capsys.readouterr().out)
    assert cli.main(["show", "--verify", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 lossless" in shown and "lossless" in shown and "times smaller" in shown
    assert cli.main(["show", "--json", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["half"]["shape"] == [131, 517]


# ---- save and load -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 300)
        self.second = nn.Linear(300, 50, bias=False).bfloat16()
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(30, 40))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden) + self.second(self.first(hidden).bfloat16()).float() + self.table.sum()


TOKENS = torch.arange(50).view(5, 10)


def assert_equal_models(model: nn.Module, other: nn.Module) -> None:
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert torch.equal(model(TOKENS), other(TOKENS))


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture(params=["one", "sharded", "torch"])
def saved(request: pytest.FixtureRequest, model: Net, tmp_path: Path) -> Path:
    if request.param == "torch":
        loaded = checkpoint.load(Net, checkpoint.save(model, tmp_path / "x.safetensors", lossless=True))
        return checkpoint.save(loaded, tmp_path / "model.pt")
    path = tmp_path / ("model.safetensors" if request.param == "one" else "folder")
    limit = None if request.param == "one" else "40KB"
    return checkpoint.save(model, path, lossless=True, max_shard_size=limit)


def test_a_loaded_model_is_the_saved_one(model: Net, saved: Path) -> None:
    loaded = checkpoint.load(Net, saved)
    weight: Any = loaded.first.weight
    assert isinstance(weight, LosslessTensor) and isinstance(weight, nn.Parameter) and weight.requires_grad
    assert loaded.head.weight is loaded.embed.weight and isinstance(loaded.table, LosslessTensor)
    files = checkpoint.open_checkpoint(saved).files
    assert weight.coded is not None and any(is_mapped(weight.coded, file) for file in files)
    assert_equal_models(model, loaded)
    assert weight.coded is not None
    first = loaded(TOKENS).sum()
    first.backward()
    model(TOKENS).sum().backward()
    for one, two in zip(loaded.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
        with torch.no_grad():
            one.sub_(one.grad), two.sub_(two.grad)
    assert weight.coded is None
    assert_equal_models(model, loaded)


def test_save_of_a_loaded_model(model: Net, saved: Path, tmp_path: Path) -> None:
    plain = checkpoint.save(model, tmp_path / "a.safetensors").read_bytes()
    coded = checkpoint.save(model, tmp_path / "b.safetensors", lossless=True).read_bytes()
    loaded = checkpoint.load(Net, saved)
    assert checkpoint.save(loaded, tmp_path / "c.safetensors").read_bytes() == plain
    assert checkpoint.save(loaded, tmp_path / "d.safetensors", lossless=True).read_bytes() == coded
    assert isinstance(loaded.first.weight, LosslessTensor) and loaded.first.weight.coded is not None
    with torch.no_grad():
        for each in (model, loaded):
            each.first.weight.mul_(2)
    for lossless in (False, True):
        one = checkpoint.save(model, tmp_path / "e.safetensors", lossless=lossless).read_bytes()
        assert checkpoint.save(loaded, tmp_path / "f.safetensors", lossless=lossless).read_bytes() == one
    with pytest.raises(ConfigError, match="lossless"):
        checkpoint.save(model, tmp_path / "g.pt", lossless=True)


def test_options_of_load(model: Net, saved: Path) -> None:
    cast = checkpoint.load(Net, saved, dtype=torch.bfloat16)
    assert type(cast.first.weight) is nn.Parameter and isinstance(cast.second.weight, LosslessTensor)
    assert torch.equal(cast.first.weight, model.first.weight.bfloat16())
    seen: dict[str, Any] = {}

    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen[name] = type(tensor)
        return tensor * 2 if name == "first.weight" else tensor

    changed = checkpoint.load(Net, saved, transform=transform)
    assert set(seen.values()) == {torch.Tensor}
    assert (
        torch.equal(changed.first.weight, model.first.weight * 2)
        and type(changed.first.weight) is nn.Parameter
    )
    assert isinstance(changed.second.weight, LosslessTensor), "unchanged, so it stays mapped"
    own = Net()
    before = own.first.weight.data_ptr()
    checkpoint.load(own, saved, assign=False)
    assert own.first.weight.data_ptr() == before
    assert_equal_models(model, own)
    trained = checkpoint.load(Net, saved)
    checkpoint.load(trained, saved, assign=False)
    assert isinstance(trained.first.weight, LosslessTensor)
    assert_equal_models(model, trained)


def test_a_load_keeps_objects_and_attributes(model: Net, saved: Path) -> None:
    for own in (Net(), checkpoint.init_empty(Net), checkpoint.load(Net, saved)):
        weight = own.first.weight
        weight.mark = "mine"  # type: ignore[assignment]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        checkpoint.load(own, saved)
        assert own.first.weight is weight and weight.mark == "mine"
        assert isinstance(weight, LosslessTensor) and weight.coded is not None
        own(TOKENS).sum().backward()
        optimizer.step()
        assert not torch.equal(own.first.weight, model.first.weight)
        checkpoint.load(own, saved)
        assert own.first.weight is weight and weight.mark == "mine"
        assert_equal_models(model, own)


def test_shared_weights(tmp_path: Path) -> None:
    for different in (False, True):
        one = torch.randn(80, 80)
        two = one + 1 if different else one.clone()
        save_file({"a.weight": one, "b.weight": two}, tmp_path / "plain.safetensors")
        path = tmp_path / f"{different}.safetensors"
        checkpoint.convert(tmp_path / "plain.safetensors", path, lossless=True)

        def make() -> SharedWeight:
            made = SharedWeight()
            made.a.weight = made.b.weight = nn.Parameter(torch.ones(80, 80))
            return made

        if different:
            with pytest.raises(ConfigError, match="two different ones"):
                checkpoint.load(make, path)
        else:
            loaded = checkpoint.load(make, path)
            assert loaded.a.weight is loaded.b.weight and torch.equal(loaded.a.weight, one)


def test_names_that_do_not_fit(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model has \[3, 64\], the file \[300, 64\]"):
        wrong = Net()
        wrong.first = nn.Linear(64, 3)
        checkpoint.load(wrong, saved)


def test_summary_tells_what_it_stands_for(model: Net, saved: Path, tmp_path: Path) -> None:
    found = checkpoint.summary(saved)
    plain = checkpoint.summary(checkpoint.save(model, tmp_path / "plain.safetensors"))
    entry = found.entries["first.weight"]
    assert entry.shape == (300, 64) and entry.dtype == torch.float32 and entry.encoding == "lossless"
    assert entry.nbytes < entry.used_bytes == 300 * 64 * 4
    assert found.total_bytes < plain.total_bytes and found.smallest_budget >= plain.smallest_budget * 0.99
    assert "lossless" in found.facts() and "lossless" not in plain.facts()


@pytest.mark.parametrize("provider", ["python"])
def test_an_install_leaves_masters_coded(model: Net, tmp_path: Path, provider: str) -> None:
    loaded = checkpoint.load(Net, checkpoint.save(model, tmp_path / "x.safetensors", lossless=True))
    weight: Any = loaded.first.weight
    with dynswap_ext.install(loaded, device="cpu", budget="1MiB", provider=provider):
        assert_equal_models(model, loaded)
        assert weight.coded is not None
        for each in (model, loaded):
            each.first.weight.data.mul_(2)
        assert_equal_models(model, loaded)
    assert loaded.first.weight is weight and weight.coded is None


# ---- coded in RAM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossless", [False, True])
def test_load_coded(model: Net, tmp_path: Path, lossless: bool) -> None:
    path = checkpoint.save(model, tmp_path / "model.safetensors", lossless=lossless)
    loaded = checkpoint.load(Net, path, coded=True)
    weight = loaded.first.weight
    assert isinstance(weight, LosslessTensor) and weight.coded is not None
    assert not is_mapped(weight.coded, path) and loaded.head.weight is loaded.embed.weight
    assert is_mapped(loaded.first.bias.detach(), path), "what would not be smaller stays mapped"
    assert_equal_models(model, loaded)
    half = checkpoint.load(Net, path, coded=True, dtype=torch.bfloat16)
    assert isinstance(half.first.weight, LosslessTensor) and half.first.weight.dtype == torch.bfloat16
    doubled = checkpoint.load(Net, path, coded=True, transform=lambda _, tensor: tensor * 2)
    assert isinstance(doubled.first.weight, LosslessTensor)
    assert torch.equal(doubled.first.weight, model.first.weight * 2)
    for wrong in ({"assign": False}, {"device": "cuda" if torch.cuda.is_available() else None}):
        if None not in wrong.values():
            with pytest.raises(ConfigError, match="coded=True"):
                checkpoint.load(Net(), path, coded=True, **wrong)  # type: ignore[arg-type]


# ---- transformers ------------------------------------------------------------------------------------------


def test_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    checkpoint.convert(tmp_path / "plain", tmp_path / "coded", lossless=True, max_shard_size="100KB")
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "coded")
    library = transformers.modeling_utils.safe_open
    models = [
        checkpoint.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / name).eval()
        for name in ("plain", "coded")
    ]
    assert transformers.modeling_utils.safe_open is library
    weight = models[1].model.layers[1].mlp.up_proj.weight
    assert isinstance(weight, LosslessTensor) and isinstance(weight, nn.Parameter)
    with torch.no_grad():
        assert torch.equal(models[0](TOKENS).logits, models[1](TOKENS).logits)
    assert weight.coded is not None
    with pytest.warns(DynswapWarning, match="They were cast to another dtype"):
        cast = checkpoint.from_pretrained(
            transformers.AutoModelForCausalLM, tmp_path / "coded", dtype=torch.float32
        )
    assert torch.equal(
        cast.model.layers[1].mlp.up_proj.weight, models[0].model.layers[1].mlp.up_proj.weight.float()
    )
