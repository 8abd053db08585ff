"""Each script in examples/ runs as users start it, on tiny checkpoints, on the CPU and without a network."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynswap_ext import cli

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

#: Smaller than the 4.5 MiB and 5.5 MiB of the tiny models, so that weights have to stream.
BUDGET = "2MiB", "3MiB"
TRAINING = ["--steps", "12", "--length", "16", "--device", "cpu", "--budget", BUDGET[0]]


def run(script: str, *arguments: str | Path, cwd: Path, ranks: int | None = None) -> str:
    """Run an example, in several `ranks` by torchrun or in one process, and return what it printed."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "DYNSWAP_PROVIDER": "native",  # which streams on a CPU, whatever this run is for
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks else ()), str(EXAMPLES / script), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints that examples/tiny.py writes."""
    pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)")
    pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[programs]')")
    folder = tmp_path_factory.mktemp("tiny")
    run("tiny.py", folder, "--only", "llama", cwd=folder)
    return folder


def figure(output: str, name: str) -> float:
    """Return the first number of the line that begins with `name`."""
    found = re.search(rf"^{re.escape(name)}\s+([\d.,]+)", output, re.MULTILINE)
    assert found, f"no line {name!r} in:\n{output}"
    return float(found[1].replace(",", ""))


def moved(output: str) -> float:
    """Return the MiB that the report has moved in all. More than the model's size proves streaming."""
    total = next(line for line in output.splitlines() if re.match(r" all +\d", line))
    amount, unit = re.findall(r"([\d.]+) (KiB|MiB|GiB)", total)[-1]
    return float(amount) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]


