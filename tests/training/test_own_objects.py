"""A user's own objects: files are kept in the run as they were, and modules know whether they learn."""

import json
import shutil
import sys

import pytest
import torch
from torch import nn

import shoal
from shoal.cli import main
from shoal.training.run import Run

MINE = '''"""Objects of a user's own; FACTOR is what an edit changes."""

from torch import nn

from shoal.nets.norm import Running

FACTOR = 0.5


class Schedule:
    def __init__(self, first, last):
        self.first = first

    def __call__(self, now):
        return self.first * FACTOR**now.updates


class Normaliser(Running):
    def __init__(self, *shape, by):
        super().__init__(*shape)
        self.by = by * FACTOR

    def normalise(self, x, clip=None):
        return super().normalise(x, clip) * self.by

    def denormalise(self, x):
        return super().denormalise(x / self.by)


class Module(nn.Module):
    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.layer = nn.Linear(width_in, width_out)

    def forward(self, x):
        return self.layer(x).sin() * FACTOR * 4


def shaper(reward, obs, step, steps):
    return reward * FACTOR + obs[..., 0]
'''
OPTIONS = {
    "algo.lr_schedule": "Schedule",
    "algo.entropy_schedule": "Schedule",
    "algo.clip_schedule": "Schedule",
    "algo.normaliser": "Normaliser:by=2,",
    "algo.shaper": "shaper",
    "net.module": "Module",
}
FLAGS = (
    "--steps 96 --envs 4 --algo.rollout 6 --algo.lr 1e-2 --eval.episodes 2 --log.tensorboard false --env.max-cycles 5 "
    "--compile off --quiet"
).split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the user's file, which one is in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MINE)
    yield tmp_path
    forget()


def forget():
    """As a new process would: files are read again."""
    for name in [n for n in sys.modules if n.startswith("shoal_user_")]:
        del sys.modules[name]


def given(file="code/mine.py", only=OPTIONS, group=""):
    return [w for option in only for w in (f"--{option.replace('.', f'.{group}', 1)}", f"{file}:{OPTIONS[option]}")]


def train(out, *flags, world="simple_spread"):
    assert main(["train", "ippo", world, *FLAGS, *map(str, flags), "--out", str(out)]) == 0
    forget()
    return Run(out)


def leaves(run):
    return {f"{g}.{k}": x for g, s in run.load("last")["algorithms"].items() for k, x in s.items()}


def assert_same(a, b):
    drop = lambda line: {k: v for k, v in line.items() if k != "time"}  # noqa: E731
    assert [drop(x) for x in a.metrics] == [drop(x) for x in b.metrics]
    mine, theirs = leaves(a), leaves(b)
    assert mine.keys() == theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []


def edited(path):
    path.write_text(MINE.replace("FACTOR = 0.5", "FACTOR = 0.1"))


def copies(run):
    return sorted((run.path / "code").rglob("*.py"))


# --- kept with the run ---


def test_a_file_is_copied_once(here):
    run = train("r", *given())
    (copy,) = copies(run)
    assert copy.read_text() == MINE
    assert copy.parts[-4:-2] == ("code", "objects")
    names = Run("r").settings.players["agents"]
    assert names["algo"]["normaliser"] == f"{copy}:Normaliser:by=2,"
    assert {names["algo"][k] for k in ("lr_schedule", "entropy_schedule", "clip_schedule")} == {f"{copy}:Schedule"}
    assert (names["algo"]["shaper"], names["net"]["module"]) == (f"{copy}:shaper", f"{copy}:Module")
    original = json.loads((run.path / "config.json").read_text())["players"]["agents"]["net"]["module"]
    assert original == f"{here}/code/mine.py:Module"  # and where it came from is written down


def test_no_file_no_folder():
    assert not (train("r").path / "code").exists()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("fate", [edited, lambda path: path.unlink()], ids=["edited", "deleted"])
