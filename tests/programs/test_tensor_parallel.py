"""A model that transformers splits over two processes, installed in each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Provider
from programs import library, llama_config

transformers = library("transformers")

_RANK = """
import os, sys
import torch, torch.distributed as dist
import dynswap_ext, transformers
from transformers.distributed import DistributedConfig
rank, folder, provider = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
tokens = torch.randint(4, 64, (2, 5), generator=torch.Generator().manual_seed(3))

def split():
    plan = DistributedConfig(tp_plan="auto")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()

def generate(model):
    return model.generate(tokens, max_new_tokens=6, do_sample=False, output_logits=True,
                          return_dict_in_generate=True)

plain, installed = split(), split()
handle = dynswap_ext.install(installed, device="cpu", provider=provider)
for _ in range(2):
    expected, actual = generate(plain), generate(installed)
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(map(torch.equal, actual.logits, expected.logits))
assert type(installed.model.layers[0].mlp.up_proj.weight).__name__ == "DTensor"
assert tuple(plain.model.layers[0].mlp.up_proj.weight.to_local().shape) == (24, 32)
print("moved", handle.stats().bytes_moved)
handle.uninstall()
assert all(map(torch.equal, generate(installed).logits, expected.logits))
dist.barrier()  # a rank that ends while another still talks to it makes that one fail
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks(provider: Provider, tmp_path: Path) -> None:
    if provider.device.type != "cpu":
        pytest.skip("gloo adds up tensors in RAM")
    config = llama_config(vocab_size=64, num_hidden_layers=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path), "native" if provider.native else "python"]
    printed = [tmp_path / f"rank {number}" for number in range(2)]
    ranks = []
    for number, path in enumerate(printed):
        with path.open("w") as output:
            command = [sys.executable, "-c", _RANK, str(number), *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        for number, rank in enumerate(ranks):
            assert rank.wait(timeout=120) == 0, printed[number].read_text()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    if provider.native:  # masters are mapped from the file
        moved = [re.findall(r"^moved (\d+)$", path.read_text(), re.MULTILINE) for path in printed]
        assert all(int(number) > 0 for (number,) in moved)
