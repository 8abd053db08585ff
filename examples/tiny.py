"""Write tiny checkpoints with random weights, to try the other examples without a download.

    python examples/tiny.py tiny
    python examples/generate.py tiny/llama --budget 2MiB --device cpu
    python examples/generate.py tiny/mixtral --budget 2MiB --device cpu
    python examples/diffusion.py tiny/stable-diffusion --budget 3MiB --size 32 --steps 4 --device cpu

The script writes `llama`, a causal language model of transformers; `mixtral`, one with experts; `whisper`,
and `noise.wav` for it; if diffusers is installed, `stable-diffusion`, and for it `red.safetensors` and
`blue.safetensors`, LoRA adapters; and `corpus.txt`, a text to train on. The models generate noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import wave
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "photo", "of"]
WORDS += ["streaming", "weights", "means"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def tokenizer(length: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with the vocabulary `WORDS`, for texts of up to `length` tokens."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **names)


def write_decoder(folder: Path) -> None:
    """Write a Llama of some 5 MB, or for another folder name a Mixtral of some 4 MB, with its tokenizer."""
    if folder.name == "llama":
        config = transformers.LlamaConfig(**TOKENS, **SIZES, intermediate_size=384, num_hidden_layers=6)
    else:
        experts = {"intermediate_size": 192, "num_hidden_layers": 3, "num_local_experts": 4}
        config = transformers.MixtralConfig(**TOKENS, **SIZES, **experts)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer(2048).save_pretrained(folder)


def write_stable_diffusion(folder: Path) -> None:
    """Write a StableDiffusion pipeline for images of 32 pixels."""
    import diffusers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text = transformers.CLIPTextConfig(**TOKENS, **sizes, max_position_embeddings=16)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    parts = {
        "unet": unet,
        "vae": vae,
        "text_encoder": transformers.CLIPTextModel(text),
        "tokenizer": tokenizer(16),
    }
    parts["scheduler"] = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    no_checker = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = diffusers.StableDiffusionPipeline(**parts, **no_checker)
    pipe.save_pretrained(folder)
    write_adapters(pipe, folder.parent)


def write_adapters(pipe: Any, folder: Path) -> None:
    """Write two LoRA adapters for the pipeline's denoiser, where peft is installed."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft import LoraConfig, get_peft_model_state_dict

    for name in ("red", "blue"):
        config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
        pipe.unet.add_adapter(config, adapter_name=name)
        layers = get_peft_model_state_dict(pipe.unet, adapter_name=name)
        pipe.save_lora_weights(folder, weight_name=f"{name}.safetensors", unet_lora_layers=layers)


def write_whisper(folder: Path) -> None:
    """Write a Whisper of some 3 MB for two seconds of speech, and `noise.wav` to its parent folder."""
    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    lengths = {"max_source_positions": 100, "max_target_positions": 64}
    rules = {"decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": []}
    config = transformers.WhisperConfig(**TOKENS, **layers, **heads, **lengths, **rules, d_model=128)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    tokenizer(64).save_pretrained(folder)
    with wave.open(str(folder.parent / "noise.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(torch.randint(-9999, 9999, (32000,), dtype=torch.int16).numpy().tobytes())


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, help="where to write")
    writers = {"llama": write_decoder, "mixtral": write_decoder, "whisper": write_whisper}
    writers |= {"stable-diffusion": write_stable_diffusion}
    parser.add_argument("--only", choices=tuple(writers), help="write only this model")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    (options.folder / "corpus.txt").write_text("the red cat sat on the blue mat\n" * 200)
    for name, write in writers.items():
        missing = "diffusion" in name and not importlib.util.find_spec("diffusers")
        if name == options.only or (options.only is None and not missing):
            write(options.folder / name)
    print(f"written to {options.folder}")


if __name__ == "__main__":
    main()
