"""`generate` of many tokens, in a loop over prompts, with each budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Provider
from programs import library
from test_transformers import VOCABULARY, llama
from ways import SMALLEST, WAYS, Way, beside_plain

library("transformers")

TOKENS = 52
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


#: Greedy search is tested with all ways to install, the others with the one that streams most weights.
CASES = [(how, way) for how in HOW for way in (WAYS if how == "greedy" else (SMALLEST,))]


@pytest.mark.parametrize(("how", "way"), CASES, ids=str)
@pytest.mark.slow
def test_prompts_in_a_loop(provider: Provider, how: str, way: Way, tmp_path: Path) -> None:
    prompts = torch.randint(4, VOCABULARY, (2, 1, 5), generator=torch.Generator().manual_seed(3))

    def program(model: Any) -> list[torch.Tensor]:
        outputs = []
        for prompt in prompts:
            made = model.generate(
                prompt.to(model.device),
                attention_mask=torch.ones_like(prompt, device=model.device),
                min_new_tokens=TOKENS,
                max_new_tokens=TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
                **HOW[how],
            )
            assert made.sequences.shape[1] == prompt.shape[1] + TOKENS
            outputs += [made.sequences, torch.stack(made.logits)]
        return outputs

    outputs = beside_plain(provider, way, tmp_path, llama, program, moved=True)
    if how == "sampling":
        assert not outputs[0][:, 5:].equal(outputs[2][:, 5:])
