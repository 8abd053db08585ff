"""Facts about other libraries that let their programs run unchanged on an installed model.

This module imports none of these libraries and changes none: they may be imported before this package or
after it. The facts are those of the versions that `tests/programs` runs with.
"""

from __future__ import annotations

from dynswap_ext._swap.device_queries import register_library

# Their code reads ``next(model.parameters()).device`` in many places, in models' forwards too.
register_library("accelerate", "get_parameter_device")
register_library("diffusers", "get_parameter_device", "get_parameter_dtype")
register_library("peft")
register_library("sentence_transformers")
register_library("transformers", "get_parameter_device", "get_parameter_dtype", "get_parameter_first_dtype")

# Code that comes with a checkpoint (``trust_remote_code=True``).
register_library("diffusers_modules")
register_library("transformers_modules")
