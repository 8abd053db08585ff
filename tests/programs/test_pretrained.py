"""checkpoint.from_pretrained: transformers' own loading, with masters that stay mapped, also fused ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import PRETEND, Provider
from dynswap_ext import DynswapWarning, checkpoint, testing
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext.errors import ConfigError, SourceError
from programs import bytes_of, library, seeded

transformers = library("transformers")

pytestmark = pytest.mark.skipif(
    not FileMappings().overlapping(0, 1 << 62), reason="the kernel does not list what is mapped from files"
)

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def mixtral() -> Any:
    return transformers.MixtralConfig(**TOKENS, **SIZES, intermediate_size=128, num_local_experts=4)


def qwen3_moe() -> Any:
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "num_experts": 8, "head_dim": 16}
    return transformers.Qwen3MoeConfig(**TOKENS, **SIZES, **sizes, num_experts_per_tok=2)


def deepseek() -> Any:
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 96, "n_routed_experts": 8, "n_group": 2}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    some = {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "v_head_dim": 16}
    return transformers.DeepseekV3Config(
        **TOKENS, **{**SIZES, "num_key_value_heads": 4}, **sizes, **ranks, **some
    )


def llama() -> Any:
    return transformers.LlamaConfig(**TOKENS, **SIZES, intermediate_size=96, tie_word_embeddings=True)


CONFIGS: dict[str, Callable[[], Any]] = {
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "deepseek-v3": deepseek,
    "llama": llama,
}
Auto = transformers.AutoModelForCausalLM


def opened(provider: Provider, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Open the checkpoint with the library, moved to the device, and with this package, on the host."""
    if provider.device.type != "cpu":
        options["experts_implementation"] = "eager"  # the grouped one takes bfloat16 there
    plain, model = (
        Auto.from_pretrained(folder, **options),
        checkpoint.from_pretrained(Auto, folder, **options),
    )
    testing.assert_bit_equal(model.state_dict(), plain.state_dict(), "masters")
    return plain.to(provider.device), model


def saved(config: Any, folder: Path, **options: Any) -> Path:
    """Write a checkpoint as it is published: with official names, and each expert by itself."""
    seeded()
    Auto.from_config(config).eval().save_pretrained(folder, **options)
    return folder


def cut_in_two(folder: Path, second: Callable[[str], bool]) -> None:
    """Split a checkpoint into two shards, as another version of the library might."""
    safetensors = library("safetensors.torch")
    tensors = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard = {name: f"model-0000{1 + second(name)}-of-00002.safetensors" for name in tensors}
    for file in set(shard.values()):
        some = {name: tensor for name, tensor in tensors.items() if shard[name] == file}
        safetensors.save_file(some, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mapped_bytes(model: nn.Module) -> int:
    mappings, found = FileMappings(), 0
    for master in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        for mapping in mappings.overlapping(master.data_ptr(), master.nbytes):
            begin = max(mapping.begin, master.data_ptr())
            found += min(mapping.end, master.data_ptr() + master.nbytes) - begin
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_official_files_stream_as_they_are(provider: Provider, name: str, tmp_path: Path) -> None:
    folder = saved(CONFIGS[name](), tmp_path)
    plain, model = opened(provider, folder)
    assert type(model) is type(plain) and not model.training
    # All but rotary frequencies, which are in no file.
    assert mapped_bytes(model) > 0.98 * bytes_of(model)

    tokens = torch.arange(3, 9, device=provider.device)[None]
    expected = plain.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    handle = provider.install(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False), expected)
    if provider.native:
        stats = handle.stats()
        assert stats.bytes_moved > 0.9 * bytes_of(model) and stats.overflow_bytes == 0
        streamed = [row for row in handle.report().rows if row.source == "file"]
        assert sum(row.bytes for row in streamed) > 0.9 * bytes_of(model)


def test_what_the_library_neither_casts_nor_fuses_streams_after_its_own_loading(
    provider: Provider, tmp_path: Path
) -> None:
    model = Auto.from_pretrained(saved(llama(), tmp_path))
    assert mapped_bytes(model) > 0.98 * bytes_of(model)
    handle = provider.install(model)
    model(torch.arange(3, 9, device=provider.device)[None])
    if provider.native:
        streamed = [row for row in handle.report().rows if row.source == "file"]
        assert sum(row.bytes for row in streamed) > 0.9 * bytes_of(model)


