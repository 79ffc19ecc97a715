"""Runs the C compiler of this machine, and keeps the libraries it made in $XDG_CACHE_HOME/shoal/kernels (or ~/.cache).

A library is named by a digest of its source, the flags and the compiler. A home folder may be shared between machines, so
the processor is part of the digest too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path


class CannotFuse(Exception):  # noqa: N818
    """Why something cannot be compiled or fused; the message is the reason, without a full stop."""


@cache
def compiler() -> tuple[str, str]:
    """The path of the C compiler, and the version of it that becomes part of a library's digest."""
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    found = next((path for x in names if x and (path := shutil.which(x))), None)
    if found is None:
        raise CannotFuse("there is no C compiler: install cc, gcc or clang, or name one in $CC")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return found, f"{found} {version} {platform.machine()}"


@cache
def keep_memory() -> None:
    """Ask glibc to keep freed memory; other C libraries have no such setting. Otherwise every large temporary tensor takes new
    pages from the system, and each page is a fault: a seventh of the time of an update, when it was measured."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, the most it takes
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@cache
def processor() -> tuple[tuple[str, ...], str]:
    """The flags that ask for every instruction of this processor, and the macros that they define here."""
    for flags in (("-march=native",), ("-mcpu=native",)):
        done = subprocess.run([compiler()[0], *flags, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True)
        if done.returncode == 0:
            return flags, done.stdout
    return (), ""


def kept(text: str, made_with: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file in the cache that was made from this text. A new one is written in a temporary folder, and renamed when it is
    complete."""
    name = f"step_{hashlib.sha256(f'{made_with}{text}'.encode()).hexdigest()[:24]}{suffix}"
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "kernels"
    for folder in (kernels, Path(tempfile.gettempdir()) / f"shoal-kernels-{os.getuid()}"):  # where home cannot be written
        path = folder / name
        if _intact(path):
            return path
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as aside:
                made = Path(aside) / name
                make(made)
                data = made.read_bytes()
                with made.open("wb") as f:  # the checksum goes behind the code, where the loader ignores it
                    f.write(data + hashlib.sha256(data).digest())
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(made, path)
                return path
    raise CannotFuse(f"no kernel could be written to {kernels} or {folder}")


def _intact(path: Path) -> bool:
    """Whether the file is as it was written: running a damaged one would kill the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def library(text: str, flags: Sequence[str], made_with: str = "") -> ctypes.CDLL:
    """The library that `text` compiles to, loaded. `made_with`: what else the result depends on, such as the processor."""
    cc, version = compiler()

    def make(path: Path) -> None:
        path.with_suffix(".c").write_text(text)
        done = subprocess.run([cc, str(path.with_suffix(".c")), "-o", str(path), *flags], capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise CannotFuse(f"{cc} failed{': ' if done.stderr else ''}{' '.join(done.stderr.split())[:300]}")

    path = kept(text, version + " ".join(flags) + made_with, ".so", make)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise CannotFuse(f"what {cc} made could not be loaded: {e}") from e
