"""A quick check of every way to stream weights to this GPU, against the same model moved whole.

It combines the engine's backends (CUDA's own, torch's streams), with and without a cast, with masters in RAM
that are page-locked, that are not, and that are mapped from a file, with a budget of a quarter of the
weights and with "auto". Each case runs three passes and a training step. Outputs and gradients have to be
equal to the bit, weights have to move, and the peak of device memory has to stay under the budget and what
the moved model computes with.

`--device cpu` proves that the script works.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
from common import Record, native_available, parser
from dynswap_ext import testing
from dynswap_ext._util.memory import format_bytes

_SCRATCH = 16 << 20  # of casts, beside the budget
_ROUNDING = 2 << 20  # torch's allocator rounds large blocks up to this
_PLACES = ("page-locked", "pageable", "file")


class Block(nn.Module):
    """A part of the models: matrices, a convolution, a vector and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.mix = nn.Conv1d(1, 1, 3, padding=1)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.nn.functional.silu(self.up(torch.tanh(x) * self.gain)))
        return x + self.mix(y[:, None])[:, 0] + self.shift


def steps(model: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run three passes without gradients and one with. Return the outputs and the gradients, in RAM."""
    with torch.inference_mode():
        outputs = [model(x) for _ in range(3)]
    model.zero_grad()
    model(x).square().mean().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return [output.cpu() for output in outputs], gradients


@contextmanager
def engine_backend(name: str) -> Iterator[None]:
    os.environ["DYNSWAP_ENGINE_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["DYNSWAP_ENGINE_BACKEND"]


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return how gradients differ. Those of an installed model are in the dtype of its masters."""
    cast = {name: gradient.to(actual[name].dtype) for name, gradient in expected.items() if name in actual}
    missing = [f"{name} has no gradient" for name in expected.keys() - actual.keys()]
    return missing + testing.differences(actual, cast, "gradients")


def check(
    device: torch.device,
    sizes: tuple[int, int],
    place: str,
    dtype: torch.dtype,
    budget: str,
    folder: Path,
) -> str:
    """Compare an installed model with a moved one; return what differs, or an empty text.

    `sizes` are the number of layers and their width.
    """
    layers, width = sizes
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)))
    x = torch.randn(64, width).to(device, dtype)
    moved = testing.moved(model, device, dtype)
    expected, expected_gradients = steps(moved, x)
    cuda = device.type == "cuda"
    weights = sum(t.nbytes for t in itertools.chain(moved.parameters(), moved.buffers()))
    activations = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            moved(x)
        gradients = sum(p.grad.nbytes for p in moved.parameters() if p.grad is not None)
        activations = torch.cuda.max_memory_allocated() - weights - gradients
    del moved
    gc.collect()
    if place == "file":
        testing.map_from_file(model, folder / f"{len(list(folder.iterdir()))}.pt")
    options: dict[str, Any] = {} if place == "page-locked" else {"host_budget": "minimum"}
    given = weights // 4 if budget == "a quarter" else budget
    with dynswap_ext.install(model, device=device, dtype=dtype, budget=given, **options) as handle:
        outputs, gradients_of_masters = steps(model, x)
        found = testing.differences(outputs, expected, "outputs")
        found += differences(gradients_of_masters, expected_gradients)
        if cuda and isinstance(given, int):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with torch.inference_mode():
                model(x)
            allowed = activations + given + _SCRATCH + _ROUNDING
            if (most := torch.cuda.max_memory_allocated()) > allowed:
                found.append(f"the peak is {format_bytes(most)}, more than {format_bytes(allowed)}")
        stats = handle.stats()
        if not stats.bytes_moved and (cuda or dtype != torch.float32):
            found.append("no weight was moved")
        if stats.host_synchronisations and budget != "auto":  # "auto" synchronises to measure activations
            found.append(f"the host waited {stats.host_synchronisations} times")
    return "; ".join(found)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--width", type=int, default=1024)
    given = options.parse_args()
    device = torch.device(given.device)
    sizes = (5, 64) if given.tiny else (12, given.width)
    torch.backends.cudnn.deterministic = True  # else a convolution's gradients are summed in any order
    record = Record("gpu_smoke", given.tiny)
    backends = ("cuda", "torch") if device.type == "cuda" and native_available(given.device) else ("auto",)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for backend, place, dtype, budget in itertools.product(
            backends, _PLACES, (torch.float32, torch.bfloat16), ("a quarter", "auto")
        ):
            name = (
                f"{backend}, {place}, {'cast to bfloat16' if dtype != torch.float32 else 'no cast'}, {budget}"
            )
            begun = time.perf_counter()
            try:
                with engine_backend(backend):
                    found = check(device, sizes, place, dtype, budget, Path(folder))
            except Exception as error:
                traceback.print_exc()
                found = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - begun
            record.figures[name] = {"seconds": seconds, "found": found}
            wrong += bool(found)
            print(f"{name:<48} {seconds:6.2f} s  {found or 'equal to the bit'}", flush=True)
            record.write(given.output)
    record.bar("ways that differ from the model moved whole", wrong, at_most=0)
    return record.finish(given.output) or int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
