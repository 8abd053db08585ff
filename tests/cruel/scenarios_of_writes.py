"""Programs for one hazard each: writes on masters and on handed-out tensors, and captures."""

from __future__ import annotations

import copy
import gc

import torch
from torch import Tensor, nn

import dynswap_ext
from scenarios import LAYER, RING, passes
from world import WIDTH, World, expected_of


class Norm(nn.Module):
    """A norm whose F.batch_norm writes its running statistics without a new version."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.data = torch.randint(-1, 2, (WIDTH, WIDTH)).float()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("var", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nn.functional.batch_norm(y, self.mean, self.var, training=True)
        return torch.remainder(y, 5.0)


def statistics_of_a_norm(world: World) -> None:
    model = nn.Sequential(*(Norm() for _ in range(6)))
    twin = copy.deepcopy(model).double()
    budget = world.random.choice([RING, 100 * LAYER])  # streamed, or all on the device
    handle = world.install(model, dtype=torch.float64, budget=budget, prefetch=0)
    for _ in range(3):
        x, host = world.numbers(torch.float64)
        with torch.no_grad():
            world.compare(model(x).cpu(), twin(host), "the output")
    handle.uninstall()
    for (name, master), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        if name.endswith("mean"):  # the last bits of a variance depend on the order of its sum
            world.compare(master, expected, f"the running {name}")


def written_in_a_forward(world: World) -> None:
    """A flush has in the masters what a forward wrote, and a later write to a master is kept."""
    model, twin = world.model(buffers=True)
    model.eval()
    handle = world.install(model, dtype=torch.float64, budget=RING)
    x, host = world.numbers(torch.float64)
    with torch.no_grad():
        held = model.layers[0].seen
        model(x)
        expected_of(twin, host, torch.float64)
        handle.flush()
        masters = dict(model.named_buffers())
        for name, buffer in twin.named_buffers():
            world.compare(masters[name], buffer, f"{name} while it is held")
        torch.cuda.synchronize()
        both = model.layers[0]._buffers["seen"], twin.layers[0].seen
        torch._foreach_add_([held], 1.0)  # calls no method of the tensor
        for master in both:
            master.fill_(2)
        del held
        gc.collect()
    world.compare(
        dict(model.named_buffers())["layers.0.seen"], twin.layers[0].seen, "a master written itself"
    )
    passes(world, model, twin, 1, "after the write")


def written_between_forward_and_backward(world: World) -> None:
    model, _ = world.model()
    world.install(model, dtype=torch.float64, budget=RING)
    x, _ = world.numbers(torch.float64)
    loss = model(x.requires_grad_()).sum()
    torch.cuda.synchronize()
    with torch.no_grad():
        dict(model.named_parameters())["layers.3.weight"].add_(1)
    refused = False
    try:
        loss.backward()
    except RuntimeError as error:
        refused = "modified by an inplace operation" in str(error)
    world.expect(refused, "backward computed with a weight that forward did not have")


class Silent(nn.Module):
    """Writes a buffer through `.data`, which has a version counter of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.data = torch.randint(-1, 2, (WIDTH, WIDTH)).float()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.remainder(self.linear(x) + self.seen, 5.0)
        self.seen.data.copy_(x.sum(0))
        return x


def written_through_data(world: World) -> None:
    model = nn.Sequential(*(Silent() for _ in range(5))).eval()
    twin = copy.deepcopy(model)
    handle = world.install(model, dtype=torch.float64, budget=RING)
    for number in range(3):
        x, host = world.numbers(torch.float64)
        with torch.no_grad():
            world.compare(model(x).cpu(), expected_of(twin, host, torch.float64), f"pass {number}")
    handle.uninstall()
    for (name, master), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        world.compare(master, expected, name)


def written_without_a_trace(world: World) -> None:
    """Masters are written through `.data` between passes."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=world.random.choice([RING, 100 * LAYER]))
    for number in range(3):
        passes(world, model, twin, 2, f"before write {number}")
        world.settle()
        for each in (model, twin):
            for layer in each.layers:
                layer.get_parameter("weight").data.neg_()
        passes(world, model, twin, 2, f"after write {number}")
    world.settle()


def written_on_another_stream(world: World) -> None:
    """A tensor is freed on another stream than that of its write, and before the write has run."""
    model, twin = world.model(buffers=True)
    model.eval()
    handle = world.install(model, dtype=torch.float64, budget=RING)
    other = world.streams[1]
    for _ in range(3):
        with torch.no_grad():
            held = model.layers[0].seen
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.cuda._sleep(20_000_000)
                again = model.layers[0].seen
                torch._foreach_add_([again], 1.0)  # a method would write it back on this stream
            del held, again
            gc.collect()
            twin.layers[0].seen.add_(1)
    world.settle()
    handle.uninstall()
    world.compare(model.layers[0].seen, twin.layers[0].seen, "what the other stream wrote")


def replayed(world: World) -> None:
    """A graph that reads residents is queued on a stream that never asked for them, when a master changes."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget="64MiB")
    x, host = world.numbers(torch.float64)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(world.streams[1]):
            for _ in range(2):
                model(x)
        world.settle()
        with torch.cuda.graph(graph):
            output = model(x)
        for number in range(3):
            before = expected_of(twin, host, torch.float64)
            stream = torch.cuda.Stream()
            world.streams.append(stream)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                graph.replay()
                kept = output.clone()
                for each in (dict(model.named_parameters()), dict(twin.named_parameters())):
                    each["layers.1.weight"].neg_()
                after = model(x)
            world.compare_later(kept, before, f"the replay, {number}", stream)
            expected = expected_of(twin, host, torch.float64)
            world.compare_later(after, expected, f"after the write, {number}", stream)
            world.settle()


def captured(world: World) -> None:
    """A capture that reads a streamed weight is refused; later passes are right."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=RING)
    passes(world, model, twin, 1, "before the capture")
    world.settle()
    x, _ = world.numbers(torch.float64)
    refused = False
    try:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
            model(x)
    except dynswap_ext.DeviceError as error:
        refused = "is streamed, so other weights" in str(error)
    world.expect(refused, "a streamed weight was captured")


SCENARIOS = [
    statistics_of_a_norm, written_in_a_forward, written_between_forward_and_backward, written_through_data,
    written_without_a_trace, written_on_another_stream, replayed, captured,
]  # fmt: skip
