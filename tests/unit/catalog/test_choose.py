"""Which iteration a resume takes, what is said about it, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.checkpoints import build_checkpoint

from perdure.catalog.choose import choose, fallback, locate
from perdure.catalog.events import append_event, damage_marks, end_torn_line, mark_damaged, read_events
from perdure.catalog.lineage import next_sequence
from perdure.catalog.root import Root
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError
from perdure.format.digest import digest_bytes
from perdure.format.names import EVENTS, TRACKER


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Three saves of one run, in which scaling has made the numbers go down."""
    place = Root(tmp_path / "checkpoint")
    os.mkdir(place.path)
    for sequence, iteration in enumerate((100, 200, 12), start=1):
        build_checkpoint(place, iteration, sequence=sequence)
    return place


def set_tracker_text(root: Root, text: bytes) -> None:
    Path(root.join(TRACKER)).write_bytes(text)


def rewrite_commit(path: str, old: bytes, new: bytes) -> None:
    """A commit.json that says something else, with a digest that holds."""
    file = Path(path, "commit.json")
    head = file.read_bytes().replace(old, new)[: -len(',"digest":"xxh3-128:') - 34]
    file.write_bytes(head + b',"digest":"' + digest_bytes(head).encode() + b'"}')


def test_iterations_are_ordered_by_sequence_not_by_number(root: Root) -> None:
    assert [i.iteration for i in root.iterations()] == [100, 200, 12]


def test_the_tracker_decides_and_newer_ones_are_mentioned(root: Root) -> None:
    assert choose(root).iteration.iteration == 12
    assert choose(root).warnings == []
    set_tracker_text(root, b"200\n")
    choice = choose(root)
    assert choice.iteration.iteration == 200
    assert "iteration_00000012" in choice.warnings[0]


@pytest.mark.parametrize("text", [b"", b"abc", b"-5", b"999", b"\xff\xfe", b"1" * 5000, b"12 34"])
def test_a_tracker_of_no_use_is_quoted_and_the_newest_save_taken(root: Root, text: bytes) -> None:
    set_tracker_text(root, text)
    choice = choose(root)
    assert choice.iteration.iteration == 12
    assert "the newest that is committed" in choice.warnings[0]
    if text.isalnum() and len(text) < 40:
        assert text.decode() in choice.warnings[0]


def test_without_a_tracker_the_run_that_saved_last_is_taken(root: Root) -> None:
    build_checkpoint(root, 5000, sequence=1, lineage="ffff", time=1.0)
    os.unlink(root.join(TRACKER))
    choice = choose(root)
    assert choice.iteration.iteration == 12
    assert any("2 runs" in w for w in choice.warnings)