def test_whatever_becomes_of_the_file_the_run_goes_on_as_it_was(here, option, fate):
    whole, half = train("a", *given(only=[option])), train("b", *given(only=[option]), "--until", 48)
    played, policy = shoal.evaluate(half, 4), shoal.load(half)
    seen = {name: [0.1 * k for k in range(18)] for name in policy.spec["agents"].agents}
    active = policy.act(seen)[0]
    forget()
    fate(here / "code" / "mine.py")
    assert torch.equal(shoal.evaluate("b", 4).returns["agents"], played.returns["agents"])
    assert shoal.load("b").act(seen)[0] == active
    assert main(["resume", "b", "--quiet"]) == 0
    assert_same(whole, half)
    if fate is edited:  # which does something where it is asked for
        other = train("c", *given(only=[option]))
        assert [x for x in leaves(whole) if not torch.equal(leaves(whole)[x], leaves(other)[x])]


def test_all_at_once_from_another_folder(here, monkeypatch):
    whole, half = train("a", *given()), train("b", *given("./code/../code/mine.py"), "--until", 48)
    shutil.rmtree("code")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["eval", "../b", "--episodes", "2"]) == 0
    assert main(["resume", "../b", "--quiet"]) == 0
    assert_same(Run("../a"), Run("../b"))
    assert whole.path != half.path


def test_a_run_that_was_moved_takes_its_code_along(here):
    whole, _ = train("a", *given()), train("b", *given(), "--until", 48)
    shutil.rmtree("code")
    shutil.move("b", "c")
    assert main(["resume", "c", "--quiet"]) == 0
    assert_same(whole, Run("c"))


def test_a_folder_that_was_moved_and_linked_to_is_not_taken_for_the_copy(here):
    whole, half = train("a", *given()), train("b", *given(), "--until", 48)
    (here / "code").rename("moved")
    (here / "code").symlink_to("moved")
    edited(here / "moved" / "mine.py")
    assert main(["resume", "b", "--quiet"]) == 0
    assert_same(whole, half)


def test_python_takes_paths_as_well(here):
    run = train("a", *given())
    sections: dict[str, dict[str, object]] = {"algo": {"rollout": 6, "lr": 1e-2}, "net": {}}
    for option, name in OPTIONS.items():
        section, _, key = option.partition(".")
        sections[section][key] = f"{here / 'code' / 'mine.py'}:{name}"
    how = {"envs": 4, "steps": 96, "quiet": True, "compile": "off", "eval": {"episodes": 2}, "log": {"tensorboard": False}}
    assert_same(run, shoal.train("ippo", "simple_spread", env={"max_cycles": 5}, out="b", **sections, **how))


def test_two_files_of_one_name_stay_apart(here):
    """One for each group: they are not mixed up, and one does not stand in for the other."""
    (here / "other").mkdir()
    edited(here / "other" / "mine.py")
    flags = [*given(group="adversary."), *given("other/mine.py", group="agent.")]
    whole, half = train("a", *flags, world="simple_tag"), train("b", *flags, "--until", 48, world="simple_tag")
    assert {c.read_text() for c in copies(half)} == {MINE, (here / "other" / "mine.py").read_text()}
    of = {g: Run("b").settings.players[g]["algo"]["shaper"].rpartition(":")[0] for g in ("adversary", "agent")}
    assert of["adversary"] != of["agent"]
    for name in ("code", "other"):
        shutil.rmtree(name)
    assert main(["resume", "b", "--quiet"]) == 0
    assert_same(whole, half)


def test_a_config_starts_again_from_the_runs_own_copies(here):
    whole = train("a", *given())
    edited(here / "code" / "mine.py")
    assert main(["train", "--config", "a", "--out", "b", "--quiet"]) == 0
    forget()
    assert_same(whole, Run("b"))
    shutil.rmtree("code")
    shutil.rmtree("a")  # and it has copies of its own
    assert main(["train", "--config", "b", "--until", "48", "--out", "c"]) == 0
    forget()
    assert main(["resume", "c", "--quiet"]) == 0
    assert_same(Run("b"), Run("c"))


