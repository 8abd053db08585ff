"""Small tensor subclasses like those of quantisation libraries. They count how often they are dequantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class ScaledInt8(torch.Tensor):
    """A floating tensor that is stored as int8 with a scale per row, as in torchao."""

    payload: torch.Tensor
    scale: torch.Tensor
    tag: str
    #: How often a tensor of this class was turned into a floating one.
    dequantised: ClassVar[int] = 0

    @staticmethod
    def __new__(
        cls, payload: torch.Tensor, scale: torch.Tensor, tag: str, dtype: torch.dtype = torch.float32
    ) -> ScaledInt8:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, payload.shape, strides=payload.stride(), dtype=dtype, device=payload.device
        )

    def __init__(
        self, payload: torch.Tensor, scale: torch.Tensor, tag: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.payload, self.scale, self.tag = payload, scale, tag

    @classmethod
    def quantise(cls, weight: torch.Tensor, tag: str = "mine") -> ScaledInt8:
        scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale, tag, weight.dtype)

    def dequantise(self) -> torch.Tensor:
        ScaledInt8.dequantised += 1
        return self.payload.to(self.dtype) * self.scale.to(self.dtype)

    def inner_bytes(self) -> int:
        return self.payload.nbytes + self.scale.nbytes

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["payload", "scale"], (self.tag, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], meta: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> ScaledInt8:
        return cls(inner["payload"], inner["scale"], *meta)

    def __repr__(self, **_: Any) -> str:
        return f"ScaledInt8({tuple(self.shape)}, {self.dtype}, {self.device}, {self.tag!r})"

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> ScaledInt8:
        return ScaledInt8(change(self.payload), change(self.scale), self.tag, dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            return _Linear.apply(x, weight) + (0 if bias is None else bias)
        if func is torch.Tensor.module_load:
            # As in PyTorch's recipe for swap_tensors: return the other tensor in this one's form.
            own, other = args[:2]
            if not isinstance(own, ScaledInt8):
                return (
                    other.dequantise().to(own.dtype) if not (kwargs or {}).get("assign") else other.detach()
                )
            return other.detach() if isinstance(other, ScaledInt8) else ScaledInt8.quantise(other, own.tag)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        this = args[0]
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            made = this._with(lambda inner: func(inner), this.dtype)
        elif func is aten._to_copy.default:
            device = kwargs.get("device")
            made = this._with(lambda inner: inner.to(device, copy=True), kwargs.get("dtype") or this.dtype)
        elif func is aten.copy_.default:
            source = args[1] if isinstance(args[1], ScaledInt8) else ScaledInt8.quantise(args[1], this.tag)
            this.payload.copy_(source.payload)
            this.scale.copy_(source.scale)
            return this
        else:
            raise NotImplementedError(f"{func} of a ScaledInt8")
        return return_and_correct_aliasing(func, args, kwargs, made)


class _Linear(torch.autograd.Function):
    """A linear product that dequantises the weight in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ScaledInt8) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.dequantise().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight.dequantise(), None


class QuantState:
    """The scale and shape of a `Params8`, like the quant_state of bitsandbytes."""

    def __init__(self, absmax: torch.Tensor, shape: torch.Size) -> None:
        self.absmax, self.shape = absmax, shape

    def to(self, device: torch.device | None) -> QuantState:
        return self if device is None else QuantState(self.absmax.to(device), self.shape)


class Params8(nn.Parameter):
    """A parameter whose data are bytes and which has its own `to`, like `Params4bit` of bitsandbytes."""

    quant_state: QuantState | None
    dequantised: ClassVar[int] = 0

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = False, quant_state: QuantState | None = None
    ) -> Params8:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.quant_state = quant_state
        return made  # type: ignore[no-any-return]

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> Params8:
        absmax = weight.detach().abs().amax()
        data = (weight.detach() / absmax * 127 + 128).round().to(torch.uint8).reshape(-1, 1)
        return cls(data, quant_state=QuantState(absmax, weight.shape))

    def to(self, *args: Any, **kwargs: Any) -> Params8:
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        state = None if self.quant_state is None else self.quant_state.to(device)
        # The dtype is never changed: the bytes are no numbers.
        return Params8(self.data.to(device=device, non_blocking=non_blocking), self.requires_grad, state)


class Linear8(nn.Module):
    """A linear layer that computes from the bytes of a `Params8` and its `quant_state`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: Any = Params8.quantise(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Params8.dequantised += 1
        weight, state = self.weight, self.weight.quant_state
        assert state.absmax.device == weight.device
        data = (weight.data.to(x.dtype) - 128) / 127 * state.absmax.to(x.dtype)
        return x @ data.reshape(state.shape).t()


def quantised_mlp(features: int = 16, layers: int = 3) -> nn.Sequential:
    """Return linear layers with a `ScaledInt8` weight and a plain bias."""
    model = nn.Sequential(*(nn.Linear(features, features) for _ in range(layers)))
    for module in model:
        module.weight = nn.Parameter(ScaledInt8.quantise(module.weight), requires_grad=False)
    return model


def bytes_mlp(features: int = 16, layers: int = 3) -> nn.Sequential:
    """Return `Linear8` layers."""
    return nn.Sequential(*(Linear8(nn.Linear(features, features)) for _ in range(layers)))
