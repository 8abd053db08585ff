"""`DynswapCallback`: programs of Lightning's `Trainer` give the same with this callback as without it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider, accelerate_knows
from dynswap_ext import testing
from dynswap_ext.errors import BudgetError, ConfigError
from programs import library, seeded
from sparse_rows import Bags, Sentences
from test_lightning import Classifier
from ways import masters

lightning = library("lightning")
DynswapCallback = importlib.import_module("dynswap_ext.integrations.lightning").DynswapCallback
callbacks = lightning.pytorch.callbacks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")


@pytest.fixture(autouse=True)
def _known(provider: Provider) -> None:
    accelerate_knows(provider)


class Module(Classifier):
    """A LightningModule with all four kinds of step."""

    def test_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.validation_step(batch, number)

    def predict_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        assert self.device == self.net.hidden.weight.device
        return self.net(batch["input_ids"])


def trainer(provider: Provider, *given: Any, **options: Any) -> Any:
    return lightning.Trainer(
        **{"max_epochs": 2, "enable_checkpointing": False, **options},
        accelerator="cpu" if provider.device.type == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(given),
    )


def loader(count: int = 24, *, shuffle: bool = False) -> Any:
    return torch.utils.data.DataLoader(Sentences(count), batch_size=6, shuffle=shuffle)


def streaming(provider: Provider, **options: Any) -> Any:
    return DynswapCallback(provider=provider.backend, **{"budget": "minimum", **options})


def beside(
    provider: Provider,
    folder: Path,
    program: Callable[[Any, Path, Sequence[Any]], Any],
    make: Callable[[], Any] = Module,
    *,
    moves: bool = True,
) -> None:
    """Run a program without the callback and with it. Assert equal results, to the bit.

    The program gets the module, a folder, and the callbacks for its trainers.
    """
    results = []
    for given in ([], [streaming(provider)]):
        seeded()
        module = make()
        if given and masters(module):
            testing.map_from_file(module, folder / "masters.pt")
        seeded()
        result = program(module, folder / ("streamed" if given else "plain"), given)
        results.append((result, masters(module)))
        assert not dynswap_ext.is_installed(module) and type(module) is make
    handle = given[0].handle
    assert not handle.active and handle.device == provider.device
    if provider.device.type != "cpu" or (moves and provider.native):  # pure Python hands mapped memory out
        assert handle.stats().bytes_moved > 0
    testing.assert_bit_equal(results[1], results[0], "with the callback")


def saved(path: Path) -> dict[str, Any]:
    """Return a checkpoint of Lightning without the entries that contain the folder."""
    found = torch.load(path, map_location="cpu", weights_only=False)
    return {name: value for name, value in found.items() if name != "callbacks"}


def test_every_run(provider: Provider, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def program(module: Any, folder: Path, given: Sequence[Any]) -> Any:
        keep = callbacks.ModelCheckpoint(folder, filename="kept", save_last=True)
        made = trainer(provider, *given, keep, enable_checkpointing=True)
        made.fit(module, loader(shuffle=True), loader(12))
        assert made.global_step == 8
        checked = [each(module, loader(12), verbose=False) for each in (made.validate, made.test)]
        predicted = [each.cpu() for each in made.predict(module, loader(12))]
        made.save_checkpoint(folder / "after.ckpt")
        files = [saved(folder / f"{name}.ckpt") for name in ("kept", "last", "after")]
        if given:
            stored = torch.load(folder / "kept.ckpt", weights_only=False)["state_dict"]
            assert {value.device.type for value in stored.values()} == {"cpu"}
        again = Module.load_from_checkpoint(folder / "kept.ckpt", map_location="cpu")
        return module.seen, checked, predicted, files, masters(again)

    beside(provider, tmp_path, program)
    ours = [str(each.message) for each in recwarn if issubclass(each.category, dynswap_ext.DynswapWarning)]
    assert not [text for text in ours if "moves nothing" in text]


@pytest.mark.parametrize("first", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("second", [False, True], ids=["plain", "streamed"])
def test_resumed(provider: Provider, first: bool, second: bool, tmp_path: Path) -> None:
    """Training can be resumed by a run of either kind. The optimizer's state is where the masters are."""
    seeded()
    whole = Module()
    trainer(provider).fit(whole, loader())
    seeded()
    begun = Module()
    made = trainer(provider, *([streaming(provider)] if first else []), max_epochs=1)
    made.fit(begun, loader())
    made.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module()
    made = trainer(provider, *([streaming(provider)] if second else []))
    made.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    testing.assert_bit_equal(begun.seen + resumed.seen, whole.seen, "seen")
    testing.assert_bit_equal(masters(resumed), masters(whole), "masters")


class Normalised(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net.output = nn.Sequential(self.net.output, nn.BatchNorm1d(3))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep no gradients: the averages of the norm are made in an epoch that has none."""


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_of_weights(provider: Provider, kind: str, tmp_path: Path) -> None:
    def program(module: Any, folder: Path, given: Sequence[Any]) -> Any:
        if kind == "swa":
            average = callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        else:
            average = callbacks.EMAWeightAveraging(device="cpu", decay=0.9)
        trainer(provider, *given, average, max_epochs=3).fit(module, loader(), loader(12))
        return module.seen

    beside(provider, tmp_path, program, Normalised)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"])
def test_precision(provider: Provider, precision: str, tmp_path: Path) -> None:
    if precision == "16-mixed" and provider.device.type == "cpu":
        pytest.skip("Lightning has it on a GPU alone")

    def program(module: Any, folder: Path, given: Sequence[Any]) -> Any:
        trainer(provider, *given, precision=precision).fit(module, loader())
        return module.seen

    # A cast takes the masters into RAM, from which nothing is streamed on the CPU.
    beside(provider, tmp_path, program, moves=not precision.endswith("true"))


class Late(Module):
    """Makes its layers in `configure_model`, and an optimizer that has a state from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.net = Bags().cpu()
        self.made_on = self.net.rows.weight.device

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2)


