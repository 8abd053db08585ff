"""Random programs of ranks that share out their copies, one of which may misbehave."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import forked_ranks

#: What a rank may do that the others do not. `none`: all behave.
MISBEHAVES = ("none", "another call", "one call less", "an error", "the end", "uninstall", "kill")
#: After so many seconds, a rank does not wait for another one any longer.
TIMEOUT = 8

_PROGRAM = """
import copy, datetime, random, time
from dynswap_ext import testing
from dynswap_ext._swap.state import session_of
seed, misbehaves, folder, timeout = arguments
same, own = random.Random(seed), random.Random(f"{seed} {rank}")  # the same on all ranks, or not
if "pretend_cuda" in sys.modules:
    sys.modules["pretend_cuda"].reset(own.randrange(1 << 20), own.choice(["late", "early", "mixed"]))
group = dist.new_group(timeout=datetime.timedelta(seconds=int(timeout)), backend=backend)
torch.manual_seed(0)
width = same.choice([128, 192, 256])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(same.choice([4, 7])))
        self.head = nn.Linear(width, 8)
        self.left_out = set()

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x = block(x)
        return self.head(x)

model = Model().requires_grad_(False)
masters = same.choice(["shared", "shared", "mapped", "private"])
trained = same.sample([name for name, _ in model.named_parameters()], same.choice([0, 0, 1, 3, 8]))
for name in trained:  # what trains is private to a rank
    model.get_parameter(name).requires_grad_(True)
if masters == "shared":
    dynswap_ext.share_masters(model)
elif masters == "mapped":
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/masters")
    dist.barrier()
    model.load_state_dict(torch.load(f"{folder}/masters", mmap=True), assign=True)
plain = copy.deepcopy(model).to(device, torch.float64)
options = dict(device=device, dtype=torch.float64, provider="native", mesh=group,
               prefetch=same.choice([0, 1, 2, 3]), budget=same.choice(["minimum", "minimum", "2MiB", "4MiB"]))
handle = dynswap_ext.install(model, **options)
held = []

def call(of, like, x, backward):
    x = x.clone().requires_grad_(backward)
    outputs = of(x), like(x)
    testing.assert_bit_equal(outputs[0].detach(), outputs[1].detach())
    if backward:
        found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in outputs)
        testing.assert_bit_equal(found, expected)

def step(kind, x):
    global handle, held
    index = same.randrange(len(model.blocks))
    if kind in ("inference", "training"):
        call(model, plain, x, kind == "training")
    elif kind == "a part":
        call(model.blocks[index], plain.blocks[index], x, False)
    elif kind == "fewer blocks":
        model.left_out = plain.left_out = set(same.sample(range(4), 2))
    elif kind == "other blocks on each rank":
        model.left_out = plain.left_out = set(own.sample(range(4), own.choice([0, 1, 2])))
    elif kind == "a pause":
        time.sleep(own.choice([0, 0.01, 0.1, 0.7]))
    elif kind == "keep tensors":
        held = [block.up.weight for block in own.sample(list(model.blocks), own.choice([0, 1, 2]))]
    elif kind == "read":
        index = own.randrange(len(model.blocks))
        testing.assert_bit_equal(model.blocks[index].down.weight, plain.blocks[index].down.weight)
    elif kind == "a write of each rank":
        for name in trained:
            value = own.randrange(16) / 16
            for written in (model, plain):
                with torch.no_grad():
                    written.get_parameter(name).fill_(value)
    elif kind == "another budget":
        handle.retune(same.choice(["minimum", "2MiB", "4MiB"]))
    elif kind == "another install":
        handle = dynswap_ext.install(model, **options)

kinds = ["inference", "training", "a part", "fewer blocks", "other blocks on each rank", "a pause",
         "keep tensors", "read", "a write of each rank", "another budget", "another install"]
steps = []
while len(steps) < 40:
    kind = same.choice(kinds)
    steps += [kind] * (same.randrange(2, 8) if kind in ("inference", "training") else 1)
at = same.randrange(5, 35)
told.update(steps=steps, misbehaves_at=at, masters=masters)
try:
    for number, kind in enumerate(steps):
        x = torch.randn(3, width, dtype=torch.float64, device=device)
        if rank == 1 and number == at:
            if misbehaves == "another call":
                call(model, plain, x, False)
            elif misbehaves == "one call less":
                continue
            elif misbehaves == "an error":
                raise KeyError("of the program")
            elif misbehaves == "the end":
                break
            elif misbehaves == "uninstall":
                handle.uninstall()
                break
            elif misbehaves == "kill":
                os.kill(os.getpid(), 9)
        told["step"] = [number, kind]
        step(kind, x)
except (dynswap_ext.SourceError, dynswap_ext.ConfigError) as error:
    told["error"] = str(error)
except KeyError:
    pass
session = session_of(model)
told["shared_out"] = session.shared_out() if session is not None else None
begun = time.monotonic()
handle.uninstall()
told["uninstalled_in"] = time.monotonic() - begun
testing.assert_bit_equal(model.double()(x.cpu()), plain.cpu()(x.cpu()))
if "pretend_cuda" in sys.modules:
    told["violations"] = sys.modules["pretend_cuda"].violations()
if misbehaves == "kill":  # nobody is left to leave together with
    with open(f"{store}.{rank}", "w") as file:
        json.dump(told, file)
    os._exit(0)
"""


def run(device_type: str, seed: int, misbehaves: str, folder: Path) -> list[dict[str, Any]]:
    """Run one program, and return what each rank tells of it. Fails on a wrong byte, and if a rank hangs."""
    count = random.Random(seed).choice((2, 2, 3, 4))
    return forked_ranks.run(
        _PROGRAM,
        count,
        folder,
        seed,
        misbehaves,
        folder,
        TIMEOUT,
        device_type=device_type,
        killed=[1] if misbehaves == "kill" else (),
        timeout=90,
    )
