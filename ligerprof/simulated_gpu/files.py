"""The files of a simulated run: existing ones stay as they are, and new ones go when the command has ended.

What a simulated program writes follows from made-up values. It has its files as long as it runs: a new file is written
where the program wants it, listed in a journal, and removed by `ligerprof run`. A file that existed before is copied
into the run directory when it is opened for writing, and is hidden when it is removed; Python's functions for files
then see the copy. An audit hook lists new files, and stops what would change an existing file in another way, such as
code that kept the original functions. Uses the standard library alone: every Python process of the command loads it.
"""

import builtins
import errno
import fcntl
import hashlib
import io
import json
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now

# one audit hook for all: Python calls every hook for every event, also for each `id`
_checks: dict[str, Callable[..., None]] = {}


def watch(checks: Mapping[str, Callable[..., None]]) -> None:
    """Call a function with the arguments of an event from now on; the events are listed in Python's documentation."""
    if not _checks:
        sys.addaudithook(_call)
    _checks.update(checks)


def _call(event: str, arguments: tuple[Any, ...]) -> None:
    check = _checks.get(event)
    if check is not None:
        check(*arguments)


FOLDER = "files"
_JOURNAL = "journal"
_WRITTEN = f"{FOLDER}/{_JOURNAL}"
# entries of the runs of this user that have not ended
_RUNS = "simulated-run-"
_NEW, _MOVED = "new", "moved"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# not files of the program: the kernel's, Python's compiled modules
_KERNEL = ("/proc/", "/sys/", "/dev/")
_CACHE = f"{os.sep}__pycache__"
_SQLITE = ("", "-journal", "-wal", "-shm")
# functions that look at a path, and whether they follow a link at its end
_LOOKS = {
    "stat": True,
    "lstat": False,
    "access": True,
    "readlink": False,
    "chdir": True,
    "statvfs": True,
    "getxattr": True,
    "listxattr": True,
}
# functions that change what a file is called by or who may use it; on an existing file they do nothing
_ATTRIBUTES = ("chmod", "chown", "utime", "lchown", "setxattr", "removexattr")


