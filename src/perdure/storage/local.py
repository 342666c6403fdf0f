"""A local or network file system, by plain system calls."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from perdure.storage.base import Buffer, Directory, FileReader, FileWriter, Storage
from perdure.storage.memory import address_of, aligned

__all__ = ["LocalStorage"]

_DIRECT_ALIGNMENT = 4096
# From this size on a read is worth a look at the page cache, and a way past it.
_LARGE = 1 << 20
_BOUNCE = 1 << 20
_HUGE = 2 << 20
# The page cache is asked once about so much of a file, by so many pages: asked about all, it takes as long as a read.
_WINDOW = 256 << 20
_SAMPLES = 16
_THREAD = threading.local()
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What a file system says to a call that it doesn't have.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_BY_HANDLE = os.open in os.supports_dir_fd
_LIBC = ctypes.CDLL(None, use_errno=True)


class LocalStorage(Storage):
    """Files on a POSIX file system.

    Args:
        direct: write and read shard files past the page cache (O_DIRECT) where the file system takes it:
            a private buffer at an aligned offset is then written straight, anything else as usual; large
            ranges are read so where the page cache has little of them.
        shared_reads: others on this machine read the same at the same time, so that all read through the page
            cache, which fetches it once.
    """

    def __init__(self, direct: bool = True, shared_reads: bool = False) -> None:
        self._direct = direct and hasattr(os, "O_DIRECT")
        self._direct_reads = self._direct and not shared_reads

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open_directory(self, path: str) -> Directory:
        return _LocalDirectory(path, self._direct_reads)

    def read(self, path: str, limit: int) -> bytes:
        reader = _LocalReader(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), path)
        return _read_all(reader, path, limit)

    def free_bytes(self, path: str) -> int:
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str, size: int) -> FileWriter:
        return _LocalWriter(path, size, self._direct)

    def write(self, path: str, data: Buffer) -> None:
        writer = _LocalWriter(path, len(data), direct=False, replace=True)
        try:
            writer.pwrite(data, 0)
            writer.finish(len(data))
        except BaseException:
            writer.abort()
            raise

    def append(self, path: str, data: Buffer, durable: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)
        try:
            before = _regular(fd, path).st_size
            view = memoryview(data)
            try:
                while view:
                    view = view[_some(os.write(fd, view), path) :]
            except OSError as error:
                # A torn line would swallow the next one.
                os.ftruncate(fd, before)
                raise OSError(error.errno, error.strerror, path) from None
            if durable:
                with _named(path):
                    os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def exchange(self, a: str, b: str) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, "no atomic exchange on this system", a)
        call = getattr(_LIBC, "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, "no renameat2 in this C library", a)
        if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), a, None, b)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _named(path):
                os.fsync(fd)
        except OSError as error:
            # Some network file systems have no fsync of directories; their renames are durable by themselves.
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(fd)


def _regular(fd: int, path: str) -> os.stat_result:
    """The status of an open file, which must be a plain one."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return status


def _some(count: int, path: str) -> int:
    """How many bytes a write took: at least one, or it would be tried for ever."""
    if count == 0:
        raise OSError(errno.EIO, "a write took no bytes", path)
    return count


