"""Functions of this package that torch.compile has to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])
_frames: Final[Any] = torch._C._dynamo.eval_frame


def untraced(function: _F) -> _F:
    """Keep torch.compile from compiling a function, and what it calls, by itself.

    Where a graph is broken, torch compiles whatever Python function is called next. A graph that the function
    is called in is traced through it as ever.
    """
    # `torch._dynamo.eval_frame.skip_code`, without the second that importing torch._dynamo takes.
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
