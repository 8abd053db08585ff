"""Small models of the kinds whose memory grows while they run, and one step of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """Layers of equal size."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """Attention over all tokens so far, and a feed-forward part four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if past is not None:
            k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
        x = x + self.out(torch.softmax(q @ k.T / k.shape[1], -1) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x)))), k, v


class Decoder(nn.Module):
    """A decoder with a key-value cache, which grows with each call until it is emptied."""

    def __init__(self, width: int, layers: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)[0]
                continue
            x, k, v = block(x, cache[i] if cache and i < len(cache) else None)
            if cache is not None:
                cache[i : i + 1] = [(k, v)]
        return self.head(x)


class UNet(nn.Module):
    """Convolutions that halve the image and double it again. Activations are largest at both ends."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(levels + 1)]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for down, norm in zip(self.down, self.norms, strict=True):
            skipped.append(x)
            x = F.silu(norm(down(x)))
        for up, skip in zip(reversed(self.up), reversed(skipped), strict=True):
            x = up(x) + skip
        return self.last(x)


@dataclass
class Subject:
    """A model of a program, and how to call it with an input of a given size, from 1 on."""

    model: nn.Module
    kind: str
    trains: bool
    optimizer: torch.optim.Optimizer | None = None
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def step(self, size: int, device: str) -> list[Tensor]:
        """Call the model, in training with backward and optimizer. Return what is to be compared."""
        generator = torch.Generator().manual_seed(size)
        if self.kind == "decoder":
            x = torch.randint(0, 32, (8 * size,), generator=generator)
        elif self.kind == "unet":
            x = torch.randn(size, 3, 32, 32, generator=generator)
        else:
            x = torch.randn(8 * size, self.model.layers[0].in_features, generator=generator)  # type: ignore
        x = x.to(device)
        if self.trains:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            gradients = [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            return gradients
        with torch.no_grad():
            return [(self.model(x, self.cache) if self.kind == "decoder" else self.model(x)).cpu()]

    def begin_again(self) -> None:
        self.cache.clear()


def subject(draw: random.Random, seed: int) -> Subject:
    """Draw a model."""
    torch.manual_seed(seed)
    kind = draw.choice(("mlp", "decoder", "unet"))
    trains = draw.random() < 0.35
    make: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: Mlp(draw.choice((96, 128, 192)), draw.randint(5, 14)),
        "decoder": lambda: Decoder(draw.choice((48, 64, 96)), draw.randint(2, 5), draw.random() < 0.5),
        "unet": lambda: UNet(draw.choice((12, 16)), draw.randint(2, 4)),
    }
    model = make[kind]().requires_grad_(trains)
    optimizer = None
    if trains:
        kinds = (torch.optim.SGD, torch.optim.AdamW)
        optimizer = draw.choice(kinds)(model.parameters(), lr=1e-3)
    return Subject(model.train(trains), kind, trains, optimizer)
