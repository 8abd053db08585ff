"""The import of the package loads nothing that is not used yet."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import dynswap_ext
assert "inspect" in dynswap_ext.__all__
assert not any(name.startswith("dynswap_ext.inspect") for name in sys.modules)
assert callable(dynswap_ext.inspect.summary) and callable(dynswap_ext.inspect.gradient_flow)
late = {"matplotlib", "rich", "dynswap_ext.checkpoint", "torch._dynamo"} & set(sys.modules)
assert not late, late
"""


def test_it_is_imported_when_it_is_used_and_brings_little() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_face_has_what_it_names() -> None:
    from dynswap_ext import inspect

    assert all(hasattr(inspect, name) for name in inspect.__all__)
