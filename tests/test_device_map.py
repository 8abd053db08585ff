"""One model over several devices of one process."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, install_by_device, testing

WIDTH, LAYERS = 64, 4


class Model(nn.Module):
    """Layers that take a mask by name, and return a tuple; the model returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight
        self.devices: list[str] = []

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        x, self.devices = self.embed(tokens), []
        for layer in self.layers:
            x, device = layer(x, extra={"mask": mask})
            self.devices.append(device)
        return {"logits": self.head(self.norm(x)), "hidden": [x]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> tuple[torch.Tensor, str]:
        return x + self.linear(x).relu() * extra["mask"], str(x.device)


def devices(provider: Provider) -> tuple[str, str]:
    """Two devices: the second one of the provider's kind if there is one, else the CPU."""
    kind = provider.device.type
    if kind == "cpu":
        return "cpu", "cpu"
    return f"{kind}:0", f"{kind}:1" if torch.accelerator.device_count() > 1 else "cpu"


def options(provider: Provider) -> dict[str, Any]:
    return {"dtype": torch.float64, "provider": "native" if provider.native else "python"}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(32, (2, 5), generator=generator), torch.rand(WIDTH, generator=generator).double()


def test_each_part_computes_on_its_device(provider: Provider) -> None:
    first, second = devices(provider)
    model = Model()
    plain = copy.deepcopy(model).double()
    where = {"embed": first, "layers.0-1": first, "layers.2-*": second, "norm": second, "head": second}
    with install_by_device(model, where, budget="minimum", **options(provider)) as handles:
        assert set(handles) == {torch.device(first), torch.device(second)}
        for _ in range(3):
            outputs = [m(*inputs()) for m in (model, plain)]
            assert model.devices == [first, first, second, second]
            for name in ("logits", "hidden"):
                testing.assert_bit_equal(outputs[0][name], outputs[1][name], name)
            for m, output in zip((model, plain), outputs, strict=True):
                m.zero_grad()
                output["logits"].square().sum().backward()
            for p, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None and p.device.type == "cpu"
                torch.testing.assert_close(p.grad, other.grad.float())
        for handle in handles.values():
            assert handle.stats().bytes_moved > 0
            assert handle.report() is not None
        names = {name for row in handles[second].report().rows for name in row.names}
        assert {"layers.3.linear.weight", "norm.weight"} <= names
        assert f"{second}\n" in str(handles)
        assert handles[torch.device(first).type] is handles[first]
        assert "nonsense" not in handles
        with pytest.raises(KeyError, match=f"nothing is installed on nonsense, only on {first}"):
            handles["nonsense"]
    assert not any(dynswap_ext.is_installed(m) for m in model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Scaled(nn.Module):
    """Weights of its own beside parts that have some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.devices: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.devices = []
        for part in self.parts:
            x = part(x)
            self.devices.append(str(x.device))
        return x.to(self.scale.device) * self.scale


@pytest.mark.parametrize("order", [1, -1])
def test_parts_within_a_part_on_another_device(provider: Provider, order: int) -> None:
    first, second = devices(provider)
    where = {"": first, "parts": second, "parts.2": first}
    model, x = Scaled(), torch.rand(3, WIDTH).double()
    plain = copy.deepcopy(model).double()
    with install_by_device(model, dict(list(where.items())[::order]), **options(provider)):
        output = model(x)
        assert output.device == x.device
        testing.assert_bit_equal(output, plain(x))
        assert model.devices == [second, second, first, second]
    with install_by_device(model, {"": first}, **options(provider)):
        assert model(x).device == x.device


def test_a_path_counts_more_than_a_pattern(provider: Provider) -> None:
    first, second = devices(provider)
    model = Scaled()
    where = {"": first, "parts.0-3": first, "parts.1": second}
    with install_by_device(model, where, **options(provider)):
        model(torch.rand(3, WIDTH).double())
        assert model.devices == [first, second, first, first]


def test_what_has_no_order_of_installs_is_refused(provider: Provider) -> None:
    first, second = devices(provider)
    if first == second:
        pytest.skip("it needs two devices")
    model = nn.Sequential(Scaled(), Scaled())
    where = {"0": first, "0.parts": second, "1": second, "1.parts": first}
    with pytest.raises(ConfigError, match=r"'0' computes on .* and '1' computes on .* around"):
        install_by_device(model, where, **options(provider))


def test_a_module_that_is_in_two_places(provider: Provider) -> None:
    first, second = devices(provider)
    model = nn.Sequential(part := nn.Linear(WIDTH, WIDTH), nn.ReLU(), part)
    with install_by_device(model, {"0": first, "2": first}, **options(provider)) as handles:
        assert set(handles) == {torch.device(first)}
    if first != second:
        with pytest.raises(
            ConfigError, match=f"'{first}' for '0' and '{second}' for '2', which are the same"
        ):
            install_by_device(model, {"0": first, "2": second}, **options(provider))


class Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH)

    def forward(self, given: Any) -> torch.Tensor:
        if isinstance(given, dict):
            assert given["missing"] == []
            return self.linear(given["x"])  # type: ignore[no-any-return]
        return self.rnn(given)[0].data  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["defaultdict", "packed"])
def test_what_is_given_keeps_its_kind(provider: Provider, kind: str) -> None:
    first, _ = devices(provider)
    model, x = Taker(), torch.rand(3, WIDTH).double()
    plain = copy.deepcopy(model).double()
    given: Any = defaultdict(list, x=x) if kind == "defaultdict" else nn.utils.rnn.pack_sequence([x, x[:2]])
    with install_by_device(model, {"": first}, **options(provider)):
        testing.assert_bit_equal(model(given).cpu(), plain(given))


def test_errors_and_threads_do_not_change_where_an_output_goes(provider: Provider) -> None:
    first, second = devices(provider)
    model, x = Scaled(), torch.rand(3, WIDTH).double()
    found: list[torch.device] = []

    def work(x: torch.Tensor) -> None:
        for _ in range(5):
            with pytest.raises(RuntimeError):
                model(x[:, 1:])
            found.append(model(x).device)

    with install_by_device(model, {"": second, "parts": first}, **options(provider)):
        inputs = [x, x.to(first)]
        threads = [threading.Thread(target=work, args=(each,)) for each in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, found)) == sorted(str(each.device) for each in inputs for _ in range(5))


def test_installs_one_after_the_other_leave_one_set_of_hooks(provider: Provider) -> None:
    first, second = devices(provider)
    model = Scaled()
    counts = []
    for _ in range(3):
        handles = install_by_device(model, {"": first, "parts": second}, **options(provider))
        counts.append(sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()))
    assert len(set(counts)) == 1
    handles.uninstall()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(m._forward_hooks_always_called for m in model.modules())


def test_a_part_that_cannot_be_uninstalled_does_not_keep_the_others(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = devices(provider)
    if first == second:
        pytest.skip("it needs two devices")
    model = Scaled()
    handles = install_by_device(model, {"": first, "parts": second}, **options(provider))
    for device in handles:

        def fail(of: Any = handles[device].uninstall) -> None:
            of()
            raise RuntimeError("a device is lost")

        monkeypatch.setattr(handles[device], "uninstall", fail)
    with pytest.raises(RuntimeError, match="a device is lost"):
        handles.uninstall()
    assert not any(dynswap_ext.is_installed(m) or m._forward_pre_hooks for m in model.modules())


def test_budgets_by_device(provider: Provider) -> None:
    first, second = devices(provider)
    if first == second:
        pytest.skip("it needs two devices")
    model = Model()
    where = {"embed": first, "layers": first, "norm": second, "head": second}
    handles = install_by_device(model, where, budget={first: "1MiB", second: "minimum"}, **options(provider))
    assert handles[first].budget == 1 << 20 and handles[second].budget is None
    with pytest.raises(ConfigError, match=f"has none for '{second}'"):
        install_by_device(model, where, budget={first: "1MiB"}, **options(provider))
    handles.uninstall()


@pytest.mark.parametrize("how", ["uninstall", "install", "copy", "pickle"])
def test_what_is_no_longer_installed_by_device_moves_nothing(provider: Provider, how: str) -> None:
    first, second = devices(provider)
    model = Model()
    plain = copy.deepcopy(model).double()
    where = {"embed": first, "layers": second, "norm": second, "head": second}
    handles = install_by_device(model, where, **options(provider))
    model(*inputs())
    if how == "install":
        handle = dynswap_ext.install(model, device="cpu", **options(provider))
        testing.assert_bit_equal(model(*inputs())["logits"], plain(*inputs())["logits"])
        handle.uninstall()
        return
    if how == "uninstall":
        dynswap_ext.uninstall(model)
    elif how == "copy":
        model = copy.deepcopy(model)
    else:
        model = pickle.loads(pickle.dumps(model))
    model.double()
    testing.assert_bit_equal(model(*inputs())["logits"], plain(*inputs())["logits"])
    handles.uninstall()


def test_what_names_no_device_or_no_module_is_refused(provider: Provider) -> None:
    first, _ = devices(provider)
    for where, message in (
        ({"embed": first, "layers": first, "norm": first}, "has no device for head; .* Add 'head'"),
        ({"layers.0": first, "head": first}, r"no device for embed, layers\.1, .*; .* Add 'embed'"),
        ({"": first, "layers.7-9": first}, r"'layers.7-9', which names no .*: layers has 0 to \d"),
        ({"": first, "layer": first}, "'layer', which names no module of the model. Did you mean 'layers'"),
        ({"": "cuda:77"}, "available here"),
        ({"": first, "norm": "disk"}, "'disk' for 'norm'; expected the device where it computes"),
        ("auto", "device_map is 'auto'; expected a mapping of modules to devices.*infer_auto"),
    ):
        model = Model()
        with pytest.raises(ConfigError, match=message):
            install_by_device(model, where, **options(provider))  # type: ignore[arg-type]
        assert not any(dynswap_ext.is_installed(m) for m in model.modules())
        assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ConfigError, match=r"device_map is \['layers'\]; expected a mapping"):
        install_by_device(model, ["layers"], **options(provider))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="second argument"):
        install_by_device(model, {"": first}, device=first)
    with pytest.raises(ConfigError, match="install_by_device"):
        dynswap_ext.install(model, device={"": first})  # type: ignore[arg-type]


class Nested(nn.Module):
    """A model and blocks with weights of their own, around modules that may be on another device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale)


@pytest.mark.parametrize(
    "where",
    [
        {"": 0, "blocks.2-*": 1},
        {"blocks.2-*": 1, "": 0},
        {"shift": 0, "blocks.*": 1, "out": 0},
        {"": 0, "blocks": 1, "blocks.0-2": 0, "blocks.2": 1},
        {"": 0, "blocks.1.linear": 1},
        {"": 1, "blocks.1": 0},
    ],
    ids=str,
)
def test_a_module_and_those_in_it_on_two_devices(provider: Provider, where: dict[str, int]) -> None:
    two = devices(provider)
    model, x = Nested(), torch.randn(2, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model).double()
    named = {key: two[number] for key, number in where.items()}
    with install_by_device(model, named, budget="minimum", **options(provider)):
        for _ in range(2):
            testing.assert_bit_equal(model(x), plain(x))
        model(x).sum().backward()
    plain(x).sum().backward()
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and other.grad is not None
        torch.testing.assert_close(p.grad, other.grad.float())
    assert not any(dynswap_ext.is_installed(m) for m in model.modules())


def test_keys_that_disagree_are_refused(provider: Provider) -> None:
    first, second = devices(provider)
    if first == second:
        pytest.skip("it needs two devices")
    for where, message in (
        (
            {"": first, "blocks.0-2": first, "blocks.1-3": second},
            "'blocks.0-2' and 'blocks.1-3' for 'blocks.1'",
        ),
        (
            {"": first, "blocks.0": second, "blocks.0.linear": first},
            r"the model computes on .* and 'blocks\.0' computes on",
        ),
    ):
        model = Nested()
        with pytest.raises(ConfigError, match=message):
            install_by_device(model, where, **options(provider))
        assert not any(dynswap_ext.is_installed(m) for m in model.modules())


def test_weights_of_one_module_on_two_devices_are_refused(provider: Provider) -> None:
    first, second = devices(provider)
    if first == second:
        pytest.skip("it needs two devices")
    with pytest.raises(ConfigError, match=f"'weight' is on {first} and 'bias' on {second}"):
        install_by_device(nn.Linear(4, 4), {"weight": first, "bias": second}, **options(provider))


def test_a_module_that_a_key_names_may_be_called_by_itself(provider: Provider) -> None:
    first, _ = devices(provider)
    model, x = Nested(), torch.randn(2, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model).double()
    with install_by_device(model, {"": first, "blocks.1": first}, **options(provider)):
        output = model.blocks[1](x)
        assert str(output.device) == first
        testing.assert_bit_equal(output.cpu(), plain.blocks[1](x))


def test_the_handle_of_a_device(provider: Provider) -> None:
    first, _ = devices(provider)
    with install_by_device(Model(), {"": first}, **options(provider)) as handles:
        assert handles[first] is next(iter(handles.values())) and "meta" not in handles
        with pytest.raises(KeyError, match=f"nothing is installed on meta, only on {first}"):
            handles["meta"]


def test_a_device_map_of_accelerate(provider: Provider) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    two = devices(provider)
    model, x = Nested(), torch.randn(2, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model).double()
    memory = {0: 40_000, 1: 400_000, "cpu": 10**9}
    inferred = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=["Block"])
    assert inferred["shift"] == 0 and inferred["out"] == 1
    named = {key: two[number] for key, number in inferred.items()}
    with install_by_device(model, named, **options(provider)):
        testing.assert_bit_equal(model(x), plain(x))
