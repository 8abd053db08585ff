"""Marks functions of this package that torch.compile is not to compile by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_frames: Final[Any] = torch._C._dynamo.eval_frame


def untraced(function: _F) -> _F:
    """Keep torch.compile from beginning a graph at a function, or at a function that it calls.

    After a graph break, torch would compile any Python function that is called next. A graph that calls the
    function is still traced through it.
    """
    # `torch._dynamo.eval_frame.skip_code`, without the second that importing torch._dynamo takes.
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
