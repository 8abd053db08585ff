"""Generate text with a causal language model that is larger than the memory it may use.

    python examples/generate.py path/to/Llama-3.1-8B-Instruct --budget 4GiB --prompt "streaming weights means"
    python examples/generate.py path/to/Qwen3-30B-A3B --budget 8GiB

The folder is a published checkpoint of transformers: a config, a tokenizer and weights in safetensors. It
may be a mixture of experts. The script maps the weights. While the model runs, they stream to the GPU within
the budget. Without a GPU, they stream from disk into RAM.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynswap_ext
from dynswap_ext import checkpoint


def peak_memory(device: torch.device) -> str:
    """Return the peak memory of the GPU, or else of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB on {device}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of RAM"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a transformers checkpoint")
    parser.add_argument("--prompt", default="streaming weights means")
    parser.add_argument(
        "--budget", default="auto", help='memory for weights: "4GiB", or "auto" (the default)'
    )
    parser.add_argument("--prefetch", type=int, default=2, help="groups of weights to copy ahead")
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = checkpoint.from_pretrained(AutoModelForCausalLM, options.folder)
    handle = dynswap_ext.install(
        model, device=options.device, budget=options.budget, prefetch=options.prefetch
    )
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)

    begin = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)[0]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    seconds = time.perf_counter() - begin

    made = len(tokens) - inputs["input_ids"].shape[1]
    print(text)
    print(handle.report())
    print(f"tokens/s     {made / seconds:.2f} ({made} tokens in {seconds:.2f} s)")
    print(f"peak memory  {peak_memory(handle.device)}")
    print(f"weights      {handle.stats().weight_bytes / 2**20:,.0f} MiB")
    handle.uninstall()


if __name__ == "__main__":
    main()
