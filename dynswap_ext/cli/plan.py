"""``dynswap plan``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import (
    parse_bandwidth,
    parse_dtype,
    parse_seconds,
    show_rate,
    show_seconds,
)
from dynswap_ext.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dynswap_ext.planning import Machine, Plan, PlannedWeight

#: Of a table that is written to a file.
_WIDTH: Final = 100


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    plan = commands.add_parser(
        "plan",
        help="predict the time of a pass and the stalls, for several budgets",
        description="Predict what a model costs under a budget: time of a pass, resident share and stalls,\n"
        "from the engine itself on a virtual clock. Of a checkpoint only headers are read; of a\n"
        "config.json a model without weights is made. Compute and bandwidth are given, or measured\n"
        "here (--device, --model), or else those of an assumed card, which the output names.",
        epilog="example:\n  dynswap plan flux1-dev.safetensors --budget 6GiB --bandwidth 25GB/s "
        "--compute 120TFLOPS --tokens 4608",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(command=_plan)
    add = plan.add_argument
    add(
        "path",
        metavar="CHECKPOINT_OR_CONFIG",
        nargs="?",
        help="a checkpoint's file, index or folder; or a config.json of transformers or diffusers",
    )
    add(
        "--budget",
        action="append",
        default=[],
        help="device memory for weights: a size, or a share of the model; may be given again (exit status 1 "
        "if one is too small)",
    )
    add("--dtype", help="dtype of floating weights on the device: bf16, fp16, ... (default: as in the file)")
    add("--prefetch", type=int, default=2, help="groups of weights to copy ahead (default: %(default)s)")
    add("--bandwidth", help="bandwidth of copies to the device, such as 25GB/s")
    add("--latency", help="latency of a copy, such as 7us")
    add(
        "--compute",
        help="time of a pass with all weights on the device, such as 350ms; or the device's throughput, such "
        "as 120TFLOPS",
    )
    add("--memory", help="bandwidth of the device's memory, such as 900GB/s (with a throughput)")
    add("--tokens", type=int, help="rows that a pass multiplies by each matrix (default: 1, or an image's)")
    add("--batch", type=int, help="batch size, which multiplies the tokens (default: 1)")
    add("--device", help="cpu or cuda: measure what is not given, on that device of this machine")
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="measure instead: a function that returns a model and the inputs of a pass. The model runs "
        "here, installed, so that it need not fit",
    )
    add("--passes", type=int, default=3, help="timed passes of --model (default: %(default)s)")
    add("--plot", metavar="FILE", help="draw time and stalls over the budget: .png, .svg, .pdf")
    add("--json", action="store_true", help="everything, for programs")


@dataclass(frozen=True)
class _Case:
    """What is planned for: weights with their compute, and a bus."""

    weights: tuple[PlannedWeight, ...]
    bandwidth: float
    latency: float
    device: torch.device | None
    #: For people, and for programs.
    facts: dict[str, str]
    values: dict[str, Any]
    notes: tuple[str, ...]
    #: With these, compute follows from rows.
    machine: Machine | None = None


def _plan(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dynswap_ext import planning
    from dynswap_ext._util.figure import check_path
    from dynswap_ext.planning.show import as_json, show

    if (options.path is None) == (options.model is None):
        raise ConfigError(
            "name either a checkpoint or config, or --model module:function; `dynswap plan --help` has an "
            "example"
        )
    dtype = parse_dtype(options.dtype)
    if options.plot:
        check_path(options.plot)  # before anything is measured
    case = _measured(options, dtype) if options.model else _outlined(options, dtype)
    made = planning.plan(
        case.weights,
        budgets=options.budget,
        bandwidth=case.bandwidth,
        latency=case.latency,
        prefetch=options.prefetch,
        backend="host" if case.device is not None and case.device.type == "cpu" else "cuda",
    )
    notes = [*_rows_notes(made, case), *case.notes]
    if options.json:
        print(json.dumps(as_json(made, case.values, notes), indent=2))
    else:
        # Files and pipes have no width of their own.
        console = Console()
        show(made, case.facts, notes, console if console.is_terminal else Console(width=_WIDTH))
    if options.plot:
        written = planning.plot(made, options.plot, title=case.facts["model"])
        print(f"drawn: {written}", file=sys.stderr if options.json else sys.stdout)
    return 1 if made.too_small else 0


def _outlined(options: argparse.Namespace, dtype: torch.dtype | None) -> _Case:
    """Take the weights of a checkpoint or a config, and rates that are given, measured or assumed."""
    from dynswap_ext import config, planning

    device = None if options.device is None else config.resolve(device=options.device).device
    found = planning.outline(options.path, dtype=dtype, disk=device is not None and device.type == "cpu")
    for name in ("tokens", "batch"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} is {given}; expected 1 or more")
    machine, source = planning.ASSUMED, f"assumed: {planning.ASSUMED.name}"
    bus = source
    if device is not None:
        largest = max(found.files, key=lambda file: file.stat().st_size, default=None)
        machine = planning.measure_machine(device, dtype=dtype, file=largest)
        source, bus = f"measured: {machine.name}", f"measured: {machine.bandwidth_kind}"
    bus = "given" if options.bandwidth else bus
    machine = machine.with_rates(bandwidth=options.bandwidth, memory=options.memory, latency=options.latency)
    values: dict[str, Any] = {"model": found.title, "order": found.order, "bandwidth_from": bus}
    whole_pass = options.compute is not None and "flop" not in options.compute.lower()
    notes = found.notes
    if whole_pass:
        _refuse(options, ("tokens", "batch", "memory"), "--compute is the time of a pass, whatever its rows")
        weights = planning.spread(found.weights, parse_seconds(options.compute))
        compute = f"{options.compute} a pass (given), spread over the matrices by their size"
        values["compute_from"] = "given"
    else:
        if options.compute:
            machine = machine.with_rates(arithmetic=options.compute)
        rows = (options.tokens or found.rows) * (options.batch or 1)
        weights = planning.timed(found.weights, machine, rows=rows)
        asked = "" if options.tokens else f" (assumed: {found.rows_as}; --tokens says how many)"
        values["compute_from"] = "given" if options.compute else source
        values |= {"arithmetic": machine.arithmetic, "memory": machine.memory, "rows": rows}
        compute = (
            f"{rows:,} row{'s' if rows > 1 else ''} a pass{asked}\n"
            f"{show_rate(machine.arithmetic, 'FLOPS')} ({values['compute_from']}), "
            f"{show_rate(machine.memory, 'B/s')} of the device's memory "
            f"({'given' if options.memory else source})"
        )
        notes += (
            "Compute includes matrix products and convolutions at the full rate, and norms; it does not "
            "include attention products and activations. --model measures a real pass.",
        )
    facts = {
        "model": found.title,
        "on the device": _on_device(weights, options.dtype),
        "order of use": found.order,
        "bandwidth": _bus(machine.bandwidth, bus, machine.latency),
        "compute": compute,
    }
    rates = None if whole_pass else machine
    return _Case(weights, machine.bandwidth, machine.latency, device, facts, values, notes, rates)


def _measured(options: argparse.Namespace, dtype: torch.dtype | None) -> _Case:
    """Run a model, and take what is measured."""
    from dynswap_ext import planning

    wrong = ("compute", "memory", "tokens", "batch")
    _refuse(options, wrong, "--model measures the compute of its own inputs")
    model, inputs = _model_and_inputs(options.model)
    found = planning.measure(model, inputs, device=options.device, dtype=dtype, passes=options.passes)
    bandwidth, source = found.bandwidth, f"measured: {found.bandwidth_kind}"
    if options.bandwidth:
        bandwidth, source = parse_bandwidth(options.bandwidth), "given"
    latency = parse_seconds(options.latency) if options.latency else found.latency
    seconds = sorted(found.compute_seconds)
    title = f"{options.model}: {type(model).__name__}, {len(found.weights)} weights"
    facts = {
        "model": title,
        "on the device": f"{_on_device(found.weights, options.dtype)}, {found.device}",
        "order of use": "as modules were called",
        "bandwidth": _bus(bandwidth, source, latency),
        "compute": f"measured module by module: {show_seconds(seconds[0])} to {show_seconds(seconds[-1])} "
        f"in {len(seconds)} passes, waits for copies left out",
    }
    values = {
        "model": title,
        "order": "called",
        "device": str(found.device),
        "bandwidth_from": source,
        "compute_from": "measured",
        "measured_compute_seconds": list(found.compute_seconds),
    }
    return _Case(found.weights, bandwidth, latency, found.device, facts, values, found.notes)


def _model_and_inputs(name: str) -> tuple[nn.Module, Any]:
    """Import the module and call the function; modules of the current folder are found too.

    Parameters
    ----------
    name
        Such as ``my_package.models:flux``. The function takes no arguments and returns a model and the inputs
        of a pass: a tensor, a sequence of arguments, or a mapping of keyword arguments.

    Raises
    ------
    ConfigError
        There is no such module or function, or it returns something else. What the function itself raises
        passes through.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"--model is {name!r}; expected MODULE:FUNCTION, such as my_package.models:flux")
    from torch import nn

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something else
        why = f"the module {module_name!r}, which is neither installed nor in {here}"
        raise ConfigError(f"--model names {why}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} ({module.__file__}) has no function {function_name!r}")
    made = function()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    types = [type(part).__name__ for part in made] if isinstance(made, tuple) else type(made).__name__
    raise ConfigError(
        f"{name} returned {types}; expected a torch.nn.Module and the inputs of a pass: return model, inputs"
    )


