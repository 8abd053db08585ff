"""Makes transformers load models on the host that a program asks it to load on the device.

The model is then moved to the device as a program would move it, which `InstallMoved` sees. With
`device_map="auto"` and its like, it would not see a move. A part of Note [A program that nobody edits].
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch

from dynswap_ext.checkpoint.loading.assembly import MappedFusion

_LOADER: Final = "transformers.modeling_utils"
#: By these, the library spreads a model over the devices that there are.
_SPREAD: Final = ("auto", "balanced", "balanced_low_0", "sequential")
_PATH: Final = "pretrained_model_name_or_path"
#: Arguments of `from_pretrained` that say which config it reads.
_OF_A_DOWNLOAD: Final = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class LoadsOnHost(importlib.abc.MetaPathFinder):
    """While it is entered, transformers loads models on the host, and moves them as a program would.

    The library may have been imported, or be imported later. Models that are to lie on several devices are
    left alone, and so are quantised ones, whose quantiser places them.
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> LoadsOnHost:
        if _LOADER in sys.modules:
            self._wrap(sys.modules[_LOADER])
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._undo()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Have the library's module changed as soon as it is there."""
        if name != _LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_and_wrap(module: ModuleType) -> None:
                run(module)
                self._wrap(module)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: Any) -> None:
        cls = module.PreTrainedModel
        original = cls.__dict__["from_pretrained"]
        load = original.__func__

        @functools.wraps(load)
        def from_pretrained(cls: type, *args: Any, **options: Any) -> Any:
            device = only_device(options.get("device_map"))
            if device is None or _is_quantised(cls, args, options):
                return load(cls, *args, **options)
            with MappedFusion():
                loaded = load(cls, *args, **{**options, "device_map": None})
            (loaded[0] if isinstance(loaded, tuple) else loaded).to(device)
            return loaded

        cls.from_pretrained = classmethod(from_pretrained)
        self._undo = lambda: setattr(cls, "from_pretrained", original)


def _is_quantised(cls: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether the call quantises the model, or its checkpoint is quantised."""
    if options.get("quantization_config") is not None or options.get("gguf_file") is not None:
        return True
    known = options.get("config") or (args[0] if args else options.get(_PATH))
    if isinstance(known, (str, os.PathLike)):
        where = {name: options[name] for name in _OF_A_DOWNLOAD if name in options}
        known, _ = cls.config_class.get_config_dict(known, **where)
        return known.get("quantization_config") is not None
    return getattr(known, "quantization_config", None) is not None


def only_device(device_map: Any) -> torch.device | None:
    """Return the accelerator that a `device_map` means; None if there are several, or none."""
    if isinstance(device_map, dict):
        places = set(map(str, device_map.values()))
        device_map = next(iter(device_map.values())) if len(places) == 1 else None
    if device_map is None or device_map == "disk" or not torch.accelerator.is_available():
        return None
    if device_map in _SPREAD:
        return torch.accelerator.current_accelerator() if torch.accelerator.device_count() == 1 else None
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError):  # the library says what is wrong
        return None
    return None if device.type in ("cpu", "meta") else device
