"""Answer prompts on several devices of one host, with one copy of the weights in its RAM.

    torchrun --nproc-per-node 4 examples/ranks.py path/to/Llama-3.1-8B-Instruct prompts.txt --budget 4GiB

Each rank takes its share of the prompts, and streams the weights to its own GPU; without GPUs, all compute
on the CPU. Only the first rank loads the model. The others make it on the meta device and share its weights.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dynswap_ext
from dynswap_ext import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of a transformers checkpoint")
    parser.add_argument("prompts", type=Path, help="a text file with a prompt on each line")
    parser.add_argument("--budget", default="auto", help="memory for weights on each device")
    parser.add_argument("--dtype", help="compute in this one, such as bfloat16 (default: the checkpoint's)")
    parser.add_argument("--mesh", action="store_true", help="each device brings a part of every weight")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    if options.mesh and options.budget == "auto":
        parser.error("--mesh needs a budget that is the same for all ranks, such as --budget 4GiB")
    prompts = options.prompts.read_text().splitlines()

    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    everyone = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    config = AutoConfig.from_pretrained(options.folder)
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(options.folder, dtype="auto")
    else:
        dtype = config.dtype or torch.float32
        model = checkpoint.init_empty(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    model.requires_grad_(False).eval()
    shared = dynswap_ext.share_masters(model)
    if rank == 0:
        say(shared)
    mesh = distributed.group.WORLD if options.mesh else None
    handle = dynswap_ext.install(model, device=device, dtype=options.dtype, budget=options.budget, mesh=mesh)

    for prompt in prompts[rank::world]:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)[0]
        say(f"[rank {rank}] {tokenizer.decode(tokens, skip_special_tokens=True)}")
    distributed.barrier(everyone)  # with --mesh, a rank that has no more prompts brings its parts until then
    if rank == 0 and options.mesh:
        say(handle.report().shared_out)
    distributed.barrier(everyone)
    handle.uninstall()
    distributed.barrier(everyone)  # a rank that leaves while another still talks to it ends that one
    distributed.destroy_process_group()


def say(line: object) -> None:
    """Write a line in one call. Ranks share a pipe, and under torchrun `print` writes the newline apart."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
