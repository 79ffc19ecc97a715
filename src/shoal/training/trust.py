"""Whose code a run brings along. Files under code/ and names of objects to import are Python that `eval`, `watch`, `resume` and
others run; so they are run only where this user made the run, or has said that it is to be trusted.

A run's code is signed when the run is made: `signature` in its folder is a keyed hash (HMAC-SHA256) over the names and contents
of all files under code/ and over the names of own objects in config.json. The key is 32 random bytes in the user's own config
folder (`$XDG_CONFIG_HOME/shoal/key`, else `~/.config/shoal/key`). A run without code of its own needs no signature, and
looking at a run (lists, plots) asks for none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from shoal import files
from shoal.flags import arguments
from shoal.ids import names_code
from shoal.ops.schedules import PYTORCH
from shoal.spec import UserError
from shoal.training.settings import SECTIONS, Settings

KEY_BYTES = 32
VALUE = "="  # stands for the field of what is in --env.args
PLAIN = {  # by field: what else has a colon, and is never imported there
    "schedule": r"kl:[\d.eE+-]+|exponential:[\d.eE+-]+(/update|/step)?|(" + "|".join(PYTORCH) + r"):.*",
    "shaper": r"python:[\w.<>]+",  # a function that is handed over
    VALUE: r"[\d:]+",
}
ACCEPTED: set[bytes] = set()  # what this process was told to trust


def names_in(values: Any, field: str = "") -> set[str]:
    """Words that stand for a user's own code: files, and objects to import (package.module:Name, gymnasium's module:Id-v0)."""
    if field == "args" and isinstance(values, str):
        return names_in(_args(values), VALUE)
    if isinstance(values, dict):
        return {name for k, v in values.items() for name in names_in(v, k)}
    if isinstance(values, list | tuple | set):
        return {name for v in values for name in names_in(v, field)}
    form = PLAIN.get("schedule" if str(field).endswith("schedule") else field)
    own = isinstance(values, str) and names_code(values) and not (form and re.fullmatch(form, values))
    return {values} if own else set()


def _args(text: str) -> list[Any]:
    """The values in --env.args as a library is given them: it may import what one names."""
    try:
        return list(arguments(text, "--env.args").values())
    except UserError:
        return [text]


def names_of(settings: Settings) -> list[str]:
    """What a run's settings name of a user's own code. A section is looked at unless nothing in it is ever imported; of who
    plays, files of algorithms: a run that plays answers for its own code."""
    sections = {k: v for k, v in settings.sections.items() if k not in SECTIONS}
    team = [who for who in settings.team.values() if str(who).endswith(".py")]
    return sorted(names_in([settings.algo, settings.env, sections, settings.groups, team, settings.players]))


def code_of(run: Path) -> tuple[dict[str, str], list[str]]:
    """The files under a run's code/, with their hashes, and the own objects that its config.json names."""
    if (run / "code").is_symlink():
        raise UserError(f"{run / 'code'} is a symbolic link, and a run's code is in its own folder.")
    files.refuse_links(run / "code")
    found = sorted(p for p in (run / "code").rglob("*") if p.is_file())
    hashes = {p.relative_to(run).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}
    return hashes, names_of(Settings.from_json(run / "config.json"))


def require(run: Path, part: Any = None) -> None:
    """Refuse a run whose code is neither this user's nor trusted. `part`: of its settings, where no more of it is run."""
    if part is not None and not names_in(part):
        return
    held, names = code_of(run)
    if not held and not names:
        return
    told = run / "signature"
    text = files.read_text(told, "replace").strip() if told.exists() else ""
    if _digest(held, names) in ACCEPTED or hmac.compare_digest(text.encode(), _signature(held, names).encode()):
        return
    brings = [*held, *(f"{n} (named in config.json)" for n in names if not n.endswith(".py") or not held)]
    raise UserError(
        f"the run {run} brings code along that was not signed by you, or has changed since, and none was run: "
        f"{', '.join(brings)}; read it, and trust it with --trust."
    )


def accept(run: Path) -> None:
    """Trust a run's code as it is now, in this process."""
    ACCEPTED.add(_digest(*code_of(run)))


def sign(run: Path, made: bool = False) -> None:
    """Sign a run's code as this user's, who `made` it or has accepted it; where nothing can be written it stays as it is."""
    held, names = code_of(run)
    if not (held or names) or not (made or _digest(held, names) in ACCEPTED):
        return
    text = _signature(held, names) + "\n"
    told = run / "signature"
    with suppress(OSError):
        if files.odd_kind(told, follow=False) is None and (not told.exists() or files.read_text(told, "replace") != text):
            files.write_text(told, text)


def require_key(settings: Settings) -> None:
    """Before a run is made: refuse one that would have code, and could not be signed."""
    if names_of(settings):
        _key(str(_home()))


def _digest(held: dict[str, str], names: list[str]) -> bytes:
    return hashlib.sha256(json.dumps([held, names], sort_keys=True).encode()).digest()


def _signature(held: dict[str, str], names: list[str]) -> str:
    return hmac.new(_key(str(_home())), _digest(held, names), "sha256").hexdigest()


def _home() -> Path:
    given = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(given) if given.startswith("/") else Path(os.path.expanduser("~")) / ".config"


@cache
def _key(home: str) -> bytes:
    """This user's key, made where there is none. A home that cannot be written has one among the temporary files."""
    places = [Path(home) / "shoal", Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"]
    for place in places:
        try:
            return _key_in(place)
        except OSError:
            continue
    raise UserError(f"no key to sign a run's code with can be kept in {places[0]} or {places[1]}: make one of them writable.")


def _key_in(folder: Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "key"
    if not path.exists():
        aside = folder / f"key.{secrets.token_hex(8)}"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(secrets.token_bytes(KEY_BYTES))
            try:
                os.link(aside, path)
            except FileExistsError:  # somebody else was first: theirs is taken
                pass
            except OSError:  # there are no hard links here
                if not path.exists():
                    aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{path} is another user's")
    with files.reading(path) as f:
        key = f.read()
    if len(key) != KEY_BYTES:
        raise UserError(
            f"{path} is no key, which has {KEY_BYTES} bytes: remove it; runs with code are then trusted with --trust."
        )
    return key
