"""Builds dynswap_ext. What is compiled, and how, stands in build_backend/dynswap_build."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "build_backend"))

from dynswap_build.extension import setup_arguments

setup(**setup_arguments())
