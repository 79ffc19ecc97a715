"""Shapers: a user's own function of what learners are paid. Reported returns never hear of it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.spec import UserError
from shoal.training.loop import Loop
from shoal.training.settings import Settings, resolve

FLAGS = (
    "--steps 96 --envs 4 --algo.rollout 6 --net.hidden 8 --eval.episodes 2 --eval.every 48 --log.every 24 --log.tensorboard "
    "false --env.max-cycles 5 --seed 3 --compile off --quiet"
).split()
LAP = 24
QUICK = {
    "envs": 4,
    "steps": 96,
    "seed": 3,
    "quiet": True,
    "compile": "off",
    "net": {"hidden": (8,)},
    "env": {"max_cycles": 5},
    "eval": {"episodes": 2, "every": 48},
    "log": {"tensorboard": False, "every": LAP},
}
SHAPERS = '''"""Shapers in a file."""

seven = 7


def nothing(reward, obs, step, steps):
    return reward * 0


def fading(reward, obs, step, steps):
    return reward * (1 - step / steps) + obs[..., 0]


def too_few(reward, obs, step, steps):
    return reward.sum(-1)


def none_at_all(reward, obs, step, steps):
    print(end="")
'''


def nothing(reward, obs, step, steps):
    return reward * 0


def fading(reward, obs, step, steps):
    return reward * (1 - step / steps) + obs[..., 0]


def train(out, world="simple_spread", algo=None, **more):
    return shoal.train("ippo", world, algo={"rollout": 6, **(algo or {})}, out=out, **{**QUICK, **more})


def metrics(run):
    return [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]


def weights(run, which="last"):
    state = run.load(which)["algorithms"]
    return {f"{g}.{k}": x for g, s in state.items() for k, x in s.items()}


def assert_same(a, b):
    assert metrics(a) == metrics(b)
    mine, theirs = weights(a), weights(b)
    assert mine.keys() == theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []


def changed(a, b, group):
    """Whether a group's nets differ."""
    mine, theirs = weights(a), weights(b)
    return any(not torch.equal(mine[k], theirs[k]) for k in mine if k.startswith((f"{group}.actor.", f"{group}.critic.")))


def recorded(run, group="agents"):
    return json.loads((run.path / "config.json").read_text())["players"][group]["algo"]["shaper"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "r")


@pytest.fixture(scope="module")
def faded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("faded") / "r", shaper=fading)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that one is in, with a file of shapers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_shapers.py").write_text(SHAPERS)
    yield tmp_path
    for name in [n for n in sys.modules if "my_shapers" in n]:
        del sys.modules[name]


def refused(capsys, *argv):
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith(".")
    return err


# --- how it is asked for ---


@pytest.mark.parametrize("name", ["my_shapers.py:fading", "./my_shapers.py:fading", "my_shapers:fading"])
def test_by_file_and_by_module_on_the_command_line(here, plain, faded, name):
    assert main(["train", "ippo", "simple_spread", *FLAGS, "--algo.shaper", name, "--out", "r"]) == 0
    run = shoal.Run("r")
    assert_same(run, faded)
    assert changed(run, plain, "agents")
    assert recorded(run) == (name if ".py" not in name else f"{here}/my_shapers.py:fading")


def test_by_name_in_python(here, faded):
    assert_same(train("r", algo={"shaper": "my_shapers.py:fading"}), faded)


@pytest.mark.parametrize("how", ["flag", "dict", "settings"])
def test_for_one_group_alone(here, how):
    """After one lap the other group has seen nothing of it."""
    without = train("a", "simple_tag", steps=LAP)
    if how == "flag":
        flags = [*FLAGS, "--steps", str(LAP), "--algo.adversary.shaper", "my_shapers.py:fading", "--out", "b"]
        assert main(["train", "ippo", "simple_tag", *flags]) == 0
    elif how == "dict":
        train("b", "simple_tag", shaper={"adversary": fading}, steps=LAP)
    else:
        train("b", "simple_tag", groups={"adversary": {"algo": {"shaper": "my_shapers:fading"}}}, steps=LAP)
    run = shoal.Run("b")
    assert changed(run, without, "adversary")
    assert not changed(run, without, "agent")
    assert recorded(run, "agent") is None
    assert recorded(run, "adversary").endswith(":fading")


