"""The ranks among which `install(mesh=)` shares out its copies."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

from dynswap_ext._util.ranks import Ranks, this_host
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_EXPECTED: Final = "expected a DeviceMesh of one dimension, or a ProcessGroup, of ranks of one host"
_MADE: Final = "init_device_mesh(device, (hosts, ranks), mesh_dim_names=('host', 'rank'))['rank']"


class Mesh:
    """Ranks of one host, each with a device of its own, that run the same program."""

    def __init__(
        self, given: DeviceMesh | ProcessGroup, options: Mapping[str, object], *, always: bool
    ) -> None:
        """Take a mesh of one dimension or a process group. Raises ConfigError for anything else.

        `options` are those in which ranks must not differ. `always` shares copies out also where that takes
        longer.
        """
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                f"mesh is {given!r}, and there is no process group; start the program with torchrun, and "
                "call torch.distributed.init_process_group() first"
            )
        if isinstance(given, distributed.device_mesh.DeviceMesh):
            if given.ndim != 1:
                names = given.mesh_dim_names or ()
                raise ConfigError(
                    f"mesh has {given.ndim} dimensions ({', '.join(names) or 'without names'}); {_EXPECTED}, "
                    f"such as {f'mesh[{names[-1]!r}]' if names else _MADE}"
                )
            if given.get_coordinate() is None:
                raise ConfigError(
                    f"mesh is {given!r}, and this rank is not in it; {_EXPECTED}, with this one"
                )
            given = given.get_group()
        elsewhere: object = distributed.GroupMember.NON_GROUP_MEMBER  # what new_group() returns there
        if given is elsewhere:
            raise ConfigError(
                f"mesh is a group that rank {distributed.get_rank()} is not in; {_EXPECTED}, with this one"
            )
        if not isinstance(given, distributed.ProcessGroup):
            raise ConfigError(f"mesh is {given!r}; {_EXPECTED}, such as torch.distributed.group.WORLD")
        self._group = given
        self._options = {name: str(value) for name, value in options.items()}
        self._always = always
        self.size = distributed.get_world_size(given)

    def open(self, device: torch.device) -> Groups:
        """Make the groups of an install's copies to a device. Every rank of the mesh calls it.

        Raises ConfigError, on all ranks, if they are on several hosts, or differ in the kind of device or in
        an option.
        """
        from torch import distributed

        ranks = Ranks(self._group, "install(mesh=)", "nothing is installed")
        if self.size == 1 < distributed.get_world_size():
            warn(
                "mesh= has this rank alone, so there is no other to share out copies with; expected all "
                f"ranks of this host, such as torch.distributed.group.WORLD or {_MADE}"
            )

        def look() -> tuple[str, str, str, dict[str, str]]:
            _backend_of(self._group, device)
            return this_host(), device.type, str(uuid.uuid4()), self._options

        told = ranks.together("looking for the ranks of the mesh", look)
        for rank, (host, kind, _, options) in enumerate(told):
            if kind != told[0][1]:
                raise ConfigError(
                    f"rank {ranks.name(0)} installs on a device of type {told[0][1]!r} and rank "
                    f"{ranks.name(rank)} on one of type {kind!r}; expected one type for all ranks of mesh="
                )
            if host != told[0][0]:
                raise ConfigError(
                    f"rank {ranks.name(rank)} is on another host or in another container than rank "
                    f"{ranks.name(0)}; expected a mesh of the ranks of one host: {_MADE}"
                )
            for name, value in options.items():
                if value != (first := told[0][3][name]):
                    raise ConfigError(
                        f"rank {ranks.name(0)} installs with {name}={first} and rank {ranks.name(rank)} with "
                        f"{name}={value}; expected the same options on all ranks of mesh="
                        + (", and a budget in bytes ('6GiB')" if name == "budget" else "")
                    )
        return Groups(self._group, device, told[0][2], always=self._always or device.type == "cpu")


def _backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return what a group has for the tensors of a device. Raises ConfigError if it has nothing."""
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the process group of mesh= has no backend for {device.type!r}; expected one, such as that of "
            f'init_process_group("cpu:gloo,cuda:nccl") ({error})'
        ) from error


class Groups:
    """What one install sends through. Nobody else uses it, so its collectives have one order.

    Groups that `torch.distributed.new_group` makes have names by number, which a later group may get again.
    """

    def __init__(self, parent: ProcessGroup, device: torch.device, name: str, *, always: bool) -> None:
        from torch import distributed
        from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout

        like = _backend_of(parent, device)
        rank, size = parent.rank(), parent.size()
        # Backends of plugins do not tell theirs.
        timeout: timedelta = like.options._timeout if hasattr(like, "options") else default_pg_timeout
        store = PrefixStore(f"dynswap_ext/{name}", parent.get_group_store())
        #: Whether copies are shared out also where that takes longer.
        self.always = always
        #: Gathers tensors in RAM.
        self.for_host = distributed.ProcessGroupGloo(PrefixStore("host", store), rank, size, timeout=timeout)
        #: Gathers tensors on the device.
        self.for_device = _made_like(like, PrefixStore("device", store), rank, size, timeout)
        #: Where the ranks leave each other messages.
        self.store = store
        #: The ranks' numbers among all of the program.
        self.numbers = [distributed.get_global_rank(parent, each) for each in range(size)]

    def close(self) -> None:
        """Send nothing any more. Ranks that still wait for this one hear of it."""
        self.for_device.shutdown()
        self.for_host.shutdown()
        del self.for_device, self.for_host, self.store


def _made_like(backend: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return another backend of the same kind."""
    from torch import distributed

    kind = type(backend)
    if isinstance(backend, distributed.ProcessGroupGloo):
        return kind(store, rank, size, timeout=timeout)
    plugin = distributed.Backend._plugins.get(backend.name().upper())
    if plugin is not None and not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    if not hasattr(kind, "Options"):
        raise ConfigError(
            f"the process group of mesh= has the backend {backend.name()!r}, of which no other can be made "
            "here; expected nccl, xccl or gloo"
        )
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)
