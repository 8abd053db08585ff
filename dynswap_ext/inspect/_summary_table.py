"""A summary as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynswap_ext._memory import format_bytes
from dynswap_ext.inspect import _text

if TYPE_CHECKING:
    from dynswap_ext.inspect._where import Weight
    from dynswap_ext.inspect.summary import Layer, Summary

__all__ = ["parts"]

#: Places that a row names before it only counts them.
_NAMED = 2


def parts(found: Summary) -> tuple[Any, Any]:
    """The table, and what stands below it."""
    ran = any(layer.calls is not None for layer in found.layers)
    shown = [i for i, layer in enumerate(found.layers) if found.depth is None or layer.depth <= found.depth]
    frozen = found.frozen_parameters > 0
    columns = [
        "layer",
        *(["output"] if ran else []),
        "parameters",
        "bytes",
        *(["trains"] if frozen else []),
        "lives",
    ]
    rows = []
    for index in shown:
        layer = found.layers[index]
        under = _under(found, index)
        closed = len(under) == 1 or layer.depth == found.depth
        weights = _weights(under if closed else under[:1])
        rows.append(
            [
                _name(layer),
                *([_output(layer, under)] if ran else []),
                *_amounts(layer, weights),
                *([_trains(weights)] if frozen else []),
                _lives(weights),
            ]
        )
    return _text.table(columns, rows, right=("parameters", "bytes")), _text.facts(_totals(found))


def _under(found: Summary, index: int) -> tuple[Layer, ...]:
    """A layer and those below it, which follow it."""
    end = index + 1
    while end < len(found.layers) and found.layers[end].depth > found.layers[index].depth:
        end += 1
    return found.layers[index:end]


def _weights(under: tuple[Layer, ...]) -> list[Weight]:
    """None of a module that comes again: they are told where it comes first."""
    if under[0].same_as is not None:
        return []
    return [weight for part in under for weight in part.weights]


def _name(layer: Layer) -> str:
    last = layer.path.rpartition(".")[2]
    text = f"{last}: {layer.class_name}" if layer.path else layer.class_name
    return "  " * layer.depth + text


def _output(layer: Layer, under: tuple[Layer, ...]) -> str:
    if layer.same_as is not None:
        return ""
    if not layer.calls:
        return "" if any(part.calls for part in under) or layer.calls is None else "not called"
    if layer.output_shapes is None:
        return ""
    text = ", ".join(_text.shape(sizes) for sizes in layer.output_shapes)
    return f"{text} ({layer.calls} calls)" if layer.calls > 1 else text


def _amounts(layer: Layer, weights: list[Weight]) -> tuple[str, str]:
    if layer.same_as is not None:
        return f"(as {layer.same_as or 'the model'})", ""
    if not weights:
        return "", ""
    once = {weight.tied_to or weight.name: weight for weight in weights}.values()
    if any(weight.shape is None for weight in once):
        return "not made yet", ""
    tied = ", ".join(sorted({weight.tied_to for weight in weights if weight.tied_to}))
    count = sum(weight.elements for weight in once if weight.is_parameter)
    size = format_bytes(sum(weight.nbytes for weight in once))
    if tied and all(weight.tied_to for weight in weights):
        return f"{count:,} (is {tied})", size
    return (f"{count:,}" if any(weight.is_parameter for weight in once) else ""), size


def _trains(weights: list[Weight]) -> str:
    answers = {weight.trainable for weight in weights if weight.is_parameter}
    if not answers:
        return ""
    return "in part" if len(answers) == 2 else "yes" if answers.pop() else "no"


def _lives(weights: list[Weight]) -> str:
    places = list(dict.fromkeys(weight.lives for weight in weights if weight.shape is not None))
    more = [f"{len(places) - _NAMED} more"] if len(places) > _NAMED else []
    return "; ".join([*places[:_NAMED], *more])


def _totals(found: Summary) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{found.total_parameters:,}"),
        ("trainable", f"{found.trainable_parameters:,}"),
        ("frozen", f"{found.frozen_parameters:,}"),
        (
            "bytes",
            f"{format_bytes(found.parameter_bytes)} in parameters, "
            f"{format_bytes(found.buffer_bytes)} in buffers",
        ),
        ("computes on", str(found.device)),
    ]
    rows += [(place, format_bytes(size)) for place, size in found.bytes_by_place.items() if size]
    return rows
