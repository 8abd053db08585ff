"""Models that consist mostly of an embedding, of which a training step uses few rows, and their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from programs import library, llama_config, seeded

ROWS, WIDTH, LENGTH, CLASSES = 16384, 32, 7, 3


class Bags(nn.Module):
    """The mean of some rows of an embedding of 2 MiB, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(self.rows(tokens).mean(dim=1))))


def bags() -> Bags:
    seeded()
    return Bags()


def llama_classifier() -> Any:
    """A Llama with a small head, so that the embedding has nearly all of its bytes."""
    transformers = library("transformers")
    config = llama_config(
        vocab_size=ROWS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        max_position_embeddings=16,
        num_labels=CLASSES,
    )
    seeded()
    return transformers.LlamaForSequenceClassification(config)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of random tokens. A token is in few of them, and each is used more than once."""

    def __init__(self, count: int = 48) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tokens = torch.randint(4, ROWS, (count, LENGTH), generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}
