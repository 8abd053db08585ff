"""Imports what baselines need, for the server that forks them."""

from __future__ import annotations

from head_to_head.apart import preload

preload()
