"""Lets a `Trainer` of Lightning install the module that it would move to the device.

Note [In place of the move]
---------------------------
A strategy moves the module to the device after `configure_model` has made its last layers, and a checkpoint
was read into them. No hook of a callback is called in between. So the callback replaces the strategy's
`model_to_device`: the module is installed first, and then moved. The move finds a module that computes on the
device already. It leaves the masters where they are, and moves other tensors, such as the state of a metric.
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

#: Precision plugins that make layers whose weights are quantised, or cached in another dtype, on the device.
_MAKE_LAYERS: Final = (BitsandbytesPrecision, TransformerEnginePrecision)
#: Methods of the strategy that the callback replaces during a run.
_REPLACED: Final = ("model_to_device", "tensor_init_context")


class DynswapCallback(Callback):  # type: ignore[misc]
    """Installs the module that a `Trainer` runs: ``Trainer(callbacks=[DynswapCallback(budget="6GiB")])``.

    `fit`, `validate`, `test` and `predict` install the module when they would move it to the device, and
    uninstall it when they end, also with an error. Masters (the tensors that the module owns) stay where they
    are. Optimizers and checkpoints refer to the masters.

    Parameters
    ----------
    **options
        The options of `dynswap_ext.install` except `device`. If neither `budget` nor `plan` is given, the
        budget is ``"auto"``.
    """

    def __init__(self, **options: Any) -> None:
        if "device" in options:
            raise TypeError("DynswapCallback() takes no device: Trainer(accelerator=, devices=) says where")
        self._options = install_options("DynswapCallback", options, without=["device"])
        #: The handle of the present run. After a run it still has the figures.
        self.handle: Handle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace methods of the strategy, so that it installs the module: Note [In place of the move]."""
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"DynswapCallback is for the Trainer of lightning, and this one is that of "
                f"{type(trainer).__module__.partition('.')[0]}; import lightning.pytorch in its place"
            )
        if next(each for each in trainer.callbacks if isinstance(each, DynswapCallback)) is not self:
            return  # a callback of the program itself comes before the one of `from_environment`
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
        """Measure activations again, as training needs more memory than the validation batches before it."""
        if self.handle is not None and self.handle.automatic:
            self.handle.retune()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the optimizers' state back to the masters, as Lightning has moved it to the compute device."""
        for optimizer in trainer.optimizers:
            for master, state in optimizer.state.items():
                if isinstance(state, MutableMapping):
                    state.update(
                        (name, move_data_to_device(value, master.device))
                        for name, value in list(state.items())
                        if name != "step"  # Lightning does not move it
                    )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Uninstall the module, and give the strategy its own methods back."""
        for name in _REPLACED:
            vars(trainer.strategy).pop(name, None)
        if self.handle is not None:
            self.handle.uninstall()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Uninstall the module here, because Lightning does not call `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")


def from_environment() -> list[DynswapCallback]:
    """Return a callback for the budget in ``DYNSWAP_LIGHTNING``, if it is set. Lightning calls this."""
    budget = config.lightning_budget()
    return [] if budget is None else [DynswapCallback(budget=budget)]
