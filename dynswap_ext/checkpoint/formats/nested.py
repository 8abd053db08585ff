"""Which part of what was saved is the model's state dict: people save it together with an optimizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynswap_ext.checkpoint.formats.common import shown
from dynswap_ext.errors import SourceError

#: {"app": {"model": state_dict, ...}} is as deep as people nest it. Deeper there are the dicts of optimizers.
_DEPTH = 2


def find_state_dict(path: Path, content: object, tensor: type[Any]) -> dict[str, Any]:
    """Return the state dict in `content`: the whole, or the one dict in it that is one, or its own tensors.

    `tensor` is the type of what has a tensor's `shape` in it.

    Raises
    ------
    SourceError
        There is none, or more than one. Names them.
    """

    def belongs(key: object, value: object) -> bool:
        return isinstance(key, str) and (key.endswith("_extra_state") or isinstance(value, tensor))

    def has_weights(state: dict[Any, Any]) -> bool:
        # Counters are saved as tensors too, {"step": tensor(3)}: weights have dimensions.
        return any(isinstance(value, tensor) and len(value.shape) for value in state.values())

    own: dict[str, Any] = content if isinstance(content, dict) else {}
    tensors = {key: value for key, value in own.items() if belongs(key, value)}
    if isinstance(content, dict) and len(tensors) == len(own):
        return own
    levels: list[dict[str, dict[str, Any]]] = []  # the state dicts at each depth, by name
    dicts = {"": own}
    for _ in range(_DEPTH):
        dicts = {
            f"{name}.{key}" if name else f"{key}": inner
            for name, value in dicts.items()
            for key, inner in value.items()
            if isinstance(inner, dict) and inner
        }
        levels.append(
            {name: state for name, state in dicts.items() if all(map(belongs, state, state.values()))}
        )
    with_weights = [{name: state for name, state in level.items() if has_weights(state)} for level in levels]
    if not any(with_weights) and has_weights(tensors):
        return tensors
    nearest = next(filter(None, [*with_weights, *levels]), {})
    if len(nearest) == 1:
        return next(iter(nearest.values()))
    if nearest:
        raise SourceError(
            f"{path} has {len(nearest)} state dicts ({', '.join(nearest)}), and which is meant is unclear: "
            "save the one that is meant alone, as the file or folder is saved now"
        )
    holds = f" with {', '.join(shown(key) for key in list(own)[:5])}" if own else ""
    raise SourceError(
        f"{path} has no state dict (it holds a {type(content).__name__}{holds}); save the weights with "
        "torch.save(model.state_dict(), path)"
    )
