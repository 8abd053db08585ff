"""Programs for one hazard each, which a random program meets seldom or never."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import dynswap_ext
import pretend_cuda
from dynswap_ext import checkpoint
from world import LAYER_BYTES, WIDTH, Layers, World, expected_of

#: Bytes of a layer in float64, and what alignment may add.
LAYER = 2 * LAYER_BYTES + 4096
RING = 3 * LAYER


def passes(world: World, model: nn.Module, twin: nn.Module, count: int, what: str) -> None:
    """Run passes on random streams, none of which waits for another, and compare each output later."""
    for number in range(count):
        x, host = world.numbers(torch.float64)
        stream = world.random.choice(world.streams)
        with torch.no_grad(), torch.cuda.stream(stream):
            output = model(x)
        expected = expected_of(twin, host, torch.float64)
        world.compare_later(output, expected, f"{what}, pass {number}", stream)


def a_ring_goes_round(world: World) -> None:
    """Copies overwrite few slots while the compute that reads them is late."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=RING, prefetch=world.random.randint(0, 3))
    passes(world, model, twin, 8, "a ring")


def residents_on_every_stream(world: World) -> None:
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget="64MiB")
    passes(world, model, twin, 6, "residents")


def large_groups(world: World) -> None:
    """Groups of weights of different sizes: a copy overwrites several, each with readers of its own."""
    sizes = [WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, 2 * WIDTH, WIDTH, WIDTH]
    model = nn.Sequential()
    for wide in sizes:
        model.append(nn.Linear(WIDTH, wide, bias=False))
        model.append(nn.Linear(wide, WIDTH, bias=False))
    for p in model.parameters():
        p.data = torch.randint(-1, 2, p.shape).float()
    twin = copy.deepcopy(model)

    def forward(layers: nn.Module, x: Tensor) -> Tensor:
        for layer in layers.children():
            x = torch.remainder(layer(x), 5.0)
        return x

    world.install(model, dtype=torch.float64, budget=8 * LAYER, prefetch=1)
    moved = copy.deepcopy(twin).double()
    for number in range(6):
        x, host = world.numbers(torch.float64)
        stream = world.random.choice(world.streams)
        with torch.no_grad():
            with torch.cuda.stream(stream):
                output = forward(model, x)
            world.compare_later(output, forward(moved, host), f"sizes, pass {number}", stream)