@contextmanager
def _named(path: str) -> Iterator[None]:
    """A system call on an open file doesn't say which file failed."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path) from None
        raise


class _LocalWriter(FileWriter):
    def __init__(self, path: str, size: int, direct: bool, replace: bool = False) -> None:
        self._path = path
        # O_NOFOLLOW: a link in a root must not make us write outside of it; O_NONBLOCK: nor a fifo make us wait.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= os.O_TRUNC if replace else os.O_EXCL
        self._fd = os.open(path, flags, 0o644)
        self._direct_fd = -1
        try:
            _regular(self._fd, path)
        except OSError:
            self.abort()
            raise
        try:
            with _named(path):
                self._reserve(size)
            if direct and size >= _DIRECT_ALIGNMENT:
                self._direct_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.abort()
                raise

    def _reserve(self, size: int) -> None:
        if size < _DIRECT_ALIGNMENT or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def pwrite(self, data: Buffer, offset: int) -> None:
        with _named(self._path):
            self._pwrite(memoryview(data).cast("B"), offset)

    def _pwrite(self, view: memoryview, offset: int) -> None:
        fd = self._fd
        if self._direct_fd >= 0 and _aligned(view, offset):
            fd = self._direct_fd
        while view:
            try:
                done = os.pwrite(fd, view, offset)
            except OSError as error:
                if error.errno == errno.EINVAL and fd == self._direct_fd and fd >= 0:
                    fd = self._fd
                    continue
                raise
            view, offset = view[_some(done, self._path) :], offset + done
            if done % _DIRECT_ALIGNMENT:
                fd = self._fd

    def finish(self, size: int) -> None:
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd = -1
        with _named(self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            # A quota may be counted as late as this.
            os.close(fd)

    def abort(self) -> None:
        for fd in (self._direct_fd, self._fd):
            if fd >= 0:
                try:
                    os.close(fd)
                except OSError:
                    continue
        self._fd = self._direct_fd = -1


def _aligned(view: memoryview, offset: int) -> bool:
    """Whether a run of bytes may be written past the page cache: only writable buffers have an address here."""
    if view.readonly or not view or (offset | len(view)) % _DIRECT_ALIGNMENT:
        return False
    return address_of(view) % _DIRECT_ALIGNMENT == 0


class _LocalReader(FileReader):
    def __init__(self, fd: int, path: str, direct: bool = False) -> None:
        self._fd = fd
        self._path = path
        try:
            self.size = _regular(fd, path).st_size
        except BaseException:
            os.close(fd)
            raise
        self._direct_fd = _reopened_direct(fd) if direct and self.size >= _LARGE else -1
        self._cached: dict[int, bool] = {}

    def pread_into(self, buffer: memoryview, offset: int) -> None:
        with _named(self._path):
            self._pread_into(buffer.cast("B"), offset)

    def _pread_into(self, view: memoryview, offset: int) -> None:
        if self._direct_fd >= 0 and len(view) >= _LARGE and not self._is_cached(offset):
            done = self._pread_direct(view, offset)
            view, offset = view[done:], offset + done
        while view:
            done = os.preadv(self._fd, [view], offset)
            if done == 0:
                raise EOFError(f"{self._path}: ends at byte {offset}, {len(view)} short")
            view, offset = view[done:], offset + done

    def _pread_direct(self, view: memoryview, offset: int) -> int:
        """Reads past the page cache through a bounce buffer of this thread; gives how many bytes it got."""
        bounce = _bounce()
        source, target, done = address_of(bounce), address_of(view), 0
        while done < len(view):
            skip = (offset + done) % _DIRECT_ALIGNMENT
            size = min(-(-(skip + len(view) - done) // _DIRECT_ALIGNMENT) * _DIRECT_ALIGNMENT, len(bounce))
            try:
                got = os.preadv(self._direct_fd, [bounce[:size]], offset + done - skip) - skip
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                break
            if got <= 0:
                break
            got = min(got, len(view) - done)
            ctypes.memmove(target + done, source + skip, got)
            done += got
        return done

    def _is_cached(self, offset: int) -> bool:
        """Whether most of a byte's surroundings lie in the page cache, when they were first read."""
        window = offset // _WINDOW
        cached = self._cached.get(window)
        if cached is None:
            cached = self._cached[window] = self._look(window * _WINDOW)
        return cached

    def _look(self, begin: int) -> bool:
        """Looks at a few pages of a window; this brings nothing into the page cache."""
        length = min(_WINDOW, self.size - begin)
        if length <= 0:
            return True
        try:
            # Private and writable, for ctypes gives no address of anything else; no byte of it is touched.
            mapped = mmap.mmap(self._fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=begin)
        except (OSError, ValueError):
            return True
        resident, found = ctypes.c_ubyte(), 0
        try:
            address = address_of(mapped)
            for number in range(_SAMPLES):
                page = address + length * number // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE
                if _LIBC.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(resident)) != 0:
                    return True
                found += resident.value & 1
        finally:
            mapped.close()
        return 2 * found >= _SAMPLES

    def close(self) -> None:
        for fd in (self._direct_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


def _reopened_direct(fd: int) -> int:
    """The same file opened past the page cache, or -1 where that can't be."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1


def _bounce() -> memoryview:
    """This thread's buffer, in one huge page where there are such, for a device takes few scattered pages at once."""
    held: memoryview | None = getattr(_THREAD, "bounce", None)
    if held is None:
        memory = aligned(2 * _HUGE)
        begin = -address_of(memory) % _HUGE
        held = _THREAD.bounce = memoryview(memory)[begin : begin + _BOUNCE]
    return held


class _LocalDirectory(Directory):
    def __init__(self, path: str, direct: bool) -> None:
        self.path, self._direct = path, direct
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd if _BY_HANDLE else self.path))

    def open(self, name: str) -> FileReader:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise OSError(errno.EINVAL, "not the name of a file in this directory", name[:200])
        # O_NOFOLLOW keeps a link from leading out of the root; O_NONBLOCK keeps a fifo from hanging us.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, flags, dir_fd=self._fd) if _BY_HANDLE else os.open(path, flags)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        return _LocalReader(fd, path, self._direct)

    def read(self, name: str, limit: int) -> bytes:
        return _read_all(self.open(name), os.path.join(self.path, name), limit)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read_all(reader: FileReader, path: str, limit: int) -> bytes:
    try:
        if reader.size > limit:
            raise OSError(errno.EFBIG, f"{reader.size} bytes, more than the {limit} that such a file can have", path)
        data = bytearray(reader.size)
        reader.pread_into(memoryview(data), 0)
        return bytes(data)
    finally:
        reader.close()
