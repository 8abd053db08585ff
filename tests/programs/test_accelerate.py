"""Programs with accelerate: a training loop with prepared objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider, accelerate_knows
from programs import assert_told_once, assert_trained_alike, both, library, same
from sample_models import mlp
from sparse_rows import Sentences, bags
from ways import TRAINING_WAYS, Way, beside_plain

accelerate = library("accelerate")


@pytest.fixture(autouse=True)
def _known(provider: Provider) -> None:
    accelerate_knows(provider)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Reset accelerate after a test, as it keeps the options of the process's first accelerator."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_prepared_loop(provider: Provider, accumulate: int, recwarn: pytest.WarningsRecorder) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 16), torch.randn(24, 16))

    def program(model: nn.Module) -> list[Any]:
        accelerator = accelerate.Accelerator(
            cpu=provider.device.type == "cpu", gradient_accumulation_steps=accumulate
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for x, y in loader:
            assert x.device == provider.device
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert accelerator.unwrap_model(model) is not None
        accelerator.free_memory()
        return losses

    with both(provider, mlp()) as (model, moved):
        same(program, model, moved)
        assert_trained_alike(provider, model.state_dict(), moved.cpu().state_dict())
    assert_told_once(recwarn, 0)  # accelerate moves the model, not the user


@pytest.mark.parametrize("way", TRAINING_WAYS, ids=str)
def test_a_scheduler_and_sparse_rows(provider: Provider, way: Way, tmp_path: Path) -> None:
    def program(model: nn.Module) -> list[Any]:
        accelerator = accelerate.Accelerator(cpu=provider.device.type == "cpu", gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        loader = torch.utils.data.DataLoader(Sentences(80), batch_size=2, shuffle=True)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        seen: list[Any] = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    seen += [norm.item(), *(p.grad.detach().clone().cpu() for p in model.parameters())]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += [accelerator.gather(loss.detach()).item(), scheduler.get_last_lr()]
        accelerator.free_memory()
        return seen

    beside_plain(provider, way, tmp_path, bags, program)


def test_autocast(provider: Provider) -> None:
    x = torch.randn(4, 16)

    def program(model: nn.Module) -> torch.Tensor:
        accelerator = accelerate.Accelerator(cpu=provider.device.type == "cpu", mixed_precision="bf16")
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        output = prepared(x.to(accelerator.device)).detach()
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        return output

    with both(provider, mlp()) as (model, moved):
        same(program, model, moved)
