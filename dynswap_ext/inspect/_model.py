"""Lists the modules of a model and their weights, with the place where each is. No weight is copied."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext._swap.state import is_scripted, modules_of, session_of
from dynswap_ext._util.file_mappings import FileMappings, Mapping
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.places import mapping_of, parts_of, stored_bytes
from dynswap_ext.errors import ConfigError


@dataclass(frozen=True)
class WeightLocation:
    """One parameter or buffer of a model, under one of its names, and where it is."""

    #: The name in the whole model, such as "layers.0.weight".
    name: str
    #: The shape; None for a parameter that a lazy module has not made yet.
    shape: tuple[int, ...] | None
    #: The dtype as it is stored.
    dtype: torch.dtype
    #: The number of elements; 0 if it is not made yet.
    elements: int
    #: Bytes as they are stored; of a quantised tensor, those of its parts together.
    nbytes: int
    #: Whether it is a parameter, not a buffer.
    is_parameter: bool
    #: Whether it is a parameter that requires a gradient.
    trainable: bool
    #: The name under which the same tensor comes first in the model; None if this is that name.
    tied_to: str | None
    #: "RAM", "pinned RAM", "shared RAM", "file" (mapped from a file), "device", "meta", or "not made yet".
    place: str
    #: The device on which the tensor is stored.
    device: torch.device
    #: The file that it is mapped from; None for other places, and if the file was deleted or replaced.
    file: Path | None
    #: How an install serves accesses: "resident" (from a copy that stays on the device), "streamed" (it is
    #: copied when it is needed), "in place" (the tensor itself), "converted" (by `.to()` at each access), or
    #: "ignored" (the tensor itself, as `ignore=` asks). None on a plain model.
    served: str | None

    @property
    def lives(self) -> str:
        """Words for the place, and for how accesses are served: "model.safetensors, streamed"."""
        place = self.place
        if place == "file":
            place = "file (gone)" if self.file is None else self.file.name
        elif place == "device":
            place = str(self.device)
        return f"{place}, {self.served}" if self.served else place


class Node(NamedTuple):
    """A place in a tree of modules. A module that is registered twice has two places."""

    #: The path of the place, such as "layers.0"; "" for the root.
    path: str
    #: The number of modules above it: 0 for the root.
    depth: int
    module: nn.Module
    #: The path of the module's first place; None if this is the first.
    same_as: str | None


def root_of(model: object) -> nn.Module:
    """Return a module, or for a wrapper of `torch.compile` the module in it. Raise ConfigError for others."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        inner: nn.Module = model._modules["_orig_mod"]
        return inner
    return model


def walk(root: nn.Module) -> list[Node]:
    """Return every place in the tree, parents before children, in the order of definition.

    A module's children are listed only at its first place, so that a cycle ends.
    """
    found: list[Node] = []
    first: dict[int, str] = {}
    pending = [("", 0, root)]
    while pending:
        path, depth, module = pending.pop()
        known = first.setdefault(id(module), path)
        again = known != path
        found.append(Node(path, depth, module, known if again else None))
        if again or is_scripted(type(module)):  # modules in a scripted one are in C++, and take no hooks
            continue
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        prefix = f"{path}." if path else ""
        pending.extend((prefix + name, depth + 1, child) for name, child in reversed(children))
    return found


def entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name, tensor, and whether it is a parameter, of a module's own parameters and buffers.

    Of a TorchScript module, those of the modules below it are included.
    """
    if is_scripted(type(module)):
        yield from ((name, tensor, True) for name, tensor in module.named_parameters())
        yield from ((name, tensor, False) for name, tensor in module.named_buffers())
    else:
        yield from own_masters(module)


def computes_on(root: nn.Module) -> torch.device:
    """Return the device of the model's install, else that of its first weight, else the CPU."""
    modules = modules_of(root)
    installed = (session.device for module in modules if (session := session_of(module)))
    masters = (master.device for module in modules for _, master, _ in entries(module))
    return next(installed, None) or next(masters, torch.device("cpu"))


def weights_of(nodes: Iterable[Node]) -> dict[int, list[WeightLocation]]:
    """Return the weights of a tree as they are now: each module's own, by the module's id."""
    first: dict[int, tuple[str, torch.Tensor]] = {}  # has the master, so that its id stays its own
    mappings = FileMappings()
    found: dict[int, list[WeightLocation]] = {}
    for path, _, module, same_as in nodes:
        if same_as is not None:
            continue
        session = session_of(module)
        services = {} if session is None else session.services(module)
        found[id(module)] = own = []
        for name, master, is_parameter in entries(module):
            full = f"{path}.{name}" if path else name
            first_name, _ = first.setdefault(id(master), (full, master))
            made = not isinstance(master, UninitializedTensorMixin)
            mapping = mapping_of(master, mappings) if made else None
            own.append(
                WeightLocation(
                    name=full,
                    shape=tuple(master.shape) if made else None,
                    dtype=master.dtype,
                    elements=master.numel() if made else 0,
                    nbytes=stored_bytes(master) if made else 0,
                    is_parameter=is_parameter,
                    trainable=is_parameter and master.requires_grad,
                    tied_to=None if first_name == full else first_name,
                    place=_place(master, mapping) if made else "not made yet",
                    device=master.device,
                    file=mapping.path if mapping else None,
                    served=services.get(name),
                )
            )
    return found


def _place(master: torch.Tensor, mapping: Mapping | None) -> str:
    if master.device.type != "cpu":
        return "meta" if master.device.type == "meta" else "device"
    if mapping is not None:
        return "file"
    part = next(parts_of(master), master)
    try:
        if part.is_pinned():
            return "pinned RAM"
        return "shared RAM" if part.is_shared() else "RAM"  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return "RAM"  # a subclass of Tensor that has no address
