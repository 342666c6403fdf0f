"""Who may write below a directory: one living process, by an open-file-description lock.

The lock dies with its holder, so a restart right after kill -9 finds it free. The file names the
holder for the message that a second one gets. Where the file system has no such locks, the named
process itself is looked for (same host), or its heartbeat (another host).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from perdure.errors import RootLockedError, SaveError, UsageError
from perdure.format.names import LOCK

__all__ = ["RootLock"]

HEARTBEAT_S = 10.0
SETTLE_S = 0.2
GRACE_S = 5.0
STALE_S = 60.0
_LIMIT = 4096
_HELD: weakref.WeakSet[RootLock] = weakref.WeakSet()


class RootLock:
    """A held lock. Made by `acquire`; given back by `release`, or by the end of the process."""

    def __init__(self, path: str, fd: int, owner: dict[str, Any], *, kernel: bool) -> None:
        self._path, self._fd, self._owner, self._kernel = path, fd, owner, kernel
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="perdure-heartbeat", daemon=True)
        if not kernel:
            self._thread.start()
        _HELD.add(self)

    @classmethod
    def acquire(
        cls,
        directory: str,
        *,
        attempt: str,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> RootLock:
        """Takes the lock of a directory, which must exist.

        Args:
            attempt: id of this start of the command; told to whoever is refused.
            now, clock, sleep: wall clock, and the clock by which a heartbeat's standstill is measured.

        Raises:
            RootLockedError: a living process holds it; host, process and since when are named.
            UsageError: there is no writing below the directory.
        """
        path = os.path.join(directory, LOCK)
        owner = {
            **_place(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
            "since": round(now(), 3),
            "attempt": attempt,
        }
        deadline = clock() + GRACE_S
        while True:
            fd = _open(path)
            try:
                kernel = _lock(fd)
                if kernel is False and (not _known_dead(_read(fd)) or clock() >= deadline):
                    raise _held(path, _read(fd))
                if kernel is None:
                    _wait_for_dead(path, fd, clock, sleep)
                # Somebody may have removed the file between our opening and locking it: a lock on nothing.
                if kernel is not False and _is_at(fd, path):
                    _write(fd, owner, path)
                    if kernel is None:
                        # Two that found the same dead holder both write; who reads itself back has it.
                        sleep(SETTLE_S)
                        if _read(fd) != owner:
                            raise _held(path, _read(fd))
                    return cls(path, fd, owner, kernel=bool(kernel))
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            # A worker forked just before its parent was killed lets go as soon as it runs.
            sleep(0.02)

    @property
    def path(self) -> str:
        """The lock file."""
        return self._path

    def still_mine(self) -> bool:
        """Whether the file is still the one that was locked, and still names this holder."""
        try:
            return self._fd >= 0 and _is_at(self._fd, self._path) and _read(self._fd) == self._owner
        except OSError:
            return False

    def check(self) -> None:
        """To be called just before something becomes visible.

        Raises:
            SaveError: another process has taken over meanwhile (this one was taken for dead).
        """
        if not self.still_mine():
            raise SaveError(
                f"{self._path}: another process has taken this root over; nothing was published",
                hint="two runs must not save below one root: give one of them another checkpoint.save_path",
            )

    def release(self) -> None:
        """Gives the lock back; the file stays, empty."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        _HELD.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                if _is_at(fd, self._path) and _read(fd) == self._owner:
                    os.ftruncate(fd, 0)
            os.close(fd)

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's, and must not outlive it here."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise UsageError(f"{path} is no plain file ({error.strerror})", hint="remove it, or move it away") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(
                f"{os.path.dirname(path)} cannot be written to ({error.strerror})",
                hint="save elsewhere: checkpoint.save_path; to load only, set checkpoint.enable_save=False",
            ) from None
        raise


def _lock(fd: int) -> bool | None:
    """True: locked; False: another holds it; None: no such locks here."""
    command = getattr(fcntl, "F_OFD_SETLK", 37)
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(fd, command, request)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return None
        raise


def _wait_for_dead(path: str, fd: int, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Returns when whoever the file names is surely dead."""
    holder = _read(fd)
    if not holder:
        return
    if _known_dead(holder):
        return
    if _is_here(holder):
        raise _held(path, holder)
    seen, deadline = os.fstat(fd).st_mtime_ns, clock() + STALE_S
    while clock() < deadline:
        sleep(1.0)
        if os.fstat(fd).st_mtime_ns != seen:
            raise _held(path, holder)


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether the holder's process id means something to us.

    The same host name may be another container or machine: only one kernel's process table can tell.
    """
    return bool(holder.get("boot")) and all(holder.get(key) == value for key, value in _place().items())


def _known_dead(holder: dict[str, Any]) -> bool:
    pid, started = holder.get("pid"), holder.get("started")
    return _is_here(holder) and not (isinstance(pid, int) and started and _start_time(pid) == started)


def _held(path: str, holder: dict[str, Any]) -> RootLockedError:
    if holder.get("pid") == os.getpid() and _is_here(holder):
        return RootLockedError(
            f"{os.path.dirname(path)} is being written to by this process itself",
            hint="close what saves there first; as a `with` block a Checkpointer closes itself",
        )
    since = holder.get("since")
    when = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}" if _is_time(since) else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{when}" if holder else "another process"
    return RootLockedError(
        f"{os.path.dirname(path)} is being written to by {who}",
        hint="wait for it or stop it; or give this run another checkpoint.save_path",
    )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1 << 40


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is the one that the path names."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _read(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, _LIMIT, 0))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(fd: int, owner: dict[str, Any], path: str) -> None:
    text, done = json.dumps(owner).encode() + b"\n", 0
    try:
        os.ftruncate(fd, 0)
        while done < len(text):
            done += os.pwrite(fd, text[done:], done)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _place() -> dict[str, str]:
    """Which process table a process id belongs to."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace}


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" for no such process, or one that is only waited for."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _after_fork() -> None:
    for lock in list(_HELD):
        lock._forget()
    _HELD.clear()


# A worker process that outlives its killed parent would otherwise keep the lock.
os.register_at_fork(after_in_child=_after_fork)
