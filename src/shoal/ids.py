"""From an id to a file to a class, for environments and algorithms; without importing what is not asked for.

The file name is the id; the class is the one concrete class in the file that derives from another. A class may declare
further names that are settings of it: `names = {"mappo": {"critic": "world"}}`. There is no registry: files are found
in the package, or given by path (`./mine.py`), which is loaded under a name of its own.

An environment that declares `rest` is an adapter and takes the rest of the id: `gymnasium/CartPole-v1`. A bare id that is no
file is asked of the adapters (`claims`), and two claims are an error. `renamed` are old names and what they are called now.
A user's own environment of another library's kind is named as `file.py:Name` or `package.module:Name`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shoal.spec import UserError

USER_MODULE = "shoal_user_"  # what the names of users' own files begin with, as modules
ROOT = Path(__file__).parent
LOADING: set[str] = set()  # modules of users' own files that are being loaded now
FROZEN: dict[str, bytes] = {}  # users' files as they were when a run began, in processes that are started later
WORLD = "shoal.envs.base.World"  # what native environments derive from
KINDS = {"algos": "algorithm", "envs": "environment"}
# what derives from these is not what a file is for
NOT_ONE = {"ABC", "Protocol", "Hook", "Module", "Function", "Exception", "UserError", "NamedTuple", "TorchDispatchMode"}


@dataclass(frozen=True)
class Entry:
    """A name that can be asked for."""

    id: str
    kind: str  # algos or envs
    path: Path
    module: str
    cls: str
    family: str  # the folder it lives in: mpe, probe; native: a world beside the adapters; adapter: of another library's worlds
    summary: str  # the first line of the module's docstring
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    rest: str = ""  # of an adapter: what the rest of its ids is
    renamed: dict[str, str] = field(default_factory=dict, hash=False)
    note: str = ""  # a sentence for whoever asked
    native: bool = False  # an environment of the package that derives from `World`

    @property
    def metrics(self) -> dict[str, str]:
        """What an algorithm logs for each group, and what that means: the part "Metrics" of its file's docstring."""
        lines = iter((ast.get_docstring(_parsed(self.path)) or "").splitlines())
        head = next((x for x in lines if x.startswith("Metrics, for each group")), "")
        others = re.search(r"those of `algos/(\w+)\.py`(?: but for ([^;]+))?", head)
        out = dict(catalog(self.kind)[others[1]].metrics) if others else {}
        for name in str(others and others[2]).split(", "):
            out.pop(name, None)
        own = (x.strip().partition(" ") for x in takewhile(lambda x: not x or x.startswith("    "), lines) if x)
        return out | {name: meaning.strip() for name, _, meaning in own}

    @property
    def form(self) -> str:
        """The id as it is asked for: of an adapter with a word for the rest."""
        return f"{self.id}/{self.rest}" if self.rest and "/" not in self.id else self.id

    def load(self) -> Any:
        module, name = load_module(self), KINDS[self.kind]
        base = getattr(importlib.import_module(f"shoal.{self.kind}.base"), name.capitalize())
        mine = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == self.module]
        fit = [c for c in mine if issubclass(c, base) and not inspect.isabstract(c)]
        if not fit:
            raise UserError(f"{self.path.name} is no {name}: no class in it derives from Shoal's {base.__name__}.")
        return next((c for c in fit if c.__name__ == self.cls), fit[-1])


@cache
def catalog(kind: str) -> dict[str, Entry]:
    """Every algorithm ("algos") or environment ("envs") of the package, by id."""
    found: dict[str, Entry] = {}
    bases: dict[str, list[str]] = {}
    for path in sorted((ROOT / kind).rglob("*.py")):
        tree, module = _parsed(path), ".".join(("shoal", *path.relative_to(ROOT).with_suffix("").parts))
        bases.update(_bases(tree, module))
        for entry in _entries(kind, path, module, tree):
            if entry.id in found:
                raise UserError(f"two files claim the id {entry.id!r}: {found[entry.id].path} and {path}.")
            found[entry.id] = entry
    return {id: _placed(entry, bases) for id, entry in found.items()} if kind == "envs" else found


def _placed(entry: Entry, bases: dict[str, list[str]]) -> Entry:
    """An environment with its family: a native world's is its folder, and all the others are adapters."""
    native = _derives(f"{entry.module}.{entry.cls}", WORLD, bases)
    family = "adapter" if not native else "native" if entry.family == entry.kind else entry.family
    return replace(entry, family=family, native=native)


def _bases(tree: ast.Module, module: str) -> dict[str, list[str]]:
    """The classes of a file and what they derive from, by their whole names: read, and not imported."""
    whole: dict[str, str] = {}  # a name in this file -> its whole name
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            place = (
                [*module.split(".")[: -node.level], *([node.module] if node.module else [])]
                if node.level
                else [str(node.module)]
            )
            whole.update({a.asname or a.name: ".".join((*place, a.name)) for a in node.names})
        elif isinstance(node, ast.Import):
            whole.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ClassDef):
            whole[node.name] = f"{module}.{node.name}"

    def name(base: ast.expr) -> str:
        first, dot, rest = ast.unparse(base).partition(".")
        return f"{whole.get(first, first)}{dot}{rest}"

    return {whole[node.name]: [name(b) for b in node.bases] for node in tree.body if isinstance(node, ast.ClassDef)}