@pytest.mark.parametrize("model", ["llama", pytest.param("mixtral", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_generate(tiny: Path, model: str) -> None:
    run("tiny.py", tiny, "--only", model, cwd=tiny)
    output = run(
        "generate.py",
        tiny / model,
        "--budget",
        BUDGET[0],
        *("--device", "cpu", "--prompt", "the red cat"),
        "--max-new-tokens",
        "8",
        cwd=tiny,
    )
    assert output.startswith("the red cat")
    assert figure(output, "tokens/s") > 0 and figure(output, "peak memory") > 0
    assert moved(output) > 8  # two passes of the model at least


@pytest.mark.slow
def test_ranks(tiny: Path, tmp_path: Path) -> None:
    """Two ranks answer as one does, each its share of the prompts, and have one copy of the weights."""
    prompts = ["the red cat", "a dog ran", "streaming weights means"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    given = [tiny / "llama", tmp_path / "prompts.txt", "--budget", BUDGET[0], "--max-new-tokens", "4"]
    alone, both = (run("ranks.py", *given, cwd=tmp_path, ranks=count).splitlines() for count in (1, 2))
    *answered, shared = sorted(both)
    assert re.match(r"ranks 0, 1 share 4\.\d+ MiB of weights in RAM", shared)
    assert alone[0].startswith("rank 0 is alone on its host")
    answers = [line.removeprefix("[rank 0] ") for line in alone[1:]]
    assert [answer.startswith(prompt) for answer, prompt in zip(answers, prompts, strict=True)] == [True] * 3
    assert answered == sorted(f"[rank {number % 2}] {text}" for number, text in enumerate(answers))
    meshed = run("ranks.py", *given, "--dtype", "float64", "--mesh", cwd=tmp_path, ranks=2)
    assert re.match(r"2 ranks share out .*; [\d.]+ MiB came from other ranks", meshed.splitlines()[-1])


@pytest.mark.slow
def test_transformers_pipeline(tiny: Path, tmp_path: Path) -> None:
    output = run(
        *("transformers_pipeline.py", tiny / "llama", "--budget", BUDGET[0], "--device", "cpu"),
        *("--prompt", "the red cat", "--max-new-tokens", "8"),
        cwd=tmp_path,
    )
    assert output.startswith("the red cat")
    assert moved(output) > 8


@pytest.mark.slow
def test_diffusion(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed (pip install -e '.[programs]')")
    run("tiny.py", tiny, "--only", "stable-diffusion", cwd=tmp_path)
    output = run(
        *("diffusion.py", tiny / "stable-diffusion", "--budget", BUDGET[1], "--device", "cpu"),
        *("--dtype", "float32", "--size", "32", "--steps", "3"),
        cwd=tmp_path,
    )
    assert (tmp_path / "image.png").read_bytes()[:4] == b"\x89PNG"
    assert figure(output, "seconds") > 0
    assert moved(output) > 8


@pytest.mark.nightly
def test_half_precision(tiny: Path, tmp_path: Path) -> None:
    run("tiny.py", tiny, "--only", "whisper", cwd=tmp_path)
    output = run(
        *("half_precision.py", tiny / "whisper", tiny / "noise.wav", "--device", "cpu", "--compare"),
        *("--budget", "1MiB", "--max-new-tokens", "8"),
        cwd=tmp_path,
    )
    assert "computes in  torch.bfloat16, from masters in torch.float32" in output
    assert "compared     the same tokens" in output
    assert moved(output) > 3  # more than the model


@pytest.mark.nightly
def test_diffusion_lora(tiny: Path, tmp_path: Path) -> None:
    for library in ("diffusers", "peft"):
        pytest.importorskip(library, reason=f"{library} is not installed (pip install -e '.[programs]')")
    run("tiny.py", tiny, "--only", "stable-diffusion", cwd=tmp_path)
    output = run(
        *("diffusion_lora.py", tiny / "stable-diffusion", "--budget", BUDGET[1], "--device", "cpu"),
        *("--lora", tiny / "red.safetensors", tiny / "blue.safetensors", "--size", "32", "--steps", "2"),
        cwd=tmp_path,
    )
    images = {path.stem: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    assert images.keys() == {"first", "second", "both", "fused", "without"}
    assert len({image for name, image in images.items() if name != "fused"}) == 4  # "fused" is near "both"
    assert all(figure(output, name) >= 0 for name in images)


@pytest.mark.slow
def test_lora(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (pip install -e '.[programs]')")
    output = run(
        "lora.py", tiny / "llama", "--text", tiny / "corpus.txt", *TRAINING, "--rate", "0.01", cwd=tmp_path
    )
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert last_loss(output) < first_loss(output)
    assert moved(output) > 8


@pytest.mark.parametrize("more", [[], ["--gradient-checkpointing"]], ids=["plain", "checkpointing"])
@pytest.mark.slow
def test_long_sequences(tiny: Path, tmp_path: Path, more: list[str]) -> None:
    pytest.importorskip("peft", reason="peft is not installed (pip install -e '.[programs]')")
    output = run(
        *("long_sequences.py", tiny / "llama", "--text", tiny / "corpus.txt", "--activations", "256KiB"),
        *("--activations-folder", tmp_path, "--device", "cpu", "--budget", BUDGET[0]),
        *("--length", "256", "--steps", "12", "--rate", "0.01", *more),
        cwd=tmp_path,
    )
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert last_loss(output) < first_loss(output)
    assert "activations: a step saves " in output
    assert "were copied to the host in all" in output


@pytest.mark.nightly
def test_finetune_and_generate_with_the_result(tiny: Path, tmp_path: Path) -> None:
    output = run(
        "finetune.py",
        tiny / "llama",
        "--text",
        tiny / "corpus.txt",
        *TRAINING,
        "--rate",
        "0.001",
        cwd=tmp_path,
    )
    assert last_loss(output) < 0.8 * first_loss(output)
    output = run(
        *("generate.py", tmp_path / "trained", "--device", "cpu", "--prompt", "the red cat"),
        *("--max-new-tokens", "5"),
        cwd=tmp_path,
    )
    assert output.startswith("the red cat sat on the blue mat")


@pytest.mark.slow
def test_lightning_trainer(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed (pip install -e '.[programs]')")
    given = [tiny / "llama", "--text", tiny / "corpus.txt", "--budget", BUDGET[0], "--accelerator", "cpu"]
    given += ["--precision", "32-true", "--length", "16", "--rate", "0.001"]
    output = run("lightning_trainer.py", *given, "--steps", "12", cwd=tmp_path)
    assert (tmp_path / "trained" / "last.ckpt").exists()
    assert moved(output) > 8
    again = run(
        *("lightning_trainer.py", *given, "--steps", "24", "--resume", tmp_path / "trained" / "last.ckpt"),
        cwd=tmp_path,
    )
    assert figure(again, "loss") < figure(output, "loss")


def test_convert_and_plan(tiny: Path, tmp_path: Path) -> None:
    output = run(
        *("convert_and_plan.py", tiny / "llama", "half.safetensors", "--dtype", "bf16"),
        *("--budget", "1MiB", "--tokens", "16", "--bandwidth", "25GB/s", "--compute", "120TFLOPS"),
        cwd=tmp_path,
    )
    whole = (tiny / "llama" / "model.safetensors").stat().st_size
    assert (tmp_path / "half.safetensors").stat().st_size < 0.6 * whole
    assert "compute hides all copies from about" in output
    assert output.splitlines()[-1].startswith("1.0 MiB:")


def test_convert_and_plan_takes_the_options_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    offered: set[str] = set()
    for command in ("convert", "plan"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        offered |= set(re.findall(r"(?<!\S)(?:--[\w-]+|[A-Z]{3}\b)", capsys.readouterr().out))
    text = (EXAMPLES / "convert_and_plan.py").read_text()
    assert set(re.findall(r'add_argument\("(--[\w-]+)"', text)) <= offered
    assert {name.upper() for name in re.findall(r'add_argument\("(\w+)"', text)} <= offered


def first_loss(output: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", output)[0])


def last_loss(output: str) -> float:
    return float(re.findall(r"loss ([\d.]+)", output)[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_use_the_public_interface(script: str) -> None:
    """Examples import no private names of the package, and have at most 95 lines (`tiny`: 130)."""
    text = (EXAMPLES / script).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dynswap_ext"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")], ast.unparse(node)
    assert len(text.splitlines()) <= (130 if script == "tiny.py" else 95)


def test_every_example_has_a_test_and_a_page() -> None:
    tests = Path(__file__).read_text()
    assert [script for script in SCRIPTS if f'"{script}"' not in tests] == []
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "guides").glob("*.md"))
    assert [script for script in SCRIPTS if f"examples/{script}" not in pages] == []


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    """A token moves less than the bytes of its experts, as some are there from earlier tokens."""
    pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[programs]')")
    output = run("experts.py", "--device", "cpu", "--max-new-tokens", "8", cwd=tmp_path)
    assert 0 < figure(output, "moved") < 2 * figure(output, "active") < figure(output, "experts")
    assert figure(output, "peak") <= 16
