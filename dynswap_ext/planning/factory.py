"""A model and its inputs from "module:function", as command lines name them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from dynswap_ext.errors import ConfigError

__all__ = ["model_and_inputs"]


def model_and_inputs(name: str) -> tuple[nn.Module, Any]:
    """Import the module and call the function; modules of the current folder are found too.

    Parameters
    ----------
    name
        Such as ``my_package.models:flux``. The function takes no arguments and returns a model and the inputs
        of a pass: a tensor, a sequence of arguments, or a mapping of keyword arguments.

    Raises
    ------
    ConfigError
        There is no such module or function, or it returns something else. What the function itself raises
        passes through.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"--model is {name!r}; expected MODULE:FUNCTION, such as my_package.models:flux")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something else
        why = f"the module {module_name!r}, which is neither installed nor in {here}"
        raise ConfigError(f"--model names {why}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} ({module.__file__}) has no function {function_name!r}")
    made = function()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    types = [type(part).__name__ for part in made] if isinstance(made, tuple) else type(made).__name__
    raise ConfigError(
        f"{name} returned {types}; expected a torch.nn.Module and the inputs of a pass: return model, inputs"
    )
