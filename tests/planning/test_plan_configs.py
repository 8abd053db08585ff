"""Outlines from configs: models of transformers and diffusers, made without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynswap_ext import planning
from dynswap_ext.errors import ConfigError, SourceError

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = write(tmp_path / "config.json", _LLAMA)
    found = planning.outline(tmp_path)
    assert found == planning.outline(config) and "LlamaForCausalLM" in found.title
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_LLAMA, "dtype": None}))
    matrices = {name: 2 * p.numel() for name, p in model.named_parameters()}
    assert {w.name: w.nbytes for w in found.weights if w.name in matrices} == matrices
    kinds = {w.name: w.kind for w in found.weights}
    assert kinds["model.embed_tokens.weight"] == "lookup" and kinds["lm_head.weight"] == "matrix"
    assert kinds["model.layers.1.input_layernorm.weight"] == "norm"
    wide = planning.outline(tmp_path, dtype=torch.float32)
    assert sum(w.nbytes for w in wide.weights if w.name in matrices) == 2 * sum(matrices.values())


def test_tied_heads_are_one_weight(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write(tmp_path / "config.json", {**_LLAMA, "tie_word_embeddings": True})
    kinds = {w.name: w.kind for w in planning.outline(tmp_path).weights}
    assert kinds["model.embed_tokens.weight"] == "matrix" and "lm_head.weight" not in kinds


def test_experts_see_a_part_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    experts = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    write(tmp_path / "config.json", {**_LLAMA, **experts, "num_experts_per_tok": 2, "num_key_value_heads": 4})
    found = planning.outline(tmp_path)
    shares = {w.share for w in found.weights if ".experts." in w.name}
    assert shares == {0.25} and {w.share for w in found.weights if ".experts." not in w.name} == {1.0}
    assert any("2 of 8 experts" in note for note in found.notes)


def test_a_config_without_an_architecture_has_a_body(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write(tmp_path / "config.json", {k: v for k, v in _LLAMA.items() if k != "architectures"})
    found = planning.outline(tmp_path)
    assert "LlamaModel" in found.title and any("without a head" in note for note in found.notes)


def test_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    config = {"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [4, 6, 6], **sizes}
    write(tmp_path / "transformer" / "config.json", config)
    found = planning.outline(tmp_path / "transformer")
    assert found.rows == 4096 and any("no dtype" in note for note in found.notes)
    kinds = {w.name: w.kind for w in found.weights}
    assert kinds["transformer_blocks.0.norm1.linear.weight"] == "once"
    assert kinds["transformer_blocks.1.attn.to_q.weight"] == "matrix"
    half = planning.outline(tmp_path / "transformer", dtype=torch.bfloat16, disk=True)
    assert half.nbytes == sum(w.moved_bytes for w in half.weights) < 0.51 * found.nbytes and not half.notes
    write(tmp_path / "model_index.json", {})
    with pytest.raises(SourceError, match=r"folder of a pipeline.*transformer"):
        planning.outline(tmp_path)


@pytest.mark.parametrize(
    ("library", "content", "said"),
    [
        ("transformers", {**_LLAMA, "model_type": "nobody_knows"}, "cannot use .*nobody_knows"),
        ("transformers", {**_LLAMA, "hidden_size": "wide"}, "hidden_size|cannot be made"),
        ("diffusers", {"_class_name": "NoSuchModel"}, "no model of that name"),
        ("diffusers", {"_class_name": "DDIMScheduler"}, "no model of that name"),
    ],
)
def test_a_config_that_the_library_cannot_use_is_named(
    library: str, content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    path = write(tmp_path / "config.json", content)
    with pytest.raises(ConfigError, match=said) as caught:
        planning.outline(tmp_path)
    assert str(path) in str(caught.value) and "checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("library", "content"), [("transformers", _LLAMA), ("diffusers", {"_class_name": "UNet2DModel"})]
)
def test_a_library_that_is_not_there_is_named(
    library: str, content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    write(tmp_path / "config.json", content)
    with pytest.raises(ConfigError, match=f"pip install {library}"):
        planning.outline(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "{", "", '{"weight": 1}'])
def test_json_that_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match="is no config"):
        planning.outline(tmp_path / "config.json")


def test_weights_beside_the_config_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write(tmp_path / "config.json", _LLAMA)
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert [w.name for w in planning.outline(tmp_path).weights] == ["a.weight"]
