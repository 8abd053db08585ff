"""Makes transformers load models on the host when a program asks it to load them on the device.

Afterwards the model is moved to the device with `Module.to`, which `InstallMoved` watches. With
`device_map="auto"`, transformers would load it there without a move. See Note [A program that nobody edits].
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
#: Values of `device_map` with which transformers spreads a model over all devices.
_SPREAD: Final = ("auto", "balanced", "balanced_low_0", "sequential")
_PATH: Final = "pretrained_model_name_or_path"
#: Arguments of `from_pretrained` that decide which config file it reads.
_OF_A_DOWNLOAD: Final = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class LoadsOnHost(importlib.abc.MetaPathFinder):
    """A context in which transformers loads models on the host, and then moves them to the device.

    It may be imported before or within the context. Models that go to several devices are left alone, and so
    are quantised models, which their quantiser places.
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
        """Find the module of transformers as usual, and have it changed once it has been imported."""
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
    """Return whether a call of `from_pretrained` quantises the model, or the checkpoint is quantised."""
    if options.get("quantization_config") is not None or options.get("gguf_file") is not None:
        return True
    known = options.get("config") or (args[0] if args else options.get(_PATH))
    if isinstance(known, (str, os.PathLike)):
        where = {name: options[name] for name in _OF_A_DOWNLOAD if name in options}
        known, _ = cls.config_class.get_config_dict(known, **where)
        return known.get("quantization_config") is not None
    return getattr(known, "quantization_config", None) is not None


def only_device(device_map: Any) -> torch.device | None:
    """Return the accelerator that a `device_map` puts the whole model on; None if it names no single one."""
    if isinstance(device_map, dict):
        places = set(map(str, device_map.values()))
        device_map = next(iter(device_map.values())) if len(places) == 1 else None
    if device_map is None or device_map == "disk" or not torch.accelerator.is_available():
        return None
    if device_map in _SPREAD:
        return torch.accelerator.current_accelerator() if torch.accelerator.device_count() == 1 else None
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError):  # transformers will raise an error
        return None
    return None if device.type in ("cpu", "meta") else device
