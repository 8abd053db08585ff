"""Registers libraries that ask a model's parameters where it computes, so that they run unchanged.

An installed model answers their code with the compute device and dtype, not with those of the masters (the
tensors that its modules own). No library is imported or changed here, so they may be imported before or after
this module. The names are those of the versions that `tests/programs` runs with.
"""

from __future__ import annotations

from dynswap_ext._swap.device_queries import register_library

# The code of these reads ``next(model.parameters()).device`` in many places, also in forwards of models.
register_library("accelerate", "get_parameter_device")
register_library("diffusers", "get_parameter_device", "get_parameter_dtype")
register_library("peft")
register_library("sentence_transformers")
register_library("transformers", "get_parameter_device", "get_parameter_dtype", "get_parameter_first_dtype")

# Code that comes with a checkpoint (``trust_remote_code=True``).
register_library("diffusers_modules")
register_library("transformers_modules")