class Files:
    """What the processes of one simulated command did to files, shared through a journal.

    Args:
        output: the run directory, which is written as usual.

    Attributes:
        secret: 32 bytes that only the processes of this command know.
    """

    def __init__(self, output: Path) -> None:
        self.secret = b""
        self._set_home(output)
        self._inside = threading.local()
        self._lock = threading.RLock()
        self._os: dict[str, Callable[..., Any]] = {"builtin_open": builtins.open}

    def _set_home(self, output: Path) -> None:
        home = os.path.realpath(output)
        self._folder = os.path.join(home, FOLDER)
        self._own = tuple(os.path.join(home, name) for name in (FOLDER, "process-", "torch-imported"))
        self._journal = os.path.join(self._folder, _JOURNAL)
        self._read = 0
        self._new: set[str] = set()
        self._moved: dict[str, str] = {}

    def move(self, output: Path) -> None:
        """Belong to a command with another run directory from now on."""
        with self._original():
            self._set_home(output)
            os.makedirs(self._folder, exist_ok=True)
            self.secret = self._read_secret()

    def install(self) -> None:
        """Watch this process for the rest of its life."""
        os.makedirs(self._folder, exist_ok=True)
        self.secret = self._read_secret()
        for name in _LOOKS:
            self._replace(name, self._looking(name))
        for name in _ATTRIBUTES:
            self._replace(name, self._attribute(name))
        for name in ("open", "listdir", "scandir", "mkdir", "remove", "rmdir", "truncate", "link", "symlink"):
            self._replace(name, getattr(self, f"_{name}"))
        self._replace("unlink", self._remove)
        self._replace("rename", self._rename)
        self._replace("replace", self._rename)
        modules: Any = builtins, io
        for module in modules:
            module.open = self._builtin_open
        # of Python 3.10, which keeps the functions
        accessor = getattr(pathlib, "_NormalAccessor", None)
        for name in self._os if accessor is not None else ():
            if name in vars(accessor):
                setattr(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))
        after_import_or_now("sqlite3", self._replace_sqlite)
        os.register_at_fork(after_in_child=self._after_fork)
        watch({event: partial(self._check, check) for event, check in _EVENTS.items()})

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leave what this thread does inside as it is."""
        with self._marked("unwatched"), self._original():
            yield

    def where(self, path: Any) -> Any:
        """The path at which code that is not Python finds a file of the program."""
        return self._mapped(path) or path

    def where_to_write(self, path: Any) -> Any:
        """The path at which code that is not Python may write a file of the program."""
        found = self._to_write(path, keeps=False)
        if found is None:
            self._note_new(self._key(path))
        return found or path

    def new(self) -> list[str]:
        """The outermost new files and folders that are there now."""
        self._update()
        return [
            path for path in sorted(set(self._new)) if os.path.lexists(path) and not self._is_new(os.path.dirname(path))
        ]

    def unchanged(self) -> list[str]:
        """The existing files and folders that the program wrote to or removed."""
        self._update()
        return sorted(self._moved)

    def _read_secret(self) -> bytes:
        path = Path(self._folder, "secret")
        with suppress(FileExistsError):
            # linked as a whole: another process may start at the same time
            made = path.with_name(f"secret-{os.getpid()}")
            made.write_bytes(os.urandom(16).hex().encode())
            try:
                os.link(made, path)
            finally:
                made.unlink()
        return path.read_bytes()

    # the journal

    def _update(self) -> None:
        try:
            size = self._call("stat", self._journal).st_size
        except OSError:
            return
        if size == self._read:
            return
        with self._lock, self._original(), io.FileIO(self._journal) as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read += sum(map(len, lines))
            for line in lines:
                kind, path = json.loads(line)
                if kind == _NEW:
                    self._new.add(path)
                else:
                    self._moved[path] = self._private(path)

    def _note(self, kind: str, path: str) -> None:
        with self._original():
            handle = self._call("open", self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, json.dumps([kind, path]).encode() + b"\n")
            finally:
                os.close(handle)
        self._update()

    def _note_new(self, key: str) -> None:
        if key not in self._new and not self._is_left_alone(key):
            self._note(_NEW, key)

    def _private(self, key: str) -> str:
        name = hashlib.sha256(os.fsencode(key)).hexdigest()[:24]
        return os.path.join(self._folder, name)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    # paths

    @contextmanager
    def _marked(self, mark: str) -> Iterator[None]:
        """Mark this thread inside."""
        before = self._is(mark)
        setattr(self._inside, mark, True)
        try:
            yield
        finally:
            setattr(self._inside, mark, before)

    def _is(self, mark: str) -> bool:
        return getattr(self._inside, mark, False)

    def _original(self) -> AbstractContextManager[None]:
        """Functions of this thread are the original ones inside."""
        return self._marked("original")

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._os.get(name, getattr(os, name, None))(*arguments, **named)  # type: ignore[misc]

    def _key(self, path: Any, dir_fd: int | None = None) -> str:
        """The absolute path, through the links of its folder."""
        text = self._absolute(path, dir_fd)
        with self._original():
            return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))

    def _absolute(self, path: Any, dir_fd: int | None = None) -> str:
        text = os.fsdecode(path)
        if dir_fd is not None and dir_fd >= 0:
            with self._original():
                text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text)

    def _mapped(self, path: Any, dir_fd: int | None = None, *, follows: bool = True) -> str | None:
        """Where a file is that the program wrote to or removed; None if it is where the program thinks."""
        if isinstance(path, int) or path is None:
            return None
        self._update()
        if not self._moved:
            return None
        absolute = self._absolute(path, dir_fd)
        found = self._below_moved(absolute) or self._below_moved(self._key(path, dir_fd))
        if found is None and follows:
            with self._original():
                found = self._below_moved(os.path.realpath(absolute))
        return found

    def _below_moved(self, path: str) -> str | None:
        position = path.find(os.sep, 1)
        while position > 0:
            private = self._moved.get(path[:position])
            if private is not None:
                return private + path[position:]
            position = path.find(os.sep, position + 1)
        return self._moved.get(path)

    def _is_new(self, key: str) -> bool:
        """Whether a program of the command made a file, or a folder that it is in."""
        while len(key) > 1:
            if key in self._new:
                return True
            key = os.path.dirname(key)
        return False

    def _is_left_alone(self, key: str) -> bool:
        return key.startswith((*self._own, *_KERNEL)) or _CACHE in key

    def _existed(self, key: str) -> bool:
        """Whether there is something that no program of the command made."""
        self._update()
        if self._is_left_alone(key) or self._is_new(key):
            return False
        with self._original():
            return os.path.lexists(key)

    def _may_change(self, key: str) -> bool:
        """Whether the program could remove or rename a file; if not, it gets the usual error."""
        with self._original():
            return os.access(os.path.dirname(key), os.W_OK)

    def _to_write(self, path: Any, dir_fd: int | None = None, *, keeps: bool) -> str | None:
        """Where to write to a file instead; None: where the program wants it.

        Args:
            keeps: whether the content stays when the file is opened.
        """
        found = self._mapped(path, dir_fd)
        if found is not None:
            return found
        with self._original():
            real = os.path.realpath(self._absolute(path, dir_fd))
            protected = os.path.isfile(real) and os.access(real, os.W_OK)
        if not protected or not self._existed(real):
            return None
        private = self._private(real)
        with self._lock, self._original():
            if keeps:
                import shutil

                shutil.copyfile(real, private)
            else:
                with io.FileIO(private, "w"):
                    pass
        self._note(_MOVED, real)
        return private

    # what replaces the functions of `os`

    def _replace(self, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(os, name, None)
        if original is None:
            return
        self._os[name] = original

        def call(*arguments: Any, **named: Any) -> Any:
            if self._is("original") or not arguments:
                return original(*arguments, **named)
            return replacement(*arguments, **named)

        call.__name__ = call.__qualname__ = name
        for support in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in support:
                support.add(call)
        setattr(os, name, call)

    def _at(self, name: str, private: str | None, path: Any, *arguments: Any, **named: Any) -> Any:
        """Call an original function, at another path if there is one; errors name the program's path."""
        if private is None:
            return self._call(name, path, *arguments, **named)
        named.pop("dir_fd", None)
        try:
            return self._call(name, private, *arguments, **named)
        except OSError as error:
            error.filename = path
            raise

    def _looking(self, name: str) -> Callable[..., Any]:
        follows = _LOOKS[name]

        def look(path: Any, *arguments: Any, **named: Any) -> Any:
            through = follows and named.get("follow_symlinks", True)
            private = self._mapped(path, named.get("dir_fd"), follows=through)
            return self._at(name, private, path, *arguments, **named)

        return look

    def _attribute(self, name: str) -> Callable[..., Any]:
        def change(path: Any, *arguments: Any, **named: Any) -> Any:
            private = self._mapped(path, named.get("dir_fd"))
            if private is None and not isinstance(path, int) and self._existed(self._key(path, named.get("dir_fd"))):
                return None
            return self._at(name, private, path, *arguments, **named)

        return change

    def _builtin_open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        original = self._os["builtin_open"]
        if self._is("original") or isinstance(file, int) or not isinstance(mode, str):
            return original(file, mode, *arguments, **named)
        if any(letter in mode for letter in "wa+"):
            private = self._to_write(file, keeps="w" not in mode)
        else:
            private = self._mapped(file)
        if private is None:
            return original(file, mode, *arguments, **named)
        if len(arguments) > 5 or named.get("opener") is not None:
            return original(private, mode, *arguments, **named)

        # the file keeps the program's name
        def opener(path: Any, flags: int) -> int:
            return int(self._at("open", private, path, flags, 0o666))

        with self._original():
            return original(file, mode, *arguments, **{**named, "opener": opener})

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        is_new = flags & os.O_EXCL and flags & os.O_CREAT
        if flags & _WRITES and dir_fd is not None:
            # the audit hook is not told the folder
            path, dir_fd = self._absolute(path, dir_fd), None
        if flags & _WRITES and not is_new:
            private = self._to_write(path, dir_fd, keeps=not flags & os.O_TRUNC)
        else:
            private = self._mapped(path, dir_fd)
        return self._at("open", private, path, flags, mode, dir_fd=dir_fd)

    def _truncate(self, path: Any, length: int) -> None:
        private = None if isinstance(path, int) else self._to_write(path, keeps=True)
        self._at("truncate", private, path, length)

    def _hidden_below(self, path: Any) -> set[str]:
        """Names in a folder that the program removed."""
        self._update()
        if not self._moved:
            return set()
        folder = self._absolute("", path) if isinstance(path, int) else self._absolute(path or ".")
        with self._original():
            folder = os.path.realpath(folder)
            moved = [(key, private) for key, private in list(self._moved.items()) if os.path.dirname(key) == folder]
            return {os.path.basename(key) for key, private in moved if not os.path.lexists(private)}

    def _listdir(self, path: Any = ".") -> Any:
        private = self._mapped(path)
        names = self._at("listdir", private, path)
        hidden = set() if private else self._hidden_below(path)
        return [name for name in names if os.fsdecode(name) not in hidden] if hidden else names

    def _scandir(self, path: Any = ".") -> Any:
        private = self._mapped(path)
        entries = self._at("scandir", private, path)
        hidden = set() if private else self._hidden_below(path)
        return _Entries(entries, hidden) if hidden else entries

    def _mkdir(self, path: Any, *arguments: Any, **named: Any) -> None:
        private = self._mapped(path, named.get("dir_fd"), follows=False)
        self._at("mkdir", private, path, *arguments, **named)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        private, key = self._mapped(path, dir_fd, follows=False), self._key(path, dir_fd)
        with self._original():
            is_folder = os.path.isdir(key) and not os.path.islink(key)
        if private is None and not is_folder and self._existed(key) and self._may_change(key):
            self._note(_MOVED, key)
        else:
            self._at("remove", private, path, dir_fd=dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        private, key = self._mapped(path, dir_fd, follows=False), self._key(path, dir_fd)
        if private is None and self._existed(key) and self._may_change(key) and os.path.isdir(key):
            if os.listdir(key):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            self._note(_MOVED, key)
        else:
            self._at("rmdir", private, path, dir_fd=dir_fd)

    def _rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """Rename; what existed is copied instead, and what would be overwritten stays below its copy."""
        from_, to = self._mapped(source, src_dir_fd, follows=False), self._mapped(target, dst_dir_fd, follows=False)
        source_key, target_key = self._key(source, src_dir_fd), self._key(target, dst_dir_fd)
        leaves = from_ is None and self._existed(source_key) and self._may_change(source_key)
        covers = to is None and self._existed(target_key) and self._may_change(target_key)
        place = from_ or source_key
        with self._original():
            if not os.path.lexists(place):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
            is_folder = os.path.isdir(place)
        if covers and is_folder:
            # also raises if there is something in it
            self._rmdir(target, dir_fd=dst_dir_fd)
            to, covers = self._mapped(target, dst_dir_fd, follows=False), False
        if not (leaves or covers or from_ or to):
            self._call("rename", source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        import shutil

        place_to = self._private(target_key) if covers else to or target_key
        with self._original():
            if not leaves:
                shutil.move(place, place_to)
            elif is_folder:
                shutil.copytree(place, place_to, symlinks=True)
            else:
                shutil.copy2(place, place_to, follow_symlinks=False)
        if leaves:
            self._note(_MOVED, source_key)
        if covers:
            self._note(_MOVED, target_key)
        elif to is None:
            self._note_new(target_key)

    def _link(self, source: Any, target: Any, **named: Any) -> None:
        """A hard link to a file that existed would let the program change it, so it becomes a copy."""
        private = self._mapped(source)
        if private is None and not self._existed(self._key(source)):
            self._at("link", None, source, self._mapped(target, follows=False) or target, **named)
            return
        import shutil

        shutil.copy2(source, target)

    def _symlink(self, source: Any, target: Any, *arguments: Any, **named: Any) -> None:
        private = self._mapped(target, named.get("dir_fd"), follows=False)
        if private is None:
            self._call("symlink", source, target, *arguments, **named)
        else:
            # relative to the place that the program thinks of
            folder = os.path.dirname(self._absolute(target, named.get("dir_fd")))
            self._call("symlink", os.path.join(folder, os.fsdecode(source)), private)

    def _replace_sqlite(self, module: Any) -> None:
        connect = module.connect

        def connect_copy(database: Any, *arguments: Any, **named: Any) -> Any:
            if str(database).startswith((":memory:", "file:")):
                return connect(database, *arguments, **named)
            return connect(self._to_write(database, keeps=True) or database, *arguments, **named)

        module.connect = connect_copy
        after_import_or_now("sqlite3.dbapi2", lambda dbapi2: setattr(dbapi2, "connect", connect_copy))

    # the audit hook

    def _check(self, check: Callable[..., None], *arguments: Any) -> None:
        if not self._is("unwatched"):
            check(self, *arguments)

    def _on_open(self, path: Any, _mode: Any, flags: int) -> None:
        if not flags & _WRITES or not isinstance(path, (str, bytes)) or self._is("original"):
            return
        text = os.fsdecode(path)
        if self._is_left_alone(text):
            return
        with self._original():
            real = os.path.realpath(text)
            exists, is_file = os.path.lexists(real), os.path.isfile(real) and os.access(real, os.W_OK)
        if not exists:
            self._note_new(real)
        elif is_file and not flags & os.O_EXCL and self._existed(real):
            self._stop(path)

    def _on_new(self, path: Any, dir_fd: int = -1) -> None:
        key = self._key(path, dir_fd)
        with self._original():
            exists = os.path.lexists(key)
        if not exists:
            self._note_new(key)

    def _on_removal(self, path: Any, dir_fd: int = -1) -> None:
        key = self._key(path, dir_fd)
        with self._original():
            empty = not os.path.isdir(key) or os.path.islink(key) or not os.listdir(key)
        if empty and self._existed(key) and self._may_change(key):
            self._stop(path)

    def _on_rename(self, source: Any, target: Any, source_fd: int = -1, target_fd: int = -1) -> None:
        key, target_key = self._key(source, source_fd), self._key(target, target_fd)
        if _CACHE in target_key or not self._may_change(key):
            return
        for each, path in ((key, source), (target_key, target)):
            if self._existed(each):
                self._stop(path)
        self._note_new(target_key)

    def _on_truncate(self, path: Any, _length: int) -> None:
        if not isinstance(path, int):
            self._on_open(path, None, os.O_WRONLY)

    def _on_sqlite(self, database: Any) -> None:
        text = os.fsdecode(database)
        if text and not text.startswith((":memory:", "file:")) and not os.path.lexists(text):
            for ending in _SQLITE:
                self._note_new(self._key(text + ending))

    def _stop(self, path: Any) -> None:
        raise PermissionError(errno.EPERM, "a simulated run changes no file that existed before it", path)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": Files._on_open,
    "os.mkdir": lambda files, path, _mode, dir_fd=-1: files._on_new(path, dir_fd),
    "os.remove": Files._on_removal,
    "os.rmdir": Files._on_removal,
    "os.rename": Files._on_rename,
    "os.truncate": Files._on_truncate,
    "os.link": lambda files, _source, target, *_: files._on_new(target),
    "os.symlink": lambda files, _source, target, dir_fd=-1: files._on_new(target, dir_fd),
    "sqlite3.connect": Files._on_sqlite,
}


class _Entries:
    """What os.scandir returns, without hidden names."""

    def __init__(self, entries: Any, hidden: set[str]) -> None:
        self._entries, self._hidden = entries, hidden

    def __iter__(self) -> Iterator[Any]:
        return (entry for entry in self._entries if os.fsdecode(entry.name) not in self._hidden)

    def __next__(self) -> Any:
        return next(iter(self))

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


def watch_files(output: Path) -> None:
    """Watch the files of this process."""
    if not _WATCHED:
        _WATCHED.append(Files(output))
        _WATCHED[0].install()


def watched() -> Files | None:
    """The files of this process; None if they are not watched."""
    return _WATCHED[0] if _WATCHED else None


@contextmanager
def unwatched() -> Iterator[None]:
    """Leave the files that this thread writes inside."""
    with _WATCHED[0].unwatched() if _WATCHED else nullcontext():
        yield


@contextmanager
def leaving_nothing(output: Path) -> Iterator[None]:
    """Remove what the processes of a command left behind after the block, and the copies of existing files.

    A folder in which another simulated run has files is left to that run.
    """
    folder = Path(tempfile.gettempdir(), f"ligerprof-{os.getuid()}")
    entry = folder / f"{_RUNS}{os.getpid()}-{hashlib.sha256(os.fsencode(output.absolute())).hexdigest()[:16]}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            entry.write_bytes(os.fsencode(output.absolute()))
    try:
        yield
    finally:
        with _alone(folder):
            _remove_new(output, [other for other in _journals_in(folder) if other != output.absolute() / _WRITTEN])
            with suppress(OSError):
                entry.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other run removes its files, if the file system can tell."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _journals_in(folder: Path) -> Iterator[Path]:
    """The journals of the runs that have not ended."""
    for entry in folder.glob(f"{_RUNS}*"):
        with suppress(OSError, ValueError):
            os.kill(int(entry.name.removeprefix(_RUNS).partition("-")[0]), 0)
            yield Path(os.fsdecode(entry.read_bytes()), _WRITTEN)


def _new_in(journal: Path) -> set[str]:
    with suppress(OSError, ValueError):
        return {path for kind, path in map(json.loads, journal.read_text().splitlines()) if kind == _NEW}
    return set()


def _remove_new(output: Path, others: Sequence[Path]) -> None:
    import shutil

    journal = output / _WRITTEN
    kept = [(other, _new_in(other)) for other in others]
    for path in sorted(_new_in(journal), reverse=True):
        inside = [other for other, paths in kept if any(each.startswith(f"{path}{os.sep}") for each in paths)]
        if inside:
            with suppress(OSError), inside[0].open("ab") as file:
                file.write(json.dumps([_NEW, path]).encode() + b"\n")
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)
    shutil.rmtree(journal.parent, ignore_errors=True)


_WATCHED: list[Files] = []
