"""`offload_activations`: what any code saves for backward leaves the device, without an install."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as recompute

import children
import dynswap_ext
from conftest import PRETEND, Provider
from dynswap_ext import testing
from sample_activations import ACTIVATION, LAYERS, LIMIT, ROWS, WIDTH, Stack, pair


@pytest.fixture
def native(provider: Provider) -> Provider:
    if not provider.native:
        pytest.skip("pure Python refuses it")
    return provider


def offloading(
    provider: Provider, model: nn.Module | None = None, limit: int = LIMIT, **options: Any
) -> dynswap_ext.ActivationOffloading:
    if provider.device.type == "cpu":
        options.setdefault("activations_folder", tempfile.gettempdir())
    return dynswap_ext.offload_activations(provider.device if model is None else model, limit, **options)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trains_equally(
    model: Stack,
    plain: Stack,
    x: Tensor,
    offload: dynswap_ext.ActivationOffloading,
    called: Any = None,
) -> None:
    """Run steps of `model`, or of what calls it, and assert that its gradients are those of `plain`."""
    for _ in range(3):
        model.zero_grad()
        with offload:
            loss = loss_of(model if called is None else called, x)
        loss.backward()
        testing.assert_bit_equal(model.gradients(), plain.step(x))


def test_a_plain_model_and_a_loss(native: Provider) -> None:
    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    offload = offloading(native, model)
    for step in range(4):
        before = offload.stats()
        model.zero_grad()
        with offload:
            loss = loss_of(model, x)
        loss.backward()
        testing.assert_bit_equal(model.gradients(), plain.step(x))
        stats = offload.stats()
        assert stats.offloaded_bytes - before.offloaded_bytes >= 2 * LAYERS * ACTIVATION - LIMIT - ACTIVATION
        assert stats.saved_bytes <= LIMIT + 3 * ACTIVATION
        if step > 1:
            assert stats.misses - before.misses <= (stats.hits - before.hits) / 20
    assert "bytes copied to the host" in repr(offload)
    assert not dynswap_ext.is_installed(model)


def test_a_decorator(native: Provider) -> None:
    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    offload = offloading(native)

    @offload
    def step() -> list[Tensor]:
        return model.step(x)  # type: ignore[no-any-return]

    for _ in range(2):
        testing.assert_bit_equal(step(), plain.step(x))
    assert offload.stats().offloaded_bytes > 0


def test_frozen_parameters_are_left_where_they_are(native: Provider) -> None:
    """Backward needs frozen weights, too. They are no activations, whoever made views of them."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).requires_grad_(False).to(native.device)
    x = torch.randn(4, 512, device=native.device, requires_grad=True)
    offload = offloading(native, plain, limit=1)
    with offload:
        loss = plain(x).sum()
    assert torch.autograd.grad(loss, x)[0].abs().sum() > 0
    assert offload.stats().offloaded_bytes == 0


def test_around_an_installed_model(native: Provider) -> None:
    model, plain, x = pair(native)
    handle = native.install(model, dtype=torch.float64)
    plain.double()
    offload = offloading(native, model)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        with offload:
            loss = loss_of(model, x.double())
        loss.backward()
        loss_of(plain, x.double()).backward()
        testing.assert_bit_equal(model.gradients(), [grad.float() for grad in plain.gradients()])
    assert offload.stats().offloaded_bytes > 0
    assert handle.stats().offloaded_bytes == 0
    assert handle.stats().misses + handle.stats().hits > 0


def test_what_is_read_inside_may_be_written(native: Provider) -> None:
    """The block is no forward: writes on weights that are read in it reach the masters."""
    model, plain, x = pair(native)
    native.install(model, dtype=torch.float64)
    with offloading(native, model), torch.no_grad():
        model.layers[0].weight.data.mul_(2)
        plain.layers[0].weight.mul_(2)
        found = model(x.double())
    testing.assert_bit_equal(found, plain.double()(x.double()))
    testing.assert_bit_equal(model.state_dict(), {k: v.float().cpu() for k, v in plain.state_dict().items()})


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_checkpoints(native: Provider, reentrant: bool) -> None:
    def forward(model: Stack, x: Tensor) -> Tensor:
        for layer in model.layers:
            block = lambda y, layer=layer: y + torch.tanh(layer(y))  # noqa: E731
            x = recompute.checkpoint(block, x, use_reentrant=reentrant)
        return x

    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    model.forward_of = forward
    x.requires_grad_()
    offload = offloading(native)
    trains_equally(model, plain, x, offload)
    stats = offload.stats()
    assert 0 < stats.offloaded_bytes <= 3 * LAYERS * ACTIVATION, "the inputs of the blocks alone"


def test_with_selective_checkpoints(native: Provider) -> None:
    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> recompute.CheckpointPolicy:
        saved = operation is torch.ops.aten.addmm.default
        policies = recompute.CheckpointPolicy
        return policies.MUST_SAVE if saved else policies.PREFER_RECOMPUTE

    def forward(model: Stack, x: Tensor) -> Tensor:
        for layer in model.layers:
            block = lambda y, layer=layer: y + torch.tanh(layer(y))  # noqa: E731
            contexts = partial(recompute.create_selective_checkpoint_contexts, policy)
            x = recompute.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x

    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    model.forward_of = forward
    offload = offloading(native)
    trains_equally(model, plain, x, offload)
    assert offload.stats().offloaded_bytes > 0


