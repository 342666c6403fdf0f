"""`perdure explain`: what a start would do, without doing it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from perdure.cli import render
from perdure.cli.paths import FilePath

if TYPE_CHECKING:
    from perdure.train.explain import Explanation

__all__ = ["command"]


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FilePath())
@click.argument("overrides", nargs=-1)
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of the job; default: as many as saved the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(config: str, overrides: tuple[str, ...], ranks: int | None, as_json: bool) -> int:
    """Says what `perdure train CONFIG` would do now: which iteration it would resume from and why from no newer one.

    Step and samples with their arithmetic, learning rates, settings that changed, how the ranks share the work, what
    each would read, and the room for saves. Nothing is written and no lock is taken. Exit code 0 where the start would
    succeed as far as can be told, else that of its error.
    """
    from perdure.config.load import load_config
    from perdure.train.explain import explain

    told = explain(load_config(config, overrides), ranks)
    if as_json:
        problems = [{"message": p.message, "hint": p.hint, "exit_code": p.exit_code} for p in told.problems]
        render.print_json({**asdict(_without_problems(told)), "problems": problems})
    else:
        _show(told)
    return told.problems[0].exit_code if told.problems else 0


def _without_problems(told: Explanation) -> Explanation:
    from dataclasses import replace

    return replace(told, problems=[])


def _show(told: Explanation) -> None:
    lines = list(_lines(told))
    width = max((len(key) for key, _ in lines), default=0)
    for key, value in lines:
        render.say(f"{key:<{width}}  {value}")
    for warning in told.warnings:
        render.warn(warning)
    for name, why in told.not_counted:
        render.note(f"not counted: {name}: {why}")
    for problem in told.problems:
        render.error(f"the start would fail: {problem.message}", problem.hint)


def _lines(told: Explanation) -> Iterator[tuple[str, str]]:
    count = render.human_count
    yield (
        "start",
        {"resume": f"resume of {told.source}", "weights only": f"from the weights of {told.source}"}.get(
            told.start, "at step 0, with fresh weights" if told.start == "fresh" else "cannot be told"
        ),
    )
    if told.made_by:
        yield "made by", told.made_by
    if told.why:
        yield "why", told.why
    if told.saved is not None:
        yield (
            "saved at",
            f"step {count(told.saved['step'])}, sample {count(told.saved['consumed_samples'])}, "
            f"{told.saved['global_batch_size']} per step",
        )
    if told.step is not None:
        left = max(0, told.steps - told.step)
        yield "step", f"{count(told.step)} of {count(told.steps)} done, {count(left)} remain"
    for line in told.arithmetic:
        yield "", line
    if told.next_samples is not None:
        first, last = told.next_samples
        yield "next step", f"samples {count(first)} to {count(last - 1)} of the stream"
        yield "epoch", f"{told.epoch}, step {told.step_in_epoch} of it"
    if told.rate is not None:
        before = "" if told.rate_before is None else f"{told.rate_before:.6g} at the last step, "
        yield "learning rate", f"{before}{told.rate:.6g} at the next"
    for change in told.changes:
        yield "changed", change
    yield from _rank_lines(told)
    for note in told.notes:
        yield "note", note
    if told.save_path:
        takes = "" if told.save_bytes is None else f"a save takes {render.human_bytes(told.save_bytes)}, "
        free = "" if told.free is None else f"{render.human_bytes(told.free)} are free below {told.save_path}"
        yield "room", f"{takes}{told.save_max} are kept, {free}"


def _rank_lines(told: Explanation) -> Iterator[tuple[str, str]]:
    if told.layout is not None:
        before = f"{_layout(told.layout_before)} -> " if told.layout_before not in (None, told.layout) else ""
        yield "layout", f"{before}{_layout(told.layout)}"
    if told.held:
        yield "weights", _per_rank(told.held, told)
    if told.reads:
        yield "reads", _per_rank(told.reads, told)
    if told.stored is not None:
        yield "stored", f"{render.human_bytes(told.stored)} in {os.path.basename(told.source)}"


def _layout(degrees: dict[str, int] | None) -> str:
    named = dict(degrees or {})
    ranks = named.pop("ranks", 1)
    shown = ", ".join(f"{name} {degree}" for name, degree in named.items())
    return f"{ranks} rank{'s' if ranks != 1 else ''}{f' ({shown})' if shown else ''}"


def _per_rank(sizes: list[int], told: Explanation) -> str:
    ranks = told.layout["ranks"] if told.layout else len(sizes)
    if len(set(sizes)) == 1:
        return render.human_bytes(sizes[0]) + (" on each rank" if ranks > 1 else "")
    shown = ", ".join(f"rank {rank}: {render.human_bytes(size)}" for rank, size in enumerate(sizes))
    return shown + (f", of {ranks} ranks" if len(sizes) < ranks else "")
