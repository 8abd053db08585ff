"""GGUF's names and llama.cpp's order of rows are converted to those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sample_gguf import random_weight, write_gguf
from torch import nn

from dynswap_ext.checkpoint.gguf import GGUFTensor, names_for, original_rows
from dynswap_ext.errors import ConfigError

HEADS, KEYS = 4, 2
#: The names of a Llama's tensors in transformers.
HF = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "model.layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = {
        "llama.block_count": 2,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEYS,
    }
    given = {name: torch.ones(1) for name in HF.values()}
    return write_gguf(tmp_path / "w.gguf", {**given, "rope_freqs.weight": torch.ones(1)}, values=values)


def test_names_are_those_of_the_model(path: Path) -> None:
    rename = names_for(path, HF)
    assert {rename(theirs): theirs for theirs in HF.values()} == HF
    assert rename("rope_freqs.weight") is None and rename("other") == "other"
    without_head = [name.removeprefix("model.") for name in HF if name.startswith("model.")]
    assert names_for(path, without_head)("blk.0.attn_q.weight") == "layers.0.self_attn.q_proj.weight"


def test_names_of_a_model_or_what_makes_it(path: Path) -> None:
    model = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(4)})})
    for given in (model, lambda: model):
        assert names_for(path, given)("output_norm.bias") == "model.norm.bias"


def test_names_that_cannot_be_made(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of the model's names belongs to llama"):
        names_for(path, ["first.weight"])
    other = write_gguf(tmp_path / "o.gguf", {"w": torch.ones(1)}, "no-such")
    with pytest.raises(ConfigError, match="architecture 'no-such', which the gguf package does not know"):
        names_for(other, HF)
    bare = write_gguf(tmp_path / "b.gguf", {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"does not say llama\.block_count as one number"):
        names_for(bare, HF)
    torch.save({}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="torch file, not GGUF"):
        names_for(tmp_path / "w.pt", HF)


def permute(weights: torch.Tensor, n_head: int) -> torch.Tensor:
    """Do what `LlamaModel.permute` of llama.cpp does."""
    shape = weights.shape
    return weights.reshape(n_head, 2, shape[0] // n_head // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.mark.parametrize(("name", "heads"), [("attn_q", HEADS), ("attn_k", KEYS)])
def test_rows_are_put_back(name: str, heads: int, path: Path) -> None:
    transform = original_rows(path)
    weight = random_weight("Q4_K", 48, 512)
    permuted = GGUFTensor(permute(weight.blocks, heads), "Q4_K")
    back = transform(f"blk.3.{name}.weight", permuted)
    assert isinstance(back, GGUFTensor) and torch.equal(back.blocks, weight.blocks)
    bias = torch.randn(48)
    assert torch.equal(transform(_named(name), permute(bias, heads)), bias)
    assert transform("blk.3.attn_v.weight", permuted) is permuted
    with pytest.raises(ConfigError, match=r"the 7 rows of blk\.0\.attn_q\.weight do not divide into 4 heads"):
        transform("blk.0.attn_q.weight", torch.ones(7))


def _named(name: str) -> str:
    return f"model.layers.3.self_attn.{name[-1]}_proj.bias"


@pytest.mark.parametrize("architecture", ["granite", "mistral3", "olmo", "smollm3"])
def test_rows_of_architectures_like_llama_are_put_back(architecture: str, tmp_path: Path) -> None:
    heads = f"{architecture}.attention.head_count"
    values = {heads: HEADS, f"{heads}_kv": KEYS}
    path = write_gguf(tmp_path / "w.gguf", {"w": torch.ones(1)}, architecture, values)
    weight = torch.randn(48, 8)
    for name, count in (("attn_q", HEADS), ("attn_k", KEYS)):
        assert torch.equal(original_rows(path)(f"blk.0.{name}.weight", permute(weight, count)), weight)
    by_layer = write_gguf(tmp_path / "l.gguf", {"w": torch.ones(1)}, architecture, {heads: [4, 0]})
    with pytest.raises(ConfigError, match=rf"does not say {heads} as one number"):
        original_rows(by_layer)


def test_rows_of_another_architecture_stay(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "w.gguf", {"w": torch.ones(1)}, "qwen2")
    tensor = torch.ones(4)
    assert original_rows(path)("blk.0.attn_q.weight", tensor) is tensor
