"""Fine-tune a model that does not fit on the device with the `Trainer` of Lightning.

    python examples/lightning_trainer.py path/to/Qwen3-0.6B --text corpus.txt --budget 1GiB

One callback is all that differs from any other program of Lightning. It saves a checkpoint of Lightning.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynswap_ext.integrations.lightning import DynswapCallback


class Tuned(lightning.LightningModule):
    """A causal language model and how it is trained."""

    def __init__(self, folder: str, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(folder)  # mapped, on the host

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the masters."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="the folder of a transformers checkpoint, or its name on the hub")
    parser.add_argument("--text", type=Path, required=True, help="a text file to train on")
    parser.add_argument(
        "--budget", default="auto", help='memory for weights: "1GiB", or "auto" (the default)'
    )
    parser.add_argument("--accelerator", default="auto", help="of the Trainer: gpu, cpu or auto")
    parser.add_argument("--precision", default="bf16-mixed", help="of the Trainer (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--batch", type=int, default=4, help="rows in a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--output", type=Path, default=Path("trained"))
    parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run")
    options = parser.parse_args()

    tokens = AutoTokenizer.from_pretrained(options.folder)(options.text.read_text(), return_tensors="pt")
    rows = tokens["input_ids"][0]
    rows = rows[: len(rows) // options.length * options.length].view(-1, options.length)
    data = torch.utils.data.DataLoader(rows, batch_size=options.batch, shuffle=True)

    streaming = DynswapCallback(budget=options.budget)
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[streaming, ModelCheckpoint(options.output, save_last=True)],
        logger=False,
    )
    trainer.fit(Tuned(options.folder, options.rate), data, ckpt_path=options.resume)

    print(streaming.handle.report())
    print(f"loss         {trainer.callback_metrics['loss']:.4f}")
    print(f"saved        {options.output / 'last.ckpt'}")


if __name__ == "__main__":
    main()
