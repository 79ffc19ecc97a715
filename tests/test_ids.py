"""From an id to a class, and what is said when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import ids
from shoal.ids import catalog, find, near
from shoal.spec import UserError
from shoal.tools.contract import check_contract

ENV = '''"""A world of my own.

More of it.
"""
from shoal.envs.probe.probe_constant import ProbeConstant


class Helper:
    pass


class Mine(ProbeConstant):
    {body}
'''


def write(path: Path, body: str = "pass") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ENV.format(body=body))
    return path


def rooted(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(ids, "ROOT", root)
    monkeypatch.setattr(ids, "catalog", catalog.__wrapped__)


def test_every_file_is_an_id() -> None:
    envs, algos = catalog("envs"), catalog("algos")
    assert {"simple_spread", "probe_copy", "probe_deaths"} <= set(envs)
    assert {"ppo", "random"} <= set(algos)
    assert not {"base", "__init__", "world"} & (set(envs) | set(algos))
    assert (envs["simple_spread"].family, envs["simple_spread"].cls) == ("mpe", "SimpleSpread")
    assert envs["simple_spread"].module == "shoal.envs.mpe.simple_spread"
    assert envs["probe_copy"].summary.startswith("Each agent sees a symbol")
    assert all(e.summary for e in (*envs.values(), *algos.values()))


@pytest.mark.parametrize("kind", ["envs", "algos"])
def test_every_entry_loads_what_it_says(kind: str) -> None:
    from shoal.algos.base import Algorithm
    from shoal.envs.base import Environment

    for entry in catalog(kind).values():
        cls = entry.load()
        assert issubclass(cls, Environment if kind == "envs" else Algorithm), entry.id
        assert cls.__name__ == entry.cls
        assert not getattr(cls, "__abstractmethods__", None), entry.id


def test_native_worlds_are_known_without_being_loaded() -> None:
    from shoal.envs.base import World

    for entry in catalog("envs").values():
        native = issubclass(entry.load(), World)
        assert entry.native == native, entry.id
        assert (entry.family == "adapter") == (not native), entry.id


TINY = '''"""Each agent is paid its action."""
from {module} import {name}
from shoal.envs.base import Move
from shoal.spec import Discrete, EnvSpec, Frame, Group, Result


class Tiny({base}):
    noise_begin = 1

    def setup(self):
        self.spec = EnvSpec((Group("agents", "agents", ("a",), (1,), Discrete(2)),), horizon=3)

    def begin(self, noise):
        return {{"x": noise}}

    def advance(self, state, actions, noise):
        return Move({{"x": state["x"]}}, {{"agents": Result(actions["agents"].to(self.dtype), self.never(1))}})

    def observe(self, state):
        return Frame({{"agents": self.view(state["x"][..., None], state["clock"])}})
'''


@pytest.mark.parametrize(
    ("place", "family", "words"),
    [
        ("tiny.py", "native", {"module": "shoal.envs.base", "name": "World", "base": "World"}),  # next to the adapters
        ("tiny.py", "native", {"module": "shoal.envs", "name": "base as b", "base": "b.World"}),
        ("tiny.py", "native", {"module": ".base", "name": "World", "base": "World"}),
        ("board/tiny.py", "board", {"module": "shoal.envs.base", "name": "World", "base": "World"}),
    ],
)
def test_a_native_world_is_found_wherever_its_file_lies(
    place: str, family: str, words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the tests over all native worlds run over it."""
    from worlds import native_worlds

    import shoal.envs

    path = tmp_path / "envs" / place
    path.parent.mkdir(parents=True)
    path.write_text(TINY.format(**words))
    for name in [m for m in sys.modules if m.startswith(("shoal.envs.tiny", "shoal.envs.board"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(shoal.envs, "__path__", [*shoal.envs.__path__, str(tmp_path / "envs")])
    rooted(monkeypatch, tmp_path)
    assert native_worlds() == ["tiny"]
    entry = find("envs", "tiny")
    assert (entry.family, entry.native, entry.summary) == (family, True, "Each agent is paid its action.")
    check_contract(entry.load()(rows=2))


def test_further_names_are_settings() -> None:
    own, team = find("algos", "ippo"), find("algos", "mappo")
    assert (own.id, own.cls, own.settings) == ("ippo", "PPO", {"critic": "own"})
    assert (team.id, team.cls, team.settings) == ("mappo", "PPO", {"critic": "world"})
    assert find("algos", "ppo").settings == {}
    assert own.load() is team.load()


def test_did_you_mean() -> None:
    for kind, noun, wrong, right in (
        ("envs", "environment", "simple_spraed", "simple_spread"),
        ("algos", "algorithm", "mapo", "mappo"),
    ):
        with pytest.raises(UserError) as e:
            find(kind, wrong)
        text = str(e.value)
        assert text.startswith(f"there is no {noun} {wrong!r}")
        assert f"did you mean {right!r}" in text
        assert text.endswith(f"`shoal {kind}` lists them.")
    with pytest.raises(UserError) as e:
        find("algos", "zzzzzz")
    assert str(e.value) == "there is no algorithm 'zzzzzz'; `shoal algos` lists them."


def test_near() -> None:
    assert "did you mean 'gamma'" in near("gama", ["gamma", "lam"])
    assert "lam" not in near("gama", ["gamma", "lam"])
    assert near("xyz", ["gamma"]) == ""


def test_a_file_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine.py", 'names = {"mine_two": {"n": 2}}')
    entry = find("envs", str(path))
    assert (entry.id, entry.cls, entry.path, entry.summary) == ("mine", "Mine", path, "A world of my own.")
    assert entry.module.startswith("shoal_user_mine_")
    cls = entry.load()
    assert cls is sys.modules[entry.module].Mine
    assert find("envs", str(path)).load() is cls  # the same class when asked again
    assert cls(rows=2).rows == 2
    monkeypatch.chdir(tmp_path)
    assert find("envs", "./mine.py") == entry
    twin = find("envs", str(write(tmp_path / "other" / "mine.py")))
    assert twin.module != entry.module  # the same name elsewhere is another module
    assert twin.load() is not cls


def test_a_file_that_is_not_there_or_defines_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^there is no file './nowhere.py'\.$"):
        find("envs", "./nowhere.py")
    empty = tmp_path / "empty.py"
    empty.write_text("class Alone:\n    pass\n")
    with pytest.raises(UserError, match="defines no environment: it needs one class that derives"):
        find("envs", str(empty))
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n")
    with pytest.raises(UserError, match=r"broken.py is not Python that can be read: .*\.$"):
        find("algos", str(broken))


def test_a_base_class_by_attribute(tmp_path: Path) -> None:
    """`class Mine(base.Algorithm)` derives from Shoal's base class as well as `class Mine(Algorithm)` does."""
    path = tmp_path / "dotted.py"
    path.write_text("from shoal.envs.probe import probe_constant\n\n\nclass Mine(probe_constant.ProbeConstant):\n    pass\n")
    assert find("envs", str(path)).cls == "Mine"


def test_nets_and_errors_next_to_the_class_are_not_it(tmp_path: Path) -> None:
    path = tmp_path / "beside.py"
    path.write_text(
        "from torch import nn\nfrom shoal.envs.probe.probe_constant import ProbeConstant\n\n\n"
        "class Mine(ProbeConstant):\n    pass\n\n\nclass Net(nn.Module):\n    pass\n\n\nclass _Own(ProbeConstant):\n    pass\n"
    )
    assert find("envs", str(path)).cls == "Mine"


def test_two_claims_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = write(tmp_path / "envs" / "a" / "same.py"), write(tmp_path / "envs" / "b" / "same.py")
    rooted(monkeypatch, tmp_path)
    with pytest.raises(UserError) as e:
        find("envs", "same")
    assert str(e.value) == f"two files claim the id 'same': {one} and {two}."


def test_a_further_name_may_not_claim_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "algos" / "a.py", 'names = {"b": {}}')
    write(tmp_path / "algos" / "b.py")
    rooted(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="two files claim the id 'b'"):
        find("algos", "b")


def test_bases_are_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "envs" / "base.py")
    write(tmp_path / "envs" / "fam" / "one.py")
    world = tmp_path / "envs" / "fam" / "world.py"
    world.write_text("from abc import ABC\n\n\nclass World(Base, ABC):\n    pass\n")
    rooted(monkeypatch, tmp_path)
    assert set(catalog.__wrapped__("envs")) == {"one"}


@pytest.mark.parametrize(
    "code",
    [
        "import shoal; dir(shoal); shoal.__version__",
        "from shoal.ids import catalog, find; catalog('envs'), catalog('algos'), find('algos', 'mappo')",
        "import shoal.flags, shoal.spec",
        "import shoal; shoal.UserError",
    ],
)
def test_no_torch_is_loaded(code: str) -> None:
    tail = "import sys, json; print(json.dumps([m for m in ('torch', 'numpy', 'rich', 'matplotlib') if m in sys.modules]))"
    out = subprocess.run([sys.executable, "-c", f"{code}\n{tail}"], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


# --- adapters ---


@pytest.mark.parametrize(
    ("id", "cls", "rest", "note"),
    [
        ("gymnasium/CartPole-v1", "Gymnasium", "CartPole-v1", ""),
        ("gymnasium/ALE/Pong-v5", "Gymnasium", "ALE/Pong-v5", ""),
        ("gymnasium/package:Thing-v0", "Gymnasium", "package:Thing-v0", ""),
        (
            "gymnasium/CarRacing-v1",
            "Gymnasium",
            "CarRacing-v3",
            "CarRacing-v1 is called CarRacing-v3 now, and that is what runs.",
        ),
        ("CarRacing-v1", "Gymnasium", "CarRacing-v3", "CarRacing-v1 is called CarRacing-v3 now, and that is what runs."),
        ("LunarLander-v3", "Gymnasium", "LunarLander-v3", ""),
        ("academy_empty_goal_close", "Football", "academy_empty_goal_close", ""),
        ("Foraging-8x8-2p-3f-v3", "LevelBasedForaging", "Foraging-8x8-2p-3f-v3", ""),
        ("rware-tiny-2ag-v2", "Warehouse", "rware-tiny-2ag-v2", ""),
        ("mine.py:Name", "Own", "mine.py:Name", ""),  # whether it is there is asked when it is made
        ("package.module:Name", "Own", "package.module:Name", ""),
    ],
)
def test_adapters_take_the_rest_of_an_id(id: str, cls: str, rest: str, note: str) -> None:
    pytest.importorskip("gymnasium")
    entry = find("envs", id)
    assert (entry.cls, entry.settings, entry.note) == (cls, {"id": rest}, note)
    assert entry.load().__name__ == cls


def test_a_native_world_goes_before_an_adapter_and_an_old_name_leads_to_it() -> None:
    assert find("envs", "Pendulum-v1").module == "shoal.envs.classic.pendulum"
    old = find("envs", "Pendulum-v0")
    assert (old.module, old.note) == (
        "shoal.envs.classic.pendulum",
        "Pendulum-v0 is called Pendulum-v1 now, and that is what runs.",
    )


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("football", "'football' takes more of an id: football/SCENARIO."),
        ("gymnasium/", "'gymnasium' takes more of an id: gymnasium/ID."),
        ("LunarLander-v9", "there is no environment 'LunarLander-v9' (did you mean 'LunarLander-v3' or"),
        (
            "CartPole-v3",
            "there is no environment 'CartPole-v3' (did you mean 'CartPole-v1' or 'CartPole-v0'?); `shoal envs` lists them.",
        ),
        ("nobody/CartPole-v1", "there is no environment 'nobody/CartPole-v1'"),
    ],
)
def test_ids_that_nobody_has(id: str, said: str) -> None:
    with pytest.raises(UserError) as e:
        find("envs", id)
    assert str(e.value).startswith(said)


def test_two_adapters_claim_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.envs import football, rware

    monkeypatch.setattr(football, "claims", lambda id: id == "thing")
    monkeypatch.setattr(rware, "claims", lambda id: id == "thing")
    with pytest.raises(UserError) as e:
        find("envs", "thing")
    assert str(e.value) == "'thing' is an environment of several libraries: say which, football/thing or rware/thing."
    assert find("envs", "rware/thing").settings == {"id": "thing"}
