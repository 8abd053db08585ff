"""Weights of real models in the order of use, from their public configurations, with their compute.

Each function returns `Layer`s: name, elements, floating-point operations of the kernel that reads it, and
the module that it belongs to. tests/test_benchmarks.py compares sums with the published parameter counts.
Attention products, norms and activations count as compute of the weight before them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    name: str
    elements: int
    operations: float
    unit: int


class Shape:
    """Collects layers. Every call that adds one begins a new module."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self._unit = -1

    def linear(self, name: str, inputs: int, outputs: int, rows: float, *, bias: bool = True) -> None:
        """Add a matrix product over `rows` vectors."""
        self._unit += 1
        self._add(f"{name}.weight", inputs * outputs, 2.0 * rows * inputs * outputs)
        if bias:
            self._add(f"{name}.bias", outputs, rows * outputs)

    def convolution(self, name: str, inputs: int, outputs: int, kernel: int, pixels: float) -> None:
        self.linear(name, inputs * kernel * kernel, outputs, pixels)

    def vectors(self, name: str, length: int, rows: float, *, count: int = 2) -> None:
        """Add a norm: a weight, and a bias if `count` is 2."""
        self._unit += 1
        for number in range(count):
            self._add(f"{name}.{'weight' if number == 0 else 'bias'}", length, 4.0 * rows * length)

    def table(self, name: str, rows: int, width: int) -> None:
        self._unit += 1
        self._add(f"{name}.weight", rows * width, 0.0)

    def operations(self, count: float) -> None:
        """Add operations, such as an attention product, to the last weight."""
        last = self.layers[-1]
        self.layers[-1] = Layer(last.name, last.elements, last.operations + count, last.unit)

    def _add(self, name: str, elements: int, operations: float) -> None:
        self.layers.append(Layer(name, elements, operations, self._unit))


def attention_operations(queries: float, keys: float, width: int) -> float:
    """Return the operations of both products of attention, over all heads."""
    return 4.0 * queries * keys * width


def llama_3_8b(tokens: int) -> list[Layer]:
    """Return the layers of Llama-3-8B: 32 layers of width 4096, inner width 14336."""
    return _llama_3(tokens, layers=32, width=4096, inner=14336)


def llama_3_70b(tokens: int) -> list[Layer]:
    """Return the layers of Llama-3-70B: 80 layers of width 8192, inner width 28672."""
    return _llama_3(tokens, layers=80, width=8192, inner=28672)


def _llama_3(tokens: int, *, layers: int, width: int, inner: int) -> list[Layer]:
    """Return the layers of a model with 8 heads of 128 for keys and values, and a vocabulary of 128256."""
    keys, vocabulary = 1024, 128256
    shape = Shape()
    shape.table("embed_tokens", vocabulary, width)
    for number in range(layers):
        name = f"layers.{number}"
        shape.vectors(f"{name}.input_layernorm", width, tokens, count=1)
        shape.linear(f"{name}.q_proj", width, width, tokens, bias=False)
        shape.linear(f"{name}.k_proj", width, keys, tokens, bias=False)
        shape.linear(f"{name}.v_proj", width, keys, tokens, bias=False)
        shape.operations(attention_operations(tokens, tokens, width) / 2)  # causal
        shape.linear(f"{name}.o_proj", width, width, tokens, bias=False)
        shape.vectors(f"{name}.post_attention_layernorm", width, tokens, count=1)
        shape.linear(f"{name}.gate_proj", width, inner, tokens, bias=False)
        shape.linear(f"{name}.up_proj", width, inner, tokens, bias=False)
        shape.linear(f"{name}.down_proj", inner, width, tokens, bias=False)
    shape.vectors("norm", width, tokens, count=1)
    shape.linear("lm_head", width, vocabulary, 1, bias=False)
    return shape.layers


def flux_1(image_tokens: int, text_tokens: int = 512) -> list[Layer]:
    """Return the layers of FLUX.1-dev's transformer: 19 double and 38 single blocks of width 3072."""
    width, head = 3072, 128
    both = image_tokens + text_tokens
    shape = Shape()
    for embedder, inputs in (("timestep", 256), ("guidance", 256), ("text", 768)):
        shape.linear(f"{embedder}_embedder.linear_1", inputs, width, 1)
        shape.linear(f"{embedder}_embedder.linear_2", width, width, 1)
    shape.linear("context_embedder", 4096, width, text_tokens)
    shape.linear("x_embedder", 64, width, image_tokens)
    streams = (("", image_tokens), ("_context", text_tokens))
    for number in range(19):
        name = f"transformer_blocks.{number}"
        for suffix, _ in streams:
            shape.linear(f"{name}.norm1{suffix}.linear", width, 6 * width, 1)
        for suffix, rows in streams:
            for part in ("q", "k", "v"):
                shape.linear(f"{name}.attn.{part}{suffix}", width, width, rows)
            for part in ("norm_q", "norm_k"):
                shape.vectors(f"{name}.attn.{part}{suffix}", head, rows, count=1)
        shape.operations(attention_operations(both, both, width))
        for suffix, rows in streams:
            shape.linear(f"{name}.attn.to_out{suffix}", width, width, rows)
        for suffix, rows in streams:
            shape.linear(f"{name}.ff{suffix}.0", width, 4 * width, rows)
            shape.linear(f"{name}.ff{suffix}.2", 4 * width, width, rows)
    for number in range(38):
        name = f"single_transformer_blocks.{number}"
        shape.linear(f"{name}.norm.linear", width, 3 * width, 1)
        shape.linear(f"{name}.proj_mlp", width, 4 * width, both)
        for part in ("q", "k", "v"):
            shape.linear(f"{name}.attn.{part}", width, width, both)
        for part in ("norm_q", "norm_k"):
            shape.vectors(f"{name}.attn.{part}", head, both, count=1)
        shape.operations(attention_operations(both, both, width))
        shape.linear(f"{name}.proj_out", 5 * width, width, both)
    shape.linear("norm_out.linear", width, 2 * width, 1)
    shape.linear("proj_out", width, 64, image_tokens)
    return shape.layers


