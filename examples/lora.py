"""Train a LoRA adapter over a base model that does not fit on the device.

    python examples/lora.py path/to/Llama-3.1-8B --text corpus.txt --budget 6GiB --output adapter

The base is frozen, and its weights stream in forward and backward. The adapter, its gradients and the
optimizer's state are small, and stay on the device. The adapter is saved in the format of peft.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
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
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument(
        "--budget", default="auto", help='memory for the base: "6GiB", or "auto" (the default)'
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument(
        "--targets", nargs="+", default=["q_proj", "v_proj"], help="layers that get an adapter"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=4, help="rows in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--output", type=Path, default=Path("adapter"))
    options = parser.parse_args()

    config = AutoConfig.from_pretrained(options.folder)
    base = checkpoint.load(lambda: AutoModelForCausalLM.from_config(config), options.folder)
    handle = dynswap_ext.install(base, device=options.device, budget=options.budget)
    model = get_peft_model(base, LoraConfig(r=options.rank, target_modules=options.targets))
    model.gradient_checkpointing_enable()  # keeps few activations, but runs a second forward
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.rate)

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    data = blocks_of(options.text.read_text(), tokenizer, options.length).to(model.device)
    begin = time.perf_counter()
    for step in range(options.steps):
        batch = data[torch.randint(len(data), (options.batch,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")
    seconds = time.perf_counter() - begin

    model.save_pretrained(options.output)
    print(handle.report())
    trained = options.steps * options.batch * options.length
    print(f"tokens/s     {trained / seconds:.1f}")
    print(f"peak memory  {peak_memory(handle.device)}")
    print(f"adapter      {options.output}")


if __name__ == "__main__":
    main()
