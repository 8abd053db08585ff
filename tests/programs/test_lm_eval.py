"""lm-eval (EleutherAI's harness): its `hf` model gives the same answers streamed as moved.

`programs` does not include it. These tests run after ``pip install lm_eval datasets`` (tested with 0.4.13).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import children
import dynswap_ext
from conftest import ACCELERATOR, ENGINE, PRETEND, Provider, accelerate_knows
from programs import library, llama, word_tokenizer

Auto = library("transformers").AutoModelForCausalLM
lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (this test's docstring says how)")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM

TEXTS = ["the red cat sat on", "a dog ran", "the blue mat", "a photo of the cat on the mat", "cat dog red"]
#: A task for each kind of request.
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["cat", "dog", "mat"],
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "cat",
        "generation_kwargs": {"max_gen_toks": 4, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def folder(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a checkpoint, and with tasks over a local file."""
    accelerate_knows(provider)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for the command's process
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(library(module), "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library("datasets.config"), "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    llama(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    documents = tmp_path / "documents.jsonl"
    documents.write_text(
        "".join(json.dumps({"text": text, "label": i % 3}) + "\n" for i, text in enumerate(TEXTS))
    )
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}}
    (tmp_path / "tasks").mkdir()
    for name, task in TASKS.items():
        text = yaml.safe_dump({"task": name, "test_split": "test", **data, **task})
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    return tmp_path


def evaluated(folder: Path, model: Any, **options: Any) -> Any:
    """Return every answer of the model, before and after the filters, and the metrics."""
    hf = HFLM(model, tokenizer=str(folder / "model"), dtype="float32", max_length=32, **options)
    tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(hf, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0)
    samples = {
        name: [(one["resps"], one["filtered_resps"]) for one in rows]
        for name, rows in found["samples"].items()
    }
    assert samples.keys() == TASKS.keys() and all(len(rows) == len(TEXTS) for rows in samples.values())
    return samples, {name: str(metrics) for name, metrics in found["results"].items()}


def test_a_model_that_streams(provider: Provider, folder: Path) -> None:
    plain = evaluated(folder, str(folder / "model"), device=str(provider.device))
    streamed = dynswap_ext.StreamConfig(budget="minimum", provider=provider.backend, device=provider.device)
    model = Auto.from_pretrained(folder / "model", quantization_config=streamed)
    provider.handles.append(dynswap_ext.handle_of(model))
    assert evaluated(folder, model) == plain


#: Runs `lm_eval` with the seeds that it would set, over one device.
COMMAND = f"""
import os, sys, torch
os.environ["DYNSWAP_ENGINE_BACKEND"] = {ENGINE!r}
torch.{ACCELERATOR}.device_count = torch.accelerator.device_count = lambda: 1
from dynswap_ext.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_its_command_under_dynswap_run(provider: Provider, folder: Path) -> None:
    if provider.device.type == "cpu" or not provider.native:
        pytest.skip("`dynswap run` installs what a program moves to an accelerator")
    assert PRETEND or torch.accelerator.device_count() > 0
    given = ("-m", "lm_eval", "--model", "hf", "--include_path", folder / "tasks", "--log_samples")
    model = f"pretrained={folder / 'model'},max_length=32"
    answers = []
    for name, options in (("plain", []), ("streamed", ["--always", "--budget", "minimum"])):
        output = folder / name
        arguments = (*given, "--model_args", model, "--tasks", ",".join(TASKS), "--output_path", output)
        done = children.run(COMMAND, "run", *options, *arguments, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert ("installed, and its weights stream" in done.stderr) == (name == "streamed")
        rows = [
            json.loads(line)
            for path in sorted(output.rglob("samples_*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        answers.append([(row["doc_id"], row["resps"], row["filtered_resps"]) for row in rows])
    assert len(answers[0]) == len(TASKS) * len(TEXTS) and answers[0] == answers[1]
