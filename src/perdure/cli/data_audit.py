"""`perdure data audit`: did a run have every sample exactly once?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from perdure.cli import render
from perdure.cli.paths import FilePath
from perdure.train.audit import LEDGER, AuditReport, audit
from perdure.train.compare_ledgers import Comparison, compare
from perdure.train.ledger import read_ledger

__all__ = ["command"]

_SHOWN = 20


@click.command("audit")
@click.argument("output_dir", type=FilePath(path_type=Path))
@click.option("--against", type=FilePath(path_type=Path), help="The output_dir of a run to compare with.")
@click.option(
    "--save-path", type=FilePath(path_type=Path), help="Where the checkpoints are; default: OUTPUT_DIR/checkpoint."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(output_dir: Path, against: Path | None, save_path: Path | None, as_json: bool) -> int:
    """Proves from the ledger in OUTPUT_DIR that no sample was repeated or missed, or says which.

    What each step must have had is computed again from the seed and the position, over all restarts, numbers
    of ranks, batch sizes, rewinds and skips, and compared with what the workers had really read; the
    checkpoints vouch for the ledger itself. Exit code 1 where anything is wrong.
    """
    report = audit(str(output_dir), save_path=None if save_path is None else str(save_path))
    compared = None
    if against is not None:
        compared = compare(read_ledger(str(output_dir / LEDGER)), read_ledger(str(against / LEDGER)))
    if as_json:
        told = {**asdict(report), "ok": report.ok}
        if compared is not None:
            told["against"] = {**asdict(compared), "same": compared.same}
        render.print_json(told)
    else:
        _show(report)
        if compared is not None:
            _show_comparison(compared)
    return 0 if report.ok and (compared is None or compared.same) else 1


def _show(report: AuditReport) -> None:
    for note in report.notes:
        render.note(f"note: {note}")
    for finding in report.findings[:_SHOWN]:
        render.say(f"{finding.kind}: {finding.what}")
    if len(report.findings) > _SHOWN:
        render.say(f"and {len(report.findings) - _SHOWN} more; --json has them all")
    count = render.human_count
    epochs = f", {report.epochs:.4g} epochs" if report.epochs else ""
    over = f"{count(report.steps)} steps of {_plural(report.attempts, 'attempt')}"
    replaced = f"; {_plural(report.superseded, 'step')} replaced later" if report.superseded else ""
    left = f"; {_plural(report.left_out, 'sample')} left out on purpose" if report.left_out else ""
    vouched = f"; {_plural(report.commits, 'checkpoint')} vouch for the ledger" if report.commits else ""
    what = f"{over}, stream positions [{count(report.first)}, {count(report.last)}){epochs}{replaced}{left}{vouched}"
    if not report.ok:
        render.say(f"{_plural(len(report.findings), 'fault')} in {what}")
    elif report.recomputed:
        render.say(f"every sample exactly once, in the order of its seed: {what}")
    else:
        render.say(f"every position exactly once: {what}")


def _show_comparison(compared: Comparison) -> None:
    for stretch in compared.different[:_SHOWN]:
        render.say(
            f"different: stream positions [{stretch.first}, {stretch.last}), step {stretch.step} here and "
            f"{stretch.other_step} there"
        )
    if len(compared.different) > _SHOWN:
        render.say(f"and {len(compared.different) - _SHOWN} more; --json has them all")
    for first, last in compared.only_here:
        render.note(f"note: only here: stream positions [{first}, {last})")
    for first, last in compared.only_there:
        render.note(f"note: only in {compared.other}: stream positions [{first}, {last})")
    steps = "step by step" if compared.step_by_step else f"at {compared.stretches} places where steps of both end"
    if not compared.stretches:
        render.say("the two runs have no place in common where their steps end")
    elif compared.same:
        render.say(f"the same samples, {steps}")
    else:
        render.say(
            f"other samples in {_plural(len(compared.different), 'stretch', 'stretches')} of {compared.stretches}"
        )


def _plural(number: int, one: str, many: str | None = None) -> str:
    return f"{render.human_count(number)} {one if number == 1 else many or f'{one}s'}"
