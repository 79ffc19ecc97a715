"""One instance that plays unlike groups of a team: what a run records of it, who else may play one of them, and where its
weights go."""

from __future__ import annotations

import json

import pytest
import torch

import shoal
from shoal.cli import main
from shoal.spec import UserError
from shoal.training.players import bound, in_order, make_players
from shoal.training.run import Run
from shoal.training.settings import Settings, make_env

CAMP = '''"""Two teams that are not side by side: scouts and a medic are red, the rival between them is blue."""

from __future__ import annotations

import torch

from shoal.envs.base import Move, World
from shoal.envs.probe.base import Copying, agent_group
from shoal.spec import Discrete, EnvSpec, Frame, Result

SIZES = {"scout": (2, 3, "red"), "rival": (1, 2, "blue"), "medic": (1, 4, "red")}


class Camp(World):
    """Everybody is shown a symbol; a team is paid the share of its agents that copy theirs. 5 steps, cut off."""

    def setup(self):
        self.tasks = {g: Copying(Discrete(k), self) for g, (n, k, team) in SIZES.items()}
        groups = tuple(agent_group(n, k, self.tasks[g].space, g, team=team) for g, (n, k, team) in SIZES.items())
        self.noise_begin = self.noise_step = 4
        self.spec = EnvSpec(groups, common=True, horizon=5)

    def begin(self, noise):
        parts = noise.split([n for n, _, _ in SIZES.values()], -1)
        return {g: task.draw(x) for (g, task), x in zip(self.tasks.items(), parts, strict=True)}

    def advance(self, state, actions, noise):
        score = {g: task.score(state[g], actions[g]) for g, task in self.tasks.items()}
        red = torch.cat((score["scout"], score["medic"]), -1).mean(-1, keepdim=True)
        paid = {"scout": red.expand(-1, 2), "rival": score["rival"], "medic": red}
        return Move(self.begin(noise), {g: Result(x, self.never(x.shape[1])) for g, x in paid.items()})

    def observe(self, state):
        return Frame({g: self.view(task.show(state[g]), state["clock"]) for g, task in self.tasks.items()})

    def last(self, state):
        return state["clock"] + 1 == 5
'''
TALK = "simple_speaker_listener"
PAST = {"rollout": 3, "every": 6, "batch": 8, "capacity": 80, "learning_starts": 12, "target_every": 4}
ALGO = {"vdn": PAST, "qmix": PAST, "ddqn": PAST, "coma": {"rollout": 3}, "ippo": {"rollout": 3}, "random": {}}
TEAMS = ["vdn", "qmix", "coma"]
RED = ["scout", "medic"]
HOW = {
    "envs": 4,
    "steps": 72,
    "seed": 1,
    "quiet": True,
    "compile": "off",
    "net": {"hidden": (8,)},
    "log": {"tensorboard": False, "csv": False, "every": 36},
    "eval": {"episodes": 4, "every": 72},
    "save": {"every": 0, "keep": 0, "best": "none"},
}


@pytest.fixture(scope="module")
def camp(tmp_path_factory):
    path = tmp_path_factory.mktemp("camp") / "camp.py"
    path.write_text(CAMP)
    return str(path)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """A run of each on the speaker and the listener."""
    folder = tmp_path_factory.mktemp("talks")
    return {name: train(folder / name, name, TALK, seed=7 + k) for k, name in enumerate(TEAMS)}


def train(out, algorithm, env, **more):
    how = {**HOW, "algo": ALGO[algorithm], **more}
    if env.startswith("simple"):
        how["env"] = {"max_cycles": 5}
    return shoal.train(algorithm, env, out=out, **how)


def metrics(run):
    return [{k: v for k, v in line.items() if k != "time"} for line in run.metrics]


def weights(run, key, name="last"):
    """An instance's, without what is only there for its learning."""
    return {k: x for k, x in run.load(name)["algorithms"][key].items() if "optimiser" not in k}


def equal(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(x, b[k]) for k, x in a.items())


def refused(capsys, *argv):
    """The one sentence on stderr."""
    short = ["--steps", "8"] if argv[0] == "train" else []  # should it not be refused
    assert main([str(a) for a in argv] + short) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ")
    assert err.count("\n") == 1
    return err


# --- who plays what ---


