"""Which part of what was saved is the model's state dict: people save it together with an optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynswap_ext.checkpoint.formats.common import shown
from dynswap_ext.errors import SourceError

#: {"app": {"model": state_dict, ...}} is as deep as people nest it. Deeper there are the dicts of optimizers.
_DEPTH = 2


def find_state_dict(
    path: Path, content: object, dimensions: Callable[[object], int | None]
) -> dict[str, Any]:
    """Return the state dict in `content`: the whole, or the one dict in it that is one, or its own tensors.

    `dimensions` gives the number of dimensions of a tensor, and None for what is no tensor.

    Raises
    ------
    SourceError
        There is none, or more than one. Names them.
    """

    def belongs(key: object, value: object) -> bool:
        return isinstance(key, str) and (key.endswith("_extra_state") or dimensions(value) is not None)

    def has_weights(state: Mapping[Any, Any]) -> bool:
        # Counters are saved as tensors too, {"step": tensor(3)}: weights have dimensions.
        return any(dimensions(value) for value in state.values())

    own: dict[str, Any] = content if isinstance(content, dict) else {}
    levels: list[dict[str, dict[str, Any]]] = []  # the state dicts at each depth, by name
    dicts = {"": own}
    for _ in range(_DEPTH + 1):
        whole = {name: value for name, value in dicts.items() if all(map(belongs, value, value.values()))}
        levels.append(whole)
        dicts = {
            f"{name}.{key}" if name else f"{key}": inner
            for name, value in dicts.items()
            for key, inner in value.items()
            if isinstance(inner, dict) and inner
        }
    if isinstance(content, dict) and levels[0]:
        return own
    with_weights = [{n: state for n, state in level.items() if has_weights(state)} for level in levels[1:]]
    tensors = {key: value for key, value in own.items() if belongs(key, value)}
    if not any(with_weights) and has_weights(tensors):
        return tensors
    nearest = next(filter(None, [*with_weights, *levels[1:]]), {})
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
