"""A program of `transformers.Trainer` that torchrun starts, as two ranks on the CPU.

Each rank trains a plain model and an installed one: the losses and the weights are the same to the bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Provider
from programs import library

transformers = library("transformers")
library("accelerate")

_PROGRAM = """
import os, sys
import torch, transformers
import dynswap_ext
from dynswap_ext import testing

folder, provider, adapters = sys.argv[1:]
rank = int(os.environ["RANK"])

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        row = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}

def make():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config)
    if adapters == "lora":
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return model

def train(model, name):
    transformers.set_seed(1)
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/{name}", max_steps=6, per_device_train_batch_size=2, logging_steps=1,
        use_cpu=True, learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train()
    trainer.save_model(f"{folder}/{name}")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]

plain = make()
losses = train(plain, "plain")
assert torch.distributed.get_world_size() == 2
installed = make()
# On the CPU, Trainer copies what a model has: with `.to("cpu:0")`, which is not "cpu" to torch.
if adapters == "lora":
    assert dynswap_ext.share_masters(installed).shared > 0
else:
    testing.map_from_file(installed, f"{folder}/masters.{rank}")
handle = dynswap_ext.install(installed, device="cpu", budget="minimum", provider=provider)
again = train(installed, "installed")
assert again == losses, (again, losses)
assert len(set(losses)) > 1
for (name, a), b in zip(installed.named_parameters(), plain.parameters(), strict=True):
    testing.assert_bit_equal(a.detach(), b.detach(), name)
assert handle.active
handle.uninstall()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

_TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d"]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["full", "lora"])
def test_trainer(provider: Provider, tmp_path: Path, adapters: str) -> None:
    if provider.device.type != "cpu":
        pytest.skip("gloo averages the gradients of masters in RAM")
    if adapters == "lora":
        library("peft")
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    command = [sys.executable, "-m", *_TORCHRUN, str(script), str(tmp_path)]
    done = subprocess.run(
        [*command, "native" if provider.native else "python", adapters],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if adapters == "full":
        saved = [tmp_path / name / "model.safetensors" for name in ("plain", "installed")]
        assert saved[0].read_bytes() == saved[1].read_bytes()
