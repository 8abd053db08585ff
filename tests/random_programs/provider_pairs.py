"""One random program under each provider: both have to do and say the same.

A seed decides the program: masters of many forms, options and steps. Each step's results are noted: outputs,
reads, gradients, masters, warnings and errors. So is how each master is served, and, if all that a plan has
is on the device, the bytes that a call moves. Values are small whole numbers and halves, so that the order
of a sum does not matter.

Two things are left out. One is what pure Python cannot see, according to docs/contract.md and
docs/limits.md: data that a forward gives, or writes through `.data`, NumPy or DLPack. The other is what each
provider decides by itself: when a budget is full; hits, copies and residents, which are counted by group
(one weight each in pure Python); and how masters in a file are served that need no cast (the engine reads
them itself, pure Python through their mapping).
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
from coded_masters import coded
from dynswap_ext import testing
from dynswap_ext.inspect import summary
from dynswap_ext.lossless.tensor import LosslessTensor
from handed_writes import HANDED_WRITES, handed_write
from master_writes import MASTER_WRITES, Dice, Place, may_go_unseen

SIDE = 6
#: The side of a master that is too large for an element-by-element comparison after writes.
LARGE = 600
NAMES = ("v", "w", "b")
#: Writes to a master inside a forward.
TRACED = ("copy_", "mul_", "a row", "an element", "foreach", "init", "detach")


def _whole(dice: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return torch.randint(0, 7, shape, generator=generator).float()


def _complex(dice: random.Random) -> Tensor:
    return torch.complex(_whole(dice, SIDE), _whole(dice, SIDE))


FORMS: dict[str, Callable[[random.Random], Tensor]] = {
    "dense": lambda dice: _whole(dice, SIDE, SIDE),
    "vector": lambda dice: _whole(dice, SIDE),
    "scalar": _whole,
    "empty": lambda dice: _whole(dice, 0, SIDE),
    "transposed": lambda dice: _whole(dice, SIDE, SIDE).t(),
    "with gaps": lambda dice: _whole(dice, SIDE, SIDE + 3)[:, :SIDE],
    "every other row": lambda dice: _whole(dice, 2 * SIDE, SIDE)[::2],
    "in a larger one": lambda dice: _whole(dice, 3 * SIDE, SIDE)[SIDE : 2 * SIDE],
    "expanded": lambda dice: _whole(dice, 1, SIDE).expand(SIDE, SIDE),
    "channels last": lambda dice: _whole(dice, 2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "double": lambda dice: _whole(dice, SIDE, SIDE).double(),
    "half": lambda dice: _whole(dice, SIDE, SIDE).half(),
    "bfloat16": lambda dice: _whole(dice, SIDE, SIDE).bfloat16(),
    "int64": lambda dice: _whole(dice, SIDE).long(),
    "uint8": lambda dice: _whole(dice, SIDE).byte(),
    "bool": lambda dice: _whole(dice, SIDE).bool(),
    "complex": _complex,
    "conj": lambda dice: _complex(dice).conj(),
    "imag of conj": lambda dice: _complex(dice).conj().imag,
    "real of complex": lambda dice: _complex(dice).real,
    "coded": lambda dice: coded(_whole(dice, SIDE, SIDE)),
    "coded bfloat16": lambda dice: coded(_whole(dice, SIDE, SIDE).bfloat16()),
    "in a larger coded one": lambda dice: coded(_whole(dice, 3 * SIDE, SIDE))[SIDE : 2 * SIDE],
    "coded and transposed": lambda dice: coded(_whole(dice, SIDE, SIDE)).t(),
    "coded and plain": lambda dice: coded(_whole(dice, SIDE, SIDE)).add_(1),
    "coded and large": lambda dice: coded(_whole(dice, LARGE, LARGE)),
    "large": lambda dice: _whole(dice, LARGE, LARGE),
    "large with gaps": lambda dice: _whole(dice, LARGE, LARGE + 3)[:, :LARGE],
}


class Layer(nn.Module):
    """Adds up its masters, each element by a factor of its own. `between` runs after the first."""

    between: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            value = getattr(self, name, None)
            if value is not None:
                x = x + _total(value)
            if name == NAMES[0] and self.between is not None:
                self.between()
        return x


def _total(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.to(torch.float64).reshape(-1)
    return (flat * (torch.arange(flat.numel(), device=flat.device) % 5 + 1)).sum()


def make(dice: random.Random) -> nn.Sequential:
    """Return layers with masters of random forms. Some share a tensor, or a storage."""
    layers = [Layer() for _ in range(dice.randint(2, 5))]
    made: list[Tensor] = []
    for layer in layers:
        for name in NAMES:
            if dice.random() < 0.25:
                continue
            if made and dice.random() < 0.12:
                tensor = dice.choice(made)
                tensor = tensor if dice.random() < 0.5 else tensor.detach()
            else:
                tensor = FORMS[dice.choice(list(FORMS))](dice)
            if name == "b":
                layer.register_buffer(name, tensor.detach(), persistent=dice.random() < 0.7)
            else:
                trains = (tensor.is_floating_point() or tensor.is_complex()) and dice.random() < 0.7
                tensor = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, trains)
                layer.register_parameter(name, tensor)
            made.append(tensor)
    return nn.Sequential(*layers)


def options_of(dice: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "dtype": dice.choice([torch.float64, torch.float64, torch.bfloat16, torch.float16, None]),
        "prefetch": dice.randrange(3),
        "budget": dice.choice([None, "1GiB", "1GiB", "smallest"]),
    }
    if dice.random() < 0.2:
        chosen["keep"] = dice.choice(["0", "*.w", ["1", "*.b"]])
    if dice.random() < 0.2:
        chosen["ignore"] = dice.choice(["1", "*.v", "0.b"])
    return chosen


def shown(value: Any) -> Any:
    """Return a value in a readable form that `==` compares."""
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    elements = tuple(value.detach().resolve_conj().resolve_neg().cpu().reshape(-1).tolist())
    return str(value.dtype), tuple(value.shape), elements if len(elements) <= SIDE * SIDE else hash(elements)


Line = tuple[str, Any]


@dataclass
class Run:
    """A program under one provider, and the results of its steps."""

    seed: int
    provider: str
    device: torch.device
    folder: Path
    lines: list[Line] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.model = make(self.dice)
        self.all_stay = False  # whether all weights of the plan stay on the device

    def __call__(self) -> list[Line]:
        for name, place in self.places():
            master = place.master
            self.note(f"{name}, {type(master).__name__}", (shown(master), master.stride()))
        if self.dice.random() < 0.3:
            testing.map_from_file(self.model, self.folder / "model.pt")
        elif self.device.type != "cpu" and self.dice.random() < 0.4:
            self.move_some()
        self.install()
        for _ in range(self.dice.randint(3, 10)):
            self.step()
        self.held.clear()
        with self.noting("uninstall"):
            dynswap_ext.uninstall(self.model)
        self.look()
        return self.lines

    def move_some(self) -> None:
        """Move some masters to the device before the install."""
        for name, place in self.places():
            if place.master.device != self.device and self.dice.random() < 0.3:
                place.master.data = place.master.data.to(self.device)
                self.note(f"moved {name}")

    def note(self, what: str, value: Any = None) -> None:
        self.lines.append((what, value))

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note the warnings of the block, and the error that ends it."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                self.note(f"{what}: {type(error).__name__}", _without_places(str(error)))
        for each in told:
            if not isinstance(each.message, dynswap_ext.DynswapWarning):  # of budgets, prefetch and sampling
                self.note(f"{what}: {each.category.__name__}", _without_places(str(each.message)))

    def places(self, inside: Layer | None = None) -> list[tuple[str, Place]]:
        return [
            (f"{i}.{name}", Place(layer, name))
            for i, layer in enumerate(self.model)
            for name in NAMES
            if inside in (None, layer) and {**layer._parameters, **layer._buffers}.get(name) is not None
        ]

    # Steps --------------------------------------------------------------------------------------------

    def step(self) -> None:
        outside = (self.write_master, self.write_handed, self.read, self.assign, self.look)
        others = (self.state, self.copy, self.freeze_or_thaw, self.load, self.install, self.count)
        self.dice.choice([self.call, self.call, self.call, *outside, *others])()

    def install(self) -> None:
        self.held.clear()
        options = options_of(self.dice)
        self.note("install", str(options))
        with self.noting("install"):
            all_stay = options["budget"] == "1GiB"
            if options["budget"] == "smallest":
                options["budget"] = self.smallest_budget(options)
            self.handle = dynswap_ext.install(
                self.model, device=self.device, provider=self.provider, **options
            )
            self.all_stay, keep = all_stay, options.get("keep", ())
            self.keep = [keep] if isinstance(keep, str) else keep
            self.note("services", self.services())

    def smallest_budget(self, options: dict[str, Any]) -> int:
        """Return the smallest budget that works, which the error for a smaller one names."""
        try:
            dynswap_ext.install(
                self.model, device=self.device, provider=self.provider, **{**options, "budget": 1}
            )
        except dynswap_ext.BudgetError as error:
            return error.smallest_bytes or 1
        return 1  # nothing is planned

    def services(self) -> dict[str, str | None]:
        """Return how each master is served, by its name; without those for which the provider decides."""
        masters = {name: place.master for name, place in self.places()}
        kept = {
            id(master)
            for name, master in masters.items()
            if any(fnmatchcase(path, pattern) for path in (name, name[0]) for pattern in self.keep)
        }
        found = {}
        for weight in summary(self.model).weights:
            view = masters[weight.name]
            if isinstance(view, LosslessTensor) and not view.is_contiguous():
                continue  # natively, it is converted until the next plan, also if it is plain by now
            cast = weight.dtype.is_floating_point and self.handle.dtype not in (None, weight.dtype)
            if weight.place == "file" and not cast:
                continue  # only the engine copies it
            policy = (
                weight.served == "resident" and not self.all_stay and id(masters[weight.name]) not in kept
            )
            found[weight.name] = "streamed" if policy else weight.served  # natively, tiny weights stay
        return found

    def count(self) -> None:
        """Call the model until its plan fits the present masters.

        Note the services and the bytes of a call.
        """
        x = torch.zeros((), dtype=torch.float64, device=self.device)
        self.held.clear()  # tensors of old values take the place of new ones
        with self.noting("count"), torch.no_grad():
            # A weight that stays for two calls is in the plan of the fourth, and on the device in the next.
            for _ in range(5):
                before = self.handle.stats().bytes_moved
                self.model(x)
            self.note("services", self.services())
            if self.all_stay:
                self.note("bytes moved", self.handle.stats().bytes_moved - before)

    def call(self) -> None:
        training = self.dice.random() < 0.4
        layer = self.dice.choice(list(self.model))
        between = self.dice.choice([None, None, self.write_handed, self.read, self.assign, self.write_master])
        layer.between = between and partial(between, layer)
        x = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.noting("call"), torch.set_grad_enabled(training):
            y = self.model(x)
            self.note("output", shown(y))
            if y.requires_grad:
                y.backward()
        layer.between = None

    def pick(self, inside: Layer | None) -> tuple[str, Place, Dice] | None:
        places = [each for each in self.places(inside) if _counts(each[1].master)]
        return (*self.dice.choice(places), Dice(self.dice.randrange(100))) if places else None

    def write_handed(self, inside: Layer | None = None) -> None:
        silent = "data assigned" if inside is None else ("data", "dlpack")
        how = self.dice.choice([name for name in HANDED_WRITES if not name.startswith(silent)])
        hold = self.dice.random() < 0.3
        if (picked := self.pick(inside)) is None:
            return
        name, place, dice = picked
        if may_go_unseen(how, place.master):
            return
        with self.noting(f"write to what is handed out for {name}: {how}"):
            handed = getattr(place.owner, name[-1])
            handed_write(how, handed, dice)
            self.note("written", shown(handed))
            if hold:
                self.held.append(handed)

    def write_master(self, inside: Layer | None = None) -> None:
        how = self.dice.choice(list(MASTER_WRITES) if inside is None else TRACED)
        picked = self.pick(inside)
        if picked is None or how == "swap_tensors":  # refused while anything else holds the master
            return
        name, place, dice = picked
        write = MASTER_WRITES[how]
        suits = write.of == "both" or place.is_parameter == (write.of == "parameters")
        if inside is None:
            self.model.state_dict()  # writes back held tensors: else one write would replace the other
        with self.noting(f"write to {name}: {how}"), torch.no_grad():
            if suits and write.can(place.master) and not may_go_unseen(how, place.master):
                write.do(place, dice)

    def read(self, inside: Layer | None = None) -> None:
        if (picked := self.pick(inside)) is None:
            return
        name, place, _ = picked
        with self.noting(f"read {name}"):
            handed = getattr(place.owner, place.name)
            about = (
                handed.stride(),
                handed.requires_grad,
                handed.device.type,
                isinstance(handed, nn.Parameter),
            )
            self.note(f"read {name}", (shown(handed), about))
            if (
                handed.numel() and place.master.device.type == "cpu"
            ):  # else it may be converted at each access
                assert getattr(place.owner, place.name) is handed
            self.held.append(handed)

    def assign(self, inside: Layer | None = None) -> None:
        layer = self.dice.choice(list(self.model)) if inside is None else inside
        with self.noting("assign"):
            if layer._buffers.get("b") is not None and _counts(layer.b):
                layer.b = layer.b * 2

    def look(self) -> None:
        with self.noting("look"):
            self.model.state_dict()
            for name, place in self.places():
                master = place.master
                self.note(f"master {name}", (shown(master), master.stride(), master.requires_grad))
                self.note(f"gradient {name}", shown(master.grad))

    def state(self) -> None:
        with self.noting("state"):
            self.note("state", shown(dict(self.model.state_dict())))

    def copy(self) -> None:
        with self.noting("copy"):
            self.note("copy", shown(dict(copy.deepcopy(self.model).state_dict())))

    def freeze_or_thaw(self) -> None:
        if (picked := self.pick(None)) is not None:
            master = picked[1].master
            with self.noting(f"freeze or thaw {picked[0]}"):
                master.requires_grad_(not master.requires_grad)

    def load(self) -> None:
        assign = self.dice.random() < 0.3
        with self.noting("load"):
            state = {
                name: value.clone() + 1
                for name, value in self.model.state_dict().items()
                if value.dtype != torch.bool
            }
            self.model.load_state_dict(state, strict=False, assign=assign)


def _counts(master: Tensor) -> bool:
    return master.is_floating_point() or master.is_complex()  # half of an integer is no integer


def _without_places(message: str) -> str:
    return re.sub(r"0x[0-9a-f]+|/\S+", "...", message)


def judge(seed: int, device: torch.device) -> str:
    """Run a program under both providers; return their first difference and the steps before it, or ""."""
    both = []
    for provider in ("native", "python"):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(seed, provider, device, Path(folder))
            try:
                both.append(run())
            finally:
                dynswap_ext.uninstall(run.model)
    native, python = both
    for i in range(max(len(native), len(python))):
        if native[i : i + 1] != python[i : i + 1]:
            before = "\n".join(str(line)[:200] for line in native[:i])
            return f"seed {seed}\n{before}\nnative: {native[i : i + 1]}\npython: {python[i : i + 1]}"
    return ""
