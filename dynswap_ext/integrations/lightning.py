"""Lets a `Trainer` of Lightning install the module that it would move to the device.

Note [In place of the move]
---------------------------
A strategy moves the module once `configure_model` has made its last layers and a checkpoint was read into
them. No hook of a callback is called in between, so the callback has the strategy's own `model_to_device`
install the module first. The move that follows finds a module that computes there already: it leaves the
masters where they are, and moves tensors that are no masters, such as the state of a metric.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from dynswap_ext import config
from dynswap_ext.errors import ConfigError
from dynswap_ext.handle import Handle
from dynswap_ext.install import install
from dynswap_ext.integrations.install_options import install_options

__all__ = ["DynswapCallback"]

#: They make layers whose weights are quantised, or cached in another dtype, on the device.
_MAKE_LAYERS: Final = (BitsandbytesPrecision, TransformerEnginePrecision)
#: Methods of the strategy that stand in for its own during a run.
_REPLACED: Final = ("model_to_device", "tensor_init_context")


class DynswapCallback(Callback):  # type: ignore[misc]
    """Installs the module that a `Trainer` runs: ``Trainer(callbacks=[DynswapCallback(budget="6GiB")])``.

    `fit`, `validate`, `test` and `predict` install it where they would move it to the device, and uninstall
    it when they end, also with an error. Masters stay where they are. Optimizers, their state and checkpoints
    are those of the masters (the tensors that the module owns).

    Parameters
    ----------
    **options
        The options of `dynswap_ext.install`, but for `device`. `budget` is ``"auto"`` unless it, or a `plan`,
        is given.
    """

    def __init__(self, **options: Any) -> None:
        if "device" in options:
            raise TypeError("DynswapCallback() takes no device: Trainer(accelerator=, devices=) says where")
        self._options = install_options("DynswapCallback", options, without=["device"])
        #: The handle of the present run, or of the latest one, whose figures it still has.
        self.handle: Handle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the strategy install the module, where it would move it: Note [In place of the move]."""
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"DynswapCallback is for the Trainer of lightning, and this one is that of "
                f"{type(trainer).__module__.partition('.')[0]}; import lightning.pytorch in its place"
            )
        if next(each for each in trainer.callbacks if isinstance(each, DynswapCallback)) is not self:
            return  # the program's own comes before that of `from_environment`
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy):
            raise ConfigError(
                f"DynswapCallback needs one device, and this Trainer's strategy is {type(strategy).__name__} "
                f"over {trainer.world_size} device(s); pass Trainer(devices=1) and no strategy, or leave "
                "the callback out"
            )
        if isinstance(strategy.precision_plugin, _MAKE_LAYERS):
            raise ConfigError(
                f"{type(strategy.precision_plugin).__name__} makes layers whose weights have to be moved to "
                "the device, which weights that stream are not; leave it out, or leave DynswapCallback out"
            )
        move, make = strategy.model_to_device, strategy.tensor_init_context

        def install_and_move() -> None:
            self.handle = install(pl_module, device=strategy.root_device, **self._options)
            move()

        @contextmanager
        def make_on_host(empty_init: bool | None = None) -> Iterator[None]:
            with make(empty_init), torch.device("cpu"):
                yield

        vars(strategy).update(zip(_REPLACED, (install_and_move, make_on_host), strict=True))

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure again, as training needs more memory than the validation batches that came first."""
        if self.handle is not None and self.handle.automatic:
            self.handle.retune()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the optimizers' state back to the masters' device, from where Lightning has moved it."""
        for optimizer in trainer.optimizers:
            for master, state in optimizer.state.items():
                if isinstance(state, MutableMapping):
                    state.update(
                        (name, move_data_to_device(value, master.device))
                        for name, value in list(state.items())
                        if name != "step"  # which Lightning leaves, too
                    )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Uninstall the module."""
        for name in _REPLACED:
            vars(trainer.strategy).pop(name, None)
        if self.handle is not None:
            self.handle.uninstall()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Uninstall the module here, because Lightning does not call `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")


def from_environment() -> list[DynswapCallback]:
    """Return the callback that ``DYNSWAP_LIGHTNING`` asks for, for Lightning's entry point."""
    budget = config.lightning_budget()
    return [] if budget is None else [DynswapCallback(budget=budget)]
