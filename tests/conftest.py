"""Fixtures of the Python tests: every semantic test runs over every provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import _provider, testing
from dynswap_ext import config as dynswap_config
from gpu_under_test import Gpu, Rehearsal

PROVIDERS = ("python", "native-host", "python-cuda", "native-cuda")


@dataclass
class Provider:
    """A provider and a device to test with, and what has been installed through it."""

    name: str
    backend: str
    device: torch.device
    handles: list[dynswap_ext.Handle] = field(default_factory=list)

    @property
    def native(self) -> bool:
        return self.backend == "native"

    def install(self, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
        handle = dynswap_ext.install(model, device=self.device, backend=self.backend, **options)
        assert handle.provider == self.backend
        self.handles.append(handle)
        return handle

    def pair(
        self, model: nn.Module, dtype: torch.dtype | None = torch.float64, **options: Any
    ) -> tuple[nn.Module, dynswap_ext.Handle]:
        """Install the model; return a moved copy to compare it with, and the handle."""
        moved = testing.moved(model, self.device, dtype)
        return moved, self.install(model, dtype=dtype, **options)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> torch.Tensor:
        """The same values on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device, dtype)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A second run under DYNSWAP_BACKEND=python is for what follows the environment.

    Tests of the `provider` fixture name their provider, and have run over each of them in the first; those of
    checkpoints, plans and records install nothing without it.
    """
    if dynswap_config.backend_from_environment() != "python":
        return
    here = Path(__file__).parent
    apart = {here / name for name in ("checkpoint", "planning", "test_compare.py", "test_gpu_suite.py")}

    def repeats(item: pytest.Item) -> bool:
        named = {"provider", "gpu"} & set(getattr(item, "fixturenames", ()))
        return bool(named or apart & {item.path, *item.path.parents})

    repeated = [item for item in items if repeats(item)]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in set(repeated)]


def skip_or_fail(reason: str, *, cuda: bool) -> None:
    """Skip for a visible reason, or fail where a machine is expected to have CUDA."""
    if cuda and dynswap_config.require_cuda():
        pytest.fail(f"DYNSWAP_REQUIRE_CUDA=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def under_test(name: str) -> Iterator[Provider]:
    """One provider, or the reason why it cannot run here. A test ends with nothing held on the device."""
    cuda = name.endswith("cuda")
    if cuda and not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    backend = name.split("-")[0]
    reason = _provider.native_unavailable(device) if backend == "native" else ""
    if reason:
        skip_or_fail(reason, cuda=cuda)
    under_test = Provider(name, backend, device)
    yield under_test
    for handle in under_test.handles:
        handle.uninstall()  # residents may hold their place until then
        testing.assert_nothing_held(handle)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """Every provider in turn."""
    with under_test(request.param) as each:
        yield each


@pytest.fixture(params=("rehearsal", "python-cuda", "native-cuda"))
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """A GPU with each provider; and a rehearsal on the CPU, which proves the test's own code."""
    if request.param != "rehearsal":
        with under_test(request.param) as each:
            yield Gpu(each)
        return
    native = not _provider.native_unavailable(torch.device("cpu"))
    with under_test("native-host" if native else "python") as each:
        yield Rehearsal(each)


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[nn.Module], nn.Module]:
    """Let a model's masters be mapped from a file."""
    return lambda model: testing.map_from_file(model, tmp_path / "model.pt")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
