"""What is to be known of other libraries, so that their programs run unchanged on an installed model.

Nothing here imports a library, and none is changed: they may be imported before this package or after it.
What is listed was read in the versions that `tests/programs` runs with.
"""

from __future__ import annotations

from dynswap_ext._swap.device_queries import register_library

# ``next(model.parameters()).device`` is asked all over their code, in models' forwards too.
register_library("accelerate", "get_parameter_device")
register_library("diffusers", "get_parameter_device", "get_parameter_dtype")
register_library("peft")
register_library("sentence_transformers")
register_library("transformers", "get_parameter_device", "get_parameter_dtype", "get_parameter_first_dtype")

# Code that comes with a checkpoint (``trust_remote_code=True``).
register_library("diffusers_modules")
register_library("transformers_modules")