def test_memory_that_its_owner_frees_and_fills_again(native: Provider) -> None:
    """Sharded models free a weight's memory after a forward, and bring its bytes back before backward."""
    if PRETEND:
        pytest.skip("the pretend device resizes no storage")
    weight = torch.randn(WIDTH, WIDTH, device=native.device)
    kept = weight.clone()
    x = torch.randn(ROWS, WIDTH, device=native.device, requires_grad=True)
    offload = offloading(native, limit=WIDTH * WIDTH * 4 * 2)
    with offload:
        first = x @ weight
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        y = first
        for _ in range(6):
            y = torch.tanh(y)
        loss = y.sum()
    weight.untyped_storage().resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(kept)
    found = torch.autograd.grad(loss, x)[0]
    y = x @ kept
    for _ in range(6):
        y = torch.tanh(y)
    testing.assert_bit_equal(found, torch.autograd.grad(y.sum(), x)[0])


def test_backward_after_it_is_gone(native: Provider) -> None:
    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    offload = offloading(native)
    with offload:
        loss = loss_of(model, x)
    del offload
    gc.collect()
    loss.backward()
    testing.assert_bit_equal(model.gradients(), plain.step(x))


def test_threads_share_one(native: Provider) -> None:
    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    offload = offloading(native)

    def gradient(each: nn.Module, scale: int) -> Tensor:
        given = (x * scale).requires_grad_()
        with offload:
            loss = loss_of(each, given)
        return torch.autograd.grad(loss, given)[0].cpu()

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda scale: gradient(model, scale), range(1, 9)))
    for scale, each in enumerate(found, 1):
        given = (x * scale).requires_grad_()
        testing.assert_bit_equal(each, torch.autograd.grad(loss_of(plain, given), given)[0].cpu())


def test_an_error_inside_ends_it(native: Provider) -> None:
    _, model, x = pair(native)
    offload = offloading(native)
    with pytest.raises(RuntimeError), offload:
        model(x)
        raise RuntimeError
    before = offload.stats().offloaded_bytes
    model.step(x)
    assert offload.stats().offloaded_bytes == before


FSDP = """
import copy, os, sys, tempfile
import torch, dynswap_ext
from torch import nn
from torch.distributed.fsdp import fully_shard
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
plain[0][0].weight.requires_grad_(False)
wrapped = copy.deepcopy(plain)
kind = sys.argv[1]
if kind == "fsdp":
    for block in wrapped:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(wrapped)
else:
    wrapped = nn.parallel.DistributedDataParallel(wrapped)
offload = dynswap_ext.offload_activations("cpu", 1 << 18, activations_folder=tempfile.gettempdir())
x = torch.randn(512, 256)
for step in range(3):
    for model in (plain, wrapped):
        model.zero_grad()
    plain(x).square().mean().backward()
    with offload:
        loss = wrapped(x).square().mean()
    loss.backward()
    for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            full = mine.grad.full_tensor() if kind == "fsdp" else mine.grad
            assert torch.equal(full, other.grad), step
assert offload.stats().offloaded_bytes > 0
print("equal")
"""


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_sharded_and_replicated_models(native: Provider, kind: str) -> None:
    if native.device.type != "cpu":
        pytest.skip("gloo's ranks compute on the CPU")
    done = children.run(FSDP, kind)
    assert done.stdout == "equal\n", done.stderr


def test_wrong_options(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("the provider is chosen by the environment")
    for amount in ("auto", None):
        with pytest.raises(dynswap_ext.ConfigError, match="measures nothing"):
            offloading(provider, limit=amount)  # type: ignore[arg-type]
    with pytest.raises(
        dynswap_ext.ConfigError, match=r"'autoo'; expected a number of bytes [^']*.* \(0\.5.*\)$"
    ):
        offloading(provider, limit="autoo")
    with pytest.raises(dynswap_ext.ConfigError, match=r"model is a list; expected a torch.nn.Module"):
        dynswap_ext.offload_activations([torch.zeros(3)], "1MiB")  # type: ignore[arg-type]
    with pytest.raises(dynswap_ext.ConfigError, match="nowhere"):
        dynswap_ext.offload_activations("nowhere", "1MiB")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(native: Provider, backend: str) -> None:
    """What compiled code saves leaves as what eager code saves does."""
    _, plain, x = pair(native)
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend=backend)
    offload = offloading(native)
    trains_equally(model, plain, x, offload, compiled)
    assert offload.stats().offloaded_bytes > 0


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its layers"])
def test_compiled_installed_models(native: Provider, whole: bool) -> None:
    model, plain, x = pair(native)
    options = {"activations_folder": tempfile.gettempdir()} if native.device.type == "cpu" else {}
    handle = native.install(model, dtype=torch.float64, activations=LIMIT, **options)
    plain.double()
    called: Any = model
    if whole:
        called = torch.compile(model, backend="aot_eager")
    else:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        loss_of(called, x.double()).backward()
        loss_of(plain, x.double()).backward()
        testing.assert_bit_equal(model.gradients(), [grad.float() for grad in plain.gradients()])
    # Of a model that is compiled as a whole, no call is noticed.
    assert (handle.stats().offloaded_bytes > 0) is not whole


def test_the_file_does_not_grow_with_steps_of_other_sizes(native: Provider, tmp_path: Path) -> None:
    if native.device.type != "cpu":
        pytest.skip("elsewhere they go to RAM")
    _, model, _ = pair(native)
    offload = offloading(native, limit=1, activations_folder=tmp_path)

    def in_file() -> int:
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this list
                if str(tmp_path) in os.readlink(link):
                    return link.stat().st_size
        raise AssertionError("there is no file")

    sizes = [1000, 100, 700, 333, 90, 512, 64, 800, 250, 999]
    for step in range(60):
        x = torch.randn(sizes[step % len(sizes)], WIDTH)
        with offload:
            loss = loss_of(model, x)
        loss.backward()
    assert in_file() <= 1.5 * (2 * LAYERS + 3) * 1000 * WIDTH * 4
