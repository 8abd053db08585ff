"""What the keys of a device map name, and the device that each module has by it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

from dynswap_ext._swap.state import named_modules_of
from dynswap_ext._util.listing import listed
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError

#: A word of a key that stands for numbers: "0-15", or "16-*".
_NUMBERS: Final = re.compile(r"(\d+)-(\d+|\*)")


def by_first_path(model: nn.Module, devices: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Return the devices with the first path of a module for each key that is another path of it."""
    paths = {module: path for path, module in named_modules_of(model)}
    found: dict[str, tuple[str, torch.device]] = {}
    for key, device in devices.items():
        try:
            path = paths.get(model.get_submodule(key), key)
        except AttributeError:  # a pattern, or a weight
            path = key
        other = found.setdefault(path, (key, device))
        if other[1] != device:
            raise ConfigError(
                f"device_map has '{other[1]}' for {other[0]!r} and '{device}' for {key!r}, which are the "
                "same module; expected one device for it"
            )
    return {path: device for path, (_, device) in found.items()}


def homes_of(model: nn.Module, devices: Mapping[str, torch.device]) -> dict[nn.Module, torch.device]:
    """Return the device of each module that has one."""
    homes: dict[nn.Module, torch.device] = {}
    inherited: dict[str, torch.device | None] = {}
    used: set[str] = set()
    homes_by_path: list[str] = []
    homeless = []
    for path, module in named_modules_of(model):  # parents before children
        above = inherited[path.rpartition(".")[0]] if path else None
        inherited[path] = home = _given(path, devices, used) or above
        names = [f"{path}.{name}" if path else name for name, _, _ in own_masters(module)]
        places = {name: _given(name, devices, used) or home for name in names}  # a weight may have a key
        if None in places.values():
            homeless += [path] if path else [name for name, place in places.items() if place is None]
            continue
        for name in names[1:]:
            if places[name] != places[names[0]]:
                raise ConfigError(
                    f"{names[0]!r} is on {places[names[0]]} and {name!r} on {places[name]}, and one module "
                    "has both; expected the weights of a module on one device"
                )
        if (device := places[names[0]] if names else home) is not None:
            homes[module] = device
            homes_by_path.append(path)
    for key in devices:
        if key not in used:
            hint = _numbers_there(key, inherited) or did_you_mean(key, list(inherited))
            raise ConfigError(f"device_map has {key!r}, which names no module of the model{hint}")
    if homeless:
        missing = _whole_modules(homeless, inherited, homes_by_path)
        raise ConfigError(
            f"device_map has no device for {listed(missing)}; expected a key for each module that has "
            f"weights or buffers, or for one around it. Add {missing[0]!r}"
        )
    return homes


def _whole_modules(homeless: list[str], paths: Collection[str], with_home: Collection[str]) -> list[str]:
    """Return the outermost modules in which nothing has a device, for the paths of all that have none."""
    taken = {above for path in with_home for above in _above(path)}
    found = dict.fromkeys(
        next((above for above in _above(path) if above in paths and above not in taken), path)
        for path in homeless
    )
    return list(found)


def _above(path: str) -> list[str]:
    """Return a path and those of the modules around it, outermost first; without the model itself."""
    words = path.split(".")
    return [".".join(words[: end + 1]) for end in range(len(words))]


def _numbers_there(key: str, paths: Collection[str]) -> str:
    """Return the end of a message about a key with a range of numbers that no module has; else nothing."""
    before, found, _ = next(
        (key.partition(f".{word}") for word in key.split(".") if _NUMBERS.fullmatch(word)), ("", "", "")
    )
    words = [path.removeprefix(f"{before}.") for path in paths if path.startswith(f"{before}.")]
    numbers = [int(word) for word in words if word.isdecimal()]
    return f": {before} has {min(numbers)} to {max(numbers)}" if found and numbers else ""


def _given(path: str, devices: Mapping[str, torch.device], used: set[str]) -> torch.device | None:
    """Return the device of the most exact key that names a module or weight, and note the keys that do."""
    keys = [key for key in devices if names(key, path)]
    used.update(keys)
    fewest = min(map(_globs_and_ranges, keys), default=None)
    best = [key for key in keys if _globs_and_ranges(key) == fewest]
    for key in best[1:]:
        if devices[key] != devices[best[0]]:
            raise ConfigError(
                f"device_map has {best[0]!r} and {key!r} for {path!r}, with different devices; expected one"
            )
    return devices[best[0]] if best else None


def _globs_and_ranges(key: str) -> tuple[int, int]:
    """Return how many words of a key are globs, and how many are ranges: the fewer, the more exact it is."""
    words = key.split(".")
    ranges = [word for word in words if _NUMBERS.fullmatch(word)]
    globs = [word for word in words if any(sign in word for sign in "*?[") and word not in ranges]
    return len(globs), len(ranges)


def names(key: str, path: str) -> bool:
    """Return whether a key matches the whole path of a module or weight."""
    words, keys = path.split("."), key.split(".")
    return len(words) == len(keys) and all(map(_is_of, words, keys))


def _is_of(word: str, key: str) -> bool:
    numbers = _NUMBERS.fullmatch(key)
    if numbers is None:
        return fnmatchcase(word, key)
    first, last = numbers.groups()
    return word.isdecimal() and int(first) <= int(word) and (last == "*" or int(word) <= int(last))
