"""The local storage: every byte at its place, by handle, and nothing followed or waited for."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from perdure.storage.local import LocalStorage


def text(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096 + 5])
def test_a_file_written_out_of_order_is_cut_to_its_size(tmp_path: Path, direct: bool, size: int) -> None:
    data = os.urandom(size)
    buffer = mmap.mmap(-1, 4 * 4096)
    buffer[:size] = data
    writer = LocalStorage(direct=direct).create(str(tmp_path / "f"), size)
    with memoryview(buffer) as view:
        for start in reversed(range(0, -(-size // 4096) * 4096, 4096)):
            writer.pwrite(view[start : start + 4096], start)
    writer.finish(size)
    assert text(tmp_path / "f") == data


@pytest.mark.parametrize("direct", [True, False])
def test_unaligned_and_read_only_buffers_are_written_too(tmp_path: Path, direct: bool) -> None:
    writer = LocalStorage(direct=direct).create(str(tmp_path / "f"), 8192)
    writer.pwrite(b"a" * 4096, 0)
    writer.pwrite(bytearray(b"b" * 4099), 4093)
    writer.finish(8192)
    assert text(tmp_path / "f") == b"a" * 4093 + b"b" * 4099


def test_a_file_system_without_direct_writes_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, "no such thing here", path)
        return plain_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    writer = LocalStorage().create(str(tmp_path / "f"), 4096)
    with memoryview(mmap.mmap(-1, 4096)) as view:
        writer.pwrite(view, 0)
    writer.finish(4096)
    assert text(tmp_path / "f") == bytes(4096)


def test_creating_refuses_what_exists(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        LocalStorage().create(str(tmp_path / "f"), 1)
    assert text(tmp_path / "f") == b"old"


def test_an_aborted_writer_is_closed_and_quiet(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = LocalStorage().create(str(tmp_path / "f"), 8192)
    writer.abort()
    writer.abort()
    assert len(os.listdir("/proc/self/fd")) == before


def test_small_files_are_replaced_and_read_within_a_limit(tmp_path: Path) -> None:
    storage, path = LocalStorage(), str(tmp_path / "f")
    storage.write(path, b"long text")
    storage.write(path, b"short")
    assert storage.read(path, 5) == b"short"
    with pytest.raises(OSError, match="more than") as caught:
        storage.read(path, 4)
    assert caught.value.errno == errno.EFBIG


def test_appending_makes_and_grows_a_file(tmp_path: Path) -> None:
    storage, path = LocalStorage(), str(tmp_path / "f")
    for line in (b"a\n", b"", b"b\n"):
        storage.append(path, line, durable=True)
    assert storage.read(path, 10) == b"a\nb\n"


def test_an_append_in_pieces_is_whole_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: plain_write(fd, bytes(data)[:1]))
    LocalStorage().append(str(tmp_path / "f"), b"abc", durable=False)
    assert text(tmp_path / "f") == b"abc"


def test_an_append_that_tears_leaves_nothing_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_write, full = os.write, [False]

    def fills_up(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        full[0] = True
        return plain_write(fd, bytes(data)[:1])

    (tmp_path / "f").write_bytes(b"before\n")
    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(OSError, match="No space") as caught:
        LocalStorage().append(str(tmp_path / "f"), b"abc", durable=False)
    assert caught.value.errno == errno.ENOSPC
    assert text(tmp_path / "f") == b"before\n"


@pytest.mark.parametrize("operation", ["append", "pwrite"])
def test_a_write_that_takes_nothing_is_an_error_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    storage, path = LocalStorage(), str(tmp_path / "f")
    with pytest.raises(OSError, match="took no bytes"):
        storage.append(path, b"abc", False) if operation == "append" else storage.write(path, b"abc")


def test_exchange_swaps_directories_with_their_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    LocalStorage().exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "a" / "which").read_text() == "b"
    assert (tmp_path / "b" / "which").read_text() == "a"


def test_exchange_with_nothing_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        LocalStorage().exchange(str(tmp_path / "a"), str(tmp_path / "missing"))
    assert os.listdir(tmp_path) == ["a"]


def test_rename_replaces_a_file_but_no_full_directory(tmp_path: Path) -> None:
    storage = LocalStorage()
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "old").write_bytes(b"old")
    storage.rename(str(tmp_path / "new"), str(tmp_path / "old"))
    assert text(tmp_path / "old") == b"new"
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").touch()
    with pytest.raises(OSError, match=r"."):
        storage.rename(str(tmp_path / "x"), str(tmp_path / "y"))
    storage.sync_directory(str(tmp_path))


def test_what_a_path_is(tmp_path: Path) -> None:
    storage = LocalStorage()
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert storage.list(str(tmp_path)) == ["d", "dangling", "link"]
    assert storage.is_directory(str(tmp_path / "d"))
    assert not storage.is_directory(str(tmp_path / "link"))
    assert not storage.is_directory(str(tmp_path / "d" / "x" / "y"))
    assert storage.exists(str(tmp_path / "dangling"))
    assert not storage.exists(str(tmp_path / "nowhere"))
    assert storage.free_bytes(str(tmp_path)) > 0


def test_a_directory_is_read_by_its_handle_after_a_rename(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"old")
    with LocalStorage().open_directory(str(tmp_path / "d")) as directory:
        (tmp_path / "d").rename(tmp_path / "moved")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").write_bytes(b"new")
        assert directory.names() == ["f"]
        assert directory.read("f", 100) == b"old"


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../f", "/etc/passwd", "a\0b"])
def test_a_name_never_leads_out_of_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(b"outside")
    (tmp_path / "d").mkdir()
    with LocalStorage().open_directory(str(tmp_path / "d")) as directory, pytest.raises(OSError, match="not the name"):
        directory.open(name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    storage = LocalStorage()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "d").mkdir()
    link = tmp_path / "d" / "link"
    link.symlink_to(tmp_path / "secret")
    with storage.open_directory(str(tmp_path / "d")) as directory:
        with pytest.raises(OSError, match=r".") as caught:
            directory.open("link")
        assert caught.value.errno == errno.ELOOP
        assert caught.value.filename == str(link)
    for attempt in (
        lambda: storage.read(str(link), 100),
        lambda: storage.write(str(link), b"x"),
        lambda: storage.append(str(link), b"x", False),
        lambda: storage.create(str(link), 1),
    ):
        with pytest.raises(OSError, match=r"."):
            attempt()
    assert text(tmp_path / "secret") == b"secret"


@pytest.mark.timeout(20)
def test_a_fifo_is_an_error_and_never_waited_for(tmp_path: Path) -> None:
    storage, path = LocalStorage(), str(tmp_path / "fifo")
    os.mkfifo(path)
    with storage.open_directory(str(tmp_path)) as directory, pytest.raises(OSError, match="regular"):
        directory.open("fifo")
    with pytest.raises(OSError, match="regular"):
        storage.read(path, 10)
    for attempt in (lambda: storage.write(path, b"x"), lambda: storage.append(path, b"x", False)):
        with pytest.raises(OSError, match=r"."):
            attempt()


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with LocalStorage().open_directory(str(tmp_path)) as directory, pytest.raises(OSError, match="regular"):
        directory.open("d")


def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with LocalStorage().open_directory(str(tmp_path)) as directory:
        reader = directory.open("f")
        buffer = bytearray(3)
        reader.pread_into(memoryview(buffer), 1)
        assert bytes(buffer) == b"234"
        with pytest.raises(EOFError, match="ends at byte 5"):
            reader.pread_into(memoryview(buffer), 3)
        reader.close()
        reader.close()
        with pytest.raises(OSError, match=r"."):
            reader.pread_into(memoryview(buffer), 0)
