"""The parts of the demo: shapes, the checkpoint that it writes, the meters, and the baselines."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import disk_bytes_read
from dynswap_ext._util.units import parse_run_budget, parse_share, show_budget
from dynswap_ext.demo import run
from dynswap_ext.demo.compare import DemoResult
from dynswap_ext.demo.model import (
    Decoder,
    DecoderConfig,
    checkpoint_file,
    coded_file,
    config_for,
    write_random,
)
from dynswap_ext.demo.run import (
    BASELINES,
    CODED,
    HOOK,
    INSTALLED,
    RESIDENT,
    Job,
    Outcome,
    install_hook,
    run_apart,
    uninstall_hook,
)
from dynswap_ext.errors import BudgetError, DynswapError, SourceError
from dynswap_ext.planning.rates import disk_bandwidth

pytestmark = pytest.mark.alone

_CONFIG = DecoderConfig(hidden=64, layers=3, vocabulary=512)


def _skeleton(config: DecoderConfig = _CONFIG) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


class TestModel:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [2_000_000, 50_000_000, 1_500_000_000, 20_000_000_000])
    def test_size_is_met_and_counted(self, size: int, dtype: torch.dtype) -> None:
        config = config_for(size, dtype)
        assert config.parameters * dtype.itemsize == pytest.approx(size, rel=0.05)
        assert config.parameters == sum(parameter.numel() for parameter in _skeleton(config).parameters())

    def test_future_tokens_change_nothing_but_the_last_position_does(self) -> None:
        torch.manual_seed(0)
        model = Decoder(_CONFIG).eval()
        tokens = torch.randint(512, (1, 6))
        other = tokens.clone()
        other[0, -1] = (other[0, -1] + 1) % 512
        with torch.inference_mode():
            assert model(tokens).shape == (1, 512)
            assert not torch.equal(model(tokens), model(other))


class TestCheckpoint:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_what_the_safetensors_library_reads(self, dtype: torch.dtype, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        steps: list[int] = []
        write_random(path, _skeleton(), dtype, lambda done, whole: steps.append(done))
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) == steps[-1]
        assert set(tensors) == {name for name, _ in _skeleton().named_parameters()}
        assert tensors["embedding.weight"].float().std() == pytest.approx(64**-0.5, rel=0.1)
        assert all(tensor.dtype == dtype for tensor in tensors.values())
        assert int.from_bytes(path.read_bytes()[:8], "little") % 4096 == 4096 - 8

    def test_is_the_same_each_time_and_each_weight_another(self, tmp_path: Path) -> None:
        for name in ("a.safetensors", "b.safetensors"):
            write_random(tmp_path / name, _skeleton(), torch.float32)
        assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
        written = load_file(tmp_path / "a.safetensors")
        assert not torch.equal(written["layers.0.key.weight"], written["layers.0.query.weight"])
        assert not torch.equal(written["layers.0.key.weight"], written["layers.1.key.weight"])

    def test_failure_leaves_no_file(self, tmp_path: Path) -> None:
        def fail(done: int, whole: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_random(tmp_path / "w.safetensors", _skeleton(), torch.float32, fail)
        assert list(tmp_path.iterdir()) == []

    def test_kept_file_is_used_again(self, tmp_path: Path) -> None:
        with checkpoint_file(tmp_path, _CONFIG, torch.float32, keep=True) as path:
            identity = path.stat().st_ino
        with checkpoint_file(tmp_path, _CONFIG, torch.float32) as path:
            assert path.stat().st_ino == identity
        assert not path.exists()


class TestMeters:
    def test_memory_meter_sees_a_peak_that_is_over(self) -> None:
        # In a process of its own: here, threads and garbage of other tests come and go.
        code = (
            "from dynswap_ext._util.peak_memory import PeakMemory; meter = PeakMemory(); "
            "block = bytearray(b'1') * (64 << 20); del block; print(meter.more())"
        )
        ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert 60 << 20 < int(ran.stdout) < 96 << 20

    def test_dropped_file_is_read_from_the_disk_again(self, tmp_path: Path) -> None:
        path = tmp_path / "w"
        with path.open("wb") as file:
            file.write(os.urandom(8 << 20))
            os.fsync(file.fileno())
        drop_file_cache(path)
        before = disk_bytes_read()
        content = path.read_bytes()
        after = disk_bytes_read()
        if after == before:
            pytest.skip("this file system is in memory")
        assert after - before >= len(content)
        path.read_bytes()
        # The file is cached now. The system may read a page of a library again meanwhile.
        assert disk_bytes_read() - after < len(content) // 8

    @pytest.mark.parametrize("readers", [1, 3])
    def test_disk_bandwidth_counts_what_it_reads(self, readers: int, tmp_path: Path) -> None:
        path = tmp_path / "w"
        path.write_bytes(bytes((32 << 20) + 5))
        assert 1e6 < disk_bandwidth(path, readers=readers) < 1e12


class TestHook:
    def test_hands_out_what_to_makes_and_goes_without_a_trace(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        classes = [type(module) for module in model.modules()]
        install_hook(model, device="cpu", dtype=torch.float64)
        assert model[0].weight.dtype is torch.float64
        assert model[0].weight is not model[0].weight
        assert dict(model.named_parameters())["0.weight"].dtype is torch.float32
        assert model.eval()(torch.randn(2, 4, dtype=torch.float64)).dtype is torch.float64
        uninstall_hook(model)
        assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1/4", 250), ("25%", 250), ("0.25", 250), (0.25, 250), ("1", 1000), ("0.0001", 1)],
)
def test_share(text: float | str, expected: int) -> None:
    assert parse_share(text, 1000) == expected


def _job(path: Path, **changes: Any) -> Job:
    job = Job(RESIDENT, path, _CONFIG, budget=_CONFIG.parameters, tokens=8, passes=2, warm_up=1)
    return dataclasses.replace(job, **changes)


class TestBaselines:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write_random(tmp_path / "w.safetensors", _skeleton(), torch.float32)
        return tmp_path / "w.safetensors"

    @pytest.mark.parametrize("cast", [None, torch.bfloat16])
    @pytest.mark.parametrize("in_memory", [False, True])
    def test_every_baseline_equals_the_resident_model(
        self, cast: torch.dtype | None, in_memory: bool, path: Path
    ) -> None:
        with coded_file(path) as coded:
            outcomes = {
                name: run.run_here(
                    _job(coded if name == CODED else path, baseline=name, dtype=cast, in_memory=in_memory)
                )
                for name in BASELINES
            }
        assert not coded.exists()
        of_python = run.run_here(
            _job(path, baseline=INSTALLED, dtype=cast, in_memory=in_memory, provider="python")
        )
        outcomes["pure Python"] = of_python
        for name, outcome in outcomes.items():
            assert len(outcome.seconds) == 2
            assert outcome.digest == outcomes[RESIDENT].digest, name
        other = run.run_here(_job(path, dtype=cast, in_memory=in_memory, warm_up=2))
        assert other.digest != outcomes[RESIDENT].digest  # other inputs
        assert of_python.provider == "python" and not outcomes[HOOK].provider
        installed = outcomes[INSTALLED]
        if installed.provider == "native" and (cast or not in_memory):
            assert installed.moved_bytes_per_pass  # without streaming, equal outputs would prove nothing
            moved = outcomes[CODED].moved_bytes_per_pass
            assert moved and moved < 0.95 * installed.moved_bytes_per_pass
        # Operations read the file through its mapping, so their bytes and waits are not counted.
        for figure in (of_python.moved_bytes_per_pass, of_python.stall_seconds_per_pass):
            assert (figure is None) == (not cast and not in_memory)


@pytest.mark.parametrize("moved", [0.0, 1e6, 1e9])
@pytest.mark.parametrize("installed", [[2.0, 3.0, 4.0], [4.0, 5.0, 6.0]], ids=["faster", "slower"])
def test_nothing_in_the_demo_is_faster_than_the_limit(installed: list[float], moved: float) -> None:
    outcomes = {
        RESIDENT: Outcome([3.0, 3.5, 5.0], None, None),
        INSTALLED: Outcome(installed, None, None, "", "native", "host", moved),
    }
    result = DemoResult(_job(Path("w")), "cpu", 1, 1e8, "read", outcomes)
    assert result.limit_seconds == (installed[0] if moved == 1e9 else min(3.0, installed[0]))


class TestApart:
    def test_what_runs_apart_equals_what_runs_here(self, tmp_path: Path) -> None:
        write_random(tmp_path / "w.safetensors", _skeleton(), torch.float32)
        job = _job(tmp_path / "w.safetensors")
        outcome = run_apart(job)
        assert outcome.digest == run.run_here(job).digest
        assert len(outcome.seconds) == 2

    def test_an_error_of_the_package_arrives_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="no such file"):
            run_apart(_job(tmp_path / "gone"))
        write_random(tmp_path / "w.safetensors", _skeleton(), torch.float32)
        with pytest.raises(BudgetError) as caught:
            run_apart(_job(tmp_path / "w.safetensors", baseline=INSTALLED, dtype=torch.bfloat16, budget=1))
        assert caught.value.smallest_bytes

    def test_a_process_that_is_killed_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "run_here", _die)
        with pytest.raises(DynswapError, match="the process of the resident run was ended from outside"):
            run_apart(_job(tmp_path / "w.safetensors"))


def _die(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_loaded_demo_model_is_tied_and_complete(tmp_path: Path) -> None:
    write_random(tmp_path / "w.safetensors", _skeleton(), torch.float32)
    model = checkpoint.load(lambda: Decoder(_CONFIG), tmp_path / "w.safetensors")
    assert model.head.weight is model.embedding.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_demo_has_the_minimum_too() -> None:
    assert parse_run_budget(" Minimum", None, 100, 25) == "minimum"
    assert parse_run_budget("1KiB", None, 100, 25) == 1024
    assert parse_run_budget(None, "1/2", 100, 25) == 50
    assert parse_run_budget(None, None, 100, 25) == 25
    assert (show_budget("minimum"), show_budget(None), show_budget(1024)) == ("minimum", "minimum", "1 KiB")