def _derives(cls: str, base: str, bases: dict[str, list[str]]) -> bool:
    return cls == base or any(_derives(b, base, bases) for b in bases.get(cls, ()))


def find(kind: str, id: str) -> Entry:
    """The entry for an id, or for a path to a user's own file."""
    if id.endswith(".py"):
        return _of_file(kind, id)
    known = catalog(kind)
    head, _, rest = id.partition("/")
    adapter = known[head] if head in known and known[head].rest else None
    if adapter is not None:
        if not rest:
            raise UserError(f"{head!r} takes more of an id: {head}/{adapter.rest}.")
        new = adapter.renamed.get(rest, rest)
        return replace(adapter, id=id, settings={"id": new}, note=_note(rest, new))
    if id in known:
        return known[id]
    if kind == "envs" and _is_own(id):
        return replace(known["own"], id=id, settings={"id": id})
    for entry in known.values():
        if id in entry.renamed:
            new = entry.renamed[id]
            return replace(find(kind, new), note=_note(id, new))
    claims = [e for e in known.values() if e.rest and load_module(e).claims(id)]
    if len(claims) > 1:
        both = " or ".join(f"{e.id}/{id}" for e in claims)
        raise UserError(f"{id!r} is an environment of several libraries: say which, {both}.")
    if not claims:
        theirs = [n for e in known.values() if e.rest for n in getattr(load_module(e), "names", list)()]
        close = near(id, dict.fromkeys((*known, *theirs)))
        raise UserError(f"there is no {KINDS[kind]} {id!r}{close}; `shoal {kind}` lists them.")
    return find(kind, f"{claims[0].id}/{id}")


def _note(old: str, new: str) -> str:
    return f"{old} is called {new} now, and that is what runs." if new != old else ""


def _of_file(kind: str, id: str) -> Entry:
    path = Path(os.path.realpath(id))
    if not os.path.isfile(path):  # false, and no error, of names that no system takes
        raise UserError(f"there is no file {id!r}.")
    entries = _entries(kind, path, _own_name(path), _parsed(path))
    if kind == "envs" and (name := _foreign(path)):
        return replace(catalog(kind)["own"], id=id, settings={"id": f"{path}:{name}"})
    if not entries:
        raise UserError(f"{id!r} defines no {KINDS[kind]}: it needs one class that derives from Shoal's base class.")
    return entries[0]


def _foreign(path: Path) -> str | None:
    """The last class in a user's file that is an environment of Gymnasium's or PettingZoo's kind, where none is of Shoal's."""
    try:
        module = load_file(path, _own_name(path))
    except Exception as e:  # whatever the user's file does when it is loaded
        raise UserError(f"{path} could not be loaded: {type(e).__name__}: {e}.") from e
    mine = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    kinds = {c.__name__: {f"{b.__module__.partition('.')[0]}.{b.__name__}" for b in c.__mro__} for c in mine}
    if any("shoal.Environment" in bases for bases in kinds.values()):
        return None
    theirs = {"gymnasium.Env", "pettingzoo.ParallelEnv", "pettingzoo.AECEnv"}
    return next((name for name, bases in reversed(kinds.items()) if bases & theirs), None)


def id_of(kind: str, thing: Any) -> str:
    """The id of a class, or of a function that makes an environment: how workers, and whoever resumes a run, find it again."""
    what = KINDS[kind]
    if isinstance(thing, str | Path):
        return str(thing)
    if not isinstance(thing, type | FunctionType):
        made = ", which is made already" if hasattr(thing, "step") or hasattr(thing, "act") else ""
        raise UserError(f"the {what} is {thing!r:.60}{made}: give its class, a function that makes one, or an id.")
    module, place, name = sys.modules.get(thing.__module__), thing.__module__, thing.__name__
    file = getattr(module, "__file__", None)
    lost = place == "__main__" and not (str(file).endswith(".py") and os.path.isfile(str(file)))  # it came through a pipe
    if lost or getattr(module, thing.__qualname__, None) is not thing:
        raise UserError(
            f"the {what} is {thing.__qualname__}, which no import finds, neither that of workers nor that of a resume: "
            "put it at the top level of a file, NAME.py."
        )
    if known := [e.id for e in catalog(kind).values() if (e.module, e.cls) == (place, name)]:
        return known[0]
    if (spec := getattr(module, "__spec__", None)) is not None:
        place = spec.name  # of python -m package.module, which is called __main__
    if place in LOADING:
        raise UserError(f'{file} trains while it is loaded: put what it does under `if __name__ == "__main__":`.')
    base = getattr(importlib.import_module(f"shoal.{kind}.base"), what.capitalize())
    ours, alone = isinstance(thing, type) and issubclass(thing, base), "." not in place and str(file).endswith(".py")
    if ours and find(kind, str(file)).cls != name:
        raise UserError(f"the {what} {name} is not the last in {file}: give it a file of its own.")
    return os.path.realpath(str(file)) if ours else f"{os.path.realpath(str(file)) if alone else place}:{name}"


