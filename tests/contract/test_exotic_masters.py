"""Masters of every kind of tensor that torch has: an install serves them, and none ends the process."""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import children
from conftest import Provider, dense_alone_is_pretended
from dynswap_ext import testing

#: Installs a model for each kind of master. A read has to give a tensor if torch's `.to()` does.
CODE = textwrap.dedent(
    '''
    import sys
    import warnings

    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dynswap_ext

    warnings.simplefilter("ignore")
    device, provider = sys.argv[1:]
    wrap_for_grad = torch._C._functorch._wrap_for_grad
    rows = torch.arange(12.0).reshape(3, 4)
    pair = [torch.ones(2, 3), torch.ones(4, 3)]


    aten = torch.ops.aten
    SIZES = {aten.size.default: (3, 4), aten.sym_size.default: (3, 4)}
    ANSWERS = {aten.dim.default: 2, aten.numel.default: 12, aten.sym_numel.default: 12, **SIZES}


    class Raises(torch.Tensor):
        """A wrapper that tells its size, and refuses whatever else torch asks."""

        @staticmethod
        def __new__(cls):
            make = torch.Tensor._make_wrapper_subclass
            return make(cls, (3, 4), dispatch_sizes_strides_policy="sizes", dispatch_layout=True)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is aten.detach.default:
                return args[0]
            if function in ANSWERS:
                return ANSWERS[function]
            raise NotImplementedError(str(function))


    def emptied():
        tensor = torch.ones(3, 4)
        tensor.untyped_storage().resize_(0)
        return tensor


    def in_inference_mode():
        with torch.inference_mode():
            return torch.ones(3, 4)


    def inside_grad():
        found = []
        torch.func.grad(lambda x: (found.append(x * 1), x.sum())[1])(rows)
        return found[0]


    KINDS = {
        "coo": rows.to_sparse,
        "csr": rows.to_sparse_csr,
        "bsc": lambda: rows.to_sparse_bsc((1, 2)),
        "mkldnn": rows.to_mkldnn,
        "quantized": lambda: torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor(pair),
        "jagged": lambda: torch.nested.nested_tensor(pair, layout=torch.jagged),
        "zero": lambda: torch._efficientzerotensor((3, 4)),
        "conjugate": lambda: torch.complex(rows, rows).conj(),
        "negated": lambda: torch.complex(rows, rows).conj().imag,
        "expanded": lambda: torch.ones(4).expand(3, 4),
        "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
        "0-dim": lambda: torch.tensor(2.0),
        "empty": lambda: torch.empty(0, 4),
        "emptied": emptied,
        "complex": lambda: torch.complex(rows, rows),
        "meta": lambda: rows.to("meta"),
        "fake": lambda: FakeTensorMode().from_tensor(rows),
        "functorch": inside_grad,
        "batched": lambda: torch._C._functorch._add_batch_dim(rows, 0, 1),
        "functional": lambda: torch._to_functional_tensor(rows),
        "masked": lambda: torch.masked.masked_tensor(rows, rows > 3),
        "raises": Raises,
        "inference": in_inference_mode,
        "bits": lambda: torch.empty(3, 4, dtype=torch.bits8),
        "float8": lambda: rows.to(torch.float8_e4m3fnuz),
        "float4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }


    class Model(nn.Module):
        def __init__(self, master, parameter):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            if parameter:
                self.register_parameter("master", nn.Parameter(master, requires_grad=False))
            else:
                self.register_buffer("master", master)

        def forward(self, x):
            return self.linear(x), self.master


    def attempt(function):
        try:
            return function()
        except Exception as error:
            return type(error)


    def look(kind, master, parameter, dtype, budget):
        model = attempt(lambda: Model(master, parameter))
        if isinstance(model, type):
            return  # torch makes no such parameter
        own = model._parameters["master"] if parameter else model.master
        install = dynswap_ext.install
        try:
            handle = install(model, device=device, dtype=dtype, budget=budget, provider=provider)
        except dynswap_ext.ConfigError:
            assert kind == "meta", kind
            return
        x = torch.ones(2, 4, device=device, dtype=model.linear.weight.dtype)
        cast = {"dtype": dtype} if dtype and own.is_floating_point() else {}
        moved = attempt(lambda: own.to(device=device, **cast))
        for read in (lambda: model.master, lambda: model(x)[1], lambda: model(x)[1]):
            got = attempt(read)
            assert isinstance(got, torch.Tensor) or not isinstance(moved, torch.Tensor), (kind, got, moved)
        attempt(model.state_dict)
        handle.flush()
        str(handle.report())
        handle.uninstall()
        assert (model._parameters["master"] if parameter else model._buffers["master"]) is own, kind


    for kind, make in KINDS.items():
        for parameter in (False, True):
            for dtype in (None, torch.bfloat16):
                for budget in (None, "1GiB"):
                    print(kind, parameter, dtype, budget, flush=True)
                    master = attempt(make)
                    if not isinstance(master, type):
                        look(kind, master, parameter, dtype, budget)
    '''
)


@pytest.mark.slow
def test_no_kind_of_master_ends_the_process(provider: Provider) -> None:
    dense_alone_is_pretended("sparse, nested or quantised")
    child = children.run(CODE, provider.device, provider.backend)
    assert child.returncode == 0, (child.returncode, child.stdout[-200:], child.stderr[-3000:])


def test_a_sparse_buffer_is_no_obstacle(provider: Provider) -> None:
    """A sparse buffer, whose `nbytes` is an error, does not hinder an install."""
    model = nn.Linear(4, 4)
    moved = testing.moved(model, provider.device, torch.float64)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x), moved(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_parameter_that_torch_converts_requires_gradients_without_a_graph(
    provider: Provider, mode: type[AbstractContextManager[None]]
) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.empty.requires_grad and self.weight.requires_grad
            return x

    model = Asks()
    provider.install(model, dtype=torch.float64)
    with mode():
        model(provider.randn(2, 4))
