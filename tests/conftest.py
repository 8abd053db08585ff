"""Fixtures of the Python tests: a test that takes `provider` runs with every provider, on every device.

Environment variables choose what runs:

- DYNSWAP_TEST_DEVICE=pretend runs, on the pretend CUDA device (tests/device), the tests that take `provider`
  or `gpu` or are marked `device`. `no-toolkit` and `privateuse1` are other kinds of that device.
- DYNSWAP_SEED decides the order in which the pretend device does its work.
- DYNSWAP_TEST_SEGMENTS=2097152 makes its allocator take memory in segments of 2 MiB, as torch's does. By
  default it takes memory to the byte.
- DYNSWAP_TEST_ACTIVATIONS=offloaded lets all that models save for backward leave the device.
- DYNSWAP_TEST_MASTERS=coded codes the parameters of each model that a provider installs (`LosslessTensor`).
- DYNSWAP_TESTS=quick leaves out what `make test-all` adds to `make test`. DYNSWAP_TESTS=nightly adds what
  only the nightly run has.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "device"))

import pretend_cuda

PRETEND = bool(os.environ.get("DYNSWAP_TEST_DEVICE"))
if PRETEND:  # before anything imports torch
    pretend_cuda.activate()
    # The device page-locks whole pages, so masters get pages of their own from here on (M_MMAP_THRESHOLD).
    # Copies from masters that are not page-locked would wait, and little would stay queued.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    # Processes that a test starts have the device, too.
    startup = Path(__file__).parent / "device" / "startup"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(startup), str(startup.parent), os.environ.get("PYTHONPATH", "")]
    )

import torch
from torch import nn

import dynswap_ext
import steps
from coded_masters import code_in_place, plain_only
from dynswap_ext import _provider, testing
from dynswap_ext import config as dynswap_config
from gpu_under_test import Gpu

if not torch.backends.flags_frozen():
    # Else the gradients of a convolution are summed in any order. A library that a test needs may import
    # torch.testing's common_utils, which freezes the flags.
    torch.backends.cudnn.deterministic = True

#: The type of device besides the CPU: "cuda", or that of the pretend device.
ACCELERATOR = pretend_cuda.device_type()
accelerator = torch.get_device_module(ACCELERATOR)
ON_CPU, ON_DEVICE = ("python", "native-host"), (f"python-{ACCELERATOR}", f"native-{ACCELERATOR}")
#: The engine's backend there.
ENGINE = "cuda" if pretend_cuda.has_toolkit() else "torch"
if dynswap_config.engine_backend_from_environment() != "auto":
    ENGINE = dynswap_config.engine_backend_from_environment()
#: Whether tests that need CUDA have to run, so that a GPU machine cannot pass without having used its GPU.
REQUIRE_CUDA = os.environ.get("DYNSWAP_REQUIRE_CUDA") == "1"
HAS_DEVICE = PRETEND or torch.cuda.is_available() or REQUIRE_CUDA
#: Without a GPU, the run on the pretend device has those on it.
PROVIDERS = (*(() if PRETEND else ON_CPU), *(ON_DEVICE if HAS_DEVICE else ()))


#: Whether what models save for backward leaves the device.
OFFLOADED = os.environ.get("DYNSWAP_TEST_ACTIVATIONS") == "offloaded"
#: Whether models are installed with coded masters.
CODED = os.environ.get("DYNSWAP_TEST_MASTERS") == "coded"


@dataclass
class Provider:
    """A provider and a device to test with, and the handles of what was installed with them."""

    name: str
    backend: str
    device: torch.device
    handles: list[dynswap_ext.Handle] = field(default_factory=list)

    @property
    def native(self) -> bool:
        return self.backend == "native"

    @property
    def device_module(self) -> Any:
        """Return torch.cuda, or the module of another type of device."""
        return torch.get_device_module(self.device)

    @property
    def expected_backend(self) -> str:
        """Return the name of the backend that copies weights to the device here."""
        if not self.native:
            return "python"
        return "host" if self.device.type == "cpu" else ENGINE

    def install(self, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
        if CODED and self.native:
            code_in_place(model)
        if OFFLOADED and self.native:
            options.setdefault("activations", 3e-9)  # some 64 bytes; an amount as small would warn
            if self.device.type == "cpu":
                options.setdefault("activations_folder", tempfile.gettempdir())
        handle = dynswap_ext.install(model, device=self.device, provider=self.backend, **options)
        assert handle.provider == self.backend
        self.handles.append(handle)
        return handle

    def offload(self, model: nn.Module, activations: int | str, **options: Any) -> dynswap_ext.Handle:
        """Install a model whose saved tensors leave the device. Skip the test in pure Python."""
        if not self.native:
            pytest.skip("pure Python refuses activations=")
        if self.device.type == "cpu":
            options.setdefault("activations_folder", tempfile.gettempdir())
        return self.install(model, activations=activations, **options)

    def sees_every_write(self, *handles: dynswap_ext.Handle) -> bool:
        """Return whether installs notice every write to a master.

        Pure Python compares only samples of some masters, so it may miss a small write to one of them.
        """
        return self.native or not any(handle.report().sampled_bytes for handle in handles)

    def pair(
        self, model: nn.Module, dtype: torch.dtype | None = torch.float64, **options: Any
    ) -> tuple[nn.Module, dynswap_ext.Handle]:
        """Install the model; return a moved copy to compare it with, and the handle."""
        moved = testing.moved(model, self.device, dtype)
        return moved, self.install(model, dtype=dtype, **options)

    def smallest_budget(self, model: nn.Module, **options: Any) -> int:
        """Return the smallest budget that works, which the error for a smaller one names."""
        with pytest.raises(dynswap_ext.BudgetError) as refused:
            self.install(model, budget=1, **options)
        smallest = refused.value.smallest_bytes
        assert smallest is not None
        return smallest

    def assert_as_masters(self, model: nn.Module, x: torch.Tensor) -> None:
        """Assert that a call returns what a copy of the model, moved to the device now, returns."""
        dtype = x.dtype if x.is_floating_point() else torch.float64
        with torch.no_grad():
            testing.assert_bit_equal(model(x), testing.moved(model, self.device, dtype)(x), "output")

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> torch.Tensor:
        """Return normally distributed values, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device, dtype)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "device: runs on the pretend device too, though it names no provider",
        "alone: measures time or memory of the machine, so nothing may run beside it",
        "slow: too long for `make test`, or one more of a kind that it has; `make test-all` runs it",
        "nightly: too long for each change, and one more of a kind that it runs; `make nightly` runs it",
    ):
        config.addinivalue_line("markers", marker)
    steps.write_report(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a run with `-m alone`, skip the files that do not contain the word, without importing them."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return "alone" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that another run has.

    The nightly run leaves out only tests that cannot run, or that do not depend on how the run differs. In
    the other runs:

    - With pure Python, tests of compilers and of other libraries' programs are left to the nightly run.
    - On the pretend device, so are test_compile.py, and tests of pure Python that repeat its run on the CPU.
    - DYNSWAP_PROVIDER=python is a second run, for tests that follow this variable. Tests that take
      `provider` or `gpu` do not. Nor do the files in `names`: they install nothing otherwise, or need the
      native provider (which streams on a CPU), or measure what is the same for both.
    """
    tests = os.environ.get("DYNSWAP_TESTS", "")
    if tests not in ("", "quick", "nightly"):
        raise pytest.UsageError(f"DYNSWAP_TESTS is {tests!r}; it can be 'quick', 'nightly', or empty")
    every = tests == "nightly"
    if CODED:
        _keep(config, items, _of_native_provider)
        for item in items:
            if (why := plain_only(item.name)) is not None:
                item.add_marker(pytest.mark.skip(reason=why))
    if not every:
        _keep(config, items, lambda item: "nightly" not in item.keywords)
    if tests == "quick":
        _keep(config, items, _quick)
    if PRETEND:
        # It compiles for minutes, and the run on the CPU has it.
        items[:] = [item for item in items if every or item.path.name != "test_compile.py"]
        wanted = [item for item in items if _names_a_provider(item) or "device" in item.keywords]
        kept = {item for item in wanted if every or not _repeats_the_run_on_the_cpu(item)}
        return _keep(config, items, kept.__contains__)
    if not HAS_DEVICE:
        _keep(config, items, lambda item: "gpu" not in getattr(item, "fixturenames", ()))
    if not every:
        _keep(config, items, lambda item: not _library_over_pure_python(item))
    if every or dynswap_config.provider_from_environment() != "python":
        return
    here = Path(__file__).parent
    names = (
        "checkpoint",
        "examples",
        "planning",
        "test_benchmarks.py",
        "test_build.py",
        "test_citations.py",
        "test_docs_first_ten_minutes.py",
        "test_docs_guides.py",
        "test_docs_reference.py",
        "test_docs_site.py",
        "test_docs_stability.py",
        "test_figures.py",
        "test_file_mappings.py",
        "test_layers.py",
        "test_logging.py",
        "test_provider.py",
        "test_silent_writes_sampled.py",
        "test_workflows.py",
    )
    apart = {here / name for name in names}

    _keep(
        config, items, lambda item: not (_names_a_provider(item) or apart & {item.path, *item.path.parents})
    )


def pytest_collection_finish() -> None:
    """Keep what the test files have imported out of garbage collections: each would take 0.5 s longer."""
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_lives_on() -> None:
    """Before each file, keep what earlier files left behind out of garbage collections.

    Otherwise a collection takes 5 s instead of 0.1 s in a worker that has run the compiler's tests.
    """
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def _of_native_provider(item: pytest.Item) -> bool:
    """Return whether a test is one of the native provider: coded masters are given to no other."""
    return _names_a_provider(item) and "native" in item.name


def _names_a_provider(item: pytest.Item) -> bool:
    return bool({"provider", "gpu"} & set(getattr(item, "fixturenames", ())))


def _quick(item: pytest.Item) -> bool:
    """Return whether `make test` runs a test.

    It runs none marked slow. With pure Python it runs only test_semantics_*.py, on the CPU. On the pretend
    device, which is slow, it leaves out programs, checkpoints, planning, inspecting, compilers and every
    module of torch.
    """
    if "slow" in item.keywords:
        return False
    folder, file = item.path.parent.name, item.path.name
    folders = ("programs", "random_programs", "checkpoint", "planning", "inspect")
    if PRETEND and (folder in folders or file.startswith(("test_compile", "test_every"))):
        return False
    return not _provider_of(item).startswith("python") or (file.startswith("test_semantics_") and not PRETEND)


def _provider_of(item: pytest.Item) -> str:
    """Return the name of the provider that a test is for; empty if it is for none."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return str(params.get("provider") or params.get("gpu") or "")


def _library_over_pure_python(item: pytest.Item) -> bool:
    other = item.path.parent.name == "programs" or item.path.name.startswith("test_compile")
    return other and _provider_of(item) == "python"


def _repeats_the_run_on_the_cpu(item: pytest.Item) -> bool:
    """Return whether a test of pure Python on the device repeats its run on the CPU.

    Those of test_semantics_*.py and those that take `gpu` do not.
    """
    named = "provider" in getattr(item, "fixturenames", ())
    return named and _provider_of(item) == ON_DEVICE[0] and not item.path.name.startswith("test_semantics_")


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    kept = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = kept


def skip_or_fail(reason: str, *, cuda: bool) -> None:
    """Skip the test. If `cuda` is missing where DYNSWAP_REQUIRE_CUDA=1 expects it, fail instead."""
    if cuda and REQUIRE_CUDA:
        pytest.fail(f"DYNSWAP_REQUIRE_CUDA=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def only_cuda_has(what: str, *, whole_module: bool = False) -> None:
    """Skip a test, or its whole module, if the accelerator is not of type "cuda"."""
    if ACCELERATOR != "cuda":
        pytest.skip(f"{what}: on CUDA alone", allow_module_level=whole_module)


def needs_cuda_runtime() -> None:
    """Skip the test without a CUDA runtime to call. A missing GPU is a failure if DYNSWAP_REQUIRE_CUDA=1."""
    only_cuda_has("its runtime")
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    if PRETEND and not pretend_cuda.has_toolkit():
        pytest.skip("this kind of pretend device has no runtime")


def accelerate_knows(provider: Provider) -> None:
    """Skip a test of accelerate or lightning on a plugin's device: they would compute on the CPU."""
    if provider.device.type not in ("cpu", "cuda"):
        pytest.skip(
            f"accelerate and lightning compute on the CPU where the device is '{provider.device.type}'"
        )


def needs_inductor(provider: Provider) -> None:
    """Skip the test if torch's compiler cannot generate code for the device."""
    if provider.device.type == "cuda":
        pytest.importorskip("triton", reason="inductor needs triton on a GPU")
    elif provider.device.type != "cpu":
        pytest.skip("inductor generates no code for this type of device")


def dense_alone_is_pretended(layout: str) -> None:
    """Skip, on the pretend device, a test that needs tensors of another `layout` there."""
    if PRETEND:
        skip_or_fail(f"the pretend device has no {layout} tensors, a GPU has", cuda=True)


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test has failed, and clear the frames of its error.

    pytest keeps the exception (as `sys.last_exc`, for a debugger) until the next test is called. Without
    this, its frames would keep the test's tensors, and their memory on the device, until then.
    """
    report = yield
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.stash[_failed] = True
        if not item.config.option.usepdb:
            _clear_frames(call.excinfo.value)
    return report


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error's traceback, and of the errors that it came from."""
    ahead: list[BaseException | None] = [error]
    seen: set[int] = set()
    while ahead:
        each = ahead.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        ahead += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
    gc.collect()


@contextmanager
def under_test(name: str, item: pytest.Item) -> Iterator[Provider]:
    """Yield a provider, or skip the test if it cannot run here; then assert that nothing is held.

    What may be held is memory for weights on the device. This is not asked of a test that failed: its error
    need not leave things in order.
    """
    on_device = name in ON_DEVICE
    if on_device and not accelerator.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    device = torch.device(ACCELERATOR, accelerator.current_device()) if on_device else torch.device("cpu")
    backend = name.split("-")[0]
    reason = _provider.native_unavailable(device) if backend == "native" else ""
    if reason and PRETEND:  # which was made for this extension
        pytest.fail(reason, pytrace=False)
    if reason:
        skip_or_fail(reason, cuda=on_device)
    under_test = Provider(name, backend, device)
    yield under_test
    with ExitStack() as uninstalls:  # each runs, even if another fails
        for handle in reversed(under_test.handles):
            uninstalls.callback(handle.uninstall)
    if item.stash.get(_failed, False):
        return
    for handle in under_test.handles:  # not before all are uninstalled: residents hold memory until then
        testing.assert_nothing_held(handle)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """Yield each provider in turn."""
    with under_test(request.param, request.node) as each:
        yield each


@pytest.fixture(params=ON_DEVICE)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Yield the GPU, a real or the pretend one, with each provider in turn."""
    with under_test(request.param, request.node) as each:
        yield Gpu(each)


@pytest.fixture
def gives_way(gpu: Gpu) -> Iterator[None]:
    """Skip the test if residents do not give way; afterwards, lift a cap on memory that the test has set.

    Residents give way if they are evicted when the program runs out of device memory.
    """
    if not gpu.native:
        pytest.skip("the pure-Python provider's residents do not give way")
    yield
    gpu.uncap()


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[nn.Module], nn.Module]:
    """Return a function that maps a model's masters from a file."""
    return lambda model: testing.map_from_file(model, tmp_path / "model.pt")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch's compiler before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset the pretend device before each test, and assert that the test broke none of the device's rules.

    The test's name and DYNSWAP_SEED decide the order in which the device works.
    """
    if not PRETEND:
        yield
        return
    draw = random.Random(f"{os.environ.get('DYNSWAP_SEED', '1')} {request.node.nodeid}")
    seed, order = draw.randrange(1 << 32), draw.choice(("late", "early", "mixed"))
    pretend_cuda.reset(seed, order)
    pretend_cuda.faults().segment_bytes = int(os.environ.get("DYNSWAP_TEST_SEGMENTS", 0))
    accelerator.set_device(0)
    yield
    found = pretend_cuda.violations()
    pretend_cuda.reset(seed, order)
    assert not found, f"on the pretend device ({order}, seed {seed}): {found}"
