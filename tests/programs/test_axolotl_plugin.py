r"""`DynswapPlugin` in axolotl's own command: results of a YAML file with it equal those without it.

axolotl requires exact versions of transformers and others, so `programs` does not include it. It runs from a
folder of its own, which comes before the installed packages and has all that it imports (tested with
0.19.0):

    pip install --no-deps --target /tmp/axolotl axolotl==0.19.0 transformers==5.16.1 tokenizers==0.23.1 \
        huggingface_hub==1.17.0 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 trl==1.9.0 posthog==6.7.11 ...
    PYTHONPATH=/tmp/axolotl:$PWD python -m pytest tests/programs/test_axolotl_plugin.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conftest import Provider, accelerate_knows
from programs import library

library("transformers")
base = pytest.importorskip(
    "axolotl.integrations.base", reason="axolotl is not installed (this test's docstring says how)"
)

ROOT = Path(__file__).parents[2]
PLUGIN = "dynswap_ext.integrations.axolotl.DynswapPlugin"
#: axolotl does not seed before it makes an adapter, so this command does.
COMMAND = (
    "import sys, torch; torch.manual_seed(0); from axolotl.cli.train import do_cli; do_cli(sys.argv.pop())"
)
#: By default axolotl trains an adapter with kernels for a GPU.
KERNELS = {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o")}


@pytest.fixture(autouse=True)
def _one_device() -> None:
    if torch.accelerator.device_count() > 1:
        pytest.skip("the plugin refuses several devices, which the pretend device has")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the example's YAML names."""
    folder = tmp_path_factory.mktemp("axolotl")
    script = ROOT / "examples" / "tiny.py"
    subprocess.run([sys.executable, script, "tiny", "--only", "llama"], cwd=folder, check=True, timeout=300)
    return folder


def train(folder: Path, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Train with the example's YAML file and other keys. None removes a key."""
    given = yaml.safe_load((ROOT / "examples" / "axolotl.yml").read_text())
    given |= {"bf16": False, "max_steps": 4, "logging_steps": 1, "dataset_num_proc": 1, **KERNELS, **keys}
    name = f"{keys['output_dir']}.yml"
    (folder / name).write_text(
        yaml.safe_dump({key: value for key, value in given.items() if value is not None})
    )
    return subprocess.run(
        [sys.executable, "-c", COMMAND, name],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )


def trained(folder: Path, output: str) -> tuple[list[float], dict[str, bytes]]:
    """Return the losses and the saved weights of a training."""
    state = json.loads(next((folder / output).glob("checkpoint-*/trainer_state.json")).read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return losses, {path.name: path.read_bytes() for path in (folder / output).glob("*.safetensors")}


@pytest.mark.parametrize("adapter", ["lora", None], ids=["lora", "all weights"])
def test_trained_as_without_it(provider: Provider, tiny: Path, adapter: str | None) -> None:
    accelerate_knows(provider)
    name = f"{adapter}-{provider.name}"
    plain = train(tiny, output_dir=f"{name}-plain", adapter=adapter, plugins=None, dynswap=None)
    assert plain.returncode == 0, plain.stdout[-4000:]
    options = {"budget": "2MiB", "provider": provider.backend}
    streamed = train(tiny, output_dir=f"{name}-streamed", adapter=adapter, dynswap=options)
    assert streamed.returncode == 0, streamed.stdout[-4000:]
    assert "dynswap: LlamaForCausalLM is installed: " in streamed.stdout
    assert f"{provider.backend}/" in streamed.stdout and "budget 2 MiB" in streamed.stdout  # its report
    losses, files = trained(tiny, f"{name}-streamed")
    assert len(losses) == 4 and files
    assert (losses, files) == trained(tiny, f"{name}-plain")


def validated(**keys: Any) -> Any:
    """Return axolotl's validated config of a file that names the plugin."""
    config = pytest.importorskip("axolotl.cli.config")
    checks = pytest.importorskip("axolotl.utils.config")
    given = yaml.safe_load((ROOT / "examples" / "axolotl.yml").read_text())
    cfg = pytest.importorskip("axolotl.utils.dict").DictDefault({**given, "bf16": False, **keys})
    config.prepare_plugins(cfg)
    return checks.validate_config(cfg)


def test_the_key_is_checked(provider: Provider) -> None:
    cfg = validated(dynswap={"budget": "6GiB", "prefetch": 3, "keep": ["*norm*"]})
    assert cfg.dynswap == {"budget": "6GiB", "prefetch": 3, "keep": ["*norm*"]} and cfg.device_map == "cpu"
    assert isinstance(base.PluginManager.get_instance().plugins[PLUGIN], base.BasePlugin)
    assert validated(dynswap=None).dynswap is None
    assert cfg.lora_qkv_kernel is False and validated(lora_qkv_kernel=True).lora_qkv_kernel is True
    for given, message in (
        ({"buget": "6GiB"}, "'buget'. Did you mean 'budget'"),
        ({"budget": "6 apples"}, "budget is '6 apples'"),
        ({"device": "cuda"}, "dynswap has no device: axolotl computes on the first GPU"),
        ({"dtype": "bf16"}, "dynswap has no dtype: axolotl's keys bf16 and fp16"),
        ("6GiB", "dynswap is '6GiB'; write options of install below it, such as budget: 6GiB"),
        (True, "dynswap is True; "),
    ):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            validated(dynswap=given)


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_offloading": True},
        {"deepspeed": "zero3.json"},
        {"fsdp_version": 2, "fsdp_config": {"offload_params": True}},
        {"load_in_8bit": True},
        {"load_in_4bit": True, "adapter": "qlora"},
        {"gpu_memory_limit": 8},
        {"device_map": "auto"},
    ],
    ids=lambda keys: list(keys)[-1],
)
def test_what_it_does_not_go_with(
    provider: Provider, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="or remove DynswapPlugin from plugins"):
        validated(**keys)
    one_device = "streams to one device; set CUDA_VISIBLE_DEVICES=0"
    with monkeypatch.context() as several, pytest.raises(ValueError, match=one_device):
        several.setenv("WORLD_SIZE", "2")
        validated()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=one_device):
        validated()
