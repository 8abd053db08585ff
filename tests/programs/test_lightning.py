"""Programs with lightning: a LightningModule, fitted and validated by its trainer with default options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider, accelerate_knows
from programs import assert_told_once, library
from sparse_rows import Bags, Sentences
from ways import TRAINING_WAYS, Way, beside_plain

lightning = library("lightning")


@pytest.fixture(autouse=True)
def _known(provider: Provider) -> None:
    accelerate_knows(provider)


class Classifier(lightning.LightningModule):
    """A usual LightningModule, which keeps its losses and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Bags()
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"])
        self.log("loss", loss)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"])
        self.log("validation", loss)
        self.seen.append(loss.item())

    def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        self.seen.append([p.grad.cpu().clone() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


@pytest.mark.parametrize("way", TRAINING_WAYS, ids=str)
@pytest.mark.parametrize("part", ["module", "net"])
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_fit(
    provider: Provider, way: Way, part: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def program(module: Classifier) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu" if provider.device.type == "cpu" else "gpu",
            devices=1,
            max_epochs=2,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(Sentences(), batch_size=6, shuffle=True)
        trainer.fit(module, loader, torch.utils.data.DataLoader(Sentences(8), batch_size=8))
        trainer.validate(module, torch.utils.data.DataLoader(Sentences(8), batch_size=8), verbose=False)
        assert trainer.global_step == 16
        return module.seen

    beside_plain(
        provider, way, tmp_path, Classifier, program, lambda made: made if part == "module" else made.net
    )
    assert_told_once(recwarn, 0)  # lightning moves the model, not the user
