"""The command ``dynswap plan``: predicts the time of a pass and the stalls for several budgets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from rich.text import Text
from torch import nn

from dynswap_ext import config, planning
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import MINIMUM, exact_bytes, format_bytes
from dynswap_ext._util.pictures import check_path
from dynswap_ext._util.tables import facts_grid, plain_table, write
from dynswap_ext._util.units import parse_dtype, parse_seconds, show_rate, show_seconds
from dynswap_ext.cli import plan_training
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning import Machine, Plan, PlannedWeight, Prediction

#: A budget is reported as slower than a smaller one if its pass takes more than so many times as long.
_SLOWER: Final = 1.01
_TITLES: Final = (
    *("budget", "of all", "resident", "moved", "time", "limit"),
    *("x\nlimit", "stalls", "x all\nresident", "misses"),
)
#: Columns that are left out, in this order, where a line is too short for all.
_LEFT_OUT: Final = ("misses", "x\nlimit", "limit", "stalls", "of all")


def add_to(commands: Any) -> None:
    """Add ``dynswap plan`` to the commands of the parser."""
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
        metavar="SIZE",
        help="device memory for weights, such as 6GiB, or minimum; may be given again (exit status 1 if one "
        "is too small)",
    )
    add("--share", action="append", default=[], help="the same as a share of the model: 25%% or 1/4")
    add("--dtype", help="dtype of floating weights on the device: bf16, fp16, ... (default: as in the file)")
    add("--prefetch", type=int, default=2, help="groups of weights to copy ahead (default: %(default)s)")
    add("--bandwidth", help="bandwidth of copies to the device, such as 25GB/s")
    add("--latency", help="latency of a copy, such as 7us")
    add("--compute", help="time of a pass with all weights on the device (350ms), or throughput (120TFLOPS)")
    add("--memory", help="bandwidth of the device's memory, such as 900GB/s (with a throughput)")
    add("--tokens", type=int, help="rows that a pass multiplies by each matrix (default: 1, or an image's)")
    add("--batch", type=int, help="batch size, which multiplies the tokens (default: 1)")
    add(
        "--train",
        choices=("full", "adapter"),
        help="also plan a training step of --tokens, of all weights or of an adapter: what it saves for "
        "backward, and its time. Needs the config.json of a language model of transformers",
    )
    add("--device", help="cpu, cuda, xpu, ...: measure what is not given, on that device of this machine")
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="measure instead: a function that returns a model and the inputs of a pass. The model runs "
        "here, installed, so that it need not fit",
    )
    add("--passes", type=int, default=3, help="timed passes of --model (default: %(default)s)")
    add("--plot", metavar="FILE", help="draw time and stalls over the budget: .png, .svg, .pdf")
    add("--json", action="store_true", help="everything, for programs")


@dataclasses.dataclass(frozen=True)
class _Case:
    """The weights and the machine to plan for, with texts on where their figures come from."""

    title: str
    weights: tuple[PlannedWeight, ...]
    order: str
    device: torch.device | None
    #: Bandwidth and latency are used. The rates of compute are used only if `values` has "rows".
    machine: Machine
    bandwidth_from: str
    compute: str
    #: Further values for ``--json``.
    values: dict[str, Any]
    notes: tuple[str, ...]


def _plan(options: argparse.Namespace) -> int:
    if (options.path is None) == (options.model is None):
        raise ConfigError(
            "name either a checkpoint or config, or --model module:function; `dynswap plan --help` has an "
            "example"
        )
    dtype = parse_dtype(options.dtype)
    if options.plot:
        check_path(options.plot)  # before anything is measured
    if options.train:
        plan_training.check(options)
    case = _measured(options, dtype) if options.model else _outlined(options, dtype)
    plan = planning.plan(
        case.weights,
        budgets=options.budget,
        shares=options.share,
        bandwidth=case.machine.bandwidth,
        latency=case.machine.latency,
        prefetch=options.prefetch,
        backend="host" if case.device is not None and case.device.type == "cpu" else "cuda",
    )
    notes = [*_rows_notes(plan, case), *case.notes]
    training = plan_training.of(options, plan, dtype) if options.train else None
    if options.json:
        more = {} if training is None else {"training": training.as_json()}
        print(json.dumps({**_as_json(plan, case), **more, "notes": notes}, indent=2))
    else:
        _print(plan, case, options.dtype, notes)
        if training is not None:
            write(*training.parts())
    if options.plot:
        written = planning.plot(plan, options.plot, title=case.title)
        print(f"drawn: {written}", file=sys.stderr if options.json else sys.stdout)
    return 1 if plan.too_small else 0


# ---- what is planned for -----------------------------------------------------------------------------------


def _outlined(options: argparse.Namespace, dtype: torch.dtype | None) -> _Case:
    """Return the case of a checkpoint or a config, with rates that are given, measured or assumed."""
    for name in ("tokens", "batch"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} is {given}; expected 1 or more")
    device = None if options.device is None else config.resolve(device=options.device).device
    found = planning.outline(options.path, dtype=dtype, disk=device is not None and device.type == "cpu")
    machine, source = planning.ASSUMED, f"assumed: {planning.ASSUMED.name}"
    bus = source
    if device is not None:
        largest = max(found.files, key=lambda file: file.stat().st_size, default=None)
        machine = planning.measure_machine(device, dtype=dtype, file=largest)
        source, bus = f"measured: {machine.name}", f"measured: {machine.bandwidth_kind}"
    machine = machine.with_rates(bandwidth=options.bandwidth, memory=options.memory, latency=options.latency)
    notes = found.notes
    values: dict[str, Any] = {"compute_from": "given" if options.compute else source}
    if options.compute is not None and "flop" not in options.compute.lower():
        of_rows = () if options.train else ("tokens", "batch")
        _refuse(options, (*of_rows, "memory"), "--compute is the time of a pass, whatever its rows")
        weights = planning.spread(found.weights, parse_seconds(options.compute))
        compute = f"{options.compute} a pass (given), spread over the matrices by their size"
    else:
        machine = machine.with_rates(arithmetic=options.compute)
        rows = (options.tokens or found.rows) * (options.batch or 1)
        weights = planning.timed(found.weights, machine, rows=rows)
        asked = "" if options.tokens else f" (assumed: {found.rows_as}; --tokens says how many)"
        compute = (
            f"{rows:,} row{'s' if rows > 1 else ''} a pass{asked}\n"
            f"{show_rate(machine.arithmetic, 'FLOPS')} ({values['compute_from']}), "
            f"{show_rate(machine.memory, 'B/s')} of the device's memory "
            f"({'given' if options.memory else source})"
        )
        values |= {"arithmetic": machine.arithmetic, "memory": machine.memory, "rows": rows}
        notes += (
            "Compute includes matrix products and convolutions at the full rate, and norms; it does not "
            "include attention products and activations. --model measures a real pass.",
        )
    bus = "given" if options.bandwidth else bus
    return _Case(found.title, weights, found.order, device, machine, bus, compute, values, notes)


def _measured(options: argparse.Namespace, dtype: torch.dtype | None) -> _Case:
    """Run the model of ``--model``, and return the case with the compute and the bandwidth measured."""
    wrong = ("compute", "memory", "tokens", "batch")
    _refuse(options, wrong, "--model measures the compute of its own inputs")
    model, inputs = _model_and_inputs(options.model)
    found = planning.measure(model, inputs, device=options.device, dtype=dtype, passes=options.passes)
    machine = dataclasses.replace(planning.ASSUMED, bandwidth=found.bandwidth, latency=found.latency)
    seconds = found.compute_seconds
    return _Case(
        title=f"{options.model}: {type(model).__name__}, {len(found.weights)} weights",
        weights=found.weights,
        order="as modules were called",
        device=found.device,
        machine=machine.with_rates(bandwidth=options.bandwidth, latency=options.latency),
        bandwidth_from="given" if options.bandwidth else f"measured: {found.bandwidth_kind}",
        compute=f"measured module by module: {show_seconds(min(seconds))} to {show_seconds(max(seconds))} "
        f"in {len(seconds)} passes, waits for copies left out",
        values={"compute_from": "measured", "measured_compute_seconds": list(seconds)},
        notes=found.notes,
    )


def _model_and_inputs(name: str) -> tuple[nn.Module, Any]:
    """Return the model and the inputs that the function MODULE:FUNCTION returns.

    Modules of the current folder are found, too.
    """
    if ":" not in name:
        raise ConfigError(f"--model is {name!r}; expected MODULE:FUNCTION, such as my_package.models:flux")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = name.partition(":")[0]
    try:
        function = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and what it imports is missing
        raise ConfigError(
            f"--model is {name!r}: {error}; expected a function of a module that is installed or in {here}"
        ) from error
    if not callable(function):
        raise ConfigError(f"--model is {name!r}, which is no function but {function!r}")
    made = function()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    types = [type(part).__name__ for part in made] if isinstance(made, tuple) else type(made).__name__
    raise ConfigError(
        f"{name} returned {types}; expected a torch.nn.Module and the inputs of a pass: return model, inputs"
    )


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name}" for name in names if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"{why}; leave out {', '.join(given)}")


# ---- what it costs -----------------------------------------------------------------------------------------


def _rows_notes(plan: Plan, case: _Case) -> Iterator[str]:
    """Yield sentences on how many rows would hide the copies, for the budgets that were asked for."""
    for prediction in plan.predictions:
        if "rows" not in case.values or prediction.hidden or prediction.budget not in plan.asked:
            continue
        rows = planning.rows_to_hide(case.weights, case.machine, prediction.copy_seconds)
        if rows is not None:
            budget = format_bytes(prediction.budget)
            yield f"At {budget} a pass of about {rows:,} rows computes for as long as its copies take."


def _print(plan: Plan, case: _Case, dtype: str | None, notes: Sequence[str]) -> None:
    """Print the facts of the case, the table of predictions, and what follows from it."""
    nbytes = sum(weight.nbytes for weight in plan.weights)
    moved = sum(weight.moved_bytes for weight in plan.weights)
    coded = any(weight.coded for weight in plan.weights)
    why = " and ".join(["coded"] * coded + ["of another dtype"] * (dtype is not None or not coded))
    fewer = f", {format_bytes(moved)} moved, as the masters are {why}" if moved != nbytes else ""
    on_device = f"{format_bytes(nbytes)}{f' as {dtype}' if dtype else ''}{fewer}"
    latency = f"{plan.latency * 1e6:.3g} us a copy"
    facts = [
        ("model", case.title),
        ("on the device", on_device if case.device is None else f"{on_device}, {case.device}"),
        ("order of use", case.order),
        ("bandwidth", f"{show_rate(plan.bandwidth, 'B/s')} ({case.bandwidth_from}), {latency}"),
        ("compute", case.compute),
    ]
    rows = []
    for prediction in plan.predictions:
        share = f"{prediction.budget / plan.all:.0%}" if prediction.budget < plan.all else "all"
        if prediction is plan.minimum:
            share = MINIMUM
        elif prediction.budget == plan.smallest < plan.all:
            share = "smallest"
        rows.append(
            (
                format_bytes(prediction.budget),
                share,
                f"{prediction.resident_share:.0%}",
                format_bytes(prediction.moved_bytes or None),
                show_seconds(prediction.seconds),
                show_seconds(prediction.limit_seconds),
                f"{prediction.to_limit:.2f}",
                show_seconds(prediction.stall_seconds if prediction.stall_seconds > 0 else None),
                _times(prediction.to_resident),
                f"{prediction.misses:.0f}" if prediction.misses else "-",
            )
        )
    asked = {place for place, prediction in enumerate(plan.predictions) if prediction.budget in plan.asked}
    table = plain_table(_TITLES, rows, right=_TITLES, optional=_LEFT_OUT, bold=asked)
    dimmed = (Text(note, style="dim") for note in notes)
    write(facts_grid(facts), table, *map(Text, _conclusions(plan)), *dimmed)


def _times(factor: float) -> str:
    return "-" if math.isinf(factor) else f"{factor:.2f}" if factor < 100 else f"{factor:.0f}"


def _conclusions(plan: Plan) -> Iterator[str]:
    """Yield sentences on what follows from the predictions."""
    largest = "the largest group of weights takes"
    if any(weight.by_use for weight in plan.weights):
        largest = "the largest group of weights and the largest expert take"
    for budget in plan.too_small:
        yield (
            f"{format_bytes(budget)} is too small: {largest} {exact_bytes(plan.smallest)}, the smallest "
            "budget that works."
        )
    for prediction in plan.predictions:
        if prediction.budget in plan.asked:
            yield f"{format_bytes(prediction.budget)}: {_sentence(prediction)}"
    of_budgets = [found for found in plan.predictions if found is not plan.minimum]
    for smaller, larger in pairwise(of_budgets):
        if larger.resident_share < smaller.resident_share and larger.seconds < smaller.seconds:
            yield (
                f"{format_bytes(larger.budget)} keeps fewer weights on the device than "
                f"{format_bytes(smaller.budget)}: room for copies ahead saves more time."
            )
    yield from _slower(of_budgets)
    if plan.hidden_from <= plan.smallest:
        yield "Compute hides all copies at any budget that works."
    elif plan.hidden_from >= 0.99 * plan.all:
        yield f"Only a budget for all weights ({format_bytes(plan.all)}) hides all copies."
    else:
        yield f"From about {format_bytes(plan.hidden_from)} on, compute hides all copies."
    yield "Times and bytes are of one pass in the steady state. The budget is for weights, not activations."
    yield "No order of copies beats the limit: max(compute, copies of what the budget cannot hold)."
    yield "x all resident: relative to all weights on the device."


def _slower(by_budget: Sequence[Prediction]) -> Iterator[str]:
    """Yield a sentence for each budget that is faster than larger ones, which names the larger ones."""
    better, slower = by_budget[0], dict[int, list[int]]()
    for prediction in by_budget[1:]:
        if prediction.seconds > _SLOWER * better.seconds:
            slower.setdefault(better.budget, []).append(prediction.budget)
        elif prediction.seconds < better.seconds:
            better = prediction
    for enough, budgets in slower.items():
        named = listed([format_bytes(budget) for budget in budgets])
        yield (
            f"Slower than {format_bytes(enough)}, which is enough: {named}. Weights are grouped, and "
            "residents chosen, for each budget by itself."
        )


def _sentence(prediction: Prediction) -> str:
    if prediction.resident_share >= 1:
        return f"every weight is resident; {show_seconds(prediction.seconds)} a pass."
    if prediction.hidden:
        tail = "compute hides the copies"
    elif prediction.copy_seconds >= prediction.compute_seconds:
        tail = "bound by copies: more budget or a faster bus helps, more prefetch hardly does"
    else:
        tail = "compute is longer than the copies in all, but not everywhere: some groups arrive late"
    slower = prediction.to_resident
    than = "" if math.isinf(slower) else f", {_times(slower)} x all resident"
    moved, seconds = format_bytes(prediction.moved_bytes), show_seconds(prediction.seconds)
    share = f"{prediction.resident_share:.0%} of the weights resident"
    return f"{share}, {moved} moved, {seconds} a pass{than}; {tail}."


def _as_json(plan: Plan, case: _Case) -> dict[str, Any]:
    """Return the whole plan for JSON, in bytes and seconds. JSON has no infinity, so that becomes None."""
    rows = [
        {
            **dataclasses.asdict(prediction),
            "to_limit": prediction.to_limit,
            "to_resident": None if math.isinf(prediction.to_resident) else prediction.to_resident,
        }
        for prediction in plan.predictions
    ]
    return {
        "model": case.title,
        "order": case.order,
        "device": None if case.device is None else str(case.device),
        "bandwidth_from": case.bandwidth_from,
        **case.values,
        "bandwidth": plan.bandwidth,
        "latency": plan.latency,
        "prefetch": plan.prefetch,
        "weights": len(plan.weights),
        "weight_bytes": sum(weight.nbytes for weight in plan.weights),
        "smallest_budget": plan.smallest,
        "all_resident_budget": plan.all,
        "minimum_budget": plan.minimum.budget if plan.minimum else None,
        "copies_hidden_from": plan.hidden_from,
        "asked": list(plan.asked),
        "too_small": list(plan.too_small),
        "budgets": rows,
    }
