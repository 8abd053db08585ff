"""A program of `transformers.Trainer` that torchrun and accelerate start, as two ranks on the CPU.

Each rank trains a plain model and an installed one: the losses and the weights are the same to the bit, and
the masters stay where they were.
"""

from __future__ import annotations

import json
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
import json, os, sys
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
if adapters == "lora":
    assert dynswap_ext.share_masters(installed).shared > 0
else:
    testing.map_from_file(installed, f"{folder}/masters.{rank}")
handle = dynswap_ext.install(installed, device="cpu", budget="minimum", provider=provider)
before = [p.data_ptr() for p in installed.parameters()]
again = train(installed, "installed")
assert again == losses, (again, losses)
assert len(set(losses)) > 1
for (name, a), b in zip(installed.named_parameters(), plain.parameters(), strict=True):
    testing.assert_bit_equal(a.detach(), b.detach(), name)
assert [p.data_ptr() for p in installed.parameters()] == before  # Trainer has sent them to "cpu:0"
told = {"moved": handle.stats().bytes_moved, "masters": handle.report().host.masters}
with open(f"{folder}/told.{rank}", "w") as file:
    json.dump(told, file)
handle.uninstall()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

_LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d"],
    # With `--cpu`, accelerate starts several processes only by mpirun.
    "accelerate launch": [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--main_process_port=0",
        "--mixed_precision=no",
        "--dynamo_backend=no",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["full", "lora"])
@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_trainer(provider: Provider, tmp_path: Path, launcher: str, adapters: str) -> None:
    if provider.device.type != "cpu":
        pytest.skip("gloo averages the gradients of masters in RAM")
    if adapters == "lora":
        library("peft")
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    command = [sys.executable, "-m", *_LAUNCHERS[launcher], str(script), str(tmp_path)]
    done = subprocess.run(
        [*command, "native" if provider.native else "python", adapters],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2)]
    if adapters == "lora":  # the frozen weights are still one copy, which rank 0 counts
        assert told[1]["masters"] < told[0]["masters"] / 4
        return
    if provider.native:  # pure Python hands mapped memory out as it is
        assert all(each["moved"] > 0 for each in told)
    saved = [tmp_path / name / "model.safetensors" for name in ("plain", "installed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