def test_a_policy_that_plays_elsewhere_brings_its_code(here):
    foe = train("foe", *given(only=["net.module"]), world="simple_tag")
    shutil.rmtree("code")
    run = train("r", "--team.adversary", foe.path, "--until", 48, world="simple_tag")
    shutil.rmtree("foe")
    assert main(["resume", "r", "--quiet"]) == 0
    mine, theirs = leaves(run), Run("r").load("last")["algorithms"]["adversary"]
    assert all(torch.equal(mine[f"adversary.{k}"], x) for k, x in theirs.items())


def test_init_takes_the_weights_of_a_module():
    train("a", *given(only=["net.module"]))
    train("b", *given(only=["net.module"]), "--init", "a", "--algo.lr", "1e-30", "--seed", "7")
    name = "actor.net.body.layer.weight"
    assert torch.equal(Run("a").load("best")["algorithms"]["agents"][name], Run("b").load("last")["algorithms"]["agents"][name])


def test_an_edit_between_two_runs_of_one_process_counts(here):
    """What ran is what was copied."""
    words = ["train", "ippo", "simple_spread", *FLAGS, *given(only=["algo.lr_schedule"])]
    assert main([*words, "--out", "a"]) == 0
    edited(here / "code" / "mine.py")
    assert main([*words, "--out", "b"]) == 0
    assert main([*words, "--out", "c", "--until", "48"]) == 0
    forget()
    assert main(["resume", "c", "--quiet"]) == 0
    assert_same(Run("b"), Run("c"))


# --- a module of one's own acts and values in eval mode, and is in train mode where a gradient is taken ---

seen: set[tuple[bool, bool]] = set()  # in train mode, where a gradient is taken
ACTS, LEARNS = (False, False), (True, True)
SPY = ["--net.module", "test_own_objects:Spy"]


class Spy(nn.Module):
    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.layer, self.norm = nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out)

    def forward(self, x):
        seen.add((self.training, torch.is_grad_enabled()))
        return self.norm(self.layer(x).flatten(0, -2)).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize(
    "flags",
    [
        ["--algo.epochs", 2],
        ["--net.memory", "gru", "--algo.target-tau", 0.1],
        ["--algo.critic", "world", "--algo.critic-slices", 2, "--algo.advantage-every", "epoch"],
        ["--net.trunk", "shared", "--algo.advantage-every", "minibatch"],
    ],
)
def test_a_module_is_in_train_mode_where_it_learns_alone(flags):
    seen.clear()
    train("r", *SPY, *flags, "--until", 48)
    assert seen == {ACTS, LEARNS}
    seen.clear()
    shoal.evaluate("r", 2)
    policy = shoal.load("r")
    policy.act({name: [0.1] * 18 for name in policy.spec["agents"].agents})
    assert seen == {ACTS}
    seen.clear()
    assert main(["resume", "r", "--quiet"]) == 0
    assert seen == {ACTS, LEARNS}


def test_what_it_counts_moves_while_it_learns_alone():
    """Batch norm's statistics are those of the update's own batches, however many evaluations there are."""
    runs = [train(every, *SPY, "--eval.every", every) for every in ("24", "0")]
    first, second = (leaves(run) for run in runs)
    assert [k for k in first if not torch.equal(first[k], second[k])] == []
    assert first["agents.actor.net.body.norm.num_batches_tracked"] > 0


def test_resume_is_exact_with_a_module_that_counts():
    whole, half = train("a", *SPY), train("b", *SPY, "--until", 48)
    assert main(["resume", "b", "--quiet"]) == 0
    assert_same(whole, half)


# --- what a module draws ---

DRAWS = ["--net.module", "test_own_objects:Draws"]


class Draws(nn.Module):
    def __init__(self, width_in, width_out, agents):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width_in, 8), nn.Dropout(0.5), nn.Linear(8, width_out))

    def forward(self, x):
        return self.layers(x)


def test_acting_draws_nothing():
    run = train("r", *DRAWS)
    assert torch.equal(shoal.evaluate(run, 4).returns["agents"], shoal.evaluate(run, 4).returns["agents"])


