"""Run PyTorch models that do not fit the device, by streaming their weights.

Examples
--------
>>> handle = dynswap_ext.install(model, device="cuda", budget="6GiB")  # doctest: +SKIP
>>> y = model(x)                                                       # doctest: +SKIP
>>> dynswap_ext.uninstall(model)                                       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynswap_ext import integrations  # noqa: F401  (registers the libraries that installs have to know)
from dynswap_ext._provider import BackendInfo, backend_info
from dynswap_ext._saved_plan import Tuning
from dynswap_ext._version import __version__
from dynswap_ext.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    DynswapError,
    DynswapWarning,
    OutOfMemoryError,
    ShortfallError,
    SourceError,
)
from dynswap_ext.handle import Handle
from dynswap_ext.install import handle_of, install, is_installed, uninstall
from dynswap_ext.profile.stats import Stats

if TYPE_CHECKING:
    from dynswap_ext import checkpoint, inspect, testing
    from dynswap_ext.activations import ActivationOffloading, offload_activations
    from dynswap_ext.device_map import Handles, install_by_device
    from dynswap_ext.integrations.transformers import StreamConfig
    from dynswap_ext.sharing import SharedMasters, share_masters

__all__ = [
    "ActivationOffloading",
    "BackendInfo",
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "DynswapError",
    "DynswapWarning",
    "Handle",
    "Handles",
    "OutOfMemoryError",
    "SharedMasters",
    "ShortfallError",
    "SourceError",
    "Stats",
    "StreamConfig",
    "Tuning",
    "__version__",
    "backend_info",
    "checkpoint",
    "handle_of",
    "inspect",
    "install",
    "install_by_device",
    "is_installed",
    "offload_activations",
    "share_masters",
    "testing",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import submodules and `StreamConfig` when they are first used: most programs need few of them."""
    import importlib

    if name in ("checkpoint", "inspect", "testing"):
        return importlib.import_module(f".{name}", __name__)
    if name in ("ActivationOffloading", "offload_activations"):
        return getattr(importlib.import_module(".activations", __name__), name)
    if name in ("Handles", "install_by_device"):
        return getattr(importlib.import_module(".device_map", __name__), name)
    if name in ("SharedMasters", "share_masters"):
        return getattr(importlib.import_module(".sharing", __name__), name)
    if name == "StreamConfig":
        try:
            return importlib.import_module(".integrations.transformers", __name__).StreamConfig
        except ModuleNotFoundError as error:
            raise ImportError(
                f"StreamConfig needs transformers ({error}): pip install 'dynswap-ext[transformers]'"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
