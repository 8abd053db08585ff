"""A program drawn from a seed: passes on several streams, training, writes, held tensors, new plans."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dynswap_ext
from dynswap_ext import testing
from world import LAYER_BYTES, WIDTH, Layers, World, expected_of, whole_numbers


class RandomProgram:
    """The state of a random program: the model, its twin, the install, and the tensors that it holds."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, world.random
        draw = self.random
        self.buffers = draw.random() < 0.3
        self.count = draw.randint(4, 9)
        self.tied = draw.random() < 0.25
        self.model, self.twin = world.model(self.count, buffers=self.buffers, tied=self.tied)
        self.model.train(draw.random() < 0.4)
        self.held: list[Tensor] = []
        self.last = world.streams[0]
        self.passes = 0
        self.reinstall()

    def run(self) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.run_passes, 6), (self.train, 3), (self.write, 2), (self.replace, 1), (self.hold, 2),
            (self.let_go, 1), (self.use_held, 1), (self.fill, 2), (self.retune, 1), (self.reinstall, 1),
            (self.record, 1), (self.run_threads, 1),
        ]  # fmt: skip
        choices, weights = zip(*actions, strict=True)
        for action in self.random.choices(choices, weights, k=self.random.randint(4, 10)):
            action()
        self.held.clear()
        self.world.settle()
        self.handle.uninstall()
        for (name, master), twin in zip(
            self.model.state_dict().items(), self.twin.state_dict().values(), strict=True
        ):
            self.world.compare(master, twin, f"the master {name} in the end")

    # Options ------------------------------------------------------------------------------------------

    def drawn_options(self) -> dict[str, Any]:
        draw = self.random
        self.dtype = draw.choice([None, torch.float64, torch.float64, torch.bfloat16, torch.float16])
        layer = LAYER_BYTES * (self.dtype.itemsize if self.dtype else 4) // 4 + 4096
        slots = draw.choice([None, 2, 3, 4, self.count, 1000])
        self.budget = slots and slots * layer
        return {
            "dtype": self.dtype,
            "budget": self.budget,
            "prefetch": draw.choice([0, 1, 2, 2, 5]),
            "host_budget": "auto" if draw.random() < 0.8 else "minimum",
        }

    def reinstall(self) -> None:
        """Install again, often while the device still works on passes of the install before."""
        if self.random.random() < 0.5:
            self.world.settle()
        options = self.drawn_options()
        self.handle = self.world.install(self.model, **options)
        if self.random.random() < 0.5:
            self.fill()

    def retune(self) -> None:
        self.handle.retune(self.random.choice([3, 4, self.count]) * 2 * LAYER_BYTES + 8192)
        self.budget = None
        for _ in range(4):
            self.run_passes()

    # Passes -------------------------------------------------------------------------------------------

    def stream(self) -> torch.cuda.Stream:
        """Return any stream.

        If forwards write buffers, it waits for the last one, as the user has to ensure.
        """
        stream = self.random.choice(self.world.streams)
        if self.buffers and stream != self.last:
            stream.wait_stream(self.last)
        self.last = stream
        return stream

    def run_passes(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            x, host = self.world.numbers(self.dtype)
            stream = self.stream()
            with torch.no_grad(), torch.cuda.stream(stream):
                output = self.model(x)
            self.passes += 1
            expected = expected_of(self.twin, host, self.dtype)
            self.world.compare_later(output, expected, f"pass {self.passes}", stream)
        stats = self.handle.stats()
        within = self.budget is None or stats.peak_bytes <= self.budget + stats.overflow_bytes
        self.world.expect(within, f"{stats.peak_bytes} bytes are more than the budget of {self.budget}")
        if self.random.random() < 0.3:
            self.world.settle()

    def run_threads(self) -> None:
        if self.buffers:
            return
        inputs = [self.world.numbers(self.dtype) for _ in self.world.streams]
        outputs: list[list[Tensor]] = [[] for _ in inputs]

        def work(index: int) -> None:
            with torch.no_grad(), torch.cuda.stream(self.world.streams[index]):
                for _ in range(3):
                    outputs[index].append(self.model(inputs[index][0]))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, (_, host) in enumerate(inputs):
            expected = expected_of(self.twin, host, self.dtype)
            self.world.expect(len(outputs[index]) == 3, f"thread {index} ended early")
            for output in outputs[index]:
                self.world.compare_later(output, expected, f"thread {index}", self.world.streams[index])

    def record(self) -> None:
        with self.handle.record():
            self.run_passes()
        self.world.expect(bool(str(self.handle.report())), "the report is empty")

    def train(self) -> None:
        """Sum the gradients of some passes, and make a step that keeps the weights small."""
        if self.dtype not in (None, torch.float64):
            return self.run_passes()
        model, twin = self.model, self.twin
        moved = testing.moved(twin, "cpu", self.dtype)
        for _ in range(self.random.randint(1, 3)):
            x, host = self.world.numbers(self.dtype)
            with torch.cuda.stream(self.stream()):
                model(x).sum().backward()
            moved(host).sum().backward()
        self.world.settle()
        with torch.no_grad():
            for (name, p), q, m in zip(
                model.named_parameters(), twin.parameters(), moved.parameters(), strict=True
            ):
                self.world.compare(p.grad, m.grad.to(torch.float32), f"gradient of {name}")
                p.grad = None
                for weight in (p, q):  # kept as sparse as it was, as sums of large numbers would be rounded
                    weight.copy_(weight.roll(1, 0) * torch.where(m.grad < 0, -1.0, 1.0))
            for buffer, written in zip(twin.buffers(), moved.buffers(), strict=True):
                buffer.copy_(written)

    # Masters ------------------------------------------------------------------------------------------

    def both(self, change: Callable[[Layers], None]) -> None:
        """Change the masters of model and twin while no pass that reads them is under way."""
        self.world.settle()
        with torch.no_grad():
            change(self.model)
            change(self.twin)

    def write(self) -> None:
        some = self.random.sample(range(self.count), self.random.randint(1, self.count))
        silently = self.random.random() < 0.3

        def change(model: Layers) -> None:
            for index in some:
                layer = model.layers[index]
                (layer.get_parameter("weight").data if silently else layer.weight).neg_()

        self.held.clear()  # a write to the master does not change a tensor that is held
        self.both(change)

    def replace(self) -> None:
        index = self.random.randrange(self.count)
        seed, way = self.random.randrange(1 << 32), self.random.choice(["data", "parameter"])

        def change(model: Layers) -> None:
            fresh = whole_numbers(torch.Generator().manual_seed(seed), WIDTH, WIDTH)
            if way == "data":
                model.layers[index].weight.data = fresh
            else:
                model.layers[index].weight = torch.nn.Parameter(fresh)

        self.held.clear()
        self.both(change)

    # What is held -------------------------------------------------------------------------------------

    def hold(self) -> None:
        layer = self.random.choice(list(self.model.layers))
        with warnings.catch_warnings(), torch.cuda.stream(self.stream()):
            warnings.simplefilter("ignore", dynswap_ext.DynswapWarning)
            self.held.append(layer.weight.detach())
        self.run_passes()

    def use_held(self) -> None:
        """Read a weight on two streams, of which the second gets the tensor that the first was given."""
        index = self.random.randrange(self.count)
        x, host = self.world.numbers(self.dtype)
        weight = self.twin.layers[index].weight.detach().to(host.dtype)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", dynswap_ext.DynswapWarning)
            for stream in self.random.sample(self.world.streams, 2):
                with torch.cuda.stream(stream):
                    held = self.model.layers[index].weight
                    output = torch.nn.functional.linear(x, held)
                expected = torch.nn.functional.linear(host, weight)
                self.world.compare_later(output, expected, f"weight {index} on a stream", stream)
        del held
        self.run_passes()

    def let_go(self) -> None:
        self.held.clear()

    def fill(self) -> None:
        with torch.cuda.stream(self.random.choice(self.world.streams)):
            self.world.fill(self.random.randint(1, 6), LAYER_BYTES * self.random.choice([1, 2, 6]))


def random_program(world: World) -> None:
    RandomProgram(world).run()
