"""A drop-in replacement for the `DynamicSwapInstaller` of FramePack and Forge.

Examples
--------
>>> from dynswap_ext.compat import DynamicSwapInstaller
>>> DynamicSwapInstaller.install_model(model, device="cuda")  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dynswap_ext import config
from dynswap_ext._installation import lock
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext.errors import ConfigError
from dynswap_ext.handle import Handle
from dynswap_ext.install import install_with, uninstall

__all__ = ["DynamicSwapInstaller"]


class DynamicSwapInstaller:
    """A drop-in replacement for FramePack's and Forge's class of this name, built on `dynswap_ext.install`.

    While a module is installed through this class, the ``__name__`` of its class begins with
    ``DynamicSwap_`` and it has an attribute ``forge_backup_original_class``, because programs look at both.
    ``__qualname__`` and ``__module__`` are those of the original class.
    """

    @staticmethod
    def install_model(
        model: nn.Module, target_device: torch.device | str | int | None = None, **kwargs: Any
    ) -> Handle:
        """Install the model, or give an installed one other settings.

        Parameters
        ----------
        model : torch.nn.Module
            Its weights stay where they are.
        target_device : torch.device, str or int, optional
            The device on which the model computes. Forge gives it this name.
        **kwargs
            ``device``, FramePack's name for `target_device`, and every other option of `dynswap_ext.install`.
            ``non_blocking``, which FramePack passes on to ``Tensor.to``, has no effect: copies run ahead of
            the compute anyway.

        Returns
        -------
        Handle
            The handle of the install. Programs may ignore it: the method that this one replaces returns None.

        Raises
        ------
        ConfigError
            An option is unknown, or has a value that cannot be used. The model stays as it was.
        """
        options = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        unknown = sorted(set(options).difference(config.OPTION_NAMES))
        if unknown:
            raise ConfigError(
                f"DynamicSwapInstaller does not know {', '.join(map(repr, unknown))}; expected target_device "
                f"or one of {', '.join(config.OPTION_NAMES)}{did_you_mean(unknown[0], config.OPTION_NAMES)}"
            )
        if target_device is not None and options.setdefault("device", target_device) is not target_device:
            raise ConfigError(
                f"both target_device ({target_device!r}) and device ({options['device']!r}) are given; they "
                "are two names of one option"
            )
        return install_with(model, config.resolve(**options), _naming)

    @staticmethod
    def uninstall_model(model: nn.Module) -> None:
        """Give every module of the tree its own class back, however it was installed."""
        uninstall(model)

    @staticmethod
    def _install_module(
        module: nn.Module, target_device: torch.device | str | int | None = None, **kwargs: Any
    ) -> Handle:
        """Install this module without its children, as an install with its own budget."""
        with _childless(module):
            return DynamicSwapInstaller.install_model(module, target_device, **kwargs)

    @staticmethod
    def _uninstall_module(module: nn.Module) -> None:
        """Uninstall this module; its children stay as they are."""
        with _childless(module):
            uninstall(module)


def _naming(original: type) -> tuple[str, dict[str, Any]]:
    # Programs that use this class move a part of the model to the device in order to keep it there. So such a
    # move has its usual effect here.
    shown = {"forge_backup_original_class": original, "_dynswap_stays": False}
    return f"DynamicSwap_{original.__name__}", shown


@contextlib.contextmanager
def _childless(module: nn.Module) -> Iterator[None]:
    """Hide a module's children, so that functions for trees work on the module alone."""
    with lock:  # so that no install of another thread finds the module without its children
        held = vars(module)
        children = held["_modules"]
        held["_modules"] = {}
        try:
            yield
        finally:
            held["_modules"] = children
