"""The cost of reading the attribute of a weight that stays on the device (a resident).

`module.weight` is timed on the same nn.Linear: untouched, under the classic Python hook, and installed with
each provider. Nothing keeps the tensor between two reads, as in `F.linear(x, self.weight)`. It is read
inside a call of its model, as a forward does. A read outside a call also looks for writes that bump no
version; that is a figure of its own.

There are two cases of a resident. `as it is` is a master that has the wanted device and dtype already.
`copy` is a device copy that stays. (On the CPU there is one only with a cast, so the wanted dtype is
another.)
"""

from __future__ import annotations

import sys
import timeit

import torch
from torch import nn

import dynswap_ext
from common import Record, native_available, parser
from dynswap_ext.demo.run import install_hook
from records import Sample


class Reads(nn.Module):
    """A model whose forward reads its layer's weight many times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, number: int, repeats: int) -> Sample:
        return time_access(self.layer, number, repeats)


def time_access(module: nn.Module, number: int, repeats: int) -> Sample:
    """Return the seconds of one `module.weight`."""
    timer = timeit.Timer("module.weight", globals={"module": module})
    timer.timeit(number)
    return Sample.of([seconds / number for seconds in timer.repeat(repeats, number)])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = options.parse_args()
    record = Record("access" if given.device == "cpu" else "access_cuda", given.tiny)
    number, repeats = (100, 2) if given.tiny else (200_000, 9)
    device = torch.device(given.device)

    def figure(name: str, module: nn.Module, calls: int = number) -> float:
        sample = module(calls, repeats) if isinstance(module, Reads) else time_access(module, calls, repeats)
        record.figures[name] = sample.__dict__
        low, middle, high = (value * 1e9 for value in (sample.low, sample.median, sample.high))
        print(f"{name:<40} {middle:9.1f} ns  ({low:.1f} .. {high:.1f})")
        return sample.median

    def linear() -> nn.Linear:
        return nn.Linear(64, 64, dtype=torch.float32)

    plain = figure("plain nn.Module", Reads(linear().to(device)))
    hooked = Reads(linear())
    install_hook(hooked, device=device)
    classic = figure("classic hook", hooked, number // 10)

    cases: dict[str, torch.dtype | None] = {"as it is": None, "copy": torch.bfloat16}
    for provider in ("python", "native"):
        if provider == "native" and not native_available(given.device):
            continue
        for case, dtype in cases.items():
            module = Reads(linear().to(device) if dtype is None else linear())
            with dynswap_ext.install(module, device=device, dtype=dtype, provider=provider, budget="64MiB"):
                calls = number if provider == "native" else number // 10
                cost = figure(f"{provider}, {case}", module, calls)
                figure(f"{provider}, {case}, outside a call", module.layer, calls)
            native = provider == "native"
            record.bar(
                f"{provider}, {case}: installed / plain", cost / plain, at_most=0.15 if native else None
            )
            record.bar(
                f"{provider}, {case}: classic / installed", classic / cost, at_least=30 if native else None
            )
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