def test_a_fused_weight_is_cast_on_the_way_within_the_budget(provider: Provider, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path)
    plain, model = opened(provider, folder)
    testing.move(plain, provider.device, torch.bfloat16)
    handle = provider.install(model, dtype=torch.bfloat16, budget=bytes_of(model) // 3)
    tokens = torch.arange(3, 9, device=provider.device)[None]
    for _ in range(3):
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    if provider.native:
        assert handle.stats().peak_bytes <= bytes_of(model) // 3


def test_what_is_written_to_a_fused_master_is_seen_and_saved(provider: Provider, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    plain, model = opened(provider, folder)
    plain.cpu()
    tokens = torch.arange(3, 9, device=provider.device)[None]
    provider.install(model)
    model(tokens)
    for each in (plain, model):
        weight = dict(each.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
        with torch.no_grad():
            weight[2, 100:] *= 2  # over a joint
        weight.data.view(-1)[7:11] = 1.5  # bumps no version of the parameter
    plain.to(provider.device)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert (folder / "model.safetensors").read_bytes() == before
    model.save_pretrained(tmp_path / "again")
    again = checkpoint.from_pretrained(Auto, tmp_path / "again")
    testing.assert_bit_equal(again.state_dict(), plain.cpu().state_dict(), "saved")
    checkpoint.save(model, tmp_path / "fused.safetensors")
    assert torch.equal(
        checkpoint.open_checkpoint(tmp_path / "fused.safetensors").tensor(
            "model.layers.1.mlp.experts.gate_up_proj"
        ),
        plain.model.layers[1].mlp.experts.gate_up_proj,
    )


def test_a_layer_over_two_shards(provider: Provider, tmp_path: Path) -> None:
    """A fused weight with parts in two files is mapped but for the fewer parts, which are copied.

    The offsets of the two differ modulo a page.
    """
    folder = saved(mixtral(), tmp_path)
    cut_in_two(folder, lambda name: "layers.1" in name and "experts.3" in name)
    plain, model = opened(provider, folder)
    expert = 3 * 64 * 128 * 4
    assert abs(bytes_of(model) - mapped_bytes(model) - expert) < 3 * 4096
    provider.install(model)
    tokens = torch.arange(3, 9, device=provider.device)[None]
    for _ in range(2):
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_gradients_and_a_step(provider: Provider, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path)
    plain, model = opened(provider, folder)
    provider.install(model)
    tokens = torch.arange(3, 9, device=provider.device)[None]
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            each(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    testing.assert_bit_equal(model.state_dict(), plain.cpu().state_dict(), "trained")


@pytest.mark.skipif(PRETEND, reason="is about the memory of the host")
def test_opening_takes_a_page_for_each_joint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 4}
    config = transformers.MixtralConfig(**TOKENS, **{**SIZES, **sizes})
    folder = saved(config, tmp_path)
    checkpoint.from_pretrained(Auto, folder)  # what the first load imports
    private = private_bytes()
    model = checkpoint.from_pretrained(Auto, folder)
    whole, parts = bytes_of(model), 4 * 3 * 16
    assert whole > 96 << 20
    assert private_bytes() - private < parts * 4096 + (8 << 20)
    peak = PeakMemory()
    checkpoint.save(model, tmp_path / "fused.safetensors")
    assert peak.more() < 0.5 * whole  # a save does not read it all into memory


def private_bytes() -> int:
    """Return the bytes of memory that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def test_what_is_copied_is_told(tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path)
    with pytest.warns(DynswapWarning, match="are in RAM and not mapped.*experts.*pass it to install") as told:
        model = checkpoint.from_pretrained(Auto, folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and len(told) == 1
    plain = Auto.from_pretrained(folder, dtype=torch.bfloat16)
    testing.assert_bit_equal(model.state_dict(), plain.state_dict(), "masters")


@pytest.mark.filterwarnings("error::dynswap_ext.errors.DynswapWarning")
def test_dtype_counts_before_its_former_name(tmp_path: Path) -> None:
    model = checkpoint.from_pretrained(
        Auto, saved(llama(), tmp_path), dtype=torch.float32, torch_dtype=torch.bfloat16
    )
    assert model.dtype == torch.float32


def test_options_are_the_librarys(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "sub").parent
    (folder / "sub" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    model, told = checkpoint.from_pretrained(
        Auto, folder, subfolder="sub", attn_implementation="eager", output_loading_info=True
    )
    assert model.generation_config.max_new_tokens == 3
    assert model.config._attn_implementation == "eager" and not told["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for place in ("auto", "cpu", {"": "cpu"}):
        with pytest.raises(ConfigError, match=r"device_map is .*give install\(\) the device"):
            checkpoint.from_pretrained(Auto, folder, subfolder="sub", device_map=place)
    for option in ("budget", "keep"):
        with pytest.raises(ConfigError, match=rf"{option} is an option of install\(\).*{option}='6GiB'\)"):
            checkpoint.from_pretrained(Auto, folder, subfolder="sub", **{option: "6GiB"})
    with pytest.raises(ConfigError, match="expected a class with from_pretrained"):
        checkpoint.from_pretrained(nn.Linear, folder)  # type: ignore[arg-type]


def test_damaged_files(provider: Provider, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path, max_shard_size="600KB")
    model = checkpoint.from_pretrained(Auto, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    tokens = torch.arange(3, 9, device=provider.device)[None]
    provider.install(model)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    with pytest.raises(SourceError, match=r"truncated|cut short|changed"):
        model(tokens)
    with pytest.raises(SourceError, match="cut short or damaged"):
        checkpoint.from_pretrained(Auto, folder)
    shard.unlink()
    with pytest.raises(SourceError, match="cannot be opened"):
        checkpoint.from_pretrained(Auto, folder)
    with pytest.raises(SourceError, match="cannot be opened"):
        checkpoint.from_pretrained(Auto, tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_load_names_this_function_where_it_does_not_fit(name: str, tmp_path: Path) -> None:
    """An error of `load` names `from_pretrained`, but only for models whose weights transformers fuses."""
    folder = saved(CONFIGS[name](), tmp_path)
    if name == "llama":
        assert checkpoint.load(lambda: Auto.from_config(llama()), folder) is not None
        return
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj") as caught:
        checkpoint.load(lambda: Auto.from_config(mixtral()), folder)
    assert "checkpoint.from_pretrained(transformers.AutoModelForCausalLM, folder)" in str(caught.value)
    assert "strict=False" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"pass strict=False") as caught:
        checkpoint.load(nn.Linear(4, 4), folder)
    assert "from_pretrained" not in str(caught.value)
