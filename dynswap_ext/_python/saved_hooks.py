"""Saved-tensor hooks for calls of installed modules (pure-Python provider; native: csrc/session/saved.cpp).

Where autograd saves a streamed weight, they keep a reference, which is fetched again in backward. See Note
[Backward fetches again] and Note [Hooks of others].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from dynswap_ext._python.autograd import one_element
from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.shown_copies import copy_of
from dynswap_ext._swap.parameter_proxy import shows_the_same
from dynswap_ext._util.untraced import untraced

_autograd: Any = torch._C._autograd


class _SavedTensor:
    """A saved tensor that is kept itself, because it is not a view of a streamed weight."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, because a saved tensor may be an operation's output, and would then own its own graph.
        self.tensor = tensor.detach()
        self.version = _version_of(self.tensor)
        # What somebody has is returned itself, so that autograd does not take its memory for a gradient's.
        self._original = weakref.ref(tensor) if copy_of(tensor) is None else None

    def unpack(self) -> torch.Tensor:
        _refuse_if_written(self.version, self.tensor)
        alive = None if self._original is None else self._original()
        return self.tensor if alive is None else alive


class _SavedWeight:
    """A saved tensor that is a streamed weight or a view of one: a reference, without the bytes."""

    def __init__(self, copy: DeviceCopy, weight: Weight, view: torch.Tensor) -> None:
        self.session, self.weight = copy.session, weight
        self.version = _version_of(weight.master)
        self.place = _place(view)

    def unpack(self) -> torch.Tensor:
        _refuse_if_written(self.version, self.weight.master)  # plain torch would have saved the master
        copy: DeviceCopy = self.session.fetch_again(self.weight)
        with torch.inference_mode(False), torch.no_grad():
            view = copy.data.as_strided(*self.place)
        view._dynswap_copy = copy  # type: ignore[attr-defined]  # so it is counted while the view is alive
        return view


def _shown_by(tensor: torch.Tensor) -> tuple[DeviceCopy, Weight] | None:
    """Return the copy that a tensor is a view of, and its weight.

    None if there is none, or if the weight's master cannot be fetched again with the same values.
    """
    copy = copy_of(tensor)
    weight = None if copy is None or tensor.is_conj() or tensor.is_neg() else copy.weight
    if copy is None or weight is None or not copy.current(weight.master):
        return None
    if copy.compare and not isinstance(weight.master, torch.nn.Parameter):
        return None  # statistics, which the forward may write without bumping a version
    copy.write_back(weight)
    return copy, weight


def _of_master(tensor: torch.Tensor, data: torch.Tensor, master: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd would save without an install: the master or a view of it.

    None if there is no view of the master that matches `tensor`, a view of the copy `data`.
    """
    if _place(tensor) == _place(data):
        return master
    # With gaps, or with a pending conjugation or negation, the master's memory differs from the copy's.
    if data.stride() != master.stride() or master.is_conj() or master.is_neg():
        return None
    offset = master.storage_offset() + tensor.storage_offset() - data.storage_offset()
    with torch.no_grad():
        return master.as_strided(tensor.shape, tensor.stride(), offset)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _refuse_if_written(saved: int, tensor: torch.Tensor) -> None:
    now = _version_of(tensor)
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {saved} instead."
        )


class _Lent(NamedTuple):
    """A saved tensor in whose place other code's hooks were given another one, mostly the master."""

    #: The tensor that their pack hook was given.
    given: torch.Tensor
    #: What their pack hook returned.
    theirs: Any
    #: What is unpacked if their unpack hook returns `given` as it was.
    saved: _SavedTensor | _SavedWeight
    #: The device and the dtype of the saved tensor.
    device: torch.device
    dtype: torch.dtype


class _Hooks:
    """The saved-tensor hooks of this provider. They call hooks that other code has pushed before, if any."""

    def __init__(self, pack: Any = None, unpack: Any = None) -> None:
        self._their_pack, self._their_unpack = pack, unpack
        self._of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        shown = _shown_by(tensor)
        streamed = shown is not None and not shown[1].resident
        saved = _SavedWeight(*shown, tensor) if shown is not None and streamed else _SavedTensor(tensor)
        if self._their_pack is None:
            return saved
        given = None if shown is None else _of_master(tensor, shown[0].data, shown[1].master)
        if self._of_checkpoint and (streamed or given is not None):
            # Checkpointing compares this with what it computes again, maybe where these hooks do not run.
            given = one_element(tensor.dtype, tensor.device).expand(tensor.shape)
        if given is None:
            return self._their_pack(tensor)
        version = _version_of(given)
        theirs = self._their_pack(given)
        if _version_of(given) != version:
            raise RuntimeError(
                "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack "
                "hook can not be modified by in-place operations as this can lead to unexpected side-effects."
            )
        return _Lent(given, theirs, saved, tensor.device, tensor.dtype)

    @untraced
    def unpack(self, packed: Any) -> Any:
        if self._their_unpack is None:
            return packed.unpack()
        if type(packed) is not _Lent:
            return self._their_unpack(packed)
        theirs = self._their_unpack(packed.theirs)
        if not isinstance(theirs, torch.Tensor):
            return theirs  # torch raises the error for it
        plain = type(theirs) in (torch.Tensor, torch.nn.Parameter)
        if theirs is packed.given or (plain and shows_the_same(theirs, packed.given)):
            return packed.saved.unpack()
        with torch.no_grad():
            return theirs.to(packed.device, packed.dtype)


_alone = _Hooks()
_ALONE: Final = _alone.pack, _alone.unpack


def wanted() -> bool:
    """Return whether to push our hooks: a graph is recorded, and the innermost hooks are not ours."""
    if not torch.is_grad_enabled() or not _autograd._saved_tensors_hooks_is_enabled():
        return False
    hooks = _innermost()
    return hooks is None or not isinstance(getattr(hooks[0], "__self__", None), _Hooks)


def push() -> None:
    """Push our saved-tensor hooks, which call those that were the innermost before."""
    _push_over(_innermost())


pop: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks


def stand_over_others() -> None:
    """If other code has pushed saved-tensor hooks inside the call, put ours in their place.

    Ours call theirs. The code that pushed its hooks pops ours instead.
    """
    hooks = _innermost()
    if hooks is not None and hooks[0] is not _ALONE[0] and wanted():
        pop()
        _push_over(hooks)


def _push_over(theirs: Any) -> None:
    ours = None if theirs is None else _Hooks(*theirs)
    _autograd._push_saved_tensors_default_hooks(*(_ALONE if ours is None else (ours.pack, ours.unpack)))


def _innermost() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)