@pytest.mark.parametrize("algorithm", TEAMS)
def test_a_run_records_who_plays_which_groups(talks, algorithm):
    players = json.loads((talks[algorithm].path / "config.json").read_text())["players"]
    assert list(players) == ["speaker", "listener"]
    for player in players.values():
        assert (player["id"], player["learns"], player["bound"]) == (algorithm, True, ["speaker", "listener"])
        assert player["net"]["hidden"] == [8]
        assert player["algo"]["rollout"] == 3
    assert players["speaker"] == players["listener"]
    assert list(talks[algorithm].load("last")["algorithms"]) == ["speaker,listener"]
    line = talks[algorithm].metrics[-2]
    assert line["speaker/td_error"] == line["listener/td_error"] > 0  # theirs in common
    assert {"return/speaker", "return/listener"} < talks[algorithm].metrics[-1].keys()


def test_those_of_a_group_play_one_each(tmp_path):
    run = train(tmp_path / "r", "ddqn", TALK)
    assert [p["bound"] for p in run.settings.players.values()] == [["speaker"], ["listener"]]
    assert list(run.load("last")["algorithms"]) == ["speaker", "listener"]


@pytest.mark.parametrize("algorithm", TEAMS)
def test_teams_that_are_not_side_by_side(camp, tmp_path, algorithm):
    """Red is the first group and the last; it comes first, and keeps the world's order inside."""
    how = {"steps": 144}
    whole = train(tmp_path / "a", algorithm, camp, **how)
    assert [whole.settings.players[g]["bound"] for g in ("scout", "rival", "medic")] == [RED, ["rival"], RED]
    assert list(whole.load("last")["algorithms"]) == ["scout,medic", "rival"]
    run = train(tmp_path / "b", algorithm, camp, until=60, **how)
    run = shoal.resume(run, quiet=True)
    assert metrics(run) == metrics(whole)
    for key in ("scout,medic", "rival"):
        assert equal(run.load("last")["algorithms"][key], whole.load("last")["algorithms"][key])
    assert shoal.evaluate(run, 4).returns.keys() == {"scout", "rival", "medic"}


def test_they_learn_who_is_who(camp, tmp_path):
    """Red can have 5 in an episode, of which chance gives (2 / 3 + 1 / 4) / 3; the rival 5, and half of it. A slip in the order
    of groups would pay one for what another does."""
    algo = {"rollout": 4, "batch": 64, "every": 8, "learning_starts": 200, "capacity": 8000, "gamma": 0.0, "lr": 2e-2}
    algo |= {"target_every": 50, "epsilon_steps": 1500}
    run = train(tmp_path / "r", "vdn", camp, envs=16, steps=2400, algo=algo, eval={"every": 0})
    played = shoal.evaluate(run, 20).returns
    assert {g: float(x.mean()) for g, x in played.items()} == pytest.approx({"scout": 5, "rival": 5, "medic": 5}, abs=0.3)


def test_order(camp):
    spec = make_env(camp, 1, torch.device("cpu")).spec
    settings = Settings("vdn", camp, sections={"algo": PAST}, team={"rival": "ippo"})
    players = make_players(settings, spec, 0, torch.device("cpu"))
    assert [(a.id, a.groups) for a in players.algorithms] == [("vdn", ("scout", "medic")), ("ippo", ("rival",))]
    assert in_order(players.algorithms[::-1], spec) == players.algorithms
    assert players.of["medic"] is players.of["scout"] is not players.of["rival"]
    entries = {g: shoal.ids.find("algos", "qmix") for g in ("scout", "rival", "medic")}
    assert [groups for groups, _ in bound(entries, spec)] == [("scout", "medic"), ("rival",)]
    entries["medic"] = shoal.ids.find("algos", "vdn")
    assert [groups for groups, _ in bound(entries, spec)] == [("scout",), ("rival",), ("medic",)]


# --- settings ---


@pytest.mark.parametrize("flag", ["--algo.speaker.lr 2e-3", "--net.listener.hidden 16", "--algo.listener.gamma 0.5"])
@pytest.mark.parametrize("algorithm", TEAMS)
def test_settings_of_one_group_alone_are_refused(capsys, tmp_path, algorithm, flag):
    err = refused(capsys, "train", algorithm, TALK, *flag.split(), "--out", tmp_path / "r")
    assert f"one {algorithm} plays speaker and listener" in err
    assert "do not go with it" in err
    assert not (tmp_path / "r").exists()


def test_settings_that_are_the_same_for_all_of_them_are_not(tmp_path):
    same = {"algo": {"lr": 1e-3}, "net": {"hidden": (4,)}}
    run = train(tmp_path / "r", "vdn", TALK, groups={"speaker": same, "listener": same})
    assert {p["algo"]["lr"] for p in run.settings.players.values()} == {1e-3}
    assert {tuple(p["net"]["hidden"]) for p in run.settings.players.values()} == {(4,)}


