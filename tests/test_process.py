"""A process with an installed model: its end, and its forks."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

import children
from conftest import Provider

HEAD = """
import copy, os, signal, sys, threading, torch, dynswap_ext
from torch import nn
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
handle = dynswap_ext.install(model, device={device!r}, dtype=torch.float64, provider={backend!r})
x = torch.ones(2, 64, dtype=torch.float64, device={device!r})
"""

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
BUDGETS = pytest.mark.parametrize("budget", ["None", "'1GiB'"], ids=["streamed", "resident"])


def run(provider: Provider, script: str) -> subprocess.CompletedProcess[str]:
    head = HEAD.format(device=str(provider.device), backend=provider.backend)
    if provider.native:  # by its name: a provider that is chosen by default may warn
        head = f"import os; os.environ['DYNSWAP_ENGINE_BACKEND'] = '{provider.expected_backend}'\n{head}"
    else:
        head = f"import warnings; warnings.filterwarnings('ignore', 'pure Python does not track')\n{head}"
    done = children.run(head + textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done


def test_exit_with_an_installed_model(provider: Provider) -> None:
    done = run(provider, "print(model(x).sum().item() == model(x).sum().item())")
    assert done.stdout == "True\n"


def test_exit_with_tensors_and_graphs_alive(provider: Provider) -> None:
    run(
        provider,
        """
        import builtins
        builtins.kept = [model[0].weight, model(x), model[1].weight.detach(), model]
        with torch.no_grad():
            model[2].weight.fill_(1)
            builtins.kept.append(model[2].weight)
        """,
    )


@FORKS
@pytest.mark.parametrize("room", ["cached", "past the page cache"])
def test_a_child_has_what_was_saved_before_the_fork(provider: Provider, room: str) -> None:
    """The parent trains on, and writes over nothing that the child may read from the file."""
    if not provider.native or provider.device.type != "cpu":
        pytest.skip("a file takes what is saved on the CPU, with the native provider")
    bound = "'auto'" if room == "cached" else "sum(p.nbytes for p in model.parameters())"
    done = run(
        provider,
        f"""
        import tempfile
        torch.set_num_threads(1)  # a child has none of the others
        handle.uninstall()
        plain = copy.deepcopy(model)
        folder = tempfile.gettempdir()
        handle = dynswap_ext.install(
            model, device="cpu", activations=1024, activations_folder=folder, host_budget={bound})
        x = torch.randn(512, 64)
        expected = torch.autograd.grad(plain(x).tanh().sum(), plain.parameters())
        loss = model(x).tanh().sum()
        seen, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(seen, 1)
            found = torch.autograd.grad(loss, model.parameters())
            os._exit(0 if all(map(torch.equal, found, expected)) else 1)
        for _ in range(3):
            found = torch.autograd.grad(loss, model.parameters())
            assert all(map(torch.equal, found, expected))
            x, loss = 2 * x, model(2 * x).tanh().sum()
            expected = torch.autograd.grad(plain(x).tanh().sum(), plain.parameters())
        os.write(go, b"x")
        assert os.waitpid(child, 0)[1] == 0
        print("both are right")
        """,
    )
    assert done.stdout == "both are right\n"


@FORKS
def test_a_forked_child_ends_as_usual(provider: Provider) -> None:
    done = run(
        provider,
        """
        with torch.no_grad():
            expected = model(x)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with the exit handlers, in a process without the parent's threads
        assert os.waitpid(child, 0)[1] == 0
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        print("both ended")
        """,
    )
    assert done.stdout == "both ended\n"


@FORKS
@BUDGETS
def test_a_forked_child_cannot_use_the_parents_device(provider: Provider, budget: str) -> None:
    """A forked child gets a clear error instead of the driver's "initialization error"."""
    if provider.device.type == "cpu" or not provider.native:
        pytest.skip("the native provider's error, of a device that has a driver")
    done = run(
        provider,
        f"""
        handle.uninstall()
        handle = dynswap_ext.install(model, dtype=x.dtype, budget={budget}, device=x.device)
        with torch.no_grad():
            expected = model(x)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            for use in (lambda: model[0].weight, lambda: model(x)):
                try:
                    use()
                except Exception as error:
                    print(type(error).__name__, error, flush=True)
            own = copy.deepcopy(model).state_dict()  # masters are the child's
            os._exit(0 if torch.equal(own["0.weight"], model.state_dict()["0.weight"]) else 1)
        assert os.waitpid(child, 0)[1] == 0
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        """,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("DeviceError") and "forked process" in line and "'spawn'" in line


@FORKS
def test_a_forked_child_does_not_inherit_a_lock_held(provider: Provider) -> None:
    if provider.name != "python":
        pytest.skip("only pure Python on the CPU has no thread or device context to lose in a fork")
    # The child only accesses weights. To compute, it would need locks of torch, which may be held too.
    run(
        provider,
        """
        expected = model[0]._parameters["weight"].double()
        entered, leave = threading.Event(), threading.Event()
        def work():
            with model.__dict__["_dynswap"].session._exclusive:
                entered.set()
                leave.wait()
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if torch.equal(model[0].weight, expected) else 1)
        status = os.waitpid(child, 0)[1]
        leave.set()
        thread.join()
        assert status == 0
        assert torch.equal(model[0].weight, expected)
        """,
    )


WRITES = {
    "a version": "[p.mul_(2) for p in model.parameters()]",
    "data": "[p.data.mul_(2) for p in model.parameters()]",
    "an element": "[p.data.view(-1)[:1].fill_(3) for p in model.parameters()]",
    "what is handed out": "model[1].weight.mul_(2); model[2].bias.detach().numpy()[0] = 4",
    "a fused step": (
        "[setattr(p, 'grad', torch.ones_like(p)) for p in model.parameters()]; "
        "torch.optim.SGD(model.parameters(), 0.1, fused=True).step()"
    ),
}


@FORKS
@pytest.mark.parametrize("write", WRITES)
@BUDGETS
def test_a_forked_child_sees_writes_to_its_masters(provider: Provider, budget: str, write: str) -> None:
    if provider.device.type != "cpu":
        pytest.skip("a forked child has no device")
    run(
        provider,
        f"""
        torch.set_num_threads(1)
        with torch.no_grad():
            handle.uninstall()
            handle = dynswap_ext.install(model, dtype=x.dtype, budget={budget}, provider="{provider.backend}")
            for _ in range(3):
                model(x)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            with torch.no_grad():
                for _ in range(2):
                    {WRITES[write]}
                    found = model(x)
                    own = copy.deepcopy(model).to(x.dtype)
                    if not torch.equal(found, own(x)):
                        os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )


@FORKS
@BUDGETS
@pytest.mark.parametrize("width", [16, 512], ids=["hashed", "watched by pages"])
def test_a_forked_child_writes_to_its_masters(provider: Provider, budget: str, width: int) -> None:
    if provider.device.type != "cpu":
        pytest.skip("a forked child has no device")
    run(
        provider,
        f"""
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(64, {width}), nn.BatchNorm1d({width})).double()
        x = x.float()  # so that statistics are not rounded for their masters
        dynswap_ext.install(net, dtype=x.dtype, budget={budget}, provider="{provider.backend}")
        net(x)
        held = net[0].weight
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            for _ in range(2):
                plain = copy.deepcopy(net).to(x.dtype)
                for each in (net, plain):
                    each(torch.arange(128.0, dtype=x.dtype).view(2, 64))
                if not torch.equal(net.state_dict()["1.running_var"], plain[1].running_var.double()):
                    os._exit(1)
            with torch.no_grad():
                held.fill_(5)
            os._exit(0 if net.state_dict()["0.weight"].eq(5).all() else 2)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
