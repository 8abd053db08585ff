"""``dynswap run``: an unchanged program does the same as without it, in less memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import children
from conftest import ACCELERATOR, ENGINE, Provider

#: A program with a model of eight layers of 1 MiB.
PROGRAM = """
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
torch.manual_seed(0)
model, x = Net(), torch.randn(2, 512)
{free}
{move}
assert __name__ == "__main__" and sys.argv[1] == "--steps", sys.argv
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torch.no_grad():
    print(model(x.to("{device}")).double().sum().item())
for _ in range(int(sys.argv[2])):
    loss = model(x.to("{device}")).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
print(next(model.parameters()).device.type, type(model).__name__)
"""
#: Caps the pretend device at 9.8 MiB of its 8 GiB, of which the model's 8 MiB leave less than a fifth.
LITTLE = "torch.get_device_module('{device}').set_per_process_memory_fraction(0.0012)"
MOVES = {
    "to": "model.to('{device}')",
    "its method": "model = model.{device}()",
    "a class's own": "Net.to = lambda self, *a: nn.Module.to(self, *a); model.to('{device}')",
}


def run(
    tmp_path: Path, options: list[str], move: str, free: str = "", steps: int = 0, expected: int = 0
) -> subprocess.CompletedProcess[str]:
    if free and ACCELERATOR != "cuda":
        pytest.skip("only of a CUDA device can a process be given a part of the memory")
    program = tmp_path / "program.py"
    free, move = (text.format(device=ACCELERATOR) for text in (free, move))
    program.write_text(PROGRAM.format(device=ACCELERATOR, move=move, free=free))
    engine = f"import os; os.environ['DYNSWAP_ENGINE_BACKEND'] = {ENGINE!r}\n"
    done = children.run(
        engine + "import sys; from dynswap_ext.cli import main; sys.exit(main(sys.argv[1:]))",
        *("run", *options, program, "--steps", steps),
    )
    assert done.returncode == expected, done.stderr
    return done


@pytest.fixture(autouse=True)
def _on_a_device(provider: Provider) -> None:
    if provider.device.type == "cpu" or not provider.native:
        pytest.skip("a program takes the provider that there is, and its models to an accelerator")


def test_what_fits_is_moved(provider: Provider, tmp_path: Path) -> None:
    done = run(tmp_path, [], MOVES["to"])
    assert done.stdout.splitlines()[-1] == f"{provider.device.type} Net" and done.stderr == ""


@pytest.mark.parametrize("move", MOVES)
def test_what_does_not_fit_is_installed(provider: Provider, move: str, tmp_path: Path) -> None:
    plain = run(tmp_path, [], MOVES["to"])
    done = run(tmp_path, ["--budget", "2.5MiB"], MOVES[move], LITTLE)
    assert done.stdout == plain.stdout  # equal bits, and the same device for the program
    told = [line for line in done.stderr.splitlines() if line.startswith("dynswap: ")]
    assert re.match(
        r"dynswap: Net has [\d.]+ MiB of weights, and \w+:0 [\d.]+ MiB of free memory: installed", told[0]
    )
    assert told[-1] == "dynswap: the report of Net:" and " all " in done.stderr
    assert "moves nothing" not in done.stderr


def test_always(provider: Provider, tmp_path: Path) -> None:
    plain = run(tmp_path, [], MOVES["to"], steps=3)
    done = run(tmp_path, ["--always", "--budget", "minimum"], MOVES["to"], steps=3)
    assert done.stdout == plain.stdout and "installed" in done.stderr


def test_what_cannot_be_installed_is_moved(provider: Provider, tmp_path: Path) -> None:
    plain = run(tmp_path, [], MOVES["to"])
    done = run(tmp_path, ["--always", "--budget", "2KiB"], MOVES["to"])
    assert done.stdout == plain.stdout
    assert "moved all the same: a budget of" in done.stderr


def test_what_is_asked_for_is_checked_first(provider: Provider, tmp_path: Path) -> None:
    done = run(tmp_path, ["--budget", "6 apples"], MOVES["to"], expected=2)
    assert done.stdout == "" and "budget is '6 apples'" in done.stderr


def test_a_device_that_there_is_not_is_torchs_to_tell(provider: Provider, tmp_path: Path) -> None:
    plain = "try: model.to('{device}:9')\nexcept RuntimeError as error: print(type(error).__name__)\n"
    done = run(tmp_path, [], plain + MOVES["to"])
    assert "ConfigError" not in done.stdout and "Error" in done.stdout


def test_the_programs_own_end(provider: Provider, tmp_path: Path) -> None:
    done = run(tmp_path, [], "sys.exit(7)", expected=7)
    assert done.stderr == ""
    done = run(tmp_path, [], "raise ValueError('its own')", expected=1)
    assert done.stderr.rstrip().endswith("ValueError: its own")
    done = run(tmp_path, [], "import dynswap_ext; dynswap_ext.install(3)", expected=1)
    assert "Traceback" in done.stderr and "model is a int" in done.stderr


def test_a_pipeline_is_installed_whole(provider: Provider, tmp_path: Path) -> None:
    """A pipeline is installed as a whole, if its models fit one by one but not together."""
    move = """
class Pipeline:
    @property
    def components(self): return {{"first": model, "second": other, "tokenizer": None}}
    def to(self, device):
        for one in (model, other): one.to(device)
other = Net()
Pipeline().to("{device}")
print(torch.equal(other(x.to("{device}")), other(x.to("{device}"))))
"""
    done = run(tmp_path, ["--budget", "3MiB"], move, LITTLE.replace("0.0012", "0.0016"))
    assert "dynswap: Pipeline has 16" in done.stderr and done.stderr.count("its weights stream") == 1
    assert done.stdout.startswith("True\n")


@pytest.mark.parametrize("device_map", ["'auto'", "'{device}'", "{{'': 0}}", "'cpu'"])
def test_what_transformers_would_load_there(provider: Provider, device_map: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(
        "import torch, transformers, dynswap_ext\n"
        "torch.accelerator.device_count = lambda: 1\n"  # else 'auto' uses both devices
        "model = transformers.LlamaForCausalLM.from_pretrained(\n"
        f"    pretrained_model_name_or_path={str(tmp_path / 'model')!r},\n"
        f"    device_map={device_map.format(device=ACCELERATOR)}\n"
        ")\n"
        "tokens = torch.arange(6, device=model.device)[None]\n"
        "made = model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False)\n"
        "print(made.tolist(), model.device.type)\n"
        "print(dynswap_ext.is_installed(model))\n"
    )
    code = f"import os; os.environ['DYNSWAP_ENGINE_BACKEND'] = {ENGINE!r}\n"
    code += "import sys; from dynswap_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    printed = []
    for options in ([], ["--always", "--budget", "minimum"]):
        done = children.run(code, "run", *options, tmp_path / "program.py")
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    on_the_device = "cpu" not in device_map
    assert printed[0][-2] == printed[1][-2]
    assert printed[0][-2].endswith(provider.device.type if on_the_device else "cpu")
    assert [lines[-1] for lines in printed] == ["False", str(on_the_device)]
