"""`dynswap run` of a program that adds peft adapters to the model that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import children
from conftest import ACCELERATOR, ENGINE, Provider
from programs import library, llama

library("peft")

#: Moves the model, adds adapters, and trains only these, like scripts of TRL and diffusers.
PROGRAM = """
import sys, peft, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).to("{device}")
torch.manual_seed(0)
model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights="gaussian", target_modules="all-linear"))
trained = [p for p in model.parameters() if p.requires_grad]
print(len(trained), {{p.device.type for p in trained}})
optimizer = torch.optim.AdamW(trained, 0.01)
tokens = torch.arange(3, 11, device="{device}")[None]
for _ in range(3):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_adapters_are_moved(provider: Provider, tmp_path: Path) -> None:
    """peft moves each adapter layer by itself, to where the base computes."""
    if provider.device.type == "cpu" or not provider.native:
        pytest.skip("a program takes the provider that there is, and its models to an accelerator")
    llama().save_pretrained(tmp_path / "model")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(device=ACCELERATOR))
    code = f"import os; os.environ['DYNSWAP_ENGINE_BACKEND'] = {ENGINE!r}\n"
    code += "import sys; from dynswap_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    printed = []
    for options in ([], ["--always", "--budget", "minimum"]):
        done = children.run(code, "run", *options, program, tmp_path / "model")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("installed, and its weights stream") == bool(options)
        assert "LlamaForCausalLM has" in done.stderr or not options
        printed.append(done.stdout)
    assert printed[0] == printed[1] and printed[0].startswith(f"42 {{'{ACCELERATOR}'}}")
