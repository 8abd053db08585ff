"""A plain model and an installed one of the same seed. A program does the same to both.

The plain model has masters of its own. If the install computes on another device or in another dtype, each
call is compared with a moved copy of the plain model (the stand-in). What the call wrote into the stand-in,
and its gradients, then go back to the plain masters.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
from architectures import ARCHITECTURES, make, total
from coded_masters import code_masters
from conftest import PRETEND, Provider
from dynswap_ext import checkpoint, testing
from dynswap_ext._swap.changed_elements import bits
from master_writes import Place

#: The values from which options of an install are drawn.
OPTIONS: dict[str, Sequence[Any]] = {
    "dtype": [torch.float64, None, torch.bfloat16],
    "budget": [None, 0.5, "1GiB", "auto"],
    "prefetch": range(4),
    "host_budget": ["auto", "minimum", "1GiB"],
    "activations": [None, None, 1, "64KiB"],
}
_LOG = os.environ.get("DYNSWAP_PROGRAMS_LOG")


def say(*words: object) -> None:
    """Log a step before it is done, so that a program that ends in a crash can be read."""
    if _LOG:
        with open(_LOG, "a") as log:
            log.write(" ".join(map(str, words)) + "\n")


class Twins:
    """A plain and an installed model, how that one is installed, and the handed-out tensors that are kept."""

    def __init__(
        self, provider: Provider, name: str, width: int, source: str, seed: int, folder: Path
    ) -> None:
        say(f"\nTwins({provider.name!r}, {name!r}, {width}, {source!r}, {seed})")
        self.provider, self.kind, self.width = provider, ARCHITECTURES[name], width
        width = width if width in self.kind.widths else self.kind.widths[0]
        self.width = width
        self.plain = make(name, width, seed)
        self.model = _with_masters(make(name, width, seed), source, folder / "model")
        if source == "torch":  # which takes ties apart
            testing.map_from_file(self.plain, folder / "plain")
        self.mapped = source not in ("ram", "coded")
        self.classes = [type(module) for module in self.model.modules()]
        #: The floating dtype of the masters of both models.
        self.dtype = torch.float32
        self.cast: torch.dtype | None = None
        self.handle: dynswap_ext.Handle | None = None
        self.options: dict[str, Any] = {}
        #: Handed-out tensors that the program keeps.
        self.held: list[Tensor] = []
        #: Views of masters that the program keeps, of both models.
        self.views: list[tuple[Tensor, Tensor]] = []
        #: Whether writes on handed-out tensors may not be in the masters yet.
        self.pending = False
        #: The masters whose handed-out tensors have been written since.
        self.unsettled: set[str] = set()
        self.optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] | None = None
        self.optimizer = ""
        self.count = 0

    def computable(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype; float64 if the pretend device has no backward of norms in it."""
        return torch.float64 if PRETEND and dtype is torch.bfloat16 else dtype

    # The install --------------------------------------------------------------------------------------

    def install(self, **options: Any) -> None:
        if options.get("dtype") is not None:
            options["dtype"] = self.computable(options["dtype"])
        if self.rounds(options.get("dtype")):
            options["dtype"] = None
        if (
            not self.mapped
            and self.provider.device.type == "cpu"
            and options.get("dtype") in (None, self.dtype)
        ):
            options["dtype"] = torch.bfloat16  # else there is nothing to move
        say("install", options)
        self.handle = self.fitting(options)
        self.options, self.cast = options, options.get("dtype")

    def installed(self, options: dict[str, Any], what: Any = None) -> dynswap_ext.Handle:
        """Install the model, or `what` instead, with the program's provider."""
        where = {"device": self.provider.device, "provider": self.provider.backend}
        if not self.provider.native:
            options = {**options, "activations": None}
        elif options.get("activations") is not None and self.provider.device.type == "cpu":
            options = {**options, "activations_folder": tempfile.gettempdir()}
        return dynswap_ext.install(self.model if what is None else what, **{**where, **options})

    def fitting(self, options: dict[str, Any], what: Any = None) -> dynswap_ext.Handle:
        """Install with a budget that works.

        A float is a share of the weights' bytes; if a budget is too small, the smallest one is taken.
        """
        given = dict(options)
        if isinstance(given.get("budget"), float):
            itemsize = (given.get("dtype") or self.dtype).itemsize
            given["budget"] = int(
                given["budget"] * itemsize * sum(p.numel() for p in self.plain.parameters())
            )
        try:
            return self.installed(given, what)
        except dynswap_ext.BudgetError as error:
            return self.installed({**given, "budget": error.smallest_bytes}, what)

    def rounds(self, dtype: torch.dtype | None) -> bool:
        """Return whether masters would round statistics.

        Streamed ones are rounded then, residents are not.
        """
        return self.kind.norms and dtype is not None and dtype.itemsize > self.dtype.itemsize

    def uninstall(self) -> None:
        say("uninstall")
        dynswap_ext.uninstall(self.model)
        self.handle, self.cast, self.pending = None, None, False
        assert [type(module) for module in self.model.modules()] == self.classes

    @property
    def direct(self) -> bool:
        """Return whether the plain model itself computes what the installed one has to."""
        return self.handle is None or (self.provider.device.type == "cpu" and self.cast in (None, self.dtype))

    @property
    def where(self) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype of the compute."""
        if self.handle is None:
            return torch.device("cpu"), self.dtype
        return self.provider.device, self.cast or self.dtype

    def flush(self, how: str = "flush") -> None:
        """Write back what was written on handed-out tensors, in one of the ways that do so."""
        say("flush", how)
        if how == "flush" and self.handle is not None:
            self.handle.flush()
        elif how == "state_dict":
            self.model.state_dict()
        else:
            list(self.model.parameters())
            list(self.model.buffers())
        self.pending = False

    def settle(self) -> None:
        """Write back pending writes before masters are touched without the install taking part."""
        if self.pending and self.handle is not None:
            self.handle.flush()
        self.pending = False

    # Calls --------------------------------------------------------------------------------------------

    def stand_in(self) -> nn.Module:
        """Return the model that is called to compare with the installed one."""
        if self.direct:
            return self.plain
        stand_in = testing.moved(self.plain, *self.where)
        for p in stand_in.parameters():
            p.grad = None
        return stand_in

    def input(self, seed: int) -> Tensor:
        return self.kind.input(seed, self.width, *self.where)

    def call(self, seed: int, training: bool) -> tuple[Tensor, Tensor, nn.Module]:
        """Call both models and compare their outputs; return both outputs and the stand-in."""
        self.model.train(training)
        self.plain.train(training)
        stand_in = self.stand_in()
        x = self.input(seed)
        outputs = []
        before = self.moved_bytes()
        for model in (stand_in, self.model):
            torch.manual_seed(seed)
            outputs.append(model(x))
        self.assert_streamed(before)
        if stand_in is not self.plain:
            self.bring_home(stand_in)
        self.pending |= self.kind.writes
        testing.assert_bit_equal(outputs[1].detach(), outputs[0].detach(), "output")
        return outputs[1], outputs[0], stand_in

    def evaluate(self, seed: int) -> None:
        say("evaluate", seed)
        with torch.no_grad():
            self.call(seed, False)

    def forward_in_training(self, seed: int) -> None:
        """Call both models in training mode and drop the graph."""
        say("forward in training", seed)
        self.call(seed, True)

    def bring_home(self, stand_in: nn.Module) -> None:
        """Write to the plain masters, in their dtype, what a call wrote into the stand-in."""
        moved = dict(places(stand_in))
        for name, place in places(self.plain):
            master, now = place.master, moved[name].master.detach()
            before = master.detach().to(*self._as_moved(master))
            if now.shape != before.shape:
                dtype = master.dtype if now.dtype == before.dtype else now.dtype
                place.held_in[place.name] = now.clone().to(master.device, dtype)
                continue
            changed = bits(before) != bits(now)
            if changed.any():
                with torch.no_grad():
                    changed = changed.to(master.device)
                    master[changed] = now.to(master.device, master.dtype)[changed]

    def _as_moved(self, master: Tensor) -> tuple[torch.device, torch.dtype]:
        device, dtype = self.where
        return device, dtype if master.is_floating_point() else master.dtype

    def moved_bytes(self) -> int:
        return self.handle.stats().bytes_moved if self.handle is not None else 0

    def assert_streamed(self, before: int) -> None:
        """Assert that a call with the smallest budget moves bytes; else a right output proves nothing."""
        if self.handle is None or self.direct or self.handle.budget is not None or self.held:
            return
        stats = self.handle.stats()
        if stats.groups > self.options.get("prefetch", 2) + 2:
            before = 0 if self.kind.chooses else before
            assert stats.bytes_moved > before, f"a call moved nothing: {stats}"

    # Training -----------------------------------------------------------------------------------------

    def optimize_with(self, name: str, both: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        say("optimizer", name)
        self.optimizers, self.optimizer = (both(self.model), both(self.plain)), name

    def backward(self, seed: int, between: Callable[[], None] = lambda: None) -> None:
        """Run a forward and a backward pass of both models, and compare loss and gradients."""
        output, expected, stand_in = self.call(seed, True)
        close = self.kind.several and (not self.direct or self.accumulates)
        eps = torch.finfo(self.where[1]).eps
        between()
        losses = total(output), total(expected)
        testing.assert_bit_equal(losses[0].detach(), losses[1].detach(), "loss")
        if not losses[0].requires_grad:
            return
        losses[1].backward()
        losses[0].backward()
        if stand_in is not self.plain:
            self.bring_gradients_home(stand_in)
        self.compare_gradients(eps if close else 0.0)

    @property
    def accumulates(self) -> bool:
        return any(p.grad is not None for p in self.plain.parameters())

    def bring_gradients_home(self, stand_in: nn.Module) -> None:
        moved = dict(stand_in.named_parameters())
        for name, p in self.plain.named_parameters():
            arrived = moved[name].grad
            if arrived is None:
                continue
            arrived = arrived.to(p.device, p.dtype)
            p.grad = arrived if p.grad is None else p.grad + arrived

    def compare_gradients(self, eps: float) -> None:
        """Compare gradients to the bit.

        If the order of a sum is open, allow `eps`, and then make them equal.
        """
        for (name, mine), (_, other) in zip(places(self.model), places(self.plain), strict=True):
            found, expected = mine.master.grad, other.master.grad
            assert (found is None) == (expected is None), f"gradient of {name}: {found}, not {expected}"
            if found is None or expected is None:
                continue
            assert found.layout == expected.layout, f"gradient of {name}"
            found, dense = found.to_dense(), expected.to_dense()
            if not eps:
                testing.assert_bit_equal(found, dense, f"gradient of {name}")
                continue
            assert found.shape == dense.shape
            off = (found - dense).abs().max().item() if found.numel() else 0.0
            bound = 16 * max(eps, torch.finfo(found.dtype).eps) * max(dense.abs().max().item(), 1e-3)
            assert not off > bound, f"gradient of {name} is {off} off"
            with torch.no_grad():
                expected.copy_(found)

    def step(self, seed: int) -> None:
        """Make one step of both optimizers.

        LBFGS calls the models itself. It is left out if gradients have gaps, which it does not take.
        """
        assert self.optimizers is not None
        if self.optimizer == "lbfgs" and not all(p.is_contiguous() for p in self.plain.parameters()):
            return
        self.settle()
        say("step", self.optimizer, seed)
        if self.optimizer != "lbfgs":
            for each in self.optimizers:
                each.step()
            return
        for each, model in zip(self.optimizers, (self.model, self.plain), strict=True):
            each.step(lambda m=model, o=each: self.closure(m, o, seed))  # type: ignore[misc]

    def closure(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
        """Return the loss as a plain number, as the two models' devices differ, and leave its gradients."""
        optimizer.zero_grad()
        runs = self.stand_in() if model is self.plain else model
        torch.manual_seed(seed)
        loss = total(runs(self.input(seed)))
        if loss.requires_grad:
            loss.backward()
        if runs is not model and model is self.plain:
            self.bring_home(runs)
            self.bring_gradients_home(runs)
        return loss.item()

    # Looking ------------------------------------------------------------------------------------------

    def compare_masters(self, listed: bool) -> None:
        """Compare all masters: as the model lists them, or as the modules hold them."""
        say("compare", "listed" if listed else "held")
        if listed:
            self.pending = False
            testing.assert_bit_equal(self.model.state_dict(), dict(self.plain.state_dict()), "state_dict")
            for each in ("named_parameters", "named_buffers"):
                mine, other = ([name for name, _ in getattr(m, each)()] for m in (self.model, self.plain))
                assert mine == other
        else:
            self.settle()
        mine, other = list(places(self.model)), list(places(self.plain))
        assert [name for name, _ in mine] == [name for name, _ in other]
        assert _ties(mine) == _ties(other)
        for (name, place), (_, plain) in zip(mine, other, strict=True):
            testing.assert_bit_equal(place.master.detach(), plain.master.detach(), f"master {name}")
            assert place.master.requires_grad == plain.master.requires_grad, name
            if place.is_parameter:
                assert place.master.stride() == plain.master.stride(), f"strides of {name}"

    def close(self) -> None:
        """Uninstall, compare all masters, and assert that nothing is held."""
        self.optimizers = None
        handle = self.handle
        self.let_go()
        self.uninstall()
        self.compare_masters(listed=False)
        self.compare_masters(listed=True)
        if handle is not None:
            testing.assert_nothing_held(handle)


def places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Yield all masters under all their names, without asking the model for them."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, value in list(held.items()):
                if value is not None:
                    yield f"{prefix}.{name}" if prefix else name, Place(module, name)


def _ties(places: list[tuple[str, Place]]) -> list[int]:
    """Return, for each master, the index of the first place that holds the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(place.master), i) for i, (_, place) in enumerate(places)]


def _with_masters(model: nn.Module, source: str, path: Path) -> nn.Module:
    """Return the model with its masters in RAM, plain or coded, or in a file of the kind `source`."""
    if source == "torch":
        return testing.map_from_file(model, path.with_suffix(".pt"))
    if source == "safetensors":
        checkpoint.save(model, path.with_suffix(".safetensors"))
        return checkpoint.load(model, path.with_suffix(".safetensors"))
    if source == "coded":
        return code_masters(model)
    return model
