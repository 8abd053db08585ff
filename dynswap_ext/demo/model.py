"""The demo's model, a decoder transformer in plain PyTorch, and the file of its weights."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.progress import ProgressCallback, ProgressOption, shown
from dynswap_ext._util.written_files import explained
from dynswap_ext.checkpoint.convert import convert
from dynswap_ext.checkpoint.writing.blocks import write
from dynswap_ext.checkpoint.writing.layout import Piece, split
from dynswap_ext.checkpoint.writing.target import Target
from dynswap_ext.errors import SourceError

_WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
_HEAD = 64
#: Widths are chosen that make about this many layers or more. With few of them, hardly anything would stream.
_FEWEST_LAYERS = 16


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder transformer. Both sides of each matrix are multiples of 64 elements."""

    hidden: int
    layers: int
    vocabulary: int

    @property
    def inner(self) -> int:
        """Width of the feed-forward part: 8/3 of the width of the model, rounded up to a multiple of 64."""
        return -(-self.hidden * 8 // 3 // 64) * 64

    @property
    def layer_elements(self) -> int:
        """The number of elements in a layer's weights."""
        return 4 * self.hidden * self.hidden + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """The number of elements in all weights. The output projection shares the embedding's."""
        return self.vocabulary * self.hidden + self.layers * self.layer_elements + self.hidden


def config_for(size: int, dtype: torch.dtype) -> DecoderConfig:
    """Return the sizes of a decoder whose weights take about `size` bytes in a dtype."""
    elements = size / dtype.itemsize
    for width in _WIDTHS:
        layer = DecoderConfig(hidden=width, layers=1, vocabulary=8 * width).layer_elements
        if elements >= _FEWEST_LAYERS * layer:
            break
    layers = round((elements - 8 * width * width) / layer)
    return DecoderConfig(hidden=width, layers=max(layers, 2), vocabulary=8 * width)


class Decoder(nn.Module):
    """A decoder transformer, from token numbers to logits of the last position."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(_Block(config.hidden, config.inner) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied, as in most small decoders

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, vocabulary) for token numbers of shape (batch, tokens)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


class _Block(nn.Module):
    """A layer: causal self-attention with rotary positions, then SwiGLU.

    Each of the two gets its input through an RMS norm, and its output is added to the input.
    """

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


def cache_folder() -> Path:
    """Return the folder in which checkpoints of the demo are written by default.

    It is not the temporary folder, which is in memory on many systems: nothing would be read from a disk.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dynswap_ext")


@contextmanager
def checkpoint_file(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    keep: bool = False,
    progress: ProgressOption = False,
) -> Iterator[Path]:
    """Yield the path of a safetensors file with random weights of a decoder, which is not in the page cache.

    An existing file is used again. The file is deleted afterwards, unless `keep`.
    """
    name = f"decoder-{config.hidden}x{config.layers}-{str(dtype).removeprefix('torch.')}.safetensors"
    path = folder / name
    with explained(folder, other_folder := "choose another --folder"):
        folder.mkdir(parents=True, exist_ok=True)
        there, free = path.exists(), shutil.disk_usage(folder).free
    if not there:
        size = config.parameters * dtype.itemsize
        if free < 1.1 * size:
            raise SourceError(
                f"the demo's checkpoint takes {format_bytes(size)} and {folder} has {format_bytes(free)} "
                "free; choose a smaller size or another folder"
            )
        with torch.device("meta"):
            skeleton = Decoder(config)
        with shown(progress, "writing the checkpoint") as tell:
            write_random(path, skeleton, dtype, tell)
    try:
        with explained(path, other_folder):
            drop_file_cache(path)
        yield path
    finally:
        if not keep:
            path.unlink(missing_ok=True)


@contextmanager
def coded_file(plain: Path, *, keep: bool = False, progress: ProgressOption = False) -> Iterator[Path]:
    """Yield the path of the same checkpoint, coded without loss, which is not in the page cache.

    An existing file is used again. The file is deleted afterwards, unless `keep`.
    """
    path = plain.with_name(f"{plain.stem}-coded.safetensors")
    try:
        convert(plain, path, lossless=True, progress=progress)
        drop_file_cache(path)
        yield path
    finally:
        if not keep:
            path.unlink(missing_ok=True)


def write_random(
    path: Path, skeleton: nn.Module, dtype: torch.dtype, progress: ProgressCallback | None = None
) -> None:
    """Write random weights for a model on the meta device to a safetensors file, always the same ones.

    Elements of matrices are normal with variance 1/columns, so that activations keep their size. Vectors are
    ones. A weight that is shared is written once, under its first name.
    """
    pieces = [
        Piece((name,), dtype, tuple(parameter.shape), partial(_fill, name, parameter.shape))
        for name, parameter in skeleton.named_parameters()
    ]
    write(Target.of(path), split(pieces, None, {}), progress)


def _fill(name: str, shape: torch.Size, first: int, into: Tensor) -> None:
    """Fill `into` with the elements of a weight from number `first` on, flattened."""
    if len(shape) < 2:
        into.fill_(1)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {first}".encode()))
    into.copy_(torch.randn(into.numel(), generator=generator).mul_(shape[-1] ** -0.5))
