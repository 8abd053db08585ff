"""Train a LoRA adapter on sequences whose activations do not fit on the device.

    python examples/long_sequences.py path/to/Llama-3.1-8B --text book.txt --length 32768

The base streams within a budget, as in examples/lora.py. What its operations save for backward may take
`--activations` of the device; the rest goes to RAM (on the CPU to a file) and comes back for backward. With
`--gradient-checkpointing` each layer saves its input alone, and its forward runs twice.
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


def peak_memory(device: torch.device) -> str:
    """Return the peak memory of the GPU, or else of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB on {device}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of RAM"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path, help="the folder of a transformers checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument(
        "--budget", default="auto", help='memory for the base: "6GiB"; default: "auto", for both'
    )
    parser.add_argument(
        "--activations", default="auto", help='memory for what is saved: "4GiB"; default: "auto", for both'
    )
    parser.add_argument(
        "--activations-folder", type=Path, help="for what no page-locked RAM takes, or on a CPU"
    )
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="save the inputs of layers alone"
    )
    parser.add_argument("--device", help="where to compute (default: the GPU if there is one, else the CPU)")
    parser.add_argument("--length", type=int, default=8192, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--output", type=Path, default=Path("adapter"))
    options = parser.parse_args()

    config = AutoConfig.from_pretrained(options.folder)
    base = checkpoint.load(lambda: AutoModelForCausalLM.from_config(config), options.folder)
    handle = dynswap_ext.install(
        base,
        device=options.device,
        budget=options.budget,
        activations=options.activations,
        activations_folder=options.activations_folder,
    )
    model = get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.rate)

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    tokens = tokenizer(options.text.read_text(), return_tensors="pt")["input_ids"][0]
    if len(tokens) < options.length:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --length {options.length}")
    data = tokens[: len(tokens) // options.length * options.length].view(-1, options.length).to(model.device)
    begin = time.perf_counter()
    for step in range(options.steps):
        batch = data[torch.randint(len(data), (1,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f}")
    seconds = time.perf_counter() - begin

    model.save_pretrained(options.output)
    print(handle.report())
    print(f"tokens/s     {options.steps * options.length / seconds:.1f}")
    print(f"peak memory  {peak_memory(handle.device)}")
    print(f"adapter      {options.output}")


if __name__ == "__main__":
    main()
