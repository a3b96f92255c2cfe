"""``limbeck plan``: memory and time of a run file under every layout of N devices, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from limbeck.cli.options import (
    JsonOption,
    OverridesArgument,
    RunFileArgument,
    console,
    distillation_of,
    print_json,
    read_run_file,
)
from limbeck.errors import ConfigError

if TYPE_CHECKING:
    from limbeck.distributed.planner import Estimate, Machine, Workload

_GIB = 1 << 30
_WIDE = 120


def plan_command(
    run_file: RunFileArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int, typer.Option("--gpus", "-g", help="Devices of the run.", min=1)] = 1,
    memory: Annotated[
        float | None, typer.Option("--memory", "-m", help="GiB of each device (default: this machine's, or 80).", min=1)
    ] = None,
    tokens: Annotated[float, typer.Option(help="Training tokens of the whole run, for time and cost.", min=0)] = 0.0,
    tflops: Annotated[
        float | None, typer.Option(help="Peak of a device in the run's precision (default: 989).", min=0.1)
    ] = None,
    utilisation: Annotated[float, typer.Option(help="Share of the peak that is reached.", min=0.01, max=1)] = 0.4,
    per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1)] = 8,
    node_link: Annotated[float, typer.Option(help="GB/s of a device to others in its node.", min=0.1)] = 450.0,
    network: Annotated[float, typer.Option(help="GB/s of a device to other nodes.", min=0.01)] = 50.0,
    price: Annotated[float, typer.Option(help="Money per device and hour.", min=0)] = 3.0,
    show: Annotated[int, typer.Option(help="Layouts to print.", min=1)] = 8,
    json_output: JsonOption = False,
) -> None:
    """Estimate memory and time per layout and pick one: data, FSDP, tensor and context parallel.

    Example: limbeck plan llama_from_qwen --gpus 8 --memory 80
    """
    run_file_and_settings = read_run_file(run_file, overrides)
    from limbeck.distributed.planner import fitting, plan
    from limbeck.tools.machine import assumed_machine
    from limbeck.tools.workload import workload_of

    config = distillation_of(run_file_and_settings)
    machine, device = assumed_machine(
        memory,
        tflops,
        gpus=gpus,
        utilisation=utilisation,
        devices_per_node=per_node,
        node_link=node_link * 1e9,
        network_link=network * 1e9,
        price_per_hour=price,
    )
    work = workload_of(config)
    estimates = plan(work, gpus, machine)
    best = fitting(estimates)
    result = {"device": device, **describe(work, estimates, machine, gpus, tokens)}
    if json_output:
        print_json(result)
    else:
        print_plan(estimates, result, show)
    if best is None:
        raise ConfigError(_refusal(estimates, machine, gpus))


def _refusal(estimates: list[Estimate], machine: Machine, gpus: int) -> str:
    """Why no layout can be used: what stands in the way of one that memory would allow, or else memory."""
    room = [e for e in estimates if e.total <= machine.memory]
    if room:
        nearest = min(room, key=lambda e: e.step_seconds)
        return (
            f"no layout of {gpus} devices can be used, though memory would do; the nearest, {nearest.layout.name}: "
            f"{nearest.problem}; change distillation.num_prompts_per_step or the number of devices"
        )
    nearest = min(estimates, key=lambda e: e.total)
    return (
        f"no layout of {gpus} devices with {machine.memory / _GIB:g} GiB fits; the nearest, {nearest.layout.name}, "
        f"needs {nearest.total / _GIB:.1f} GiB ({nearest.problem}): take more devices, cache the teacher, or switch "
        "activation_checkpointing on"
    )


def describe(
    work: Workload, estimates: list[Estimate], machine: Machine, gpus: int, tokens: float = 0.0
) -> dict[str, Any]:
    """The plan as plain data: all layouts, the choice, and settings that ask for it."""
    from limbeck.distributed.planner import fitting

    best = fitting(estimates)
    out: dict[str, Any] = {
        "gpus": gpus,
        "memory_gib": machine.memory / _GIB,
        "student_parameters": work.student.parameters,
        "teachers": [{"kind": t.kind, "parameters": t.shape.parameters if t.shape else None} for t in work.teachers],
        "tokens_per_step": work.tokens_per_step,
        "layouts": [e.to_dict() for e in estimates],
        "best": best.layout.name if best else None,
    }
    if best is not None:
        mesh = best.layout.mesh
        speed = work.tokens_per_step / best.step_seconds
        out["settings"] = _settings("policy", mesh.tensor, mesh.context, sharded=best.layout.sharded)
        for number, teacher in enumerate(best.teachers):
            if teacher.live:
                section = "teacher" if len(best.teachers) == 1 else f"teachers.{number}"
                sharded = teacher.sharded and best.layout.sharded
                context = mesh.context if teacher.layer_bytes is None else 1
                out["settings"] += _settings(section, teacher.tensor(mesh), context, sharded=sharded)
        out["tokens_per_second"] = round(speed, 1)
        if tokens:
            hours = tokens / speed / 3600
            out["run"] = {
                "tokens": tokens,
                "hours": round(hours, 2),
                "device_hours": round(hours * gpus, 1),
                "cost": round(hours * gpus * machine.price_per_hour, 2),
                "signal_bytes": [tokens * t.tokens_ratio * t.signal_bytes for t in work.teachers],
            }
    return out


def _settings(section: str, tensor: int, context: int, *, sharded: bool) -> list[str]:
    """Overrides that lay a model out."""
    values = {"fsdp": str(sharded).lower(), "tensor_parallel_size": tensor, "context_parallel_size": context}
    return [f"{section}.dtensor_cfg.{key}={value}" for key, value in values.items()]


def print_plan(estimates: list[Estimate], result: dict[str, Any], show: int) -> None:
    """The plan as a table of the best layouts, and what to set."""
    from rich.table import Table

    table = Table(title=f"GiB per device, {result['gpus']} x {result['device']}", title_justify="left")
    out = console()
    parts = list(dict.fromkeys(name for e in estimates for name in e.memory))
    # what memory holds takes a column each; a narrow terminal gets those of the best layout below the table
    names = parts if out.width >= _WIDE else []
    table.add_column("layout", no_wrap=True)
    for name in (*names, "total", "s/step"):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("", overflow="fold")
    for e in estimates[:show]:
        cells = [f"{e.memory.get(name, 0.0) / _GIB:.1f}" for name in names]
        table.add_row(e.layout.name, *cells, f"{e.total / _GIB:.1f}", f"{e.step_seconds:.3g}", e.problem or "fits")
    out.print(table)
    if not names:
        first = estimates[0]
        held = ", ".join(f"{name.replace('_', ' ')} {first.memory.get(name, 0.0) / _GIB:.1f}" for name in parts)
        out.print(f"{first.layout.name} holds, in GiB: {held}")
    if result["best"]:
        typer.echo(f"best: {result['best']}, about {result['tokens_per_second']:,.0f} tokens/s; set")
        typer.echo("  " + " ".join(result["settings"]))
    if "run" in result:
        r = result["run"]
        stored = sum(r["signal_bytes"]) / 1e12
        typer.echo(
            f"{r['tokens']:.3g} tokens: {r['hours']:,.1f} hours, {r['device_hours']:,.0f} device hours, "
            f"{r['cost']:,.0f} in money" + (f", {stored:,.1f} TB of teacher signals" if stored else "")
        )
