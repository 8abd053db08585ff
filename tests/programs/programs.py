"""Shared parts of the programs: an installed model, the same model moved, and their comparison."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import PRETEND, Provider
from dynswap_ext import testing

T = TypeVar("T")

#: On the CPU, weights are only streamed if they are cast.
INFERENCE_DTYPE = torch.float64


def library(name: str) -> Any:
    """Import a library, or skip for a visible reason."""
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install -e '.[programs]')")


def seeded() -> None:
    """Seed all generators, those of devices too."""
    random.seed(0)
    torch.manual_seed(0)


def inference_dtype(provider: Provider) -> torch.dtype | None:
    return INFERENCE_DTYPE if provider.device.type == "cpu" else None


def bytes_of(*models: nn.Module) -> int:
    """Return the bytes of the masters of models, counting tied ones once."""
    masters = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
    return sum(master.nbytes for master in masters.values())


class _Installed:
    """Installed models, and copies of them that were moved."""

    def __init__(self, provider: Provider, models: tuple[nn.Module, ...], dtype: torch.dtype | None) -> None:
        # All at once, as some share parts.
        self.moved: tuple[nn.Module, ...] = copy.deepcopy(models)
        for model in self.moved:
            testing.move(model, provider.device, dtype)
        self._masters = [[(name, t, t.device) for name, t in _masters(m)] for m in models]
        self.models = models
        self._dtype = dtype
        self.handles = [provider.install(model, dtype=dtype) for model in models]

    @property
    def bytes_moved(self) -> int:
        return sum(handle.stats().bytes_moved for handle in self.handles)

    def check(self) -> None:
        """Assert that weights were streamed, and that masters are the same tensors on the same device."""
        device = self.handles[0].device
        for model, handle, masters in zip(self.models, self.handles, self._masters, strict=True):
            held = {id(t) for _, t in _masters(model)}  # under other names perhaps
            for name, master, where in masters:
                assert id(master) in held and master.device == where, name
            if device.type != "cpu" or self._dtype is not None:
                assert handle.stats().bytes_moved > 0.5 * bytes_of(model)


def _masters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def both(
    provider: Provider, *models: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[Any, Any]]:
    """Install models; yield them and moved copies, as single models or tuples. Then check the masters."""
    installed = _Installed(provider, models, dtype)
    yield (models[0], installed.moved[0]) if len(models) == 1 else (models, installed.moved)
    installed.check()


def same(program: Callable[[Any], T], installed: Any, moved: Any) -> T:
    """Run a program on both, from the same seed. Assert equal results to the bit, and return them."""
    seeded()
    expected = program(moved)
    seeded()
    actual = program(installed)
    testing.assert_bit_equal(actual, expected, "result")
    return actual


def assert_trained_alike(provider: Provider, actual: Any, expected: Any, what: str = "value") -> None:
    """Assert that a few steps of torch's optimizers gave the same, to the bit.

    On a GPU the plain model's optimizer steps there, and the installed model's on the CPU, where its masters
    are. Rounding differs, so results are only close.
    """
    if PRETEND or provider.device.type == "cpu":
        testing.assert_bit_equal(actual, expected, what)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5, msg=lambda text: f"{what}: {text}")


def assert_told_once(told: pytest.WarningsRecorder | list[Any], times: int) -> None:
    texts = [str(w.message) for w in told if issubclass(w.category, dynswap_ext.DynswapWarning)]
    assert len([text for text in texts if "moves nothing" in text]) == times, texts


def llama_config(**options: Any) -> Any:
    """Return the config of a small model for the tokens of `word_tokenizer`, with some options changed."""
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return library("transformers").LlamaConfig(**{**sizes, **options})


def llama(**options: Any) -> Any:
    """Return a small model with these options and seeded weights."""
    seeded()
    return library("transformers").LlamaForCausalLM(llama_config(**options))


def word_tokenizer(**special: str) -> Any:
    """Return a tokenizer with a few words."""
    tokenizers = library("tokenizers")
    transformers = library("transformers")
    words = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "photo", "of"]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    options = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **options)
