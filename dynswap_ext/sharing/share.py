"""Shares one copy of a model's frozen weights among the ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.places import stored_bytes
from dynswap_ext._util.ranks import Ranks, this_host
from dynswap_ext._util.warn import warn
from dynswap_ext.sharing.outline import Outline, Place, compare, compare_values, digests_of, places_of
from dynswap_ext.sharing.segment import Segment, keep_steps_private, make_private

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SharedMasters:
    """How many bytes of a model the ranks of a host share, from `share_masters`. ``print`` shows it."""

    #: The ranks of this host, which share the memory. The first one counts it in its `Report.host`.
    ranks: tuple[int, ...]
    #: Bytes of masters in the shared memory.
    shared: int
    #: Bytes of masters that this rank has to itself.
    private: int
    #: Bytes of masters that every rank of the host has mapped from the same files, whose pages they share.
    mapped: int

    def __str__(self) -> str:
        """Return the bytes and the ranks as one line."""
        private, mapped = format_bytes(self.private), f"{format_bytes(self.mapped)} in files"
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} is alone on its host: {private} of weights in RAM and {mapped}"
        shared = f"{format_bytes(self.shared)} of weights in RAM and {mapped}"
        return f"ranks {', '.join(map(str, self.ranks))} share {shared}; this rank has {private} to itself"


def share_masters(
    model: nn.Module, group: ProcessGroup | None = None, *, buffers: str | Sequence[str] = ()
) -> SharedMasters:
    """Share one copy of a model's frozen weights among the ranks of a host.

    Every rank of the group calls it with the same model, before `install`. The ranks of a host then use the
    memory of the first of them for all parameters that do not require a gradient, and for the `buffers` that
    are named. So freeze the model first (`model.requires_grad_(False)`). Each rank keeps its own parameters
    that require a gradient, its own other buffers, and its own sparse parameters. Weights that all ranks have
    mapped from the same file (`checkpoint.load`) stay mapped and are not compared, because their pages are
    shared already.

    A rank may have its model on the meta device (`checkpoint.init_empty`). Its parameters are replaced by
    those of the first rank, and by copies of those that are not shared. On the other ranks, the parameters
    stay the same objects. If all ranks but the first have the model on the meta device, the host never holds
    two copies.

    What one rank writes to a shared weight, the others read. If a rank trains a shared weight later, it gets
    a copy of its own before the optimizer's first step, or when all ranks call this again.

    Parameters
    ----------
    model : torch.nn.Module
        Not installed. On the CPU or, on any rank but the first of a host, on the meta device.
    group : torch.distributed.ProcessGroup, optional
        The ranks that call this; all of them by default. With the backend "nccl" alone, call
        `torch.cuda.set_device` before, because torch sends what ranks tell each other through the GPU.
    buffers : str or sequence of str
        Names of buffers to share, such as quantized weights: no rank may write to them. ``*`` and ``?`` stand
        for characters, as in file names.

    Returns
    -------
    SharedMasters
        How many bytes are shared, and by which ranks.

    Raises
    ------
    ConfigError
        On every rank, if the ranks of a host differ in a name, shape, dtype or value, or in which parameters
        require a gradient, or if one of them fails. It names the rank and the weight. No rank's weights have
        changed then.

    Warns
    -----
    DynswapWarning
        Nothing is shared, because all parameters require a gradient.

    Notes
    -----
    The memory has no file. The system frees it when the last process that has it has ended, even by a signal.
    """
    ranks = Ranks(group, "share_masters", "share_masters has shared nothing")
    places: list[Place] = []

    def look() -> tuple[str, list[Outline]]:
        places.extend(places_of(model, buffers))
        return this_host(), [place.outline for place in places]

    told = ranks.together("looking for the weights", look)
    here = [rank for rank, (host, _) in enumerate(told) if host == told[ranks.own][0]]
    outlines = {rank: told[rank][1] for rank in here}
    ranks.together("comparing the weights", lambda: compare(ranks, outlines))
    first, *others = here

    shared, copied, mapped, compared = list[int](), list[int](), set[int](), set[int]()
    for index, of_ranks in enumerate(zip(*outlines.values(), strict=True)):
        files = {each.file for each in of_ranks}
        loaded = sum(not each.is_meta for each in of_ranks)
        if len(files) == 1 and None not in files:
            mapped.add(index)
        elif others and all(each.shareable for each in of_ranks):
            shared.append(index)
            if loaded > 1:
                compared.add(index)
        elif loaded < len(here):
            copied.append(index)
    mine = [places[i].master if i in compared and not places[i].outline.is_meta else None for i in shared]
    digests = ranks.together("reading the weights", lambda: digests_of(mine, len(here)))
    names = [outlines[first][i].name for i in shared]
    found = {rank: digests[rank] for rank in here}

    def agree() -> None:
        compare_values(ranks, names, found)
        if ranks.own == first and others and not shared and not mapped:
            _warn_if_none_is_frozen(outlines[first])

    ranks.together("comparing the values", agree)

    segments = [Segment([places[index] for index in indices]) for indices in (shared, copied)]
    is_first = ranks.own == first
    try:
        offers = ranks.together(
            "making the shared memory", lambda: [segment.make() for segment in segments] if is_first else []
        )
        offered = list(zip(segments, offers[first], strict=True))
        ranks.together("mapping the shared memory", lambda: _each(Segment.map, offered))
        takes = list(zip(segments, (True, False), strict=True)) if is_first else []
        ranks.together("filling the shared memory", lambda: _each(Segment.fill, takes))
    finally:
        for segment in segments:
            segment.close()
    if not is_first:
        segments[0].give(copies=False)
        segments[1].give(copies=True)
    now_shared = {*shared}  # and not those that an earlier call has shared
    make_private(place.now() for index, place in enumerate(places) if index not in now_shared)
    if shared:
        keep_steps_private()
    return _summary(here, ranks, places, now_shared, mapped)


def _warn_if_none_is_frozen(outlines: Sequence[Outline]) -> None:
    trained = [each.name for each in outlines if each.about[3]]
    if trained:
        warn(
            f"share_masters shares nothing: {len(trained)} parameters require a gradient, so each rank has "
            "its own. Call model.requires_grad_(False) before share_masters, for all that is not trained"
        )


def _each(do: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    for arguments in calls:
        do(*arguments)


def _summary(
    here: Iterable[int], ranks: Ranks, places: Sequence[Place], shared: set[int], mapped: set[int]
) -> SharedMasters:
    counted = set[int]()
    nbytes = {"shared": 0, "mapped": 0, "private": 0}
    for index, place in enumerate(places):
        master = place.now()
        if id(master) in counted:
            continue
        counted.add(id(master))
        kind = "shared" if index in shared else "mapped" if index in mapped else "private"
        nbytes[kind] += stored_bytes(master)
    summary = SharedMasters(tuple(map(ranks.name, here)), **nbytes)
    logger.info("share_masters: %s", summary)
    return summary
