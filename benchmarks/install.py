"""Time of install and uninstall for a model of 10,000 nn.Linear, per module, and of the classic installer.

New classes are counted, too. An install makes at most one for each class of the tree.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import dynswap_ext
from common import Record, native_available, parser
from dynswap_ext.demo.run import install_hook, uninstall_hook
from records import Sample


def build(modules: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(modules))


def count_classes() -> int:
    """Return the number of classes that descend from nn.Module, after a garbage collection."""
    gc.collect()
    found: set[type] = set()
    ahead: list[type] = [nn.Module]
    while ahead:
        children: list[type] = ahead.pop().__subclasses__()
        for cls in children:
            if cls not in found:
                found.add(cls)
                ahead.append(cls)
    return len(found)


def measure(
    install: Callable[[nn.Module], object],
    uninstall: Callable[[nn.Module], object],
    modules: int,
    repeats: int,
) -> tuple[Sample, Sample, int]:
    """Return the seconds per module of install and uninstall, and the classes that the last install made."""
    into, out = [], []
    made = 0
    for number in range(repeats + 1):
        model = build(modules)
        classes = count_classes()
        start = time.perf_counter()
        install(model)
        installed = time.perf_counter()
        made = count_classes() - classes
        begin = time.perf_counter()
        uninstall(model)
        ended = time.perf_counter()
        if number:  # the first is warm-up
            into.append((installed - start) / modules)
            out.append((ended - begin) / modules)
        del model
    return Sample.of(into), Sample.of(out), made


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--modules", type=int, default=10_000)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = options.parse_args()
    record = Record("install" if given.device == "cpu" else "install_cuda", given.tiny)
    modules, repeats = (20, 2) if given.tiny else (given.modules, 7)

    def figure(name: str, into: Sample, out: Sample, made: int) -> None:
        record.figures[name] = {"install": into.__dict__, "uninstall": out.__dict__, "classes": made}
        print(
            f"{name:<24} install {into.median * 1e6:7.2f} us a module ({into.low * 1e6:.2f} .. "
            f"{into.high * 1e6:.2f}), uninstall {out.median * 1e6:7.2f} us, classes made {made}"
        )

    classic = measure(
        lambda model: install_hook(model, device=given.device), uninstall_hook, modules, repeats
    )
    figure("classic installer", *classic)
    for provider in ("python", "native"):
        if provider == "native" and not native_available(given.device):
            continue

        def install(model: nn.Module, provider: str = provider) -> object:
            return dynswap_ext.install(model, device=given.device, provider=provider)

        into, out, made = measure(install, dynswap_ext.uninstall, modules, repeats)
        figure(f"dynswap ({provider})", into, out, made)
        record.bar(
            f"{provider}: us a module of {modules:,}",
            into.median * 1e6,
            at_most=6 if provider == "native" else None,
        )
        record.bar(f"{provider}: classes made for a tree of 2 classes", made, at_most=2)
        record.bar(f"{provider}: classic / installed", classic[0].median / into.median)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