def test_a_shaper_for_each_group(tmp_path):
    two = train(tmp_path / "a", "simple_tag", shaper={"adversary": fading, "agent": nothing})
    assert (recorded(two, "adversary"), recorded(two, "agent")) == ("test_shaper:fading", "test_shaper:nothing")
    one = train(tmp_path / "b", "simple_tag", shaper=fading)
    assert changed(one, two, "agent")


def test_who_does_not_learn_needs_none(tmp_path):
    run = train(tmp_path / "r", "simple_tag", shaper=fading, team={"adversary": "random"})
    assert recorded(run, "agent") == "test_shaper:fading"


# --- what it does ---


def test_reported_returns_stay_raw(tmp_path):
    """Policies that stay as they are earn the same however they are paid: every metric of returns is the same, bit for bit,
    and only what the critic learns is not."""
    still = {"lr": 1e-30}
    runs = [train(tmp_path / "a", algo=still), train(tmp_path / "b", algo=still, shaper=nothing)]
    lines = [metrics(run) for run in runs]
    named = [[{k: v for k, v in x.items() if not k.startswith("agents/")} for x in some] for some in lines]
    assert named[0] == named[1]
    assert {"return/agents", "return/agents/0", "return_sum/agents", "reward_total/agents"} < named[0][1].keys()
    assert all(x["return/agents"] < -1 for x in named[1])
    assert [x["agents/value_loss"] for x in lines[0] if x["kind"] == "train"] != [
        x["agents/value_loss"] for x in lines[1] if x["kind"] == "train"
    ]


def test_learners_are_paid_what_it_gives(tmp_path):
    """The same through the shaper as through the reward's own scale."""
    by_scale = train(tmp_path / "a", algo={"reward_scale": 0.5})
    by_shaper = train(tmp_path / "b", shaper=lambda reward, obs, step, steps: reward * 0.5)
    assert_same(by_scale, by_shaper)


def test_it_hears_the_observations_the_steps_done_and_their_total(tmp_path):
    heard = []

    def listen(reward, obs, step, steps):
        assert (step.shape, step.dtype, type(steps)) == ((), torch.long, int)
        if len(reward) > 1:  # it is tried on a single step of nothing first
            heard.append((int(step), steps, tuple(reward.shape), tuple(obs.shape)))
        return reward

    run = train(tmp_path / "r", shaper=listen, until=48)
    assert heard == [(s, 96, (6, 4, 3), (6, 4, 3, 18)) for s in (0, 24)]
    shoal.resume(run, shaper=listen, quiet=True)
    assert [h[0] for h in heard] == [0, 24, 48, 72]
    shoal.resume(run, shaper=listen, quiet=True, steps=120)
    assert heard[-1][:2] == (96, 120)


def test_it_comes_after_team_pay_and_the_worlds_own_shaping():
    given = {}

    def keep(reward, obs, step, steps):
        given["reward"], given["obs"] = reward.clone(), obs
        return reward + 100

    run, groups = {"envs": 4, "reward": "team-sum", "quiet": True}, {"pair": {"algo": {"shaper": "python:keep"}}}
    loop = Loop(resolve(Settings("mappo", "probe_teams", run, {"env": {"shaped": True}}, groups)), shaper={"pair": keep})
    batch = loop.collector.collect(8)
    loop.shaping(batch)
    pay = batch.results["pair"]
    assert pay.shaping.abs().sum() > 0
    assert torch.equal(given["reward"], pay.reward.sum(-1, keepdim=True) + pay.shaping)
    assert torch.equal(given["obs"], batch.frame["pair"].obs)
    assert torch.equal(batch.learner_reward["pair"], given["reward"] + 100)
    assert torch.equal(batch.learner_reward["lone"], batch.results["lone"].reward)
    raw = float(pay.reward.sum((0, 1)).mean() / batch.over.sum())
    loop.collector.episode_stats.count(batch)
    assert float(loop.collector.episode_stats.take()["return/pair"]) == pytest.approx(raw)