def _is_own(id: str) -> bool:
    """Whether it names a user's own object: file.py:Name or package.module:Name, and not Gymnasium's module:Name-v0."""
    place, colon, name = id.rpartition(":")
    return bool(colon and place and name.isidentifier())


def names_code(word: str) -> bool:
    """Whether a user's own code may be run where it is looked up: a file, what `_is_own` takes, Gymnasium's module:Name-v0."""
    return ":" in word or word.endswith(".py")


def near(word: str, words: Any) -> str:
    """' (did you mean ...?)', or nothing where nothing is near."""
    close = difflib.get_close_matches(word, list(words), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""


def load_module(entry: Entry) -> ModuleType:
    if entry.module.startswith(USER_MODULE):
        return load_file(entry.path, entry.module)
    return importlib.import_module(entry.module)


def split_arguments(text: str) -> tuple[str, str]:
    """`file.py:Class:clip=5` as the name of a user's own object, and the words behind it."""
    match = re.fullmatch(r"((?:.+?\.py|[\w.]+):\w+):(.*)", text, re.DOTALL)
    return (match[1], match[2]) if match else (text, "")


def own_object(text: str, flag: str) -> Any:
    """What `package.module:Name` or `file.py:Name` stands for: a user's own class or function."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{flag} is {text!r}: it takes package.module:Name or file.py:Name.")
    try:
        module = _own_file(Path(os.path.realpath(place))) if place.endswith(".py") else _own_module(place)
    except UserError:
        raise
    except Exception as e:  # whatever the user's file does when it is loaded
        raise UserError(f"{flag} is {text!r}, and {place} could not be loaded: {type(e).__name__}: {e}.") from e
    if not hasattr(module, name):
        raise UserError(f"{flag} is {text!r}, and {place} has no {name!r}{near(name, vars(module))}.")
    return getattr(module, name)


def _own_module(name: str) -> ModuleType:
    sys.path.append("")  # the folder one is in, as `python -m` has it
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _own_file(path: Path) -> ModuleType:
    if str(path) not in FROZEN and not os.path.isfile(path):
        raise UserError(f"there is no file {path}.")
    return load_file(path, _own_name(path))


def own_files(words: Iterable[Any]) -> dict[str, bytes]:
    """What is in the files of users' own objects that are named among these words."""
    places = (w.rpartition(":")[0] for w in words if isinstance(w, str) and _is_own(w))
    paths = {Path(os.path.realpath(place)) for place in places if place.endswith(".py")}
    return {str(path): path.read_bytes() for path in paths if os.path.isfile(path)}


def _own_name(path: Path) -> str:
    """A name for a user's file as it is now: once edited, it is another module."""
    return f"{USER_MODULE}{path.stem}_{hashlib.sha1(str(path).encode() + _content(path)).hexdigest()[:8]}"


def _content(path: Path) -> bytes:
    return FROZEN[str(path)] if str(path) in FROZEN else path.read_bytes()


def load_file(path: Path, name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and workers look a class's module up there
    sys.path.insert(0, str(path.parent))  # what lies beside it can be imported, as when it is run
    LOADING.add(name)
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a run's code stays as it was signed
    try:
        exec(compile(_content(path), path, "exec"), vars(module))  # what is read is what is run, and no cache beside it
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
        LOADING.discard(name)
        sys.dont_write_bytecode = kept
    return module


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not Python that can be read: {e}.") from None


def _entries(kind: str, path: Path, module: str, tree: ast.Module) -> list[Entry]:
    concrete = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and node.bases
        and not node.name.startswith("_")
        and not any("dataclass" in ast.unparse(d) for d in node.decorator_list)  # settings
        and not NOT_ONE & {ast.unparse(b).rpartition(".")[2] for b in node.bases}
    ]
    if path.stem in ("base", "__init__") or not concrete:
        return []
    cls = concrete[-1]
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    family = path.parent.name
    declared: dict[str, Any] = {}
    for node in cls.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in ("names", "rest", "renamed") and getattr(node, "value", None):
            declared[target.id] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    more = {k: declared[k] for k in ("rest", "renamed") if k in declared}
    entries = [Entry(path.stem, kind, path, module, cls.name, family, summary, **more)]
    for name, settings in declared.get("names", {}).items():
        entries.append(Entry(name, kind, path, module, cls.name, family, summary, settings))
    return entries


def slug(id: str) -> str:
    """An id as a folder's name: of a user's own file its name alone."""
    place, _, name = id.rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).stem}-{name}"
    return Path(id).stem if id.endswith(".py") else id.replace("/", "-").replace(":", "-")
