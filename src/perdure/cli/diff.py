"""`perdure diff`: are two checkpoints the same, and if not, which tensors differ by how much?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from perdure.catalog.diff import DiffReport, TensorDiff, diff
from perdure.catalog.fingerprint import by_section, fingerprint
from perdure.cli import render
from perdure.cli.paths import FilePath
from perdure.format.metadata import SECTIONS, Section

__all__ = ["command"]

_SHOWN = 20


@click.command("diff")
@click.argument("a", type=FilePath(path_type=Path))
@click.argument("b", type=FilePath(path_type=Path))
@click.option("--section", type=click.Choice(SECTIONS), help="Compare the tensors of one section only.")
@click.option("--read-data", is_flag=True, help="Read also what both recorded with the same digests.")
@click.option("--fingerprint", "with_fingerprint", is_flag=True, help="Read all and tell the fingerprints too.")
@click.option("--all", "everything", is_flag=True, help=f"Every difference, not the first {_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    a: Path,
    b: Path,
    section: Section | None,
    read_data: bool,
    with_fingerprint: bool,
    everything: bool,
    as_json: bool,
) -> int:
    """Compares A and B: iteration directories, or roots (what a resume would take), however each is cut.

    Exit code 0 where all is equal bit for bit, 1 where anything differs.
    """
    report = diff(a, b, section=section, read_data=read_data)
    prints = [by_section(fingerprint(side)) for side in (report.a, report.b)] if with_fingerprint else []
    if as_json:
        told = {"fingerprints": prints} if with_fingerprint else {}
        render.print_json({**asdict(report), "equal": report.equal, **told})
    else:
        _show(report, everything)
        for path, sections in zip((report.a, report.b), prints, strict=False):
            render.say(f"{path}: fingerprint {sections.get(section or 'all', '-')}")
    return 0 if report.equal else 1


def _show(report: DiffReport, everything: bool) -> None:
    for note in report.notes:
        render.note(f"note: {note}")
    for title, pairs in (("progress", report.progress), ("training", report.training)):
        for key, (one, other) in pairs.items():
            render.say(f"{title}: {key}: {_short(one)} -> {_short(other)}")
    if report.tensors:
        shown = report.tensors if everything else report.tensors[:_SHOWN]
        render.table(["section", "tensor", "differs in", "how"], [_row(t) for t in shown])
        if len(shown) < len(report.tensors):
            render.note(f"{len(report.tensors) - len(shown)} more tensors differ: --all shows them")
    tensors = f"{render.human_count(report.compared)} tensors compared"
    if report.equal:
        render.say(f"equal: {tensors}")
    else:
        values = sum(t.what == "values" for t in report.tensors)
        other = len(report.tensors) - values
        render.say(f"different: {tensors}, {values} differ in values, {other} in name, dtype or shape")


def _row(tensor: TensorDiff) -> tuple[str, str, str, str]:
    if tensor.what == "values":
        share = f"{render.human_count(tensor.differing)} of {render.human_count(tensor.elements)} elements"
        most = "not comparable as numbers" if tensor.max_abs is None else f"at most by {tensor.max_abs:.6g}"
        how = f"{share}, {most}"
    else:
        how = (
            " -> ".join(side or "-" for side in (tensor.a, tensor.b)) if tensor.a and tensor.b else tensor.a or tensor.b
        )
    return tensor.section, tensor.name, tensor.what, how


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
