"""Masters of every memory layout in a graph of torch.compile, which is compiled for their strides."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import Provider, needs_inductor
from dynswap_ext import testing

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator)


def channels_last(*shape: int) -> Tensor:
    return values(*shape).contiguous(memory_format=torch.channels_last)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: values(4, 6),
    "every other column": lambda: values(4, 12)[:, ::2],
    "a slice of columns": lambda: values(4, 12)[:, :6],
    "one column": lambda: values(4, 12)[:, 3:4],
    "transposed": lambda: values(6, 4).t(),
    "a slice, transposed": lambda: values(4, 12)[:, :6].t(),
    "expanded columns": lambda: values(4, 1).expand(4, 6),
    "expanded rows": lambda: values(1, 6).expand(4, 6),
    "overlapping": lambda: values(20).as_strided((4, 4), (2, 1)),
    "channels_last": lambda: channels_last(2, 3, 4, 5),
    "channels_last, a slice": lambda: channels_last(2, 6, 4, 5)[:, ::2],
    "channels_last, every other": lambda: channels_last(4, 3, 4, 5)[::2],
    "permuted with gaps": lambda: values(3, 8, 5).permute(2, 0, 1)[:, :, ::2],
    "a dimension of size 1": lambda: values(64).as_strided((4, 1, 4), (4, 99, 1)),
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: values(0, 4),
    "empty, transposed": lambda: values(4, 0, 3).transpose(0, 2),
    "integers with gaps": lambda: torch.arange(48).reshape(4, 12)[:, ::2],
}


class Holder(nn.Module):
    """Returns what a forward gets of each master: values, stride, dtype and device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {layout: make() for layout, make in LAYOUTS.items()}
        # Buffers without elements are left out: the forward gets the master itself.
        self.layouts = [n for n, value in made.items() if kind == "parameters" or value.numel() > 0]
        self.names = [f"m{i}" for i in range(len(self.layouts))]
        for name, layout in zip(self.names, self.layouts, strict=True):
            value = made[layout]
            if kind == "parameters":
                self.register_parameter(name, nn.Parameter(value, requires_grad=value.is_floating_point()))
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor, tuple[int, ...], torch.dtype, torch.device]]:
        found = []
        for name in self.names:
            held = getattr(self, name)
            found.append((held * x, held.clone(), held.stride(), held.dtype, held.device))
        return found


budgets = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, None], ids=["cast", "as is"])
kinds = pytest.mark.parametrize("kind", ["parameters", "buffers"])


def check(provider: Provider, backend: str, kind: str, dtype: torch.dtype | None, budget: str | None) -> None:
    model = Holder(kind).eval()
    moved, _ = provider.pair(model, dtype, budget=budget)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.tensor(2.0).to(provider.device)
    with torch.no_grad():
        everything = zip(model.layouts, compiled(x), model(x), moved(x), strict=True)
    for layout, found, eager, expected in everything:
        testing.assert_bit_equal(found[0], expected[0], f"{layout}: product")
        testing.assert_bit_equal(found[1], expected[1], f"{layout}: values")
        assert found[1].stride() == eager[1].stride(), layout
        assert found[2:] == eager[2:], layout


@budgets
@dtypes
@kinds
@pytest.mark.slow
def test_a_graph_knows_how_weights_lie(
    provider: Provider, kind: str, dtype: torch.dtype | None, budget: str | None
) -> None:
    check(provider, "aot_eager", kind, dtype, budget)


@kinds
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(provider: Provider, kind: str) -> None:
    needs_inductor(provider)
    check(provider, "inductor", kind, torch.float64, None)
