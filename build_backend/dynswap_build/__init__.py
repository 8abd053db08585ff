"""Build backend: that of setuptools, but building against the torch that the interpreter already has.

pip builds in an isolated environment, in which the torch that the extension will run with is not visible. To
install another one there takes a download of gigabytes, and it may have another ABI. So the hooks look past
the isolation: they put a suitable torch of the interpreter on ``sys.path``. Only if there is none, torch
becomes a build requirement.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta

from dynswap_build.extension import toolkit_requirements, wants_extension
from dynswap_build.installed_torch import REQUIREMENT, reveal_torch

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist


def _requirements() -> list[str]:
    if not wants_extension():
        return []
    torch = [] if reveal_torch() else [REQUIREMENT]
    return [*torch, *toolkit_requirements(torch_is_installed=not torch), "ninja>=1.11"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return setuptools' requirements and what compiling the extension needs."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return setuptools' requirements and what compiling the extension needs."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_requirements()]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the metadata of the wheel, which requires the torch that it is built for. Nothing is compiled."""
    reveal_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the metadata of the editable wheel."""
    reveal_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Compile the extension and pack the wheel. Return the wheel's file name."""
    reveal_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Compile the extension in place, and pack a wheel that points to this checkout. Return its file name."""
    reveal_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