def test_a_tracker_that_is_a_link_is_not_followed(root: Root, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("100")
    os.unlink(root.join(TRACKER))
    os.symlink(tmp_path / "elsewhere", root.join(TRACKER))
    assert root.tracker().state == "unreadable"
    assert choose(root).iteration.iteration == 12


def test_foreign_names_and_uncommitted_directories_never_count(root: Root) -> None:
    for name in ("iteration_best", "iteration_00000300.bak", "iteration_00000400", ".iteration_00000500.partial-ab-9"):
        os.mkdir(root.join(name))
    os.symlink(root.join("iteration_00000100"), root.join("iteration_00000600"))
    os.unlink(root.join(TRACKER))
    assert choose(root).iteration.iteration == 12
    assert {u.name: u.kind for u in root.uncommitted()} == {
        "iteration_00000400": "no-commit",
        "iteration_00000600": "foreign",
        ".iteration_00000500.partial-ab-9": "partial",
    }


def test_a_complete_replaced_directory_without_its_namesake_counts(root: Root) -> None:
    os.rename(root.join("iteration_00000012"), root.join(".iteration_00000012.replaced-3"))
    assert choose(root).iteration.dirname == ".iteration_00000012.replaced-3"
    shutil.copytree(root.join("iteration_00000100"), root.join(".iteration_00000100.replaced-1"))
    assert [i.iteration for i in root.iterations()] == [100, 200, 12]


def test_what_is_marked_as_damaged_gives_way_to_its_parent(root: Root) -> None:
    mark_damaged(root, root.iterations()[2], "flipped")
    choice = choose(root, exclude=damage_marks(root))
    assert choice.iteration.iteration == 200
    assert "damaged" in choice.warnings[-1]
    for iteration in root.iterations():
        mark_damaged(root, iteration, "flipped")
    with pytest.raises(DamagedCheckpointError, match="no sound one"):
        choose(root, exclude=damage_marks(root))


def with_events(root: Root) -> None:
    for iteration in root.iterations():
        commit = iteration.commit
        fields = {"step": iteration.iteration, "sequence": commit.sequence, "parent": commit.parent}
        append_event(root, "save", lineage=commit.lineage, **fields)


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_tracked_iteration_without_a_sound_commit_gives_way_to_its_parent_not_to_a_left_branch(
    root: Root, harm: str
) -> None:
    with_events(root)
    set_tracker_text(root, b"200")
    commit = Path(root.join("iteration_00000200"), "commit.json")
    commit.write_bytes(commit.read_bytes()[:-5] + b'00"}\n') if harm == "flip" else commit.unlink()
    # 12 was saved last, but the root was rewound to 200.
    choice = choose(root)
    assert choice.iteration.iteration == 100
    assert "iteration_00000200" in choice.warnings[0]
    assert "descends" in choice.warnings[0]
    shutil.rmtree(root.join("iteration_00000100"))
    with pytest.raises(DamagedCheckpointError, match=r"iteration_00000200.*nothing that it descends from") as caught:
        choose(root)
    assert caught.value.hint is not None
    assert "rewind" in caught.value.hint


def test_the_last_save_of_a_number_is_the_one_that_the_tracker_means(root: Root) -> None:
    with_events(root)
    build_checkpoint(root, 200, sequence=4, parent=3)
    append_event(root, "save", lineage="a1b2c3d4", step=200, sequence=4, parent=3)
    Path(root.join("iteration_00000200"), "commit.json").write_bytes(b"{}")
    assert choose(root).iteration.iteration == 12


def test_falling_back_never_enters_an_abandoned_branch(root: Root) -> None:
    build_checkpoint(root, 150, sequence=4, parent=1)
    newest = next(i for i in root.iterations() if i.commit.sequence == 4)
    older = fallback(root, newest)
    assert older is not None
    assert older.iteration == 100
    assert fallback(root, older) is None


def test_falling_back_passes_over_a_parent_that_retention_removed(root: Root) -> None:
    child = root.iterations()[2]
    shutil.rmtree(root.join("iteration_00000200"))
    assert fallback(root, child) is None
    append_event(root, "save", lineage=child.commit.lineage, sequence=2, parent=1)
    older = fallback(root, child)
    assert older is not None
    assert older.iteration == 100


def test_load_healthy_takes_the_nearest_healthy_ancestor(root: Root) -> None:
    build_checkpoint(root, 13, sequence=4, parent=2, healthy=False)
    assert choose(root).iteration.iteration == 13
    choice = choose(root, load_healthy=True)
    assert choice.iteration.iteration == 200
    assert "abnormal" in choice.warnings[-1]


def test_load_healthy_without_a_healthy_one_is_an_error(tmp_path: Path) -> None:
    root = Root(tmp_path)
    build_checkpoint(root, 1, healthy=False)
    with pytest.raises(CheckpointNotFoundError, match="healthy"):
        choose(root, load_healthy=True)


def test_a_newer_format_is_refused_where_it_would_be_taken(root: Root) -> None:
    rewrite_commit(root.join("iteration_00000012"), b'"version":1', b'"version":2')
    with pytest.raises(FormatTooNewError):
        choose(root)
    os.unlink(root.join(TRACKER))
    with pytest.raises(FormatTooNewError):
        choose(root)
    set_tracker_text(root, b"100")
    assert choose(root).iteration.iteration == 100


def test_a_newer_version_is_believed_only_if_the_digest_holds(root: Root) -> None:
    file = Path(root.join("iteration_00000012"), "commit.json")
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":2'))
    assert choose(root).iteration.iteration == 200
    assert [u.kind for u in root.uncommitted()] == ["damaged"]


def test_a_directory_under_another_number_does_not_count(root: Root) -> None:
    os.rename(root.join("iteration_00000012"), root.join("iteration_00000013"))
    assert [u.kind for u in root.uncommitted()] == ["damaged"]
    assert "iteration 12" in root.uncommitted()[0].why
    assert any("iteration_00000013 does not count" in warning for warning in choose(root).warnings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text("x"), "is a file"),
        (lambda p: p.mkdir(), "is empty"),
        (lambda p: (p.mkdir(), (p / "notes.txt").write_text("x")), "holds no checkpoint"),
        (lambda p: (p / "iteration_00000010").mkdir(parents=True), "no committed iteration"),
    ],
)
def test_a_path_without_a_checkpoint_is_named_with_what_was_expected(tmp_path: Path, make, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "somewhere"
    make(path)
    with pytest.raises(CheckpointNotFoundError, match=said) as caught:
        locate(str(path))
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 10


def test_the_directory_of_a_run_is_told_where_its_root_is(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "run" / "checkpoint")
    build_checkpoint(Root(tmp_path / "run" / "checkpoint"), 5)
    with pytest.raises(CheckpointNotFoundError) as caught:
        locate(tmp_path / "run")
    assert caught.value.hint == f"name the save root in it: {tmp_path / 'run' / 'checkpoint'}"


def test_an_iteration_directory_is_accepted_with_its_root(root: Root) -> None:
    located = locate(root.join("iteration_00000200") + "/")
    assert located.kind == "iteration"
    assert located.iteration is not None
    assert (located.iteration.iteration, located.root.path) == (200, root.path)
    assert locate(root.path).kind == "root"


def test_a_damaged_iteration_named_itself_is_the_damage(root: Root) -> None:
    Path(root.join("iteration_00000200"), "commit.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpointError, match="digest"):
        locate(root.join("iteration_00000200"))


def test_numeric_order_and_nine_digits(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for sequence, iteration in enumerate((9, 10, 99999999, 100000000), start=1):
        build_checkpoint(root, iteration, sequence=sequence)
    os.unlink(root.join(TRACKER))
    assert choose(root).iteration.iteration == 100000000


def test_a_root_that_vanishes_or_never_was_is_an_empty_listing(tmp_path: Path) -> None:
    assert Root(tmp_path / "no").iterations() == []
    assert Root(tmp_path / "no").tracker().state == "missing"


def test_events_survive_a_torn_line_and_garbage(root: Root) -> None:
    append_event(root, "save", sequence=1)
    with open(root.join(EVENTS), "ab") as file:
        file.write(b'{"time": 1, "event": "sa')
    assert [e["event"] for e in read_events(root)] == ["save"]
    assert end_torn_line(root)
    append_event(root, "load", iteration=3)
    assert not end_torn_line(root)
    assert [e["event"] for e in read_events(root)] == ["save", "load"]


def test_a_sequence_is_never_given_twice(root: Root) -> None:
    lineage = root.iterations()[0].commit.lineage
    assert next_sequence(root.iterations(), lineage, 1) == 4
    append_event(root, "save", lineage=lineage, sequence=9, parent=3)
    assert next_sequence(root.iterations(), lineage, 1, read_events(root)) == 10
    assert next_sequence(root.iterations(), "other", 6) == 7
