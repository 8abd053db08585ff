"""`generate` of transformers on ranks that share out their copies, each with prompts of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forked_ranks
import pretend_cuda
from conftest import Provider
from programs import library

library("transformers")

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forks"),
]

_PROGRAM = """
import copy, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128)
model = transformers.LlamaForCausalLM(config).bfloat16().requires_grad_(False).eval()
dynswap_ext.share_masters(model)
plain = copy.deepcopy(model).to(device, torch.float32)
handle = dynswap_ext.install(
    model, device=device, dtype=torch.float32, budget="minimum", mesh=dist.group.WORLD)
draws = torch.Generator().manual_seed(rank)
for length in range(1 + rank, 5 + 2 * rank):  # more prompts on the second rank, and longer ones
    prompt = torch.randint(96, (2, length), generator=draws).to(device)
    options = dict(max_new_tokens=4 + length, do_sample=False, pad_token_id=0)
    found, expected = (each.generate(prompt, **options) for each in (model, plain))
    assert found.tolist() == expected.tolist()
dist.barrier()  # whoever is here first takes part in the calls of the other
told.update(handle.report().as_dict()["shared_out"])
handle.uninstall()
"""


def test_each_rank_generates_from_prompts_of_its_own(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not provider.native:
        pytest.skip("in pure Python, each rank copies all bytes")
    if provider.device.type != "cpu" and not pretend_cuda.active() and torch.accelerator.device_count() < 2:
        pytest.skip("it needs two GPUs")
    monkeypatch.setenv("DYNSWAP_MESH", "always")
    first, second = forked_ranks.run(_PROGRAM, 2, tmp_path, device_type=provider.device.type)
    assert first["for_others"] > 0  # it makes fewer calls
    assert first["gathered"] > 100 and second["gathered"] > 100
