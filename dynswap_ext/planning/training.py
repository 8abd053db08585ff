"""What a training step saves for backward, found without computing it, and the time that a step needs.

Note [A step on fake tensors]
The forward runs on fake tensors of the CPU: shapes are those of a real step, and nothing is computed or
allocated. Each storage counts once, whatever views of it are saved. Parameters and buffers do not count.
Attention is that of torch's fused kernel, which saves no matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from dynswap_ext._util.memory import KEPT_OF_BOUND
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.predict import Prediction

#: What a step trains: all weights, or adapters over weights that are frozen.
Trains = Literal["full", "adapter"]
#: Compute of a backward pass, relative to the forward: frozen weights get no gradients.
_BACKWARD: Final[dict[str, float]] = {"full": 2.0, "adapter": 1.0}
#: The bounds that are listed, as shares of what is saved.
_BOUNDS: Final = (0.5, 0.25, 0.1)


@dataclass(frozen=True)
class SavedTensors:
    """What a training step saves for backward, in bytes."""

    #: All of it.
    nbytes: int
    #: What is left if each of the repeated layers is checkpointed: their inputs, and what lies outside them.
    checkpointed_bytes: int
    #: What one of the repeated layers saves, which it does again in backward if it is checkpointed.
    layer_bytes: int
    #: The largest tensor: beside three quarters of a bound, it is on the device as a whole.
    largest_bytes: int
    #: The number of the repeated layers.
    layers: int


@dataclass(frozen=True)
class TrainingStep:
    """Memory and time of a training step with one way to keep what is saved."""

    #: "all stays", "activations=", "checkpointing", or "checkpointing, activations=".
    way: str
    #: The option `activations` in bytes; None: what is saved stays.
    bound: int | None
    #: Most bytes of saved tensors on the device.
    peak_bytes: int
    #: Bytes that are copied to the host, and as many back.
    moved_bytes: int
    #: Seconds of a step if copies and compute overlap as far as they can.
    seconds: float


def saved_for_backward(
    make: Callable[[], nn.Module], *, batch: int = 1, tokens: int, trains: Trains = "full"
) -> SavedTensors:
    """Return what the loss of a causal language model saves: Note [A step on fake tensors].

    Parameters
    ----------
    make
        Returns the model, such as ``lambda: make_causal_model(path)``. It is called with `input_ids` and
        `labels`, as those of transformers are.
    batch, tokens
        The rows of a step, and the tokens of a row.
    trains
        "full", or "adapter": weights are frozen, and gradients flow through the activations alone. What the
        adapter itself saves, the inputs of its layers, is not counted.

    Raises
    ------
    ConfigError
        The call fails. The message has the error.
    """
    storages: dict[int, int] = {}
    given: dict[int, int] = {}
    inside: list[set[int]] = []
    kept: list[torch.Tensor] = []  # so that no storage takes the place of another
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make().train()
        own = {master.untyped_storage()._cdata for master in (*model.parameters(), *model.buffers())}
        if trains == "adapter":
            model.requires_grad_(False)
            table: Any = model.get_input_embeddings()  # type: ignore[operator]
            table.register_forward_hook(lambda *call: call[-1].requires_grad_())

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages.setdefault(storage._cdata, storage.nbytes())
                kept.append(tensor)
            return tensor

        def begins(layer: nn.Module, arguments: Any, keywords: Any) -> None:
            inside.append(set(storages))
            for value in tree_iter((arguments, keywords)):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    given[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
                    kept.append(value)

        def ends(layer: nn.Module, *_: Any) -> None:
            inside[-1] = set(storages) - inside[-1]

        repeated = _repeated(model)
        for layer in repeated:
            layer.register_forward_pre_hook(begins, with_kwargs=True)
            layer.register_forward_hook(ends)
        rows = torch.zeros(batch, tokens, dtype=torch.int64)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(input_ids=rows, labels=rows)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"a step of {type(model).__name__} cannot be outlined without computing it "
                f"({type(error).__name__}: {text}); train it with activations=, and read handle.report()"
            ) from error
    again = set[int]().union(*inside)
    left = {key: size for key, size in storages.items() if key not in again} | given
    of_layers = sum(storages[key] for key in again)
    return SavedTensors(
        nbytes=sum(storages.values()),
        checkpointed_bytes=sum(left.values()),
        layer_bytes=of_layers // len(repeated) if repeated else 0,
        largest_bytes=max(storages.values(), default=0),
        layers=len(repeated),
    )


def training_steps(
    saved: SavedTensors, weights: Prediction, *, bandwidth: float, trains: Trains = "full"
) -> list[TrainingStep]:
    """Return memory and time of a step for each way to keep what is saved.

    In forward, weights come in while saved tensors go out, over one bus in both directions; in backward both
    come in. Each phase takes at least its compute, and at least its copies: that is the time, as if both
    overlapped perfectly. With checkpointing, streamed weights are counted twice in backward.

    Parameters
    ----------
    saved
        What a step saves.
    weights
        The prediction of a forward with the same rows, at the budget for weights.
    bandwidth
        Bytes per second of copies, in either direction.
    trains
        As for `saved_for_backward`.
    """

    def seconds(moved: int, again: bool) -> float:
        forward = weights.compute_seconds
        backward = (_BACKWARD[trains] + again) * forward
        out, back = weights.moved_bytes, (1 + again) * weights.moved_bytes + moved
        return max(forward, out / bandwidth, moved / bandwidth) + max(backward, back / bandwidth)

    def step(way: str, nbytes: int, share: float | None, again: bool = False) -> TrainingStep:
        one_layer = saved.layer_bytes if again else 0
        if share is None:
            return TrainingStep(way, None, nbytes + one_layer, 0, seconds(0, again))
        bound = round(nbytes * share)
        kept = round(KEPT_OF_BOUND * bound)
        peak = min(nbytes, kept + max(bound - kept, saved.largest_bytes)) + one_layer
        return TrainingStep(way, bound, peak, nbytes - kept, seconds(nbytes - kept, again))

    rows = [step("all stays", saved.nbytes, None)]
    rows += [step("activations=", saved.nbytes, share) for share in _BOUNDS]
    if saved.layers:
        rows.append(step("checkpointing", saved.checkpointed_bytes, None, again=True))
        rows.append(step("checkpointing, activations=", saved.checkpointed_bytes, _BOUNDS[-1], again=True))
    return rows


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Return the layers that programs checkpoint: the longest list of modules of one class."""
    lists = [
        list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    equal = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return max(equal, key=len, default=[])