def test_layers_that_are_made_late(provider: Provider, tmp_path: Path) -> None:
    seeded()
    module = Late()
    callback = streaming(provider, dtype=torch.float64)
    trainer(provider, callback).fit(module, loader())
    assert module.made_on.type == "cpu" and callback.handle.stats().bytes_moved > 0
    if provider.device.type == "cpu":
        assert len(module.seen) == 16
        return
    moved = Late()
    trainer(provider, callbacks.Callback(), precision="64-true").fit(moved, loader())
    assert len(moved.seen) == len(module.seen)


def test_after_an_error(provider: Provider, tmp_path: Path) -> None:
    class Failing(Module):
        fails = True

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.fails:
                raise KeyError("a defect of the program")

    module = Failing()
    made = trainer(provider, streaming(provider, budget="auto"))
    with pytest.raises(KeyError, match="a defect"):
        made.fit(module, loader(), loader(12))
    assert not dynswap_ext.is_installed(module) and type(module) is Failing
    assert "model_to_device" not in vars(made.strategy)
    Failing.fails = False
    trainer(provider, streaming(provider, budget="auto")).fit(module, loader(), loader(12))


def test_what_is_refused(provider: Provider, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"DynswapCallback\(\) got .*'buget'\. Did you mean 'budget'\?"):
        DynswapCallback(buget="1GiB")
    with pytest.raises(TypeError, match="takes no device: Trainer"):
        DynswapCallback(device="cuda")
    module = testing.map_from_file(Module(), tmp_path / "masters.pt")
    with pytest.raises(ConfigError, match="budget is '6 apples'"):
        trainer(provider, streaming(provider, budget="6 apples")).fit(module, loader())
    with pytest.raises(BudgetError, match="the smallest budget that works is"):
        trainer(provider, streaming(provider, budget=2000)).fit(module, loader())
    with pytest.raises(ConfigError, match="the Trainer of lightning, and this one is that of torch"):
        streaming(provider).setup(nn.Module(), module, "fit")  # as pytorch_lightning's Trainer is
    several = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    callback = streaming(provider)
    several.callbacks.append(callback)
    with pytest.raises(ConfigError, match=r"needs one device, .* is DDPStrategy over 2 device\(s\)"):
        callback.setup(several, module, "fit")
    made = trainer(provider, callback)
    kind = lightning.pytorch.plugins.BitsandbytesPrecision
    made.strategy.precision_plugin = kind.__new__(kind)  # its constructor needs a GPU
    with pytest.raises(ConfigError, match="BitsandbytesPrecision makes layers"):
        callback.setup(made, module, "fit")
    assert not dynswap_ext.is_installed(module)


def test_asked_for_by_the_environment(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry points of pyproject.toml, as pip writes them, let the environment ask for the callback."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n((?:\w+ = ".*"\n)+)', text, re.MULTILINE)
    assert [group for group, _ in found] == ["lightning.pytorch.callbacks_factory"]
    (folder := tmp_path / "an_install-1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: an_install\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{found[0][0]}]\n{found[0][1]}".replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)

    def given(*mine: Any) -> list[Any]:
        made = trainer(provider, *mine)
        module = Module()
        made.fit(module, loader())
        return [each.handle for each in made.callbacks if isinstance(each, DynswapCallback)]

    monkeypatch.delenv("DYNSWAP_LIGHTNING", raising=False)
    assert given() == []
    monkeypatch.setenv("DYNSWAP_LIGHTNING", "1GiB")
    assert given()[0].budget == 1 << 30
    mine = streaming(provider, budget="auto")
    first, *others = given(mine)
    assert first is mine.handle and first.automatic and others and not any(others)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric(provider: Provider, precision: str, tmp_path: Path) -> None:
    """Fabric calls no callback before it moves a model, so the program installs it."""
    results = []
    for streams in (False, True):
        seeded()
        model = Bags()
        if streams:
            provider.install(testing.map_from_file(model, tmp_path / "masters.pt"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        fabric = lightning.Fabric(
            accelerator="cpu" if provider.device.type == "cpu" else "gpu", devices=1, precision=precision
        )
        module, optimizer = fabric.setup(model, optimizer)
        seen = []
        for batch in fabric.setup_dataloaders(loader()):
            loss = nn.functional.cross_entropy(module(batch["input_ids"]), batch["labels"])
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        fabric.save(tmp_path / "saved.ckpt", {"model": module, "optimizer": optimizer})
        fabric.load(tmp_path / "saved.ckpt", {"model": module, "optimizer": optimizer}, weights_only=False)
        seen.append(module(batch["input_ids"]).cpu())
        file = torch.load(tmp_path / "saved.ckpt", map_location="cpu", weights_only=False)
        results.append((seen, file, masters(model)))
    testing.assert_bit_equal(results[1], results[0], "installed")
