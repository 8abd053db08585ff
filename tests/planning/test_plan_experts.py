"""Plans of mixtures of experts: the smallest budget is an install's, and a pass moves what it uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import checkpoint, planning, testing
from dynswap_ext.errors import BudgetError
from sample_experts import WIDTH, Fused, Mixture, OneByOne, choices

MIB = 1 << 20


class Named(nn.Module):
    """Fused experts, with the name that they have in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Fused()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(x, chosen)


def assert_same_smallest(provider: Provider, path: Path, model: nn.Module) -> int:
    """Assert that a file, its plan, the model's plan and an install have one smallest budget. Return it."""
    on_cpu = provider.device.type == "cpu"
    expected = provider.smallest_budget(model)
    group = checkpoint.summary(path).largest_groups["cpu" if on_cpu else "accelerator"]
    assert group.nbytes == expected, group.names
    for outline in (planning.outline(path, disk=on_cpu), planning.outline_of_model(model, disk=on_cpu)):
        weights = planning.timed(outline.weights, planning.ASSUMED, rows=1)
        backend = "host" if on_cpu else "cuda"
        assert planning.plan(weights, bandwidth=1e9, backend=backend).smallest == expected, outline.title
    return expected


@pytest.fixture(autouse=True)
def _native(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches fused experts whole")


@pytest.mark.parametrize("experts", [Named, OneByOne])
def test_the_smallest_budget_is_an_installs(
    provider: Provider, experts: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Mixture(experts)

    path = checkpoint.save(make(), tmp_path / "model.safetensors")
    model = checkpoint.load(make, path)
    smallest = assert_same_smallest(provider, path, model)
    moved = testing.moved(model, provider.device)
    with pytest.raises(BudgetError):
        provider.install(model, budget=smallest - 1)
    handle = provider.install(model, budget=smallest)
    x, chosen = provider.randn(3, WIDTH, dtype=torch.float32), choices(tokens=3, device=provider.device)
    with torch.no_grad():
        testing.assert_bit_equal(model(x, chosen), moved(x, chosen))
    assert handle.stats().resident_bytes + handle.stats().arena_bytes <= smallest


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_single_experts_count_as_the_library_fuses_them(
    provider: Provider, family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    experts = {
        "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 96},
        "Mixtral": {"num_local_experts": 8},
    }
    config = getattr(transformers, f"{family}Config")(
        vocab_size=99,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        **experts[family],
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    names = checkpoint.summary(tmp_path).entries
    assert any(".experts.7." in name for name in names)  # one by one in the file
    model = checkpoint.from_pretrained(
        transformers.AutoModelForCausalLM, tmp_path, experts_implementation="eager"
    )
    smallest = assert_same_smallest(provider, tmp_path, model)
    tokens = torch.arange(5, device=provider.device)[None]
    moved = testing.moved(model, provider.device)
    provider.install(model, budget=smallest)
    with torch.no_grad():
        testing.assert_bit_equal(model(tokens).logits, moved(tokens).logits)


def test_a_shared_expert_and_a_lone_one_are_used_in_order(tmp_path: Path) -> None:
    names = ("a.experts.0.w", "a.experts.1.w", "b.experts.0.w", "b.shared_experts.w", "conv.weight", "moe.up")
    shapes = dict.fromkeys(names, (4, 4)) | {"conv.weight": (4, 4, 4), "moe.up": (4, 4, 4)}
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path)
    found = planning.outline(path).weights
    assert [w.name for w in found if w.by_use] == [*names[:2], *(f"moe.up[{number}]" for number in range(4))]


def mixture(by_use: float) -> list[planning.PlannedWeight]:
    """Return a dense matrix of 4 MiB and 16 experts of 1 MiB each."""
    dense = planning.PlannedWeight("dense", 4 * MIB, 4 * MIB, 0, "matrix", MIB, seconds=1e-4)
    experts = (
        planning.PlannedWeight(f"experts.{i}", MIB, MIB, i, "matrix", MIB // 4, seconds=1e-5, by_use=by_use)
        for i in range(1, 17)
    )
    return [dense, *experts]


def test_a_pass_moves_the_experts_that_it_uses() -> None:
    budgets = (5 * MIB, 12 * MIB, 19 * MIB, 20 * MIB)
    some, half, most, whole = planning.predict(mixture(0.25), budgets=budgets, bandwidth=1e9)
    assert 3 * MIB <= some.moved_bytes <= 4 * MIB  # four experts, of which one may be there already
    assert some.moved_bytes > half.moved_bytes > most.moved_bytes > whole.moved_bytes == 0
    assert some.compute_seconds == pytest.approx(2.6e-4) == whole.seconds
    every = planning.predict(mixture(1.0), budgets=budgets[:1], bandwidth=1e9)[0]
    assert 15 * MIB <= every.moved_bytes <= 16 * MIB
    for prediction in (some, half, most):
        assert prediction.limit_seconds <= prediction.seconds


def test_a_config_beside_the_file_says_how_many_experts_a_row_goes_through(tmp_path: Path) -> None:
    entries = {f"layers.0.experts.{i}.w": torch.ones(8, 8) for i in range(8)}
    path = tmp_path / "model.safetensors"
    save_file(entries, path)
    assert {weight.by_use for weight in planning.outline(path).weights} == {1.0}
    config: dict[str, Any] = {"model_type": "some", "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planning.outline(path)
    assert "2 of 8 experts" in found.notes[0] and {weight.share for weight in found.weights} == {0.25}
    timed = planning.timed(found.weights, planning.ASSUMED, rows=2)
    assert {weight.by_use for weight in timed} == {1 - 0.75**2}
