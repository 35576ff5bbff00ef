"""Takes away, in this process, what Windows or macOS lacks; only Python's own is needed before.

What a library of somebody else's looks up when it is imported must be imported earlier.
"""

import ctypes
import errno
import os
import pathlib
import platform
import shutil
import signal
import socket
import sys
import sysconfig
import types

ONLY_ON_LINUX = """eventfd getrandom memfd_create pidfd_open posix_fadvise posix_fallocate
    sched_getaffinity sched_setaffinity setns splice unshare O_DIRECT O_TMPFILE"""
NOT_ON_WINDOWS = """chown fchmod fchown fdatasync fork forkpty getegid geteuid getgid getgroups
    getloadavg getpgid getsid getuid killpg lchown mkfifo mknod nice posix_spawn pread pwrite
    register_at_fork sendfile set_blocking setpgid setsid statvfs sync sysconf uname wait wait3
    wait4 waitid O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC WNOHANG"""
MODULES = "curses fcntl grp pty pwd readline resource syslog termios tty"
SIGNALS = """SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
    SIGWINCH alarm pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait"""
LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")
RESERVED = set('<>:"|?*\\')


def take_away(system):
    """Make this process one on "win32", "darwin" or, which takes nothing away, "linux"."""
    sys.addaudithook(_watch_names)
    if system == "linux":
        return
    sysconfig.get_config_vars(), platform.uname()  # are kept
    sys.platform = system
    platform.system = lambda: {"win32": "Windows", "darwin": "Darwin"}[system]
    platform.libc_ver = lambda *_: ("", "")
    _drop(os, ONLY_ON_LINUX)
    _hide_folders()
    if system == "win32":
        _be_windows()


def _drop(module, names):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def _watch_names(event, arguments):
    """Refuse files that Windows could not have, and two whose names differ only in their case."""
    is_new = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("xwa+")
    if not is_new and event not in ("os.mkdir", "os.rename"):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    if not isinstance(path, str | os.PathLike) or os.fspath(path).startswith("/dev/"):
        return
    folder, name = os.path.split(os.path.abspath(path))
    bad = RESERVED & set(name) or name.endswith((".", " "))
    known = _NAMES.setdefault((folder, name.casefold()), name)
    if bad or known != name:
        raise AssertionError(f"Windows can't have the file {name!r} beside {known!r}")


_NAMES = {}


def _hide_folders():
    for name in ("stat", "lstat"):
        setattr(os, name, _hiding(getattr(os, name)))
    if sys.version_info < (3, 11):  # whose paths keep a function of their own
        pathlib._NormalAccessor.stat = staticmethod(os.stat)
    sys.addaudithook(_hide_files)


def _is_hidden(path):
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(LINUX_FOLDERS)


def _hiding(look):
    def hidden(path, *args, **kwargs):
        if _is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "there is none here", os.fspath(path))
        return look(path, *args, **kwargs)

    return hidden


def _hide_files(event, arguments):
    if event in ("open", "os.scandir", "os.listdir") and _is_hidden(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, "there is none here", os.fspath(arguments[0]))


def _be_windows():
    shutil._use_fd_functions = False
    shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=lambda name: True)
    _drop(os, NOT_ON_WINDOWS)
    _drop(signal, SIGNALS)
    _drop(socket, "AF_UNIX recv_fds send_fds SCM_RIGHTS")
    os.open, os.fsync = _windows_files(os.open, os.fsync)
    for name in MODULES.split():
        sys.modules[name] = None  # to import it fails
    os.kill = _kill
    ctypes.CDLL = _Library


def _windows_files(opens, flushes):
    """`os.open` that opens no folder, and `os.fsync` that flushes only what may be written."""
    import fcntl  # before it is gone

    def opened(path, flags, mode=0o777, *, dir_fd=None):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "it is a folder", os.fspath(path))
        return opens(path, flags, mode, dir_fd=dir_fd)

    def fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "it is open for reading")
        flushes(descriptor)

    return opened, fsync


def _kill(pid, number):
    raise AssertionError(f"on Windows, os.kill({pid}, {number}) would end the process")


class _Library(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("this process has no name")
        super().__init__(name, *args, **kwargs)
