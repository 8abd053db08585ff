"""`install`, `uninstall`, `is_installed` and `handle_of`: the entry points of the package."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dynswap_ext import _provider, config
from dynswap_ext._calls import hooks
from dynswap_ext._installation import Installation, detach, installation_of, lock, log_plan
from dynswap_ext._swap import distributed, other_offloading
from dynswap_ext._swap.choices import Choices
from dynswap_ext._swap.class_swap import ClassNaming
from dynswap_ext._swap.models import Installable, as_tree, models_in
from dynswap_ext._swap.state import is_scripted, modules_of, name_in, session_of, sessions_of
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.listing import listed
from dynswap_ext._util.log import log_to_stderr, logger
from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.progress import ProgressOption
from dynswap_ext._util.units import show_seconds
from dynswap_ext._util.warn import warn
from dynswap_ext.config import DEFAULT_PREFETCH
from dynswap_ext.errors import ConfigError
from dynswap_ext.handle import Handle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_Given = TypeVar("_Given")


@check_option_names
def install(
    model: Installable,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    prefetch: int = DEFAULT_PREFETCH,
    budget: int | float | str | None = None,
    plan: str | PathLike[str] | None = None,
    host_budget: int | float | str = "auto",
    provider: str = "auto",
    strict_budget: bool = False,
    mesh: DeviceMesh | ProcessGroup | None = None,
    headroom: int | float | str | None = None,
    activations: int | float | str | None = None,
    activations_folder: str | PathLike[str] | None = None,
    keep: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    progress: ProgressOption = False,
) -> Handle:
    """Make a model compute on a device that need not hold all of its weights at one time.

    Weights are copied to the device as they are used: an access to a parameter or buffer, such as
    `module.weight`, returns a tensor there. The model still owns its original tensors, the masters:
    `parameters()`, `state_dict()` and optimizers see them as before.

    A second install of the model, of a part of it or of a larger tree replaces the settings of the first for
    the modules that both cover; installs never nest. Forwards of other threads continue undisturbed if the
    second install has the same device and dtype, or raises an error.

    Parameters
    ----------
    model : torch.nn.Module, or a pipeline, list, tuple or dict of modules
        Its parameters and buffers may be in RAM, mapped from a file, or on the device itself. Several models
        share one budget, and the first weights of the next model are fetched while one model still computes.
        A pipeline is one of transformers, or an object with a mapping `components`, as in diffusers.
        Containers may be nested. Other things are skipped in pipelines and dicts, and refused in lists and
        tuples. `install` takes the modules that the container has now: later changes have no effect.
    device : torch.device, str or int, optional
        The device on which the model computes. Default: the accelerator if there is one, else the CPU.
    dtype : torch.dtype or str, optional
        A floating dtype (``torch.bfloat16``, ``"bf16"``) into which floating weights are cast on the way to
        the device. Default: each master's own. Integer, boolean and complex weights are never cast.
    prefetch : int
        Groups of weights to have on the device, or on their way there, ahead of the one in use.
    budget : int, float or str, optional
        The device memory for the weights of all models together: bytes (``6_000_000_000``), a string
        (``"6GiB"``, ``"6G"``, ``"512 MB"``), or a fraction of what the device has free (``0.5``, ``"50%"``).
        Some weights stay on the device (residents), the others are streamed through the rest.
        ``"minimum"`` is only what `prefetch` needs: no weight stays on the device but tiny ones, such as
        norms, which take at most a 128th of the model.
        ``"auto"`` starts with half of what is free. The second and third pass are measured (a pass is a call
        of the model, or one round of all models that were installed together). From the fourth on, the budget
        is what these leave, and the weights that save the most time stay on the device. If memory runs out in
        a call, residents give way where torch's allocator asks for memory (CUDA, ROCm); elsewhere the error
        is raised, and the budget shrinks. See `Handle.retune`.
        Default: ``"minimum"``.
    plan : str or path, optional
        A file that `Handle.save_plan` has written, in place of `budget` and `prefetch`. The first pass then
        has the budget, the residents (weights that stay on the device) and the order of use that were saved,
        and nothing is measured. The plan is refused if it was made for other weights, another device,
        backend, `dtype` or `keep`, or another version of torch or of this package.
    host_budget : int, float or str
        The most RAM that the weights of all installed models of the process may take together: bytes, a
        string (``"48GiB"``), or a fraction of the RAM that the process may use. These count: masters that are
        in RAM, page-locked copies of them, page-locked tensors that were saved for backward (`activations`),
        the buffers through which bytes are staged, and the pages of the system's page cache that are brought
        there by the engine's reads of checkpoint files and by writes to `activations_folder`. Where nothing
        is left for a copy or for the cache, bytes come by a slower path.
        Default, ``"auto"``: masters are page-locked in place, so that an accelerator reads them directly, up
        to four fifths of the RAM that the process may use. On devices for which torch cannot lock them in
        place, page-locked copies take up to half of the free RAM. Weights of files that are read a second
        time enter the page cache where that saves time, up to four fifths of the free RAM.
        ``"minimum"`` does none of this: masters go through a small pinned buffer, and files are read and
        written past the page cache.
        `Handle.report` shows what is taken. The pure-Python provider takes no RAM besides the masters, and
        reads files through mappings, whose pages the system caches.
    provider : {"auto", "native", "python"}
        Which provider serves accesses: the native extension, or pure Python. "auto" follows
        ``DYNSWAP_PROVIDER``, else prefers the native extension.
    strict_budget : bool
        Whether to raise `BudgetError` if tensors that the program keeps (`module.weight` in a list, say)
        leave no room within the budget. Default: allocate outside it, count the bytes (``overflow_bytes``,
        the most at one time) and, if `budget` is not ``"minimum"``, warn once.
    mesh : torch.distributed.device_mesh.DeviceMesh or torch.distributed.ProcessGroup, optional
        Ranks of this host that share out the copies, such as ``torch.distributed.group.WORLD``: each brings
        its part of every group of weights to its device, and the devices exchange the parts, over links that
        are faster than the bus. All of them call this at the same time, with the same `budget` (not
        ``"auto"``), `dtype`, `prefetch`, `keep` and `ignore`; then each may call the model as often as it
        likes. Shared out are groups of weights of which the ranks have one copy in RAM (`share_masters`) or
        in a file (`checkpoint.load`); of others, each rank copies all bytes. If a rank has died, the next
        call of each other one raises `SourceError`, and later calls go on without it. `Handle.report` says
        what is shared out.
    headroom : int, float or str, optional
        Device memory that ``budget="auto"`` leaves to others, such as another process on the same card:
        bytes, a string (``"2GiB"``), or a fraction of the device's memory. The driver is asked at the
        beginning of each pass. If less is free, weights that stayed on the device leave it at once; if more
        is free for some passes, they return. Default: a plan leaves 3 % of the device free (10 % of the RAM
        on the CPU) when it is made, and the driver is not asked again.
    activations : int, float or str, optional
        Device memory for the tensors that the model's operations save for backward, beside `budget`: bytes,
        a string (``"4GiB"``), or a fraction of what the device has free. If a step saves more, three quarters
        of it stay. The rest is copied to RAM as soon as it is saved, and comes back ahead of its use in
        backward, in one order with the weights. ``"auto"``, with ``budget="auto"``: measured steps share the
        memory out between weights and what is saved. Default: all of it stays on the device. Needs the native
        provider.
    activations_folder : str or PathLike, optional
        The folder of a file to which saved tensors go if `host_budget` leaves them no page-locked memory, and
        always if the model computes on the CPU. The file has no name, and its space is free again when the
        process ends, however it ends.
    keep : str or sequence of str
        Names of weights that stay on the device from their first use on, within the budget. The name of a
        module means all weights in it, and ``*`` matches any characters: ``"text_encoder"``, ``"*.norm*"``.
        With ``"minimum"``, they are added to what `prefetch` needs.
    ignore : str or sequence of str
        Names of weights that are left alone, in the form of `keep`: the model gets the masters themselves,
        where they are. They do not count towards the budget. A module whose weights are all ignored is not
        installed.
    progress : bool or callable
        True shows the progress of the first pass, in bytes of weights that have arrived, where stderr is a
        terminal or a notebook. A function is called with the bytes so far and the total, on another thread.
        Both end with the pass.

    Returns
    -------
    Handle
        It has the figures of the install, and can uninstall it. As a context manager it uninstalls at the end
        of the block. It does not keep the model alive.

    Raises
    ------
    ConfigError
        An option has a value that cannot be used, a master is on the meta device, the model is sharded
        (FSDP, `fully_shard`), hooks of another library move its weights, a container holds no module, a list
        or tuple holds something that is no model, or the ranks of `mesh` differ in an option.
    BudgetError
        The budget cannot hold the largest group (the weights that travel in one copy) and what `keep` names;
        ``smallest_bytes`` is the smallest that can.

    Notes
    -----
    After any error the model is as it was.
    """
    options = config.resolve(
        device=device,
        dtype=dtype,
        prefetch=prefetch,
        budget=budget,
        plan=plan,
        host_budget=host_budget,
        provider=provider,
        strict_budget=strict_budget,
        mesh=mesh,
        headroom=headroom,
        activations=activations,
        activations_folder=activations_folder,
        keep=keep,
        ignore=ignore,
        progress=progress,
    )
    return install_with(model, options)


def install_with(given: Installable, options: config.Options, naming: ClassNaming | None = None) -> Handle:
    """Install a model with options that `config.resolve` has checked.

    `naming` gives the subclasses that replace the modules' classes another name and more attributes.
    """
    model = as_tree(given)
    log_to_stderr(config.log_level())
    begun = time.monotonic()
    with lock:
        provider = _provider.select(options.provider, options.device)
        if options.mesh is not None and provider.name == "python":
            warn(
                "mesh= has no effect in pure Python, where each rank copies all bytes itself; install the "
                "native extension on all ranks"
            )
        _check_activations(options, provider.name)
        choices = Choices(options.keep, options.ignore)
        choices.survey(model)
        modules = modules_of(model)
        scripted = _survey(model, modules, choices)
        made = Installation(options, provider, choices, hooks(choices, options.dtype), naming, begun=begun)
        try:  # a warning may be an error, after which the model is as it was
            made.draft(model, modules)
            if made.session.sampled_bytes:
                _warn_of_sampling(provider.name)
            _provider.warn_of_one_memory(options.device)
            if scripted:
                warn(
                    f"{scripted} TorchScript module(s) are left as they are: their weights are not streamed, "
                    "and have to be on the compute device"
                )
        except BaseException:
            made.give_up()
            raise
        replaced = [
            other for session in sessions_of(modules) if (other := installation_of(session)) is not None
        ]
        before = [(other, other.everything()) for other in replaced]
        try:
            made.begin(model, modules)
            _warn_of_no_effect(made, modules, choices, type(given).__name__, scripted)
        except BaseException:
            made.close_session()
            try:
                for other, what in before:
                    other.begin_again(what)
            finally:
                made.give_up()
            raise
        for other in replaced:
            other.end_if_over(replaced_by=made)
    log_plan("installed", made, f"{type(given).__name__} in {show_seconds(time.monotonic() - begun)}")
    logger.debug("the install's options: %s", options)
    return Handle(made)


def _check_activations(options: config.Options, provider: str) -> None:
    """Raise ConfigError if tensors saved for backward cannot leave the device, or would gain nothing."""
    if options.budget.activations is None:
        return
    if provider == "python":
        raise ConfigError(
            f"activations= needs the native provider, and pure Python serves '{options.device}' here; "
            "dynswap_ext.backend_info() says why"
        )
    if options.device.type != "cpu" and DeviceMemory(options.device).is_the_hosts():
        raise ConfigError(
            f"activations= would move tensors within one memory: that of '{options.device}' is the host's. "
            "Leave it out, or use torch.utils.checkpoint"
        )


def _warn_of_no_effect(
    made: Installation, modules: Sequence[nn.Module], choices: Choices, name: str, scripted: int
) -> None:
    """Warn if an install streams nothing, or if `prefetch` and `keep` ask for more than the budget can hold.

    `scripted` is the number of TorchScript modules, which the install leaves alone and has warned of.
    """
    plan, options = made.session.stats(), made.options
    offloads = options.budget.activations is not None
    if not scripted and not offloads and not any(own_masters(module) for module in modules):
        warn(f"{name} has no weights, so nothing is streamed: it computes as it did before")
    _warn_of_weights_there(made, modules, choices)
    streamed = plan["groups"] - plan["resident_groups"]
    if not streamed or made.session.provider != "native":
        return
    if options.keep and plan["resident_bytes"] and plan["depth"] < min(1, options.prefetch):
        _warn_of_room_that_keep_takes(made)
    if options.prefetch <= DEFAULT_PREFETCH or options.budget.automatic:
        return
    if plan["depth"] < options.prefetch:
        warn(
            f"prefetch is {options.prefetch}, and the budget has room for {plan['depth']} group(s) of "
            "weights ahead of the one in use: so many are fetched ahead. A larger budget has more room"
        )
    elif streamed <= options.prefetch:
        warn(
            f"prefetch is {options.prefetch}, and {streamed} group(s) of weights are streamed: all of them "
            f"are fetched ahead, into {format_bytes(plan['arena_bytes'])} of the device's memory. 2 or 3 are "
            "usually enough; budget= bounds the memory"
        )


def _warn_of_room_that_keep_takes(made: Installation) -> None:
    """Warn that the weights that `keep` names leave room for one group only, so nothing is fetched ahead."""
    groups, ahead = made.session.groups(), made.options.prefetch
    kept = made.session.stats()["resident_bytes"]
    largest = [
        max(
            (group["bytes"] for group in groups if not group["resident"] and group["by_use"] is by_use),
            default=0,
        )
        for by_use in (False, True)
    ]
    warn(
        f"{format_bytes(kept)} of weights stay on the device, as keep= asks, and the rest of the budget has "
        "room for one group of weights: nothing is fetched ahead, and each copy is waited for. A budget of "
        f"{exact_bytes(kept + (ahead + 1) * sum(largest))} has room for keep= and for {ahead} group(s) ahead"
    )


def _warn_of_weights_there(made: Installation, modules: Sequence[nn.Module], choices: Choices) -> None:
    """Warn if most weights are on the compute device already, so that the install saves little memory."""
    device = made.session.device
    if device.type == "cpu":
        return
    there = every = 0
    for module in modules:
        for name, master, _ in () if is_scripted(type(module)) else own_masters(module):
            if is_lazy(master) or choices.ignores(module, name):
                continue
            size = master.numel() * master.element_size()  # sparse tensors refuse to tell `nbytes`
            every += size
            there += size if master.device == device else 0
    if there > every // 2:
        warn(
            f"{format_bytes(there)} of {format_bytes(every)} of weights are on {device} already: they stay "
            "there, outside the budget, and are not streamed. Call model.cpu() before install, or leave the "
            "model on the CPU where it is made"
        )


@functools.cache
def _warn_of_sampling(provider: str) -> None:
    who, remedy = (
        "the kernel does not track writes to some masters",
        "Linux 6.7 or later with userfaultfd allowed, and masters in ordinary memory: neither shared nor "
        "from `pin_memory()` (an install page-locks them where they are)",
    )
    if provider == "python":
        who, remedy = "pure Python does not track writes to large masters", "the native provider"
    warn(
        f"{who}, so writes that bump no version (`p.data[i] = x`, "
        "NumPy) are detected by sampling: optimizers' steps are seen, but a write to a few elements can be "
        f"missed. Write in a way that bumps it (`with torch.no_grad(): p[i] = x`), or use {remedy}"
    )


def uninstall(model: _Given) -> _Given:
    """Undo `install`: give every module its own class back, and free the device memory.

    What was written on tensors that `module.weight` returned reaches the masters first. A model that is not
    installed is left as it is.

    Parameters
    ----------
    model : torch.nn.Module, or a pipeline, list, tuple or dict of modules
        An installed model, or a part of one: then the rest stays installed.

    Returns
    -------
    The argument itself.
    """
    with lock:
        tree = as_tree(model)
        serving = sessions_of(modules_of(tree))
        for session in serving:
            detach(session, tree)
        for session in serving:
            if (other := installation_of(session)) is not None:
                other.end_if_over()
    return model


def is_installed(model: Installable) -> bool:
    """Return whether a module itself is installed. Its children may be installed without it.

    For a pipeline, a list, a tuple or a dict, return whether all models in it are installed.
    """
    return all(session_of(module) is not None for module in models_in(as_tree(model)).values())


def handle_of(model: Installable) -> Handle:
    """Return the handle that `install` has returned for a model.

    Parameters
    ----------
    model : torch.nn.Module, or a pipeline, list, tuple or dict of modules
        An installed model, or a part of one.

    Raises
    ------
    ConfigError
        The model is not installed, or several installs each serve a part of it.
    """
    sessions = sessions_of(modules_of(as_tree(model)))
    found = [made for session in sessions if (made := installation_of(session)) is not None]
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} is not installed: dynswap_ext.install() returns a handle"
            if not found
            else f"{len(found)} installs serve parts of {type(model).__name__}: ask for the handle of a part"
        )
    return Handle.of(found[0])


def _survey(model: nn.Module, modules: Sequence[nn.Module], choices: Choices) -> int:
    """Check a tree before an install, and return how many TorchScript modules it has.

    Raises ConfigError if a master is on the meta device, if the tree is sharded, or if hooks of another
    library move its weights.
    """
    classes = {id(cls): cls for cls in map(type, modules)}
    plain = modules
    if any(map(is_scripted, classes.values())):
        plain = [module for module in modules if not is_scripted(type(module))]
    distributed.refuse_to_install(plain)
    other_offloading.refuse_to_install(plain)
    suspects = {
        id(module): module
        for module in plain
        for masters in (module._parameters, module._buffers)
        if masters
        for master in list(masters.values())
        if master is not None and master.is_meta
    }
    meta = [
        master
        for module in suspects.values()
        for name, master, _ in own_masters(module)
        if master.is_meta and not choices.ignores(module, name)
    ]
    if meta:
        names = listed([name_in(model, master) for master in meta])
        raise ConfigError(
            f"{len(meta)} master(s) are on the meta device and hold no data: {names}. Load them before "
            "the install, for instance with dynswap_ext.checkpoint.load(model, path); if accelerate's hooks "
            "put them there, remove those first"
        )
    return len(modules) - len(plain)
