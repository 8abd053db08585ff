"""Mixtures of experts, fused in one parameter or one module each, with experts chosen by the caller."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, WIDTH, HIDDEN = 16, 24, 32


class Fused(nn.Module):
    """Experts in one parameter, as in transformers. `read` names the way in which a forward reads it."""

    def __init__(self, read: str = "loop") -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.read = read

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of what the experts `chosen` (tokens, k) make of the tokens `x`."""
        return READS[self.read](self, x, chosen)


class OneByOne(nn.Module):
    """Experts that are one module each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            tokens = (chosen == index).any(-1).nonzero()[:, 0]
            out = out.index_add(0, tokens, self.experts[index](x[tokens]))
        return out


class Mixture(nn.Module):
    """Layers of a dense part and experts. The forward takes `chosen`, of shape (layers, tokens, k)."""

    def __init__(self, experts: Callable[[], nn.Module] = Fused, layers: int = 3) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.mixtures = nn.ModuleList(experts() for _ in range(layers))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for dense, experts, choice in zip(self.dense, self.mixtures, chosen, strict=True):
            x = torch.tanh(x + dense(x))
            x = x + experts(x, choice)
        return x


def _loop(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in chosen.unique():
        tokens = (chosen == index).any(-1).nonzero()[:, 0]
        inner = F.silu(F.linear(x[tokens], experts.up[index], experts.up_bias[index]))
        out = out.index_add(0, tokens, F.linear(inner, experts.down[index]))
    return out


def _numbers(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    """Index the parameters with integers, negative ones too, and with all dimensions in the index."""
    out = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        tokens = (chosen == index).any(-1).nonzero()[:, 0]
        inner = F.silu(x[tokens] @ experts.up[index - EXPERTS, :, :].T + experts.up_bias[index, ...])
        out = out.index_add(0, tokens, inner @ experts.down.transpose(1, 2)[index])
    return out


def _batched(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.reshape(-1)
    rows = x.repeat_interleave(chosen.shape[-1], 0)
    inner = torch.bmm(experts.up[flat], rows.unsqueeze(-1)).squeeze(-1) + experts.up_bias[flat]
    out = torch.bmm(F.silu(inner).unsqueeze(1), experts.down.mT[flat]).squeeze(1)
    return out.view(*chosen.shape, -1).sum(1)


def _listed(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    """Index the parameters with a list of experts and with a range of them."""
    used = sorted(set(chosen.reshape(-1).tolist()))
    inner = F.silu(torch.einsum("td,ehd->eth", x, experts.up[used]) + experts.up_bias[used].unsqueeze(1))
    down = experts.down[used[0] : used[-1] + 1]
    down = torch.stack([down[index - used[0]] for index in used])
    mask = torch.stack([(chosen == index).any(-1) for index in used]).unsqueeze(-1)
    return (torch.einsum("eth,edh->etd", inner, down) * mask).sum(0)


def _all(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    """Compute every expert for every token, in one operation."""
    inner = F.silu(torch.bmm(x.expand(EXPERTS, -1, -1), experts.up.mT) + experts.up_bias.unsqueeze(1))
    out = torch.bmm(inner, experts.down.mT)
    mask = torch.stack([(chosen == index).any(-1) for index in range(EXPERTS)]).unsqueeze(-1)
    return (out * mask).sum(0)


def _each(experts: Fused, x: Tensor, chosen: Tensor) -> Tensor:
    """Compute every expert for every token, one expert after the other."""
    out = torch.zeros_like(x)
    for index, (up, bias, down) in enumerate(zip(experts.up, experts.up_bias, experts.down, strict=True)):
        mask = (chosen == index).any(-1).unsqueeze(-1)
        out = out + F.linear(F.silu(F.linear(x, up, bias)), down) * mask
    return out


READS: dict[str, Callable[[Fused, Tensor, Tensor], Tensor]] = {
    "loop": _loop,
    "numbers": _numbers,
    "batched": _batched,
    "listed": _listed,
    "all": _all,
    "each": _each,
}
#: The reads that need only the chosen experts.
BY_CHOICE = ("loop", "numbers", "batched")


def choices(
    layers: int = 3, tokens: int = 1, chosen: int = 2, *, seed: int = 0, device: torch.device | None = None
) -> Tensor:
    """Return random choices of shape (layers, tokens, chosen): distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(EXPERTS, generator=generator)[:chosen] for _ in range(layers * tokens)]
    return torch.stack(drawn).view(layers, tokens, chosen).to(device)
