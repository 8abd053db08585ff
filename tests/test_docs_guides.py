"""The guides: their Python runs, shows the lines of its script, and names what exists."""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import PRETEND
from dynswap_ext import checkpoint
from pages import run_page

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
EXAMPLES = ROOT / "examples"
#: The page of a script, where it has another name, and where on that page the blocks of the script end.
PAGES = {"ranks": ("several_devices", "## One program over several devices")}
OF_SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "tiny")


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the names that the pages use: a model on disk, of six layers of 16 KiB."""
    pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)")
    monkeypatch.chdir(tmp_path)
    torch.save(Model(64).state_dict(), "model.pt")
    checkpoint.convert("model.pt", "model.safetensors")
    model = checkpoint.load(lambda: Model(64), "model.safetensors")
    yield {
        "model": model,
        "Model": Model,
        "config": 64,
        "x": torch.randn(2, 64),
        "transformer": Model(64),
        "device": "cpu",
    }


def page_of(script: str) -> str:
    """Return what is about a script on its page."""
    page, end = PAGES.get(script, (script, None))
    text = (GUIDES / f"{page}.md").read_text()
    assert end is None or end in text
    return text if end is None else text.partition(end)[0]


def python_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("script", OF_SCRIPTS)
def test_a_page_shows_its_script(script: str) -> None:
    """Each block of Python on a page is in its script, at some indentation."""
    text = (EXAMPLES / f"{script}.py").read_text()
    blocks = python_of(page_of(script))
    assert len(blocks) >= 2
    for block in blocks:
        assert any(textwrap.indent(block, " " * depth) in text for depth in (0, 4, 8)), block


@pytest.mark.parametrize("script", OF_SCRIPTS)
def test_commands_name_options_that_there_are(script: str) -> None:
    page = page_of(script)
    known = {name: options_of(name) for name in [*OF_SCRIPTS, "tiny"]}
    commands = re.findall(r"^(?:python|torchrun .*) examples/(\w+)\.py (.*)$", page, re.MULTILINE)
    assert commands
    for name, arguments in commands:
        assert set(re.findall(r"(?<!\S)--[\w-]+", arguments)) <= known[name], arguments


def options_of(script: str) -> set[str]:
    tree = ast.parse((EXAMPLES / f"{script}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
    ]
    return {call.args[0].value for call in added if isinstance(call.args[0], ast.Constant)}


def test_troubleshooting_runs(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(GUIDES / "troubleshooting.md", names, capsys) > 6
    assert names["handle"].stats().bytes_moved > 0
    dynswap_ext.uninstall(names["model"])


@pytest.mark.parametrize(
    "words",
    [
        "runs in pure Python on",
        "the extension is not built",
        "the extension was built without CUDA",
        "the system refused to page-lock",
        "of weights lie on memory pages that are not known to be theirs alone",
        "the kernel does not track writes to some masters",
        "computes on",
        "every slot of the arena is held by tensors that are still in use",
    ],
)
def test_troubleshooting_quotes_messages_that_there_are(words: str) -> None:
    """The page quotes messages that exist, which is what a user searches for."""
    page = " ".join(
        re.sub(r"^> ?", "", (GUIDES / "troubleshooting.md").read_text(), flags=re.MULTILINE).split()
    )
    assert words in page
    sources = [*(ROOT / "dynswap_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    joined = (re.sub(r'"\s+f?"', "", path.read_text()) for path in sources)
    assert any(words in text for text in joined)


def test_migration_runs_after(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Every *After* of the page runs, on tiny checkpoints in the places that it names."""
    pytest.importorskip("diffusers", reason="diffusers is not installed (pip install -e '.[programs]')")
    tiny = load_example("tiny")
    tiny.write_decoder(Path("path/to/llama"))
    tiny.write_stable_diffusion(Path("path/to/pipeline"))
    names["input_ids"] = torch.tensor([[4, 5, 6]])
    assert run_page(GUIDES / "migration.md", names, capsys) > 7
    assert 3 < names["tokens"].shape[1] <= 7
    assert names["image"].size == (32, 32)
    assert type(names["transformer"]).__name__ == "DynamicSwap_Model"
    for part in (names["model"], names["pipe"].unet, names["transformer"]):
        dynswap_ext.uninstall(part)


def test_trainer_runs(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The page's program runs on a tiny checkpoint: it trains the adapter, and the base is streamed."""
    for library in ("transformers", "peft", "accelerate"):
        pytest.importorskip(library, reason=f"{library} is not installed (pip install -e '.[programs]')")
    if PRETEND:
        pytest.skip("Trainer takes both of the pretend device's GPUs, and an install is for one")
    tiny = load_example("tiny")
    tiny.write_decoder(Path("path/to/llama"))
    Path("corpus.txt").write_text("the red cat sat on the mat\na dog ran\n" * 4)
    assert run_page(GUIDES / "trainer.md", names, capsys) == 1
    assert names["trainer"].state.global_step == 1
    assert Path("trained/adapter_model.safetensors").exists()
    assert dynswap_ext.handle_of(names["base"]).stats().bytes_moved > 0
    dynswap_ext.uninstall(names["base"])


@pytest.mark.device
def test_one_program_over_several_devices_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The block of the page runs on two GPUs, on a small Llama with the layers that it names."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs, or the pretend device (make test-cuda)")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 18, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        expected = copy.deepcopy(model).to("cuda:0")(tokens.to("cuda:0")).logits.cpu()
    page = (GUIDES / "several_devices.md").read_text().partition(PAGES["ranks"][1])[2]
    (block,) = python_of(page)
    names: dict[str, Any] = {"model": model, "tokens": tokens, "torch": torch, "dynswap_ext": dynswap_ext}
    exec(block, names)
    assert torch.equal(names["logits"], expected)
    assert "model.layers.{16..17}" in capsys.readouterr().out


def test_migration_knows_the_calls_of_before() -> None:
    """Each *Before* is valid Python. What it imports, and calls on a pipeline or a part, exists."""
    diffusers = pytest.importorskip("diffusers")
    page = (GUIDES / "migration.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module in ("accelerate", "transformers"):
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
    assert hasattr(diffusers.StableDiffusionPipeline, "enable_model_cpu_offload")
    assert hasattr(diffusers.StableDiffusionPipeline, "enable_sequential_cpu_offload")
    assert hasattr(diffusers.StableDiffusionPipeline, "remove_all_hooks")
    assert hasattr(diffusers.ModelMixin, "enable_group_offload")
    hooks = importlib.import_module("accelerate.hooks")
    assert hasattr(hooks, "remove_hook_from_submodules")


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_in_plain_blocks() -> None:
    """No code block is left open, which would hide the rest of a page from these tests."""
    for page in GUIDES.glob("*.md"):
        assert page.read_text().count("```") % 2 == 0, page
        assert textwrap.dedent(page.read_text()) == page.read_text(), page
