"""Write tiny checkpoints with random weights, to try the other examples without a download.

    python examples/tiny.py tiny
    python examples/generate.py tiny/llama --budget 2MiB --device cpu
    python examples/diffusion.py tiny/stable-diffusion --budget 3MiB --size 32 --steps 4 --device cpu

The script writes three things to the folder: `llama`, a causal language model of transformers;
`stable-diffusion`, a pipeline of diffusers; and `corpus.txt`, a text to train on. The models generate noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "photo", "of"]
WORDS += ["streaming", "weights", "means"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokenizer(length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the vocabulary `WORDS`, for texts of up to `length` tokens."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **names)


def write_llama(folder: Path) -> None:
    """Write a Llama of some 5 MB with its tokenizer."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**TOKENS, **sizes, **heads)).save_pretrained(folder)
    tokenizer(2048).save_pretrained(folder)


def write_stable_diffusion(folder: Path) -> None:
    """Write a StableDiffusion pipeline for images of 32 pixels."""
    import diffusers

    text = CLIPTextConfig(
        **TOKENS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=16
    )
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
    parts = {"unet": unet, "vae": vae, "text_encoder": CLIPTextModel(text), "tokenizer": tokenizer(16)}
    parts["scheduler"] = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    no_checker = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    diffusers.StableDiffusionPipeline(**parts, **no_checker).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--only", choices=("llama", "stable-diffusion"), help="write only this model")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only != "stable-diffusion":
        write_llama(options.folder / "llama")
    if options.only != "llama":
        write_stable_diffusion(options.folder / "stable-diffusion")
    (options.folder / "corpus.txt").write_text("the red cat sat on the blue mat\n" * 200)
    print(f"written to {options.folder}")


if __name__ == "__main__":
    main()