def sdxl_unet(latent: int, batch: int = 2, text_tokens: int = 77) -> list[Layer]:
    """Return the layers of SDXL's UNet: widths 320, 640, 1280, with 0, 2 and 10 transformer layers each."""
    widths, depths, context, time = (320, 640, 1280), (0, 2, 10), 2048, 1280
    shape = Shape()

    def pixels(side: int) -> float:
        return float(batch * side * side)

    def residual(name: str, inputs: int, outputs: int, side: int) -> None:
        shape.vectors(f"{name}.norm1", inputs, pixels(side))
        shape.convolution(f"{name}.conv1", inputs, outputs, 3, pixels(side))
        shape.linear(f"{name}.time_emb_proj", time, outputs, batch)
        shape.vectors(f"{name}.norm2", outputs, pixels(side))
        shape.convolution(f"{name}.conv2", outputs, outputs, 3, pixels(side))
        if inputs != outputs:
            shape.convolution(f"{name}.conv_shortcut", inputs, outputs, 1, pixels(side))

    def transformer(name: str, width: int, layers: int, side: int) -> None:
        rows, words = pixels(side), float(batch * text_tokens)
        shape.vectors(f"{name}.norm", width, rows)
        shape.linear(f"{name}.proj_in", width, width, rows)
        for number in range(layers):
            block = f"{name}.transformer_blocks.{number}"
            for attention, source, source_rows, keys in (
                ("attn1", width, rows, side * side),
                ("attn2", context, words, text_tokens),
            ):
                shape.vectors(f"{block}.{attention}.norm", width, rows)
                shape.linear(f"{block}.{attention}.to_q", width, width, rows, bias=False)
                shape.linear(f"{block}.{attention}.to_k", source, width, source_rows, bias=False)
                shape.linear(f"{block}.{attention}.to_v", source, width, source_rows, bias=False)
                shape.operations(attention_operations(rows, keys, width))
                shape.linear(f"{block}.{attention}.to_out", width, width, rows)
            shape.vectors(f"{block}.norm3", width, rows)
            shape.linear(f"{block}.ff.0", width, 8 * width, rows)
            shape.linear(f"{block}.ff.2", 4 * width, width, rows)
        shape.linear(f"{name}.proj_out", width, width, rows)

    shape.linear("time_embedding.linear_1", widths[0], time, batch)
    shape.linear("time_embedding.linear_2", time, time, batch)
    shape.linear("add_embedding.linear_1", 2816, time, batch)
    shape.linear("add_embedding.linear_2", time, time, batch)
    shape.convolution("conv_in", 4, widths[0], 3, pixels(latent))
    side, skips, width = latent, [widths[0]], widths[0]
    for level, out in enumerate(widths):
        for number in range(2):
            residual(f"down.{level}.resnets.{number}", width, out, side)
            width = out
            if depths[level]:
                transformer(f"down.{level}.attentions.{number}", out, depths[level], side)
            skips.append(out)
        if level < 2:
            side //= 2
            shape.convolution(f"down.{level}.downsample", out, out, 3, pixels(side))
            skips.append(out)
    residual("mid.resnets.0", width, width, side)
    transformer("mid.attentions.0", width, depths[-1], side)
    residual("mid.resnets.1", width, width, side)
    for level, out in reversed(list(enumerate(widths))):
        for number in range(3):
            residual(f"up.{level}.resnets.{number}", width + skips.pop(), out, side)
            width = out
            if depths[level]:
                transformer(f"up.{level}.attentions.{number}", out, depths[level], side)
        if level > 0:
            side *= 2
            shape.convolution(f"up.{level}.upsample", out, out, 3, pixels(side))
    shape.vectors("conv_norm_out", widths[0], pixels(latent))
    shape.convolution("conv_out", widths[0], 4, 3, pixels(latent))
    return shape.layers