def memory_beside_the_budget(world: World) -> None:
    """More weights are held than there are slots; their extra memory is freed while it is still read."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=RING, prefetch=0)
    weights = [layer.weight.detach().double() for layer in twin.layers]
    for number in range(3):
        x, host = world.numbers(torch.float64)
        stream = world.random.choice(world.streams[1:])
        with torch.no_grad(), torch.cuda.stream(stream):
            held = [layer.weight for layer in model.layers]
            outputs = [nn.functional.linear(x, weight) for weight in held]
        del held
        model.layers[0].weight  # noqa: B018 - what was let go is looked at with the next access
        world.fill(6, 2 * LAYER_BYTES)
        for index, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
            expected = nn.functional.linear(host, weight)
            world.compare_later(output, expected, f"outside, {number}, weight {index}", stream)
    world.settle()


def freed_memory_becomes_the_arena(world: World) -> None:
    """Queued work of other code still uses the block that the install gets for its weights."""
    model, twin = world.model()
    torch.cuda.empty_cache()
    block = torch.ones(RING // 512 * 512, dtype=torch.uint8, device="cuda:0")
    other = [torch.ones(6 * LAYER // 512 * 512, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    sums = [each.sum() for each in (block, *other)]
    sizes = [each.nbytes for each in (block, *other)]
    del block, other
    world.install(model, dtype=torch.float64, budget=world.random.choice([RING, 6 * LAYER]))
    passes(world, model, twin, 3, "in freed memory")
    world.settle()
    for each, size in zip(sums, sizes, strict=True):
        world.compare(int(each), size, "what the block held before")


def uninstalled_at_once(world: World) -> None:
    """A model is uninstalled while copies and readers are queued."""
    for number in range(3):
        model, twin = world.model()
        with world.install(model, dtype=world.random.choice([torch.float64, None]), budget=RING) as handle:
            dtype = handle.dtype
            x, host = world.numbers(dtype)
            with torch.no_grad(), torch.cuda.stream(world.streams[1]):
                output = model(x)
        world.fill(6, 2 * LAYER_BYTES)
        expected = expected_of(twin, host, dtype)
        world.compare_later(output, expected, f"uninstalled, {number}", world.streams[1])
        del model
    world.settle()


def through_the_staging_ring(world: World) -> None:
    """Masters are in pageable memory, with more copies under way than there are staging buffers."""
    model, twin = world.model(count=12)
    dtype = world.random.choice([None, torch.float64, torch.bfloat16])
    world.install(model, dtype=dtype, budget=8 * LAYER, host_budget="minimum", prefetch=5)
    for number in range(5):
        x, host = world.numbers(dtype)
        stream = world.random.choice(world.streams)
        with torch.no_grad(), torch.cuda.stream(stream):
            output = model(x)
        world.compare_later(output, expected_of(twin, host, dtype), f"staged, pass {number}", stream)


def a_file_that_changes(world: World) -> None:
    """Weights are refused while their file has another modification time, and are right once it is reset."""
    source, twin = world.model(count=5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        checkpoint.save(source, path)
        time = path.stat().st_mtime_ns
        model = checkpoint.load(Layers(0, 5), path)
        world.install(model, dtype=torch.float64, budget=RING, prefetch=world.random.randint(0, 2))
        for number in range(3):
            x, host = world.numbers(torch.float64)
            os.utime(path, ns=(time, time + 1))
            refused = False
            try:
                with torch.no_grad():
                    output = model(x)
            except dynswap_ext.errors.SourceError:
                refused = True
            world.expect(refused, f"weights of a changed file were handed out, {number}")
            os.utime(path, ns=(time, time))
            expected = expected_of(twin, host, torch.float64)
            for _ in range(6):  # prefetches have failed as well, which shows when their weights are read
                try:
                    with torch.no_grad():
                        output = model(x)
                    world.compare(output.cpu(), expected, f"as it was again, {number}")
                    break
                except dynswap_ext.errors.SourceError:
                    pass
            else:
                world.expect(False, f"a weight whose file is as it was is refused, {number}")
        dynswap_ext.uninstall(model)


def gradients_on_the_way(world: World) -> None:
    """Steps without a pause on the user's streams. Each gradient's memory is needed again at once."""
    model, twin = world.model(count=8)
    world.install(model, dtype=torch.float64, budget=RING)
    moved = copy.deepcopy(twin).double()
    for number in range(3):
        x, host = world.numbers(torch.float64)
        with torch.cuda.stream(world.random.choice(world.streams)):
            model(x).sum().backward()
        moved(host).sum().backward()
        for (name, p), m in zip(model.named_parameters(), moved.parameters(), strict=True):
            world.compare(p.grad, m.grad.float(), f"gradient of {name} after {number + 1}")


def one_weight_on_two_streams(world: World) -> None:
    """One stream is done with a weight before another, which also reads it, has begun."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=RING)
    first, second = world.streams[1:]
    x, host = world.numbers(torch.float64)
    weight = twin.layers[0].weight.detach().double()
    for number in range(3):
        with torch.no_grad():
            with torch.cuda.stream(first):
                held = model.layers[0].weight
                here = nn.functional.linear(x, held)
            with torch.cuda.stream(second):
                torch.cuda._sleep(20_000_000)
                again = model.layers[0].weight
                there = nn.functional.linear(x, again)
            del held, again
            with torch.cuda.stream(first):
                output = model(x)
        expected = nn.functional.linear(host, weight)
        world.compare_later(here, expected, f"the first stream, {number}", first)
        world.compare_later(there, expected, f"the second stream, {number}", second)
        world.compare_later(output, expected_of(twin, host, torch.float64), f"a pass, {number}", first)


def threads_let_go_and_take(world: World) -> None:
    """One thread's last lease ends while another thread looks for a slot."""
    model, twin = world.model(count=8)
    world.install(model, dtype=torch.float64, budget=2 * LAYER, prefetch=0)
    inputs = [world.numbers(torch.float64) for _ in world.streams]
    weights = [layer.weight.detach().double() for layer in twin.layers]
    outputs: list[list[tuple[int, Tensor]]] = [[] for _ in world.streams]
    order = [world.random.randrange(8) for _ in range(60)]

    def work(thread: int) -> None:
        with warnings.catch_warnings(), torch.no_grad(), torch.cuda.stream(world.streams[thread]):
            for index in order[thread * 5 :]:
                outputs[thread].append(
                    (index, nn.functional.linear(inputs[thread][0], model.layers[index].weight))
                )

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(len(world.streams))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for thread, found in enumerate(outputs):
        for index, output in found:
            expected = nn.functional.linear(inputs[thread][1], weights[index])
            world.compare_later(output, expected, f"thread {thread}", world.streams[thread])
    world.settle()


def masters_on_pages_of_their_own(world: World) -> None:
    """A master is replaced while its pages are registered, and the system reuses their addresses."""
    pretend_cuda.watch_pages()
    model, twin = world.model()
    handle = world.install(model, dtype=torch.float64, budget=RING)
    passes(world, model, twin, 2, "before")
    world.settle()
    for layer, plain in zip(model.layers, twin.layers, strict=True):
        fresh = -plain.weight.detach()
        layer.weight.data = fresh
        plain.weight.data = fresh.clone()
        del fresh
    gc.collect()
    passes(world, model, twin, 3, "after")
    world.settle()
    handle.uninstall()


