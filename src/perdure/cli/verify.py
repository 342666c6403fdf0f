"""`perdure verify`: is what lies there what was written?"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from perdure.catalog.fingerprint import by_section, fingerprint
from perdure.catalog.report import Report
from perdure.catalog.verify import verify
from perdure.cli import render
from perdure.cli.paths import FilePath

__all__ = ["command"]


@click.command("verify")
@click.argument("path", type=FilePath(path_type=Path))
@click.option("--read-data", is_flag=True, help="Read every byte of every tensor too.")
@click.option(
    "--fingerprint",
    "with_fingerprint",
    is_flag=True,
    help="Read all and tell a fingerprint that no cut into shards changes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(path: Path, read_data: bool, with_fingerprint: bool, as_json: bool) -> int:
    """Checks PATH, an iteration directory or a whole root, and changes nothing.

    Structure and headers always; with --read-data the digest of every block of every tensor. Exit code 1 where
    anything isn't what was written. Two iterations with the same --fingerprint hold the same tensors, bit for bit,
    whatever ranks and layouts they were saved on.
    """
    # What is damaged has no fingerprint.
    read_data = read_data or with_fingerprint
    with ExitStack() as stack:
        advance: list[render.Advance] = []
        done = 0

        def progress(count: int, total: int) -> None:
            nonlocal done
            if not advance:
                advance.append(stack.enter_context(render.progress("verifying", total)))
            advance[0](count - done)
            done = count

        report = verify(path, read_data=read_data, progress=progress)
    prints = _fingerprints(report) if with_fingerprint else {}
    if as_json:
        told = {"fingerprints": prints} if with_fingerprint else {}
        render.print_json({**asdict(report), "ok": report.ok, "read_data": read_data, **told})
    else:
        _show(report, read_data)
        for name, sections in prints.items():
            parts = ", ".join(f"{section} {value}" for section, value in sections.items() if section != "all")
            render.say(f"{name}: fingerprint {sections['all']}")
            render.note(f"  of these: {parts}")
    return 0 if report.ok else 1


def _fingerprints(report: Report) -> dict[str, dict[str, str]]:
    """The fingerprints of what was verified and is sound, by iteration and then by section, `all` being the whole."""
    hurt = {problem.path for problem in report.problems}
    found = {}
    for name in report.iterations:
        path = report.path if os.path.basename(os.path.abspath(report.path)) == name else f"{report.path}/{name}"
        if hurt.isdisjoint((path, os.path.abspath(path))):
            found[name] = by_section(fingerprint(path))
    return found


def _show(report: Report, read_data: bool) -> None:
    for note in report.notes:
        render.note(f"note: {note}")
    for problem in report.problems:
        render.say(f"problem: {problem.what}")
        if problem.expected or problem.found:
            render.say(f"  expected {problem.expected or '-'}, found {problem.found or '-'}")
        if problem.hint:
            render.say(f"  hint: {problem.hint}")
    count = len(report.iterations)
    checked = f"{count} iteration{'s' if count != 1 else ''}"
    depth = f"every byte ({render.human_bytes(report.bytes_read)} of tensors)" if read_data else "structure and headers"
    if report.ok:
        render.say(f"{checked} in {report.path}: {depth} as written")
        if not read_data:
            render.note("tensor data were not read; --read-data does")
    else:
        faults = len(report.problems)
        render.say(f"{faults} problem{'s' if faults != 1 else ''} in {checked} of {report.path}")
