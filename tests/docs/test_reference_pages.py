"""The reference says what the program does: examples are real, the page of commands is theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perdure.cli.reference import page
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.digest import digest_bytes
from perdure.format.metadata import CheckpointMetadata

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def examples() -> dict[str, bytes]:
    """The JSON examples of the page about files, by name."""
    text = (DOCS / "reference" / "format.md").read_text(encoding="utf-8")
    return {name: body.encode() for name, body in re.findall(r"```json (\w+)\n(.*)\n```", text)}


def test_the_examples_are_files_that_are_read_and_written_again(examples: dict[str, bytes]) -> None:
    assert CommitRecord.decode(examples["commit"]).encode() == examples["commit"]
    assert CommonInfo.decode(examples["common"]).encode() == examples["common"]
    metadata = CheckpointMetadata.decode(examples["metadata"])
    metadata.check()
    assert metadata.encode() == examples["metadata"]


def test_the_examples_belong_together(examples: dict[str, bytes]) -> None:
    commit = CommitRecord.decode(examples["commit"])
    assert commit.metadata_digest == digest_bytes(examples["metadata"])
    assert commit.common_digest == digest_bytes(examples["common"])
    assert commit.iteration == CommonInfo.decode(examples["common"]).global_step
    files = CheckpointMetadata.decode(examples["metadata"]).files
    assert commit.size == len(examples["metadata"]) + len(examples["common"]) + sum(f.size for f in files)


def test_the_page_of_commands_is_up_to_date() -> None:
    told = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    assert told == page(), "run: python -m perdure.cli.reference > docs/reference/cli.md"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda p: p.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).as_posix()
        assert name == "index.md" or f"({name})" in index