def views_of_one_block(world: World) -> None:
    """Masters of two models overlap in one storage."""
    size = WIDTH * WIDTH
    block = torch.randint(-1, 2, (6 * size + 1024,)).float()
    models = []
    for start in (0, 512):
        model = Layers(0, 2)
        for index, layer in enumerate(model.layers):
            begin = start + index * 3 * size
            layer.weight.data = block[begin : begin + size].view(WIDTH, WIDTH)
        models.append((model, copy.deepcopy(model)))
    for model, _ in models:
        world.install(model, dtype=torch.float64, budget=RING)
    for model, twin in models:
        passes(world, model, twin, 2, "views")


def recorded_on_another_stream(world: World) -> None:
    """A tensor is used on a stream that never asked the model for it, after a wait and a `record_stream`."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget=RING)
    first, second = world.streams[1:]
    x, host = world.numbers(torch.float64)
    expected = nn.functional.linear(host, twin.layers[0].weight.detach().double())
    for number in range(3):
        with torch.no_grad():
            with torch.cuda.stream(first):
                held = model.layers[0].weight
            second.wait_stream(first)
            with torch.cuda.stream(second):
                torch.cuda._sleep(20_000_000)
                there = nn.functional.linear(x, held)
            held.record_stream(second)
            del held
            with torch.cuda.stream(first):
                model(x)
        world.compare_later(there, expected, f"recorded, {number}", second)
    world.settle()


def residents_go_from_plan_to_plan(world: World) -> None:
    """A resident of two plans is written in the second while readers of the first are late."""
    model, twin = world.model()
    world.install(model, dtype=torch.float64, budget="64MiB")
    passes(world, model, twin, 2, "the first plan")
    world.settle()
    first, second = world.streams[1:]
    for number in range(3):
        x, host = world.numbers(torch.float64)
        weight = twin.layers[0].weight.detach().double()
        with torch.no_grad(), torch.cuda.stream(first):
            torch.cuda._sleep(50_000_000)
            held = model.layers[0].weight if number > 0 else None
            output = model(x)
        world.compare_later(output, expected_of(twin, host, torch.float64), f"late, plan {number}", first)
        last = dict(model.named_parameters())["layers.5.weight"]
        last.data = last.data.to(torch.float64 if last.dtype is torch.float32 else torch.float32)
        with torch.no_grad(), torch.cuda.stream(second):
            output = model(x)  # makes a plan
        world.compare_later(output, expected_of(twin, host, torch.float64), f"plan {number}", second)
        if held is not None:
            with torch.no_grad(), torch.cuda.stream(first):
                there = nn.functional.linear(x, held)
            world.compare_later(there, nn.functional.linear(host, weight), f"held, plan {number}", first)
        second.synchronize()  # the copies are over, so masters may be written
        with torch.no_grad():
            for changed in (model, twin):
                for master in changed.parameters():
                    master.copy_(master.flip(0))
        with torch.no_grad(), torch.cuda.stream(second):
            output = model(x)
        world.compare_later(output, expected_of(twin, host, torch.float64), f"after plan {number}", second)
        del held
        world.settle()


def a_late_reader_of_the_plan_before(world: World) -> None:
    """A resident that is still being read is written in the next plan; nothing else waits for its reader.

    The masters are page-locked. Without that, a ring for staging would be freed, which waits for the reader.
    """
    model, twin = world.model()
    more = copy.deepcopy(twin.layers[0])
    for layer in [*model.layers, fresh := copy.deepcopy(more)]:
        layer.weight.data = layer.weight.data.pin_memory()
    world.install(model, dtype=torch.float64, budget="64MiB")
    passes(world, model, twin, 2, "the first plan")
    world.settle()
    late, second = world.streams[1:]
    x, host = world.numbers(torch.float64)
    expected = nn.functional.linear(host, twin.layers[2].weight.detach().double())
    with torch.no_grad(), torch.cuda.stream(late):
        torch.cuda._sleep(50_000_000)
        world.compare_later(nn.functional.linear(x, model.layers[2].weight), expected, "late", late)
    model.layers.append(fresh)
    twin.layers.append(more)
    for what in ("the second plan", "after the write"):
        with torch.no_grad(), torch.cuda.stream(second):
            output = model(x)
        world.compare_later(output, expected_of(twin, host, torch.float64), what, second)
        second.synchronize()  # the copies are over, so masters may be written
        with torch.no_grad():
            for changed in (model, twin):
                dict(changed.named_parameters())["layers.2.weight"].neg_()
    world.settle()


SCENARIOS = [
    a_ring_goes_round, residents_on_every_stream, large_groups, memory_beside_the_budget,
    freed_memory_becomes_the_arena, uninstalled_at_once, through_the_staging_ring, a_file_that_changes,
    gradients_on_the_way, one_weight_on_two_streams, threads_let_go_and_take,
    masters_on_pages_of_their_own, views_of_one_block, recorded_on_another_stream,
    residents_go_from_plan_to_plan, a_late_reader_of_the_plan_before,
]  # fmt: skip
