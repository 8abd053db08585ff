"""Lets transformers' own `from_pretrained` install the model that it loads.

Note [A quantizer that quantises nothing]
-----------------------------------------
While transformers loads a model, one other object can decide what becomes of the weights: a quantizer. So
this is a quantizer, although it quantises nothing. It leaves each weight mapped, as it is in the checkpoint,
and installs the model when it is complete. Then it removes itself from the model, which can be trained and
saved like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynswap_ext import config
from dynswap_ext._util.devices import resolve_device
from dynswap_ext.checkpoint.loading.assembly import MappedFusion
from dynswap_ext.checkpoint.loading.coded_files import coded_files
from dynswap_ext.checkpoint.pretrained import warn_of_copies
from dynswap_ext.errors import ConfigError
from dynswap_ext.install import install
from dynswap_ext.integrations.install_options import install_options
from dynswap_ext.integrations.loaded_models import only_device

__all__ = ["StreamConfig"]

_METHOD: Final = "dynswap"
#: The dtypes that `from_pretrained(dtype=)` may cast, by safetensors' names.
_FLOATING: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@register_quantization_config(_METHOD)
class StreamConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Installs the model that `from_pretrained` loads: ``quantization_config=StreamConfig(budget="6GiB")``.

    Nothing is quantised: transformers has no other argument that lets others take part in a load. Weights are
    mapped from the checkpoint, and stream from there. If the ``dtype=`` of `from_pretrained` is not the
    checkpoint's, they are cast on their way to the device. `dynswap_ext.handle_of` gives the model's handle.

    Parameters
    ----------
    **options
        The options of `dynswap_ext.install` except `dtype`. If neither `budget` nor `plan` is given, the
        budget is ``"auto"``.
    """

    def __init__(self, *, quant_method: str = _METHOD, **options: Any) -> None:
        if "dtype" in options:
            raise TypeError("StreamConfig() takes no dtype: it is an argument of from_pretrained, beside it")
        self.options = install_options("StreamConfig", options, without=["dtype"])
        self.quant_method = quant_method

    def to_dict(self) -> dict[str, Any]:
        """Return the options as values that JSON can hold, for logs and files."""
        plain = {
            name: value if value is None or isinstance(value, (bool, int, float, str, list)) else str(value)
            for name, value in self.options.items()
        }
        return {"quant_method": self.quant_method, **plain}


@register_quantizer(_METHOD)
class StreamQuantizer(HfQuantizer):  # type: ignore[misc]
    """Takes part in one load for a `StreamConfig`: Note [A quantizer that quantises nothing]."""

    def __init__(self, quantization_config: StreamConfig, **_: Any) -> None:
        super().__init__(quantization_config, pre_quantized=True)  # so that `get_new_dtype` is asked
        self._options = quantization_config.options
        self._dtype: torch.dtype | None = None
        self._casts = False
        #: Open during the load. If that fails, it is closed with the quantizer.
        self._files = coded_files()

    def validate_environment(self, device_map: object = None, **_: Any) -> None:
        """Check the options before anything is read, and take the device from `device_map` if it has one."""
        config.resolve(**self._options)
        if device_map is None or _is_host(device_map):
            return
        named, given = only_device(device_map), self._options.get("device")
        if named is None:
            raise ConfigError(
                f"device_map is {device_map!r}, and a model that streams computes on one device, with its "
                "weights on the host; leave it out (or pass device_map=None), or name one device"
            )
        if given is not None and resolve_device(given) != resolve_device(named):
            raise ConfigError(
                f"device_map is {device_map!r}, and the device of StreamConfig is {given!r}; leave one of "
                "them out"
            )
        self._options = {**self._options, "device": named}

    def update_device_map(self, device_map: object) -> None:
        """Return None, so that the weights stay on the host. The model computes on the device of the map."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember the dtype to which `install` casts weights on their way to the device."""
        self._dtype = dtype
        return dtype

    def get_new_dtype(self, converter: object, param: Any, dtype: torch.dtype | None) -> None:
        """Return None, so that the weight stays mapped in its dtype. Note if `install` has to cast it."""
        stored = _FLOATING.get(param.get_dtype()) if hasattr(param, "get_dtype") else param.dtype
        self._casts |= stored in _FLOATING.values() and dtype not in (None, stored)

    def update_weight_conversions(self, weight_conversions: Sequence[Any], model: nn.Module) -> list[Any]:
        """Return conversions that map the parts of a fused weight, instead of copying them."""
        return [
            each.copy(
                each._original_source_patterns,
                each._original_target_patterns,
                operations=[_Mapped(each.operations)],
            )
            if isinstance(each, WeightConverter)
            else each
            for each in weight_conversions
        ]

    def preprocess_model(self, model: nn.Module, **_: Any) -> None:
        """Leave the modules as they are, and have coded weights read as what they stand for."""
        self._files.__enter__()

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """Remove this quantizer from the loaded model, and install the model."""
        self._files.__exit__(None, None, None)
        del model.hf_quantizer, model.config.quantization_config
        warn_of_copies(model, str(model.name_or_path))
        install(model, dtype=self._dtype if self._casts else None, **self._options)

    def is_serializable(self) -> bool:
        """Return True, as the model's masters are saved, which are not quantised."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True, as gradients reach the masters."""
        return True


def _is_host(device_map: object) -> bool:
    """Return whether a `device_map` only leaves all weights in RAM, and names no device to compute on."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    return set(map(str, places)) == {"cpu"}


class _Mapped(ConversionOps):  # type: ignore[misc]
    """Runs the operations of one conversion in order, and maps weights that they fuse instead of copying."""

    def __init__(self, operations: Sequence[ConversionOps]) -> None:
        self.operations = list(operations)
        self.supports_many_to_many = any(each.supports_many_to_many for each in operations)

    def convert(self, input_dict: dict[str, Any], **context: Any) -> dict[str, Any]:
        with MappedFusion():
            for operation in self.operations:
                input_dict = operation.convert(input_dict, **context)
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _Mapped([each.reverse_op for each in reversed(self.operations)])


_merge_configs = AutoHfQuantizer.merge_quantization_configs


def _merged(stored: Any, given: QuantizationConfigMixin | None) -> Any:
    """Raise ConfigError for a StreamConfig if the checkpoint is quantised, and say what to do instead.

    The error of transformers only says that the two configs have different classes.
    """
    if isinstance(given, StreamConfig):
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        options = "".join(f", {name}={value!r}" for name, value in given.options.items())
        raise ConfigError(
            f"the checkpoint is quantised ({getattr(method, 'value', method)}), and transformers takes one "
            "quantization_config; leave StreamConfig out, and install what from_pretrained returns: "
            f"dynswap_ext.install(model{options})"
        )
    return _merge_configs(stored, given)


AutoHfQuantizer.merge_quantization_configs = staticmethod(_merged)
