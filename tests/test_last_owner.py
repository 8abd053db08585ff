"""A tensor may be the last owner of its install, and be freed on any thread."""

from __future__ import annotations

import pytest

import children

PROGRAM = """
import sys, threading, time, torch, dynswap_ext
from torch import nn

sys.setswitchinterval(1e-6)
end = time.monotonic() + 20
rounds = 0
while time.monotonic() < end:
    model = nn.Module()
    for index in range(600):
        model.register_parameter(f"p{index}", nn.Parameter(torch.ones(4)))
    masters = list(model.parameters())
    handle = dynswap_ext.install(model, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        read = [getattr(model, f"p{index}") for index in range(600)]
        handle.uninstall()
        torch._foreach_add_(read, 1)
        torch._foreach_add_(masters, 1)  # so that writes on read tensors are lost
    begin = threading.Event()
    thread = threading.Thread(target=lambda: (begin.wait(), read.clear()))
    thread.start()
    begin.set()
    time.sleep(rounds % 40 * 1e-4)
    del handle, model
    thread.join()
    rounds += 1
print("rounds", rounds)
"""


@pytest.mark.nightly  # what it looks for takes up to twenty seconds to happen
def test_the_model_goes_while_what_was_read_dies() -> None:
    done = children.run(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "rounds" in done.stdout
