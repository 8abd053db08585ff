"""The demo's model: a decoder transformer in plain PyTorch that knows nothing of dynswap_ext."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_HEAD = 64
#: A model has at least this many layers, so that what passes through a ring of a few weights is a stream.
_FEWEST_LAYERS = 16


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. Matrices are multiples of 64 elements in each direction."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Elements of all weights; the output projection shares the embedding."""
        return (
            self.vocabulary * self.hidden
            + self.layers * _layer_elements(self.hidden, self.inner)
            + self.hidden
        )


def config_for(size: int, dtype: torch.dtype) -> DecoderConfig:
    """The decoder whose weights come closest to `size` bytes when they are stored as `dtype`."""
    elements = size / dtype.itemsize
    fitting = [
        width for width in _WIDTHS if elements >= _FEWEST_LAYERS * _layer_elements(width, _inner(width))
    ]
    hidden = max(fitting, default=_WIDTHS[0])
    inner, vocabulary = _inner(hidden), 8 * hidden
    layers = round((elements - vocabulary * hidden) / _layer_elements(hidden, inner))
    return DecoderConfig(hidden=hidden, inner=inner, layers=max(layers, 2), vocabulary=vocabulary)


def _inner(hidden: int) -> int:
    return -(-hidden * 8 // 3 // 64) * 64


def _layer_elements(hidden: int, inner: int) -> int:
    return 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    inverse_frequency: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // _HEAD
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        frequency = 10_000.0 ** (-torch.arange(0, _HEAD, 2, dtype=torch.float32) / _HEAD)
        self.register_buffer("inverse_frequency", frequency, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, hidden) to the same."""
        batch, tokens, hidden = x.shape
        angles = torch.outer(
            torch.arange(tokens, device=x.device, dtype=torch.float32), self.inverse_frequency.float()
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, self.heads, _HEAD).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            _rotate(split(self.query(x)), cos, sin),
            _rotate(split(self.key(x)), cos, sin),
            split(self.value(x)),
            is_causal=True,
        )
        projected: Tensor = self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return projected


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, hidden) to the same."""
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """One block: attention and feed-forward, each after an RMS norm, each added."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = Attention(hidden)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.feed_forward = FeedForward(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, tokens, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Decoder(nn.Module):
    """Tokens, shape (batch, tokens), to logits of the last position, shape (batch, vocabulary)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config.hidden, config.inner) for _ in range(config.layers))
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
