"""Random forwards that read, assign and write buffers, compiled or exported, plain and installed.

A forward is generated as source code, which a failure shows. Its values are small whole numbers, so that no
order of operations and no dtype changes them.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing

#: The ways to run a forward. Without an install, the others are compared with the first.
HOW: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model, _: model,
    "compile": lambda model, _: torch.compile(model, backend="eager", fullgraph=True),
    "aot_eager": lambda model, _: torch.compile(model, backend="aot_eager", fullgraph=True),
    "strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "non-strict": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
}
CALLS = 3
_numbers = itertools.count()


@dataclass
class Written:
    """The source code of a forward, while it is generated."""

    dice: random.Random
    buffers: list[str]
    parameters: list[str]
    calls: str | None = None
    writes_parameters: bool = False
    lines: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=lambda: ["x"])

    def add(self, *lines: str) -> None:
        self.lines += lines

    def new(self, value: str) -> str:
        name = f"t{len(self.lines)}"
        self.add(f"{name} = {value}")
        self.known.append(name)
        return name

    def tensor(self) -> str:
        return self.dice.choice(self.known + self.buffers)

    def value(self) -> str:
        one, other = self.tensor(), self.dice.choice([self.tensor(), self.dice.choice(self.parameters)])
        return f"(({one} * {self.dice.randint(1, 3)} + {other}).detach() % 11)"

    def statement(self) -> None:
        dice, (one, other) = self.dice, self.dice.sample(self.buffers, 2)
        match dice.randrange(15 if self.writes_parameters else 14):
            case 0 | 1:
                self.new(dice.choice([one, self.value()]))
            case 2 | 3:
                self.add(f"{one} = {self.value()}")
            case 4:
                self.add(f"{one}, {other} = {other}, {one}")
            case 5:
                old = self.new(one)
                self.add(f"{one} = {self.value()}")
                for _ in range(dice.randrange(3)):
                    self.write(dice.choice([one, old]))
                self.new(self.value())
                self.add(f"{one} = {old}")
            case 6 | 7 | 8:
                self.write(dice.choice([*self.buffers, *(name for name in self.known if name != "x")]))
            case 9:
                self.add(f"{one} += {dice.randint(1, 3)}", f"{one}.remainder_(11)")
            case 10:
                asked = dice.choice(
                    [
                        f"isinstance({dice.choice(self.parameters)}, nn.Parameter)",
                        f"isinstance({one}, nn.Parameter)",
                        f"{dice.choice(self.parameters)}.requires_grad",
                        f"{one} is {dice.choice([one, other])}",
                        f"{one}.dtype == {other}.dtype",
                        "m.training",
                    ]
                )
                self.add(f"x = x + ({dice.randint(1, 3)} if {asked} else {dice.randint(4, 6)})")
            case 11:
                self.add("with torch.no_grad():", f"    {one}.add_({dice.randint(1, 3)}).remainder_(11)")
            case 12:
                view = self.new(f"{one}[{dice.randrange(2)}:]")
                self.known.remove(view)
                self.add(f"{view}.mul_(2).remainder_(11)")
                if dice.random() < 0.5:
                    self.write(one)
                    self.add(f"{view}.sub_(1).remainder_(11)")
            case 13:
                if self.calls is not None:
                    self.new(f"{self.calls}({self.value()})")
            case 14:
                parameter = dice.choice(self.parameters)
                self.add("with torch.no_grad():", f"    {parameter}.mul_(3).remainder_(11)")

    def write(self, name: str) -> None:
        dice, number = self.dice, self.dice.randint(1, 3)
        self.add(
            dice.choice(
                [
                    f"{name}.copy_({self.value()})",
                    f"{name}.mul_({number}).remainder_(11)",
                    f"{name}.lerp_({self.value()}, 0.5).floor_()",
                    f"{name}[{number % 2}:].add_({number}).remainder_(11)",
                    f"{name}[{number % 3}] = {number}",
                    f"{name}[:2].copy_({self.value()}[1:])",
                    f"torch.add({name}.clone(), 1, out={name}).remainder_(11)",
                    f"{name}.zero_()",
                ]
            )
        )

    def source(self, name: str, statements: int) -> str:
        for _ in range(statements):
            self.statement()
        used = " + ".join(
            f"{each} * {i}"
            for i, each in enumerate(self.known[-4:] + self.buffers[:3] + self.parameters, start=2)
        )
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def {name}(m, x):\n{body}\n    return x + ({used}) % 101\n"


class Inner(nn.Module):
    rule: Callable[[nn.Module, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 1.0, 2.0]))
        self.register_buffer("c", torch.tensor([1.0, 4.0, 2.0]))
        self.register_buffer("d", torch.tensor([5.0, 0.0, 7.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


class Net(nn.Module):
    rule: Callable[[nn.Module, Tensor], Tensor]

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.frozen = nn.Parameter(torch.tensor([2.0, 5.0, 3.0]), requires_grad=False)
        self.register_buffer("a", torch.tensor([2.0, 3.0, 5.0]))
        self.register_buffer("b", torch.tensor([7.0, 1.0, 6.0]))
        self.inner = Inner()
        if shared:
            self.inner.register_buffer("c", self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


@dataclass
class Forward:
    """A forward that was generated from a seed, and how it is run."""

    seed: int
    dtype: torch.dtype | None
    shared: bool
    training: bool
    grad: bool
    source: str

    def model(self) -> nn.Module:
        place = f"<forward {self.seed}, {next(_numbers)}>"
        linecache.cache[place] = (len(self.source), None, self.source.splitlines(True), place)
        made: dict[str, Any] = {"torch": torch, "nn": nn}
        exec(compile(self.source, place, "exec"), made)
        model = Net(shared=self.shared)
        model.rule, model.inner.rule = made["outer"], made["inner"]
        return model.train(self.training)

    def moved(self, device: torch.device) -> nn.Module:
        moved = testing.moved(self.model(), device, self.dtype)
        if self.shared:  # a cast makes two buffers of a shared one
            moved.inner.register_buffer("c", moved.a)
        return moved

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: dtype {self.dtype}, shared {self.shared}, training {self.training}, "
            f"grad {self.grad}\n{self.source}"
        )


def forward_of(seed: int, how: str) -> Forward:
    dice = random.Random(seed)
    writes_parameters = how == "non-strict" and dice.random() < 0.5
    inner = Written(dice, ["m.c", "m.d"], ["m.w"], None, writes_parameters)
    reached = ["m.a", "m.b", *dice.choice([[], ["m.inner.c"], ["m.inner.c", "m.inner.d"]])]
    outer = Written(dice, reached, ["m.w", "m.frozen"], "m.inner", writes_parameters)
    source = inner.source("inner", dice.randint(0, 3)) + outer.source("outer", dice.randint(2, 8))
    return Forward(
        seed,
        dtype=dice.choice([torch.float64, torch.float64, None]),
        shared=dice.random() < 0.3,
        training=dice.random() < 0.5,
        grad=dice.random() < 0.5,
        source=source,
    )


@dataclass
class Ran:
    outputs: list[Tensor]
    masters: dict[str, Tensor]
    #: Pairs of buffers that had the same memory after one of the calls.
    ties: frozenset[tuple[str, str]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ran):
            return NotImplemented
        return _same(self.outputs, other.outputs) and _same(
            list(self.masters.values()), list(other.masters.values())
        )


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def run(model: nn.Module, made: Forward, how: str, device: torch.device, calls: int = CALLS) -> Ran:
    dtype = made.dtype or torch.float32
    inputs = [(torch.arange(3, device=device) + i).to(dtype) for i in range(calls)]
    with torch.set_grad_enabled(made.grad):
        called = HOW[how](model, inputs[0])
        outputs, ties = [], set[tuple[str, str]]()
        for x in inputs:
            outputs.append(called(x).detach().clone())
            ties |= set(_ties(model))
    masters = {
        name: value.detach().to("cpu", torch.float64).clone() for name, value in _masters(model).items()
    }
    return Ran(outputs, masters, frozenset(ties))


def _masters(model: nn.Module) -> dict[str, Tensor]:
    return dict(
        itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
    )


def _ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    for (one, a), (other, b) in itertools.combinations(_masters(model).items(), 2):
        if a.untyped_storage()._cdata == b.untyped_storage()._cdata:
            yield one, other


@dataclass
class Judged:
    compared: bool = False
    failure: str = ""


def judge(seed: int, how: str, provider: Provider) -> Judged:
    """Compare the installed model with a moved one, both run by the same compiler or exporter.

    If torch's own exported program is wrong, only one call is compared. Ours may be right in that call, and
    further calls would compute with a mixture of both.
    """
    made = forward_of(seed, how)
    judged = _judge(made, how, provider, CALLS)
    return _judge(made, how, provider, 1) if judged is None else judged


def _judge(made: Forward, how: str, provider: Provider, calls: int) -> Judged | None:
    """Compare a number of calls; None if torch's own program is wrong and several calls were asked for."""
    try:
        plain = run(made.moved(provider.device), made, "eager", provider.device, calls)
    except RuntimeError:
        return Judged()  # such as `out=` on a tensor that requires gradients
    if not plain.ties <= _allowed_ties(made):
        return Judged()  # docs/limits.md: here, they are copies of what is one tensor in plain torch
    with _quiet():
        try:
            moved = made.moved(provider.device)
            expected = run(moved, made, how, provider.device, calls)
        except Exception:
            return Judged()
        if expected != plain and how in ("compile", "aot_eager"):
            return Judged()  # a bug of torch
        if expected != plain and calls > 1:
            return None
        model = made.model()
        # Not through the fixture, which asserts that nothing is held: torch keeps a program's attributes.
        handle = dynswap_ext.install(
            model, device=provider.device, provider=provider.backend, dtype=made.dtype
        )
        try:
            found = run(model, made, how, provider.device, calls)
        except Exception as error:
            return Judged(True, f"{made}\n{type(error).__name__}: {error}")
        finally:
            handle.uninstall()
    if not _is_right(found, expected, plain):
        return Judged(True, f"{made}\nfound {found}\nexpected {expected}")
    return Judged(True)


def _is_right(found: Ran, expected: Ran, plain: Ran) -> bool:
    """Return whether results equal those of torch's program, or else of the plain forward.

    torch's program is wrong in three cases: two buffers that change places both get the value of one, what
    is assigned to a buffer of a submodule is lost, and two buffers that were one stay one.
    """
    outputs = _same(found.outputs, expected.outputs) or _same(found.outputs, plain.outputs)
    masters = {
        name
        for name, master in found.masters.items()
        if torch.equal(master, expected.masters[name]) or torch.equal(master, plain.masters[name])
    }
    for one, other in expected.ties:
        if masters & {one, other} and torch.equal(found.masters[one], found.masters[other]):
            masters |= {one, other}
    return outputs and masters == set(found.masters)


def _allowed_ties(made: Forward) -> frozenset[tuple[str, str]]:
    return frozenset([("a", "inner.c")] if made.shared else [])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()
