"""Fine-tune all weights of a model that does not fit on the device, with a plain loop and a fused AdamW.

    python examples/finetune.py path/to/Qwen3-0.6B --text corpus.txt --budget 1GiB --output trained

In forward and backward, weights stream to the device within the budget, and the model computes in bfloat16.
The model's own weights (masters), gradients and optimizer state are float32 in RAM, where AdamW's fused
kernel updates them. The next pass uses the new values.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dynswap_ext
from dynswap_ext import checkpoint


def blocks_of(text: str, tokenizer, length: int) -> torch.Tensor:
    """Return the text as rows of `length` tokens."""
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    rows = len(tokens) // length
    if not rows:
        raise SystemExit(
            f"the text has {len(tokens)} tokens; give a longer text, or a smaller --length than {length}"
        )
    return tokens[: rows * length].view(rows, length)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a transformers checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument(
        "--budget", default="auto", help='memory for weights: "1GiB", or "auto" (the default)'
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the compute")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=4, help="rows in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--output", type=Path, default=Path("trained"))
    options = parser.parse_args()

    config = AutoConfig.from_pretrained(options.folder)
    model = checkpoint.load(
        lambda: AutoModelForCausalLM.from_config(config), options.folder, dtype=torch.float32
    )
    handle = dynswap_ext.install(
        model, device=options.device, dtype=getattr(torch, options.dtype), budget=options.budget
    )
    # The parameters are the masters in RAM, so this is the CPU's fused kernel, with its state in RAM.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=True)

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    data = blocks_of(options.text.read_text(), tokenizer, options.length).to(model.device)
    model.train()
    begin = time.perf_counter()
    for step in range(options.steps):
        batch = data[torch.randint(len(data), (options.batch,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")
    seconds = time.perf_counter() - begin

    options.output.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    checkpoint.save(model, options.output / "model.safetensors")
    print(handle.report())
    print(f"tokens/s     {options.steps * options.batch * options.length / seconds:.1f}")
    print(f"peak memory  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of RAM")
    if handle.device.type == "cuda":
        print(f"             {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on {handle.device}")
    print(f"saved        {options.output}")


if __name__ == "__main__":
    main()