def _rows_notes(made: Plan, case: _Case) -> list[str]:
    """Say how many rows would hide the copies, at the budgets that were asked for."""
    from dynswap_ext.planning import rows_to_hide

    notes: list[str] = []
    for prediction in made.predictions:
        if case.machine is None or prediction.hidden or prediction.budget not in made.asked:
            continue
        rows = rows_to_hide(case.weights, case.machine, prediction.copy_seconds)
        if rows is not None:
            budget = format_bytes(prediction.budget)
            notes.append(
                f"At {budget} a pass of about {rows:,} rows computes for as long as its copies take."
            )
    return notes


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name}" for name in names if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"{why}; leave out {', '.join(given)}")


def _bus(bandwidth: float, source: str, latency: float) -> str:
    return f"{show_rate(bandwidth, 'B/s')} ({source}), {latency * 1e6:.3g} us a copy"


def _on_device(weights: tuple[PlannedWeight, ...], dtype: str | None) -> str:
    nbytes = sum(weight.nbytes for weight in weights)
    moved = sum(weight.moved_bytes for weight in weights)
    cast = f", {format_bytes(moved)} moved, as the masters are of another dtype" if moved != nbytes else ""
    return f"{format_bytes(nbytes)}{f' as {dtype}' if dtype else ''}{cast}"