def test_observations_with_names_come_as_a_dict(tmp_path):
    def needs_peers(reward, obs, step, steps):
        return reward + obs["asks"][..., 1] + obs["picture"].float().mean((-1, -2, -3))

    train(tmp_path / "r", "probe_image", shaper=needs_peers, env={"vector": True})


# --- resume ---


def test_an_importable_one_resumes_by_itself(tmp_path, faded):
    run = train(tmp_path / "r", shaper=fading, until=48)
    assert recorded(run) == "test_shaper:fading"
    assert_same(shoal.resume(run, quiet=True), faded)


def test_another_must_be_handed_over_again(tmp_path, faded):
    mine = lambda *given: fading(*given)  # noqa: E731
    run = train(tmp_path / "r", shaper=mine, until=48)
    assert recorded(run).startswith("python:")
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"'agents'.*hand it over again.*shaper=\.\.\.\)\.$"):
        shoal.resume(run, quiet=True)
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert main(["resume", str(run.path)]) == 2
    shoal.evaluate(run, 2)  # who only plays is paid nothing
    shoal.load(run)
    assert_same(shoal.resume(run, quiet=True, shaper=mine), faded)


def test_a_group_whose_own_is_missing_is_named(tmp_path):
    def mine(*given):
        return fading(*given)

    run = train(tmp_path / "r", "simple_tag", shaper=mine, until=48)
    with pytest.raises(UserError, match="'agent' are shaped by a function that no import finds"):
        shoal.resume(run, quiet=True, shaper={"adversary": mine})
    shoal.resume(run, quiet=True, shaper={"adversary": mine, "agent": mine})


def test_a_method_a_partial_and_an_object_are_functions_too(tmp_path, faded):
    from functools import partial

    class Fading:
        def __call__(self, *given):
            return fading(*given)

        def method(self, *given):
            return fading(*given)

    for k, shaper in enumerate((Fading(), Fading().method, partial(fading))):
        run = train(tmp_path / str(k), shaper=shaper)
        assert recorded(run).startswith("python:")
        assert_same(run, faded)


def test_one_that_draws_resumes_exactly(tmp_path):
    noisy = lambda reward, *_: reward + torch.randn_like(reward)  # noqa: E731
    whole, half = train(tmp_path / "a", shaper=noisy), train(tmp_path / "b", shaper=noisy, until=48)
    assert_same(whole, shoal.resume(half, quiet=True, shaper=noisy))


# --- several seeds ---


def test_several_seeds_take_turns_and_are_what_each_is_alone(tmp_path, faded):
    steps = []

    def mine(reward, obs, step, steps_in_all):
        steps.extend([int(step)] if len(reward) > 1 else [])
        return fading(reward, obs, step, steps_in_all)

    runs = train(tmp_path / "r", shaper=mine, seeds=2)
    assert steps == [0, 0, 24, 24, 48, 48, 72, 72]
    assert_same(runs[0], faded)
    assert_same(runs[1], train(tmp_path / "alone", shaper=fading, seed=4))


def test_several_seeds_are_resumed_with_it(tmp_path, faded):
    mine = lambda *given: fading(*given)  # noqa: E731
    train(tmp_path / "r", shaper=mine, seeds=2, until=48)
    with pytest.raises(UserError, match="hand it over again"):
        shoal.resume(tmp_path / "r", quiet=True)
    assert_same(shoal.resume(tmp_path / "r", quiet=True, shaper=mine)[0], faded)


def test_several_seeds_in_processes_find_it_in_their_own_copy(here, faded):
    """And one of them goes on without the file."""
    flags = [*FLAGS, "--seeds", "2", "--until", "48", "--algo.shaper", "my_shapers.py:fading", "--out", "r"]
    assert main(["train", "ippo", "simple_spread", *flags]) == 0
    (here / "my_shapers.py").unlink()
    assert_same(shoal.resume(min(Path("r").iterdir()), quiet=True), faded)


# --- mistakes ---