def test_a_team_and_another_may_have_settings_of_their_own(camp, tmp_path):
    run = train(tmp_path / "r", "qmix", camp, groups={"rival": {"algo": {"lr": 5e-4}, "net": {"hidden": (4,)}}})
    players = run.settings.players
    assert [players[g]["algo"]["lr"] for g in ("scout", "rival", "medic")] == [1e-3, 5e-4, 1e-3]
    assert [tuple(players[g]["net"]["hidden"]) for g in ("scout", "rival", "medic")] == [(8,), (4,), (8,)]


# --- after training ---


@pytest.mark.parametrize("algorithm", TEAMS)
def test_eval_plays_what_was_learnt(talks, algorithm, capsys):
    run = talks[algorithm]
    assert main(["eval", str(run.path), "--episodes", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["metrics"]
    assert told["return/speaker"] == told["return/listener"]  # they are paid alike
    again = shoal.evaluate(run, 4)
    assert float(again.returns["listener"].mean()) == pytest.approx(told["return/listener"]["mean"])


@pytest.mark.parametrize("algorithm", TEAMS)
def test_a_policy_acts_as_the_evaluation_does(talks, algorithm):
    """By agents' names, with the memory passed back in: what was done last is a part of it."""
    run = talks[algorithm]
    policy = shoal.load(run)
    env = run.resolve("cpu").make_env(1)
    frame = env.reset(torch.rand(1, env.noise))
    players, memory, carried = policy.players, policy.players.memory(1, env.device), None
    seen = set()
    for _ in range(5):
        actions, memory, _ = players.act(frame, memory, players.noise(torch.Generator(), 1), explore=False, greedy=True)
        observed = {name: frame[g.name].obs[0, i].numpy() for g in env.spec.groups for i, name in enumerate(g.agents)}
        chosen, carried = policy.act(observed, carried)
        assert chosen == {"speaker_0": int(actions["speaker"][0, 0]), "listener_0": int(actions["listener"][0, 0])}
        seen.add(tuple(chosen.values()))
        frame = env.step(actions, torch.rand(1, env.noise)).frame
    assert {a.groups for a in players.algorithms} == {("speaker",), ("listener",)}


@pytest.mark.parametrize("algorithm", TEAMS)
def test_eval_with_another_in_one_seat(talks, algorithm, capsys):
    """The speaker of one run beside the listener of another."""
    run, other = talks[algorithm], talks["vdn" if algorithm != "vdn" else "qmix"]
    alone = shoal.evaluate(run, 8).returns["listener"]
    assert torch.equal(shoal.evaluate(run, 8, team={"speaker": run.path}).returns["listener"], alone)  # it is the same one
    mixed = shoal.evaluate(run, 8, team={"listener": other.path}).returns["listener"]
    assert not torch.equal(mixed, alone)
    crossed = shoal.evaluate(other, 8, team={"speaker": run.path}, seed=run.settings.run["seed"]).returns["listener"]
    assert torch.equal(mixed, crossed)  # the same two
    assert not torch.equal(shoal.evaluate(run, 8, team={"listener": "random"}).returns["listener"], alone)
    assert "has learnt nothing" in refused(capsys, "eval", run.path, "--team.speaker", algorithm)


@pytest.mark.parametrize(("algorithm", "memory"), [("vdn", "none"), ("qmix", "gru"), ("coma", "gru")])
def test_nets_in_files_of_their_own(tmp_path, camp, algorithm, memory):
    algo = {**ALGO[algorithm], **({} if algorithm == "coma" else {"chunk": 3, "burn_in": 1})}
    save = {**HOW["save"], "nets": True}
    run = train(tmp_path / "r", algorithm, camp, save=save, algo=algo, net={"hidden": (8,), "memory": memory, "share": "id"})
    nets = {"coma": ["actor", "critic", "target_critic"], "vdn": ["values", "target_values"]}
    nets["qmix"] = [*nets["vdn"], "mixer", "target_mixer"]
    folder = run.checkpoints / "nets" / "last"
    assert {p.name for p in folder.iterdir()} == {f"{g}.{n}.pt" for g in ("scout+medic", "rival") for n in nets[algorithm]}
    prefixes = {"values": "online.", "mixer": "mixer.", "actor": "actors.", "critic": "critics."}
    prefixes |= {"target_values": "target.module.agents.", "target_mixer": "target.module.mixer."}
    for path in folder.iterdir():
        groups, net, _ = path.name.split(".")
        theirs = run.load("last")["algorithms"][groups.replace("+", ",")]
        prefix = prefixes.get(net, "target.module.")
        expected = {k.removeprefix(prefix): x for k, x in theirs.items() if k.startswith(prefix)}
        assert equal(torch.load(path, weights_only=True)["net"], expected)
        assert expected


# --- as a partner, an opponent, a beginning ---


@pytest.mark.parametrize(("theirs", "mine"), [("vdn", "coma"), ("qmix", "ddqn"), ("coma", "ddqn"), ("coma", "coma")])
def test_a_partner_of_another_run_in_one_seat(talks, tmp_path, theirs, mine):
    """It acts and does not learn, is kept in the run, and the run goes on as if never stopped."""
    team = {"speaker": str(talks[theirs].path)}
    whole = train(tmp_path / "a", mine, TALK, team=team)
    players = whole.settings.players
    assert (players["speaker"]["id"], players["speaker"]["learns"]) == (theirs, False)
    assert players["speaker"]["bound"] == ["speaker", "listener"]
    assert (players["listener"]["id"], players["listener"]["bound"]) == (mine, ["listener"])
    assert equal(whole.load("last")["algorithms"]["speaker"], talks[theirs].load("last")["algorithms"]["speaker,listener"])
    run = train(tmp_path / "b", mine, TALK, team=team, until=36)
    moved = talks[theirs].path.rename(talks[theirs].path.with_name("away"))  # nothing of it is needed any more
    try:
        shoal.resume(run, quiet=True)
        assert metrics(run) == metrics(whole)
        for key in ("speaker", "listener"):
            assert equal(run.load("last")["algorithms"][key], whole.load("last")["algorithms"][key])
        shoal.evaluate(run, 4)
        assert set(shoal.load(run).act({"speaker_0": [0.0] * 3, "listener_0": [0.0] * 11})[0]) == {"speaker_0", "listener_0"}
    finally:
        moved.rename(talks[theirs].path)
    at_second_hand = shoal.evaluate(talks[theirs], 8, team={"speaker": run.path}).returns["listener"]
    assert torch.equal(at_second_hand, shoal.evaluate(talks[theirs], 8).returns["listener"])  # it is the speaker it was


def test_both_seats_may_be_another_runs(talks, tmp_path):
    team = {"speaker": str(talks["qmix"].path), "listener": str(talks["coma"].path)}
    run = train(tmp_path / "r", "vdn", TALK, team=team)
    assert [(p["id"], p["learns"]) for p in run.settings.players.values()] == [("qmix", False), ("coma", False)]
    a = shoal.evaluate(run, 8).returns["listener"]
    b = shoal.evaluate(talks["qmix"], 8, team={"listener": talks["coma"].path}, seed=1).returns["listener"]
    assert torch.equal(a, b)


def test_an_opponent_that_plays_a_whole_team(camp, tmp_path):
    """Red is two groups: by its team's name both are the other run's, by a group's only that."""
    foe = train(tmp_path / "foe", "qmix", camp, seed=5)
    for name, team in {"whole": {"red": str(foe.path)}, "medic": {"medic": str(foe.path)}}.items():
        whole = train(tmp_path / f"{name}-a", "vdn", camp, team=team)
        run = train(tmp_path / f"{name}-b", "vdn", camp, team=team, until=36)
        assert metrics(shoal.resume(run, quiet=True)) == metrics(whole)
        players = run.settings.players
        assert players["medic"]["learns"] is False
        assert players["medic"]["bound"] == ["scout", "medic"]
        assert players["scout"]["learns"] is (name == "medic")
        kept = run.load("last")["algorithms"]
        assert list(kept) == ["scout", "rival", "medic"]
        assert equal(kept["medic"], foe.load("last")["algorithms"]["scout,medic"])
        assert shoal.evaluate(run, 4).returns.keys() == {"scout", "rival", "medic"}


def test_a_partner_that_is_not_known_here(talks, capsys, tmp_path, camp):
    run = talks["vdn"].path
    assert "has no group 'scout'" in refused(capsys, "train", "ddqn", camp, "--team.scout", run, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


LONE = CAMP.replace('"medic": (1, 4, "red")', '"cook": (1, 4, "red")').replace('"medic"', '"cook"')


def test_half_a_team_where_the_other_half_is_not(camp, capsys, tmp_path):
    """Its values were learnt with another group's, which is not here."""
    (tmp_path / "lone.py").write_text(LONE)
    foe = train(tmp_path / "foe", "vdn", camp)
    err = refused(capsys, "train", "ddqn", tmp_path / "lone.py", "--team.scout", foe.path, "--out", tmp_path / "r")
    assert "learnt scout, medic as one, and medic is not here" in err
    half = train(tmp_path / "half", "ddqn", camp, team={"scout": str(foe.path)})  # at second hand
    err = refused(capsys, "train", "ddqn", tmp_path / "lone.py", "--team.scout", half.path, "--out", tmp_path / "r")
    assert "medic is not here" in err


@pytest.mark.parametrize("algorithm", TEAMS)
def test_init_takes_the_weights_of_all_of_them(talks, tmp_path, algorithm):
    source = talks[algorithm]
    run = train(tmp_path / "r", algorithm, TALK, init=str(source.path), steps=1, algo={**ALGO[algorithm], "rollout": 1})
    a, b = weights(run, "speaker,listener"), weights(source, "speaker,listener")
    learnt = [k for k in a if k.startswith(("online", "mixer", "actors", "critics"))]
    assert len(learnt) >= 8
    if algorithm != "coma":  # which has learnt from its one rollout
        assert all(torch.equal(a[k], b[k]) for k in learnt)
    else:
        assert all(torch.allclose(a[k], b[k], atol=2e-3) for k in learnt)
        assert not all(torch.equal(a[k], b[k]) for k in learnt)


def test_init_from_a_team_that_was_played_otherwise(talks, capsys, tmp_path):
    words = ["train", "ddqn", TALK, "--init", talks["vdn"].path, "--out", tmp_path / "r"]
    err = refused(capsys, *words)
    assert "has no group 'speaker'" in err
    assert "speaker,listener" in err
    words = ["train", "vdn", TALK, "--team.speaker", "ddqn", "--init", talks["vdn"].path, "--out", tmp_path / "r"]
    assert "has no group 'speaker'" in refused(capsys, *words)
    words = ["train", "qmix", TALK, "--net.hidden", "8", "--init", talks["vdn"].path, "--out", tmp_path / "r"]
    assert "does not fit the group 'speaker,listener'" in refused(capsys, *words)
    assert not (tmp_path / "r").exists()


# --- a team that is played by several ---


def test_a_team_that_is_played_by_two_algorithms(camp, tmp_path):
    """Each plays what it was asked for; a mixer mixes its own groups alone."""
    team = {"medic": "ddqn"}
    whole = train(tmp_path / "a", "qmix", camp, team=team)
    players = {g: (p["id"], p["bound"]) for g, p in whole.settings.players.items()}
    assert players == {"scout": ("qmix", ["scout"]), "rival": ("qmix", ["rival"]), "medic": ("ddqn", ["medic"])}
    kept = whole.load("last")["algorithms"]
    assert list(kept) == ["scout", "rival", "medic"]
    assert not [k for k in kept["medic"] if "mixer" in k]
    assert [k for k in kept["scout"] if k.startswith("mixer")]
    run = train(tmp_path / "b", "qmix", camp, team=team, until=36)
    assert metrics(shoal.resume(run, quiet=True)) == metrics(whole)
    shoal.evaluate(run, 4)


@pytest.mark.parametrize("pair", [("vdn", "qmix"), ("coma", "vdn"), ("vdn", "ippo"), ("vdn", "random")])
def test_two_in_a_team_resume(tmp_path, pair):
    team = {"speaker": pair[0], "listener": pair[1]}
    groups = {"speaker": {"algo": ALGO[pair[0]]}, "listener": {"algo": ALGO[pair[1]]}}
    algo = {"rollout": 3} if "random" not in pair else {}
    whole = train(tmp_path / "a", pair[0], TALK, team=team, groups=groups, algo=algo)
    assert [(p["id"], p["bound"]) for p in whole.settings.players.values()] == [(pair[0], ["speaker"]), (pair[1], ["listener"])]
    run = train(tmp_path / "b", pair[0], TALK, team=team, groups=groups, algo=algo, until=36)
    assert metrics(shoal.resume(run, quiet=True)) == metrics(whole)
    assert all(equal(run.load("last")["algorithms"][g], whole.load("last")["algorithms"][g]) for g in team)


def test_pay_must_be_alike(tmp_path):
    for algorithm in TEAMS:
        with pytest.raises(UserError, match="--reward team-mean or --reward team-sum"):
            train(tmp_path / "r", algorithm, "simple_world_comm", reward="own")
        assert not (tmp_path / "r").exists()
    run = train(tmp_path / "r", "vdn", "simple_world_comm", reward="team-mean")
    assert list(run.load("last")["algorithms"]) == ["leadadversary,adversary", "agent"]
    assert [p["bound"] for p in Run(run.path).settings.players.values()] == [["leadadversary", "adversary"]] * 2 + [["agent"]]
