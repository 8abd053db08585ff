"""Generate text with a mixture of experts, of which only the chosen experts are fetched.

    python examples/experts.py path/to/Qwen3-30B-A3B --budget 12GiB --prompt "streaming weights means"

The folder is a checkpoint of transformers: a config, a tokenizer and weights in safetensors. Without one, the
script builds a small model with random weights. A router chooses some experts for each token; those stream
to the GPU, and the ones that are used most stay there, as far as the budget goes. Without a GPU, they stream
into RAM.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import dynswap_ext


def load(folder: Path | None) -> tuple[torch.nn.Module, torch.Tensor | None]:
    """Return the model, and a prompt of random tokens if there is no folder with a tokenizer."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), None
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config).eval(), torch.randint(0, 512, (1, 8))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of a transformers checkpoint")
    parser.add_argument("--prompt", default="streaming weights means")
    parser.add_argument("--budget", default="16MiB", help='memory for weights: "12GiB", or "auto"')
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--dtype", default="bfloat16", help="the dtype to compute in")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    model, prompt = load(options.folder)
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    active = experts * model.config.num_experts_per_tok // model.config.num_experts

    handle = dynswap_ext.install(
        model, device=options.device, dtype=getattr(torch, options.dtype), budget=options.budget
    )
    if prompt is None:
        tokenizer = AutoTokenizer.from_pretrained(options.folder)
        prompt = tokenizer(options.prompt, return_tensors="pt")["input_ids"]

    with torch.inference_mode():
        first = model.generate(prompt.to(model.device), max_new_tokens=2, min_new_tokens=2, do_sample=False)
        handle.reset_stats()  # the prompt used most experts
        begin = time.perf_counter()
        tokens = model.generate(
            first,
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.max_new_tokens,
            do_sample=False,
        )
        seconds = time.perf_counter() - begin

    made = tokens.shape[1] - first.shape[1]
    size = next(model.parameters()).element_size()
    moved = handle.stats().bytes_moved
    if options.folder is not None:
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    print(f"tokens/s      {made / seconds:.2f} ({made} tokens in {seconds:.2f} s)")
    print(f"experts       {experts * size / 2**20:,.1f} MiB")
    print(f"active        {active * size / 2**20:,.1f} MiB a token")
    print(f"moved         {moved / made / 2**20:,.1f} MiB a token")
    print(f"peak          {handle.stats().peak_bytes / 2**20:,.1f} MiB of weights on {handle.device}")
    handle.uninstall()


if __name__ == "__main__":
    main()
