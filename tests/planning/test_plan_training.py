"""`planning.saved_for_backward` and `dynswap plan --train`: what a step saves, without computing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dynswap_ext import cli, planning
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning import Prediction, SavedTensors

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BATCH, TOKENS, LAYERS = 2, 96, 3


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        architectures=["LlamaForCausalLM"],
    )


def measured(trains: str, checkpointed: bool = False) -> int:
    """Return the bytes that a real step saves, each storage once, without parameters and buffers."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if trains == "adapter":
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_())
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    rows = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=rows, labels=rows, use_cache=False)
    return sum(found.values())


@pytest.mark.parametrize("trains", ["full", "adapter"])
def test_it_is_what_a_step_saves(tmp_path: Path, trains: Any) -> None:
    config().save_pretrained(tmp_path)
    found = planning.saved_for_backward(
        lambda: planning.make_causal_model(tmp_path), batch=BATCH, tokens=TOKENS, trains=trains
    )
    real = measured(trains)
    assert abs(found.nbytes - real) <= 0.02 * real
    assert found.layers == LAYERS
    assert found.checkpointed_bytes < 0.7 * found.nbytes
    with_inputs = measured(trains, checkpointed=True)
    assert abs(found.checkpointed_bytes - with_inputs) <= 0.05 * with_inputs


def test_a_model_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step of Linear cannot be outlined"):
        planning.saved_for_backward(lambda: torch.nn.Linear(2, 2), tokens=4)


def prediction(moved: float, compute: float) -> Prediction:
    return Prediction(
        *(1, 0.0, 0, moved, compute, compute, moved, compute, 0.0, 0.0, 1, 1),
    )


def test_times_of_a_step() -> None:
    """Weights of 10 s on the bus, compute of 4 s, and saved tensors of 40 s."""
    saved = SavedTensors(nbytes=40, checkpointed_bytes=8, layer_bytes=16, largest_bytes=4, layers=2)
    found = {
        (step.way, step.bound): step
        for step in planning.training_steps(saved, prediction(10, 4), bandwidth=1.0)
    }
    assert found["all stays", None].seconds == 10 + 10
    assert found["activations=", 20].moved_bytes == 25  # three quarters of the bound stay
    assert found["activations=", 20].peak_bytes == 20
    assert found["activations=", 20].seconds == 25 + 35
    assert found["activations=", 4].peak_bytes == 3 + 4  # the largest tensor is more than a quarter
    assert found["activations=", 4].seconds == 37 + 47
    assert found["checkpointing", None].peak_bytes == 8 + 16
    assert found["checkpointing", None].seconds == 10 + 20
    assert found["checkpointing, activations=", 1].seconds == 10 + 27
    short = SavedTensors(nbytes=4, checkpointed_bytes=4, layer_bytes=0, largest_bytes=1, layers=0)
    slow = planning.training_steps(short, prediction(1, 10), bandwidth=1.0, trains="adapter")
    assert [step.seconds for step in slow] == [20] * 4  # compute hides the copies


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)")
    config().save_pretrained(tmp_path)
    given = ["plan", str(tmp_path), "--train", "full", "--tokens", "96", "--batch", "2"]
    assert cli.main(given) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "A training step of 2 x 96 tokens saves" in told
    assert "if its 3 layers are checkpointed" in told
    assert "checkpointing, activations=" in told
    assert cli.main([*given, "--json"]) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["saved"]["layers"] == LAYERS
    assert [step["way"] for step in training["steps"]][::4] == ["all stays", "checkpointing"]


def test_the_command_needs_tokens_and_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config().save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--train", "full"]) != 0
    assert "--train needs --tokens" in " ".join(capsys.readouterr().err.split())
    given = ["plan", str(tmp_path / "model.safetensors"), "--train", "full", "--tokens", "8"]
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    assert cli.main(given) != 0
    assert "--train needs the config.json" in " ".join(capsys.readouterr().err.split())
