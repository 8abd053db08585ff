"""The saved-tensor hooks under which an installed module's call runs (pure-Python provider).

See Note [Backward fetches again] and Note [Hooks of others].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dynswap_ext._python.saved import (
    Saved,
    SavedTensor,
    of_master,
    reference_to,
    same,
    version_of,
)
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced

_autograd: Any = torch._C._autograd


def wanted() -> bool:
    """Return whether hooks of ours are to be pushed: a graph is recorded, and the innermost are not ours."""
    if not torch.is_grad_enabled() or not _autograd._saved_tensors_hooks_is_enabled():
        return False
    hooks = _innermost()
    return hooks is None or not _is_ours(hooks[0])


def push() -> None:
    """Push hooks of ours, which ask those that were the innermost."""
    hooks = _innermost()
    _autograd._push_saved_tensors_default_hooks(*((_pack, _unpack) if hooks is None else _over(*hooks)))


pop: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks


def stand_over_others() -> None:
    """Replace hooks of others that were pushed since the call began with ours, which ask them.

    The code that pushed them pops ours.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0] is not _pack and wanted():
        ours = _over(*hooks)
        pop()
        _autograd._push_saved_tensors_default_hooks(*ours)


def _innermost() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)


def _is_ours(pack: Any) -> bool:
    return pack is _pack or isinstance(getattr(pack, "__self__", None), _Over)


@untraced
def _pack(tensor: torch.Tensor) -> Saved:
    return reference_to(tensor) or SavedTensor(tensor)


@untraced
def _unpack(saved: Saved) -> torch.Tensor:
    return saved.unpack()


def _over(pack: Any, unpack: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks of ours, which go on asking hooks of others of every tensor that is saved."""
    hooks = _Over(pack, unpack)
    return hooks.pack, hooks.unpack


class _Lent(NamedTuple):
    """What others were given instead of a saved tensor."""

    given: torch.Tensor
    #: What they made of it.
    theirs: Any
    #: What to use if they left it alone.
    saved: Saved
    #: Of the saved tensor.
    device: torch.device
    dtype: torch.dtype


@functools.cache
def _one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what stands for a weight. Were it ever computed with, that should show."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
        return torch.full((), value, dtype=dtype, device=device)


class _Over:
    """Hooks of ours over those of others."""

    def __init__(self, pack: Any, unpack: Any) -> None:
        self.inner_pack, self.inner_unpack = pack, unpack
        self._of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        reference, given = reference_to(tensor), of_master(tensor)
        if self._of_checkpoint and (reference is not None or given is not None):
            # It compares what is saved with what is computed again, maybe where these hooks are not.
            given = _one_element(tensor.dtype, tensor.device).expand(tensor.shape)
        if given is None:
            return self.inner_pack(tensor)
        version = version_of(given)
        theirs = self.inner_pack(given)
        if version_of(given) != version:
            raise RuntimeError(
                "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack "
                "hook can not be modified by in-place operations as this can lead to unexpected side-effects."
            )
        return _Lent(given, theirs, reference or SavedTensor(tensor), tensor.device, tensor.dtype)

    @untraced
    def unpack(self, packed: Any) -> Any:
        if type(packed) is not _Lent:
            return self.inner_unpack(packed)
        theirs = self.inner_unpack(packed.theirs)
        if not isinstance(theirs, torch.Tensor):
            return theirs  # torch says what is wrong with it
        if same(theirs, packed.given):
            return packed.saved.unpack()
        with torch.no_grad():
            return theirs.to(packed.device, packed.dtype)