def test_what_a_module_draws_follows_from_the_seed_and_leaves_others_alone():
    torch.manual_seed(1)
    one, after = train("a", *DRAWS), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after  # the caller's own draws go on as if there had been no run
    torch.manual_seed(2)
    assert_same(one, train("b", *DRAWS))
    other = train("c", *DRAWS, "--algo.entropy", "0")
    assert any(not torch.equal(x, leaves(other)[k]) for k, x in leaves(one).items())


def test_resume_is_exact_with_a_module_that_draws():
    whole, half = train("a", *DRAWS), train("b", *DRAWS, "--until", 48)
    assert main(["resume", "b", "--quiet"]) == 0
    assert_same(whole, half)


# --- mistakes ---

WRONG = '''"""Objects that will not do."""

import torch
from torch import nn

from shoal.nets.norm import Running

seven = 7


class Bare:
    pass


class Takes:
    def __init__(self, *given):
        pass


class Says(Takes):
    def __call__(self, now):
        return "much"


class Mute(nn.Module):
    def __init__(self, *given):
        super().__init__()


class Pair(nn.Module):
    def __init__(self, a, b, n):
        super().__init__()
        self.layer = nn.Linear(a, b)

    def forward(self, x):
        return self.layer(x), x


class Wide(Pair):
    def forward(self, x):
        return torch.cat((x, x), -1)


class Still(Mute):
    def __init__(self, a, b, n):
        super().__init__()
        self.width = b

    def forward(self, x):
        return x[..., :1].expand(*x.shape[:-1], self.width)


class Asks(Running):
    def __init__(self, *shape, by):
        super().__init__(*shape)
        self.by = by

    def normalise(self, x, clip=None):
        return x * (self.by + 1)


class Plain:
    def __init__(self, *shape):
        self.mean = 0.0

    def update(self, x, mask=None):
        self.mean = self.mean / 2 + x.mean() / 2

    def normalise(self, x, clip=None):
        return x - self.mean

    def denormalise(self, x):
        return x + self.mean
'''
NOT = {
    **{option: ["Nobody", "seven", "Bare", "Takes", "Says"] for option in OPTIONS if "schedule" in option},
    "algo.normaliser": [
        *("Nobody", "seven", "Bare", "Takes", "Mute", "Plain", "Mute:3", "seven:x=1"),
        *("Asks", "Asks:bye=1", "Asks:by", "Asks:by=one", "Asks:by='one'", "Asks:by=1,by=2", "Asks:by=1,width=2", "Asks:by=("),
    ],
    "algo.shaper": ["Nobody", "seven", "Bare"],
    "net.module": ["Nobody", "seven", "Bare", "Takes", "Mute", "Pair", "Wide", "Still"],
}


@pytest.mark.parametrize(("option", "name"), [(option, name) for option, names in NOT.items() for name in names])
def test_what_will_not_do_is_a_sentence_and_no_folder(capsys, here, option, name):
    (here / "code" / "wrong.py").write_text(WRONG)
    flags = [f"--{option.replace('_', '-')}", f"code/wrong.py:{name}", "--algo.normalise-obs", "false", "--out", "r"]
    assert main(["train", "ippo", "simple_spread", *FLAGS, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith(".")
    assert f"wrong.py:{name}" in err or "nothing to learn" in err or "the shaper of 'agents'" in err
    assert not (here / "r").exists()


def test_arguments_of_a_normaliser_that_are_wrong_say_what_is_near(capsys, here):
    (here / "code" / "wrong.py").write_text(WRONG)
    flags = ["--algo.state-normaliser", "code/wrong.py:Asks:bye=1", "--out", "r"]
    assert main(["train", "mappo", "simple_spread", *FLAGS, *flags]) == 2
    said = "--algo.state-normaliser is code/wrong.py:Asks:bye=1, and Asks takes no 'bye' (did you mean 'by'?): it takes by."
    assert capsys.readouterr().err == f"shoal: {said}\n"
