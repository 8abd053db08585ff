"""The demo's model: a decoder transformer in plain PyTorch that knows nothing of dynswap_ext."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
_HEAD = 64
#: A model has at least this many layers, so that what passes through a ring of a few weights is a stream.
_FEWEST_LAYERS = 16


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. Matrices are multiples of 64 elements in each direction."""

    hidden: int
    layers: int
    vocabulary: int

    @property
    def inner(self) -> int:
        """Width of the feed-forward part: 8/3 of the model's, rounded up."""
        return -(-self.hidden * 8 // 3 // 64) * 64

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's weights."""
        return 4 * self.hidden * self.hidden + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all weights; the output projection shares the embedding."""
        return self.vocabulary * self.hidden + self.layers * self.layer_elements + self.hidden


def config_for(size: int, dtype: torch.dtype) -> DecoderConfig:
    """Return the decoder whose weights come closest to `size` bytes when they are stored as `dtype`."""
    elements = size / dtype.itemsize
    for width in _WIDTHS:
        layer = DecoderConfig(hidden=width, layers=1, vocabulary=8 * width).layer_elements
        if elements >= _FEWEST_LAYERS * layer:
            break
    layers = round((elements - 8 * width * width) / layer)
    return DecoderConfig(hidden=width, layers=max(layers, 2), vocabulary=8 * width)


class Decoder(nn.Module):
    """Tokens, shape (batch, tokens), to logits of the last position, shape (batch, vocabulary)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(_Block(config.hidden, config.inner) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied, as in most small decoders

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers to logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


class _Block(nn.Module):
    """Causal self-attention with rotary positions, then SwiGLU: each after an RMS norm, each added."""

    inverse_frequency: Tensor

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        frequency = 10_000.0 ** (-torch.arange(0, _HEAD, 2, dtype=torch.float32) / _HEAD)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        normed = self.feed_forward_norm(x)
        y: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequency.float())
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def rotate(heads: Tensor) -> Tensor:
            left, right = heads.chunk(2, dim=-1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

        query, key, value = (
            project(x).unflatten(-1, (-1, _HEAD)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected
