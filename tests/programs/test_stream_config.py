"""`from_pretrained(..., quantization_config=StreamConfig())` loads a model and installs it."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider, accelerate_knows
from dynswap_ext import checkpoint, testing
from dynswap_ext.errors import BudgetError, ConfigError
from programs import assert_told_once, bytes_of, library
from sparse_rows import llama_classifier
from test_pretrained import CONFIGS, Auto, llama, mapped_bytes, mixtral, saved
from test_trainer import trainer
from ways import masters

transformers = library("transformers")

ADDED = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def config(provider: Provider, **options: Any) -> Any:
    """Return a config for the provider. On the CPU, weights are streamed only if they are mapped or cast."""
    return dynswap_ext.StreamConfig(device=provider.device, provider=provider.backend, **options)


def both(provider: Provider, folder: Path, cls: Any = Auto, *, load: Any = None, **options: Any) -> Any:
    """Load the checkpoint with the library, moved, and with StreamConfig, streamed."""
    load = load or {}
    if provider.device.type != "cpu":
        load["experts_implementation"] = "eager"  # the grouped one takes bfloat16 there
    plain = cls.from_pretrained(folder, **load).to(provider.device)
    model = cls.from_pretrained(folder, quantization_config=config(provider, **options), **load)
    provider.handles.append(dynswap_ext.handle_of(model))
    return plain, model


def tokens(provider: Provider) -> torch.Tensor:
    return torch.arange(3, 9, device=provider.device)[None]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_loaded_streams_from_its_files(provider: Provider, name: str, tmp_path: Path) -> None:
    plain, model = both(provider, saved(CONFIGS[name](), tmp_path), budget="minimum")
    assert dynswap_ext.is_installed(model) and model.device == provider.device and not model.training
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer")
    assert mapped_bytes(model) > 0.98 * bytes_of(model)  # though experts are fused while they are loaded
    expected = plain.generate(tokens(provider), **ADDED)
    assert torch.equal(model.generate(tokens(provider), **ADDED), expected)
    if provider.native:
        assert dynswap_ext.handle_of(model).stats().bytes_moved > 0.9 * bytes_of(model)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_dtype_is_cast_on_the_way(
    provider: Provider, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(llama(), tmp_path)
    Auto.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    plain, model = both(provider, folder, load={"dtype": dtype}, budget="minimum")
    assert mapped_bytes(model) > 0.98 * bytes_of(model)
    assert {master.dtype for master in masters(model).values()} >= {stored}
    assert model.dtype == plain.dtype == dtype
    assert torch.equal(model(tokens(provider)).logits, plain(tokens(provider)).logits)


def test_coded_weights_are_read_as_what_they_stand_for(provider: Provider, tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "plain")
    plain = Auto.from_pretrained(folder)
    checkpoint.convert(folder, tmp_path / "coded", lossless=True)
    for each in folder.glob("*config.json"):
        shutil.copy(each, tmp_path / "coded")
    model = Auto.from_pretrained(tmp_path / "coded", quantization_config=config(provider, budget="minimum"))
    provider.handles.append(dynswap_ext.handle_of(model))
    testing.assert_bit_equal(dict(model.state_dict()), dict(plain.state_dict()))
    moved = plain.to(provider.device)
    assert torch.equal(model.generate(tokens(provider), **ADDED), moved.generate(tokens(provider), **ADDED))
    if provider.native:
        assert dynswap_ext.handle_of(model).stats().bytes_moved > 0


def test_it_is_saved_as_any_model(provider: Provider, tmp_path: Path) -> None:
    """A save has experts under their official names, and nothing of the install."""
    folder = saved(mixtral(), tmp_path / "official")
    plain, model = both(provider, folder)
    model.save_pretrained(tmp_path / "saved")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    for name in names:
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes(), name
    again = Auto.from_pretrained(tmp_path / "saved")
    testing.assert_bit_equal(again.state_dict(), plain.cpu().state_dict(), "saved")


def test_in_a_pipeline(provider: Provider, tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 64)}}
    inner = library("tokenizers").Tokenizer(library("tokenizers").models.WordLevel(words, "<unk>"))
    inner.pre_tokenizer = library("tokenizers").pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<unk>").save_pretrained(folder)

    def run(**options: Any) -> Any:
        pipeline = transformers.pipeline(
            "text-generation", model=str(folder), device=provider.device.type, **options
        )
        return pipeline, pipeline("w3 w4 w5", **ADDED)

    _, expected = run()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        streamed, written = run(model_kwargs={"quantization_config": config(provider, budget="minimum")})
    assert_told_once(told, 0)  # the pipeline moves the model, not the user
    provider.handles.append(dynswap_ext.handle_of(streamed.model))
    assert written == expected and dynswap_ext.is_installed(streamed.model)
    assert mapped_bytes(streamed.model) > 0.98 * bytes_of(streamed.model)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "peft"])
def test_trained(provider: Provider, adapted: bool, tmp_path: Path) -> None:
    accelerate_knows(provider)
    llama_classifier().save_pretrained(tmp_path / "base")
    trained = []
    for model in both(provider, tmp_path / "base", transformers.AutoModelForSequenceClassification):
        if adapted:
            peft = library("peft")
            torch.manual_seed(0)
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(0)
        made, seen = trainer(provider, model, tmp_path, max_steps=4)
        made.train()
        trained.append((seen.logged, copy.deepcopy(masters(made.model))))
    (plain, of_plain), (streamed, of_streamed) = trained
    assert streamed == plain
    testing.assert_bit_equal(of_streamed, {n: t.cpu() for n, t in of_plain.items()}, "trained")


def test_as_a_dict(provider: Provider, tmp_path: Path) -> None:
    made = config(provider, budget="1MiB", prefetch=1)
    again = type(made).from_dict(made.to_dict())
    assert again.to_dict() == made.to_dict() and again.options["prefetch"] == 1
    model = Auto.from_pretrained(saved(llama(), tmp_path), quantization_config=made.to_dict())
    provider.handles.append(dynswap_ext.handle_of(model))
    assert provider.handles[-1].budget == 1 << 20


def test_what_is_refused(provider: Provider, tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)

    def load(streamed: Any, **options: Any) -> Any:
        return Auto.from_pretrained(folder, quantization_config=streamed, **options)

    with pytest.raises(TypeError, match=r"StreamConfig\(\) got .*'buget'\. Did you mean 'budget'\?"):
        config(provider, buget="1GiB")
    with pytest.raises(TypeError, match="dtype: it is an argument of from_pretrained"):
        config(provider, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="budget is '6 apples'"):
        load(config(provider, budget="6 apples"))
    with pytest.raises(BudgetError, match="the smallest budget that works is"):
        load(config(provider, budget=2000))
    library("accelerate")
    for several in ("auto", {"model": provider.device, "lm_head": "disk"}):  # the pretend device is two
        with pytest.raises(ConfigError, match=r"device_map is .* computes on one device.*; leave it out"):
            load(config(provider), device_map=several)
    if provider.device.type != "cpu":
        with pytest.raises(ConfigError, match="the device of StreamConfig is 'cpu'; leave one of them out"):
            load(dynswap_ext.StreamConfig(device="cpu"), device_map=provider.device)


@pytest.mark.parametrize("one", ["{}", {"": "{}"}, "cpu"], ids=str)
def test_a_device_map_of_one_device(provider: Provider, one: Any, tmp_path: Path) -> None:
    """With a device map of one device, the model computes there, and its weights are mapped on the host."""
    library("accelerate")
    folder, device = saved(llama(), tmp_path), str(provider.device)
    plain = Auto.from_pretrained(folder).to(device)
    options = {} if one != "cpu" else {"device": device}
    streamed = dynswap_ext.StreamConfig(provider=provider.backend, budget="minimum", **options)
    device_map = {"": device} if isinstance(one, dict) else one.format(device)
    model = Auto.from_pretrained(folder, quantization_config=streamed, device_map=device_map)
    provider.handles.append(dynswap_ext.handle_of(model))
    assert model.device == provider.device and mapped_bytes(model) > 0.98 * bytes_of(model)
    assert torch.equal(model(tokens(provider)).logits, plain(tokens(provider)).logits)


def test_a_quantised_checkpoint_is_installed_after_its_load(provider: Provider, tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(stored))
    for options, named in (({}, "budget='auto'"), ({"plan": "plan.json"}, "plan='plan.json'")):
        with pytest.raises(ConfigError, match=rf"quantised \(fp8\).*install\(model, .*{named}"):
            Auto.from_pretrained(folder, quantization_config=config(provider, **options))
