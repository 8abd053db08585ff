"""Programs with `transformers.Trainer` on default options: full training, and LoRA with peft."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dynswap_ext
from conftest import Provider, accelerate_knows
from programs import assert_told_once, library, seeded
from sparse_rows import Sentences, llama_classifier
from ways import CAST, MAPPED, SMALLEST, TRAINING_WAYS, Way, beside_plain, masters

transformers = library("transformers")
library("accelerate")

STEPS = 20


@pytest.fixture(autouse=True)
def _known(provider: Provider) -> None:
    accelerate_knows(provider)


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    """Freeze existing objects, as accelerate collects garbage after each training, which would take long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Seen(transformers.TrainerCallback):
    """Keeps what a program can see of each step: the optimizer's gradients, and the log."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert trained
        self.gradients.append({name: grad.detach().cpu().clone() for name, grad in trained.items()})

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        self.logged.append({key: value for key, value in logs.items() if _is_no_time(key)})


def _is_no_time(key: str) -> bool:
    return not key.endswith(("runtime", "per_second"))


def trainer(provider: Provider, model: Any, folder: Path, **options: Any) -> tuple[Any, Seen]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", **options},
        use_cpu=provider.device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    assert arguments.optim == "adamw_torch_fused" and arguments.weight_decay == 0.0
    arguments._n_gpu = min(arguments.n_gpu, 1)  # more would mean DataParallel, which installs do not support
    seen = Seen()
    made = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(8),
        callbacks=[seen],
    )
    return made, seen


def training(provider: Provider, folder: Path, **options: Any) -> Callable[[Any], Any]:
    def program(model: Any) -> Any:
        made, seen = trainer(provider, model, folder, **options)
        result = made.train()
        assert len(seen.gradients) == result.global_step == options.get("max_steps", STEPS)
        return result.training_loss, seen.logged, seen.gradients

    return program


@pytest.mark.parametrize("way", TRAINING_WAYS, ids=str)
def test_default_arguments(
    provider: Provider, way: Way, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    beside_plain(provider, way, tmp_path, llama_classifier, training(provider, tmp_path))
    assert_told_once(recwarn, 0)  # the trainer moves the model, not the user


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let accelerate find what a launcher of one process leaves, so that Trainer sends models to "cpu:0"."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**ranks, "MASTER_PORT": 29500}.items():  # accelerate sets those that are missing
        monkeypatch.setenv(name, str(value))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    library("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", [MAPPED, CAST], ids=str)
def test_sent_to_the_cpu_by_its_index(
    provider: Provider, way: Way, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    if provider.device.type != "cpu":
        pytest.skip("other devices have an index")

    def program(model: Any) -> Any:
        made, seen = trainer(provider, model, tmp_path)
        assert str(made.args.device) == "cpu:0"
        before = [p.data_ptr() for p in model.parameters()]
        made.train()
        if dynswap_ext.is_installed(model):
            assert [p.data_ptr() for p in model.parameters()] == before
        return seen.logged, seen.gradients

    beside_plain(provider, way, tmp_path, llama_classifier, program)
    assert_told_once(recwarn, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4, "max_steps": 5},
        {"gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 4},
    ],
    ids=["accumulation", "checkpointing", "evaluation"],
)
def test_options(provider: Provider, options: dict[str, Any], tmp_path: Path) -> None:
    beside_plain(provider, MAPPED, tmp_path, llama_classifier, training(provider, tmp_path, **options))


def test_saved_and_resumed(provider: Provider, tmp_path: Path) -> None:
    """Training on an installed model resumes from a checkpoint of another one, as with plain models."""

    def program(model: Any) -> Any:
        made, seen = trainer(provider, model, tmp_path, max_steps=10, save_strategy="steps", save_steps=5)
        made.train(resume_from_checkpoint=resume)
        return seen.logged

    resume = None
    whole = beside_plain(provider, MAPPED, tmp_path, llama_classifier, program)
    resume = str(tmp_path / "checkpoint-5")
    rest = beside_plain(provider, MAPPED, tmp_path, llama_classifier, program)
    assert _losses(rest)[-5:] == _losses(whole)[-5:]


def _losses(logged: list[dict[str, Any]]) -> list[float]:
    return [logs["loss"] for logs in logged if "loss" in logs]


def with_adapter(model: Any) -> Any:
    peft = library("peft")
    targets = ["q_proj", "v_proj", "embed_tokens"]
    seeded()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="SEQ_CLS", target_modules=targets))


def test_lora_over_an_installed_base(provider: Provider, tmp_path: Path) -> None:
    train = training(provider, tmp_path)

    def program(model: Any) -> Any:
        made = with_adapter(model)
        return train(made), masters(made)

    beside_plain(provider, SMALLEST, tmp_path, llama_classifier, program)


def test_an_install_over_lora(provider: Provider, tmp_path: Path) -> None:
    train = training(provider, tmp_path)
    beside_plain(provider, MAPPED, tmp_path, lambda: with_adapter(llama_classifier()), train)
