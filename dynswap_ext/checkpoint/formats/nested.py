"""Which part of what was saved is the model's state dict: people save it beside an optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynswap_ext.checkpoint.formats.common import shown
from dynswap_ext.errors import SourceError

#: {"app": {"model": state_dict, ...}} is as deep as people nest it. Deeper there are the dicts of optimizers.
_DEPTH = 2


def find_state_dict(
    path: Path, content: object, dimensions: Callable[[object], int | None]
) -> dict[str, Any]:
    """The state dict in `content`: the whole, or the one dict in it that is one, or its own tensors.

    Parameters
    ----------
    path
        For the errors.
    content
        What was saved.
    dimensions
        The number of dimensions of a tensor; None for what is no tensor.

    Raises
    ------
    SourceError
        There is none, or more than one. Names them.
    """
    if not isinstance(content, dict):
        raise _none(path, content)
    if _is_state_dict(content, dimensions):
        return content
    found = list(_inner(content, dimensions))
    # Counters are saved as tensors too, {"step": tensor(3)}: weights have dimensions.
    weights = [candidate for candidate in found if _has_weights(candidate.state, dimensions)]
    own = {key: value for key, value in content.items() if _belongs(key, value, dimensions)}
    if not weights and _has_weights(own, dimensions):
        return own
    nearest = [one for one in weights or found if one.depth == (weights or found)[0].depth]
    if len(nearest) == 1:
        return nearest[0].state
    if nearest:
        raise SourceError(
            f"{path} has {len(nearest)} state dicts ({', '.join(one.name for one in nearest)}), and which is "
            "meant is unclear: save the one that is meant alone, as the file or folder is saved now"
        )
    raise _none(path, content)


@dataclass(frozen=True)
class _Candidate:
    name: str
    depth: int
    state: dict[str, Any]


def _inner(content: dict[Any, Any], dimensions: Callable[[object], int | None]) -> Iterator[_Candidate]:
    """The state dicts in `content`, the nearest first."""
    level: dict[str, dict[Any, Any]] = {"": content}
    for depth in range(1, _DEPTH + 1):
        level = {
            f"{prefix}.{key}" if prefix else f"{key}": value
            for prefix, outer in level.items()
            for key, value in outer.items()
            if isinstance(value, dict) and value
        }
        for name, value in level.items():
            if _is_state_dict(value, dimensions):
                yield _Candidate(name, depth, value)


def build(tree: Any, value: Callable[[Any], Any]) -> Any:
    """A tree of dicts with its leaves' values, and lists where the keys are indexes."""
    if not isinstance(tree, dict):
        return value(tree)
    if tree and all(isinstance(key, int) for key in tree):
        return [build(tree[key], value) for key in sorted(tree)]
    return {key: build(inner, value) for key, inner in tree.items()}


def _is_state_dict(value: object, dimensions: Callable[[object], int | None]) -> bool:
    return isinstance(value, dict) and all(_belongs(key, entry, dimensions) for key, entry in value.items())


def _belongs(key: object, value: object, dimensions: Callable[[object], int | None]) -> bool:
    return isinstance(key, str) and (key.endswith("_extra_state") or dimensions(value) is not None)


def _has_weights(state: Mapping[str, Any], dimensions: Callable[[object], int | None]) -> bool:
    return any(dimensions(value) for value in state.values())


def _none(path: Path, content: object) -> SourceError:
    holds = f"a {type(content).__name__}"
    if isinstance(content, dict) and content:
        holds += f" with {', '.join(shown(key) for key in list(content)[:5])}"
    return SourceError(
        f"{path} has no state dict (it holds {holds}); save the weights with "
        "torch.save(model.state_dict(), path)"
    )