WRONG = [
    ("--algo.shaper", "nowhere.py:f", "no file"),
    ("--algo.shaper", "nowhere:f", "could not be loaded"),
    ("--algo.shaper", "my_shapers.py", "module:"),
    ("--algo.shaper", "my_shapers.py:fadng", "'fading'"),
    ("--algo.shaper", "my_shapers.py:", "file.py:"),
    ("--algo.shaper", "python:gone", "no import finds"),
    ("--algo.nobody.shaper", "my_shapers.py:fading", "'nobody'"),
    ("--algo.agents.shaper", "my_shapers.py:fadng", "'fading'"),
    ("--algo.shaper", "my_shapers.py:seven", "the shaper of 'agents' failed"),
    ("--algo.shaper", "my_shapers.py:too_few", "[1, 4] for rewards of [1, 4, 3]"),
]


@pytest.mark.parametrize(("flag", "name", "word"), WRONG)
def test_a_mistake_is_one_sentence_and_no_folder(capsys, here, flag, name, word):
    before = sorted(here.iterdir())
    assert word in refused(capsys, "train", "ippo", "simple_spread", *FLAGS, flag, name)
    assert [p for p in sorted(here.iterdir()) if p.name != "__pycache__"] == before


def test_what_is_no_function_is_a_sentence(tmp_path):
    for wrong in (7, "test_shaper:fading", {"agents": 7}):
        with pytest.raises(UserError, match="it takes a function"):
            train(tmp_path / "r", shaper=wrong)
    with pytest.raises(UserError, match=r"no group 'agnts' here \(did you mean 'agents'\?\)"):
        train(tmp_path / "r", shaper={"agnts": fading})
    assert not (tmp_path / "r").exists()
    run = train(tmp_path / "s", shaper=fading, until=48)
    with pytest.raises(UserError, match="no group 'agnts'"):
        shoal.resume(run, shaper={"agnts": fading})


@pytest.mark.parametrize(("name", "gave"), [("too_few", r"\[1, 4\]"), ("none_at_all", "NoneType")])
def test_a_wrong_shape_is_a_sentence(here, name, gave):
    with pytest.raises(
        UserError, match=rf"^the shaper of 'agents' gave {gave} for rewards of \[1, 4, 3\]: it must give as many\.$"
    ):
        train("a", algo={"shaper": f"my_shapers.py:{name}"})
    assert not Path("a").exists()


def test_a_wrong_shape_that_comes_later_is_a_sentence_too(tmp_path):
    with pytest.raises(UserError, match=r"gave \[4, 3\] for rewards of \[6, 4, 3\]"):
        train(tmp_path / "r", shaper=lambda reward, obs, step, steps: reward if step == 0 else reward[0])
    assert shoal.Run(tmp_path / "r").load("last")["step"] == LAP  # what was good is kept


def test_a_run_keeps_its_pay(tmp_path):
    run = train(tmp_path / "r", until=48)
    with pytest.raises(UserError, match="were not shaped when this run began"):
        shoal.resume(run, quiet=True, shaper=fading)


def test_it_may_write_on_what_it_is_given(tmp_path, faded):
    """It is given copies: learners see, and the log reports, what there was."""

    def writes(reward, obs, step, steps):
        out = fading(reward, obs, step, steps)
        reward.zero_()
        obs.zero_()
        return out

    assert_same(train(tmp_path / "r", shaper=writes), faded)


def test_an_algorithm_that_learns_nothing_takes_none(tmp_path):
    with pytest.raises(UserError, match="has no setting 'shaper'"):
        shoal.train("random", "simple_spread", shaper=fading, out=tmp_path / "r", quiet=True)
    assert not (tmp_path / "r").exists()


def test_a_config_starts_it_again(here, faded):
    """From a folder that has gone since; and without, where a flag says so."""
    assert main(["train", "ippo", "simple_spread", *FLAGS, "--algo.shaper", "my_shapers.py:fading", "--out", "r"]) == 0
    (here / "my_shapers.py").unlink()
    assert main(["train", "--config", "r", "--out", "again"]) == 0
    assert_same(shoal.Run("again"), faded)
    shutil.rmtree("r")
    assert_same(shoal.resume("again", steps=120, quiet=True), shoal.resume(shutil.copytree(faded.path, "f"), 120, quiet=True))
    assert main(["train", "--config", "again", "--algo.shaper", "none", "--out", "without"]) == 0
    assert recorded(shoal.Run("without")) is None
