"""`perdure bench`: what saving and loading cost on this storage, and how often to save."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import render
from perdure.cli.paths import FilePath

if TYPE_CHECKING:
    from perdure.train.measure import Measured, Observed

__all__ = ["command"]

_MOST = 4 << 30
_DAY = 86400.0


@click.command("bench")
@click.argument("path", type=FilePath(exists=True, file_okay=False), default=".")
@click.option("--config", type=FilePath(), help="A configuration whose model and optimizer are measured.")
@click.option("--gib", type=click.FloatRange(min=0.001), help="Size of a made-up state; default: the root's, or 1.")
@click.option("--failures-per-day", type=click.FloatRange(min=0, min_open=True), help="Default: as observed, or 1.")
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Default: as observed.")
@click.option("--seconds", type=click.FloatRange(min=0), default=40.0, show_default=True, help="Time to spend.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    path: str,
    config: str | None,
    gib: float | None,
    failures_per_day: float | None,
    step_seconds: float | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Measures raw writing and reading, a save, a load and an asynchronous save below PATH, and recommends an interval.

    PATH is a directory on the storage in question, such as a run's save root, whose history then says how large
    the state is, how long a step takes and how often the run was interrupted. It holds up to four copies of the
    state meanwhile.
    """
    from perdure.train.measure import measure, observe, synthetic

    seen = observe(path)
    if config is not None:
        model, optimizer = _configured(config)
    else:
        model, optimizer = synthetic(int(gib * (1 << 30)) if gib is not None else min(seen.bytes or 1 << 30, _MOST))
    found = measure(path, model, optimizer, budget_s=seconds, progress=render.note)
    advice = _advice(found, seen, failures_per_day, step_seconds)
    if as_json:
        render.print_json({"measured": asdict(found), "observed": asdict(seen), "advice": advice})
    else:
        _show(found, advice)


def _configured(path: str) -> tuple[Any, Any]:
    """Model and optimizer of a configuration, built as a run of one process builds them."""
    import torch

    from perdure.config.load import load_config
    from perdure.config.ranks import check_ranks
    from perdure.parallel.mesh import make_mesh
    from perdure.train import build

    config = load_config(path)
    device = build.device()
    model = build.network(config, None, build.data(config, None)).to(device)
    mesh = make_mesh(check_ranks(config, 1), torch.device(device))
    return model, build.optimizer_and_schedule(config, model, None, mesh)[0]


def _advice(
    found: Measured, seen: Observed, failures_per_day: float | None, step_seconds: float | None
) -> dict[str, Any]:
    from perdure.engine.interval import best_interval, steps_between

    given = _DAY / failures_per_day if failures_per_day is not None else None
    mtbf = given or seen.mtbf_s or _DAY
    step = step_seconds or seen.step_s
    advice: dict[str, Any] = {
        "mtbf_s": mtbf,
        "mtbf_from": "given" if given else "observed" if seen.mtbf_s else "assumed",
        "step_s": step,
    }
    for name, cost, save in (
        ("async_save", found.stall_s, found.background_s),
        ("synchronous", found.save_s, found.save_s),
    ):
        interval = best_interval(cost, mtbf)
        steps = steps_between(interval, step, save) if step else None
        # What saving takes away, and what a failure loses on average: half an interval and the save under way.
        lost = cost / (interval + cost) + (interval / 2 + save) / mtbf
        advice[name] = {"interval_s": interval, "save_interleaved_steps": steps, "time_lost": lost}
    return advice


def _show(found: Measured, advice: dict[str, Any]) -> None:
    size = found.bytes / (1 << 30)
    names = {
        "copy_s": "copy in memory",
        "raw_write_s": "raw write, durable",
        "raw_read_s": "raw read",
        "save_s": "save, waited for",
        "load_s": "load",
        "stall_s": "asynchronous save: stall",
        "background_s": "asynchronous save: committed after",
    }
    rows = []
    for key, name in names.items():
        seconds: float = getattr(found, key)
        rows.append((name, f"{seconds:.3f}", f"{size / seconds:.2f}" if seconds else None))
    render.say(f"state of {render.human_bytes(found.bytes)}")
    render.table(("measured", "seconds", "GiB/s"), rows, numbers=("seconds", "GiB/s"))
    day = advice["mtbf_s"]
    render.say(f"\nwith a failure every {render.human_seconds(day)} ({advice['mtbf_from']}), save")
    for name, what in (("async_save", "async_save: true"), ("synchronous", "async_save: false")):
        each = advice[name]
        steps = each["save_interleaved_steps"]
        told = f"save_interleaved_steps: {steps}, that is " if steps else ""
        render.say(
            f"  {what:<18} {told}every {render.human_seconds(each['interval_s'])}; "
            f"{100 * each['time_lost']:.2f} % of the time is lost to saves and failures"
        )
    if not advice["step_s"]:
        render.note("hint: --step-seconds S turns this into steps")
