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
from typing import Any

from perdure.errors import RootLockedError, SaveError
from perdure.format.names import LOCK

__all__ = ["RootLock"]

HEARTBEAT_S = 10.0
STALE_S = 60.0
_LIMIT = 4096


class RootLock:
    """A held lock. Made by `acquire`; given back by `release`, or by the end of the process."""

    def __init__(self, path: str, fd: int, owner: dict[str, Any], *, kernel: bool) -> None:
        self._path, self._fd, self._owner, self._kernel = path, fd, owner, kernel
        self._stop = threading.Event()
        if not kernel:
            threading.Thread(target=self._beat, name="perdure-heartbeat", daemon=True).start()

    @classmethod
    def acquire(cls, directory: str, *, attempt: str) -> RootLock:
        """Takes the lock of a directory.

        Raises:
            RootLockedError: a living process holds it; host, process and since when are named.
        """
        path = os.path.join(directory, LOCK)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        owner = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
            "since": time.time(),
            "attempt": attempt,
        }
        try:
            kernel = _lock(fd)
            if kernel is False:
                raise _held(path, _read(fd))
            if kernel is None:
                _wait_for_dead(path, fd)
            _write(fd, owner)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, owner, kernel=bool(kernel))

    def check(self) -> None:
        """To be called just before something becomes visible.

        Raises:
            SaveError: another process has taken over meanwhile (this one was taken for dead).
        """
        try:
            same = os.fstat(self._fd).st_ino == os.stat(self._path).st_ino and _read(self._fd) == self._owner
        except OSError:
            same = False
        if not same:
            raise SaveError(
                f"{self._path}: another process has taken this root over; nothing was published",
                hint="two runs must not save below one root: give one of them another checkpoint.save_path",
            )

    def release(self) -> None:
        """Gives the lock back; the file stays, empty."""
        self._stop.set()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._fd)


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


def _wait_for_dead(path: str, fd: int) -> None:
    """Returns when whoever the file names is surely dead."""
    holder = _read(fd)
    if not holder:
        return
    if holder.get("host") == socket.gethostname():
        if holder.get("boot") == _boot_id() and _start_time(int(holder.get("pid", 0))) == holder.get("started"):
            raise _held(path, holder)
        return
    seen, deadline = os.fstat(fd).st_mtime_ns, time.monotonic() + STALE_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        if os.fstat(fd).st_mtime_ns != seen:
            raise _held(path, holder)


def _held(path: str, holder: dict[str, Any]) -> RootLockedError:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("since", 0))))
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {since}" if holder else "a process"
    return RootLockedError(
        f"{os.path.dirname(path)} is being written to by {who}",
        hint="wait for it or stop it; or give this run another checkpoint.save_path",
    )


def _read(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, _LIMIT, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(fd: int, owner: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(owner).encode() + b"\n", 0)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" for no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
