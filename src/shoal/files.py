"""Files: written aside and renamed, so that one is whole or not there; only plain ones are read.

What a user names for an output may be a device (/dev/null) or a pipe that somebody reads. There one writes directly: a rename
would put a plain file in its place. Into a file that this process has open itself (/dev/stdout, /dev/fd/1) one writes through
its descriptor, after what was written there before.

What is written aside is called NAME.RANDOM.part: two writers of one file do not meet, and whoever is last wins.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from shoal.spec import UserError

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a disk",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
}
DIRECT = ("a named pipe", "a device")


def odd_kind(path: Path, follow: bool = True) -> str | None:
    """What is there in place of a plain file, in words; none where one is, or nothing."""
    try:
        mode = path.stat(follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no plain file")


def reading(path: Path) -> BinaryIO:
    """A plain file, opened; what else goes by its name is refused, and not waited for."""
    if what := odd_kind(path):
        raise UserError(f"{path} is {what}, and a plain file is read there.")
    return path.open("rb")


def read_text(path: Path, errors: str = "strict") -> str:
    with reading(path) as f:
        return f.read().decode(errors=errors)


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its name when all is written, on the disk."""
    what, ours = odd_kind(path), _descriptor(path)
    if what is not None and what not in DIRECT:
        raise UserError(f"{path} is {what}: name a file to be written.")
    if what is not None or ours is not None or path.parent == Path("/dev"):  # where no plain files are made
        whole = io.BytesIO()
        yield whole
        _write_into(path, ours, whole.getbuffer())
        return
    path = path.resolve()
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with aside.open("xb") as f:  # which follows no link
            with suppress(FileNotFoundError):
                os.fchmod(f.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield f
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with writing(path) as f:
        f.write(text.encode())


def _descriptor(path: Path) -> int | None:
    """Which of the files that this process has open a path such as /dev/stdout means."""
    places = {Path(p).resolve() for p in ("/dev/fd", "/proc/self/fd")}
    while True:
        place = path.parent.resolve()
        if place in places and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = place / path.readlink()


def _write_into(path: Path, ours: int | None, data: memoryview) -> None:
    if ours is not None:  # opened anew it would have a position of its own
        print(end="", flush=True)
        with open(os.dup(ours), "wb") as f:
            f.write(data)
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)  # a pipe that nobody reads would make us wait
    except OSError as e:
        if e.errno != errno.ENXIO:
            raise
        raise UserError(f"{path} is {odd_kind(path)} that nobody reads: name a file to be written.") from None
    os.set_blocking(file, True)
    with open(file, "wb") as f:
        f.write(data)


def refuse_links(folder: Path, leave: tuple[str, ...] = ()) -> None:
    """Refuse a folder in which something is neither a plain file nor a folder: what is written or deleted there would be
    elsewhere. `leave` are names right under it that others look after."""
    for place, folders, files in os.walk(folder):
        if place == str(folder):
            folders[:] = [name for name in folders if name not in leave]
        for name in (*folders, *files):
            what = odd_kind(path := Path(place, name), follow=False)
            if what not in (None, "a folder"):
                raise UserError(f"{path} is {what}, and nothing is written to a run that has one: put a file or folder there.")
