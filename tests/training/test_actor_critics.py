"""Actor-critics with a replay among others: teams whose actions are of all kinds, peers of other algorithms, with memory or of
other runs, that central critics ask; the nets they may have; what they refuse; what is left of them."""

from __future__ import annotations

import pytest
import torch
from test_options_resume import MINE, differing, leaves
from test_replay_resume import RANKED, STOPS, play
from test_teams import refused

import shoal
from shoal.algos.base import Algorithm
from shoal.cli import main
from shoal.ops.values import as_vector
from shoal.training.loop import Loop
from shoal.training.offpolicy import batch_of
from shoal.training.run import Run
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

TRIO = '''"""A speaker of three words, a listener with two limbs, and two clerks with two choices at once."""

from __future__ import annotations

import torch

from shoal.envs.base import Move, World
from shoal.envs.probe.base import SPACES, Copying, agent_group
from shoal.spec import EnvSpec, Frame, Result

CAST = {"speaker": (1, "discrete", "talk"), "listener": (1, "continuous", "talk"), "clerk": (2, "multi", "desk")}


class Trio(World):
    """Everybody is paid for copying what is shown, to the listener after the speaker was right alone. 5 steps."""

    def setup(self):
        self.tasks = {g: Copying(SPACES[kind], self) for g, (_, kind, _) in CAST.items()}
        groups = (agent_group(n, self.tasks[g].width, self.tasks[g].space, g, team=team) for g, (n, _, team) in CAST.items())
        self.spec = EnvSpec(tuple(groups), horizon=5)
        self.sizes = [n * self.tasks[g].draws for g, (n, _, _) in CAST.items()]
        self.noise_begin = self.noise_step = sum(self.sizes)

    def begin(self, noise):
        drawn = {g: self.tasks[g].draw(x) for g, x in zip(CAST, noise.split(self.sizes, -1), strict=True)}
        return {**drawn, "heard": self.tensor(0.0).expand(self.rows, 1)}

    def advance(self, state, actions, noise):
        score = {g: task.score(state[g], actions[g]) for g, task in self.tasks.items()}
        pays = {g: Result(x, self.never(x.shape[1])) for g, x in score.items()}
        return Move({**self.begin(noise), "heard": score["speaker"]}, pays)

    def observe(self, state):
        shown = {g: task.show(state[g]) for g, task in self.tasks.items()}
        shown["listener"] = shown["listener"] * state["heard"][..., None]
        return Frame({g: self.view(x, state["clock"]) for g, x in shown.items()})

    def last(self, state):
        return state["clock"] + 1 == 5
'''
CAST = {"speaker": ["speaker_0"], "listener": ["listener_0"], "clerk": ["clerk_0", "clerk_1"]}
RECALL = {"net.memory": "gru", "algo.chunk": 3, "algo.burn_in": 2}
ALIKE, SMOOTH = {"run.reward": "team-mean"}, {"env.actions": "continuous"}
UPDATES = 9  # of a run of `play`: 72 steps, 24 without, one in 5


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "trio.py").write_text(TRIO)
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Who was asked what each group would do, as often as it was: (player, group, now, answer)."""
    told, real = [], Algorithm.target_actions

    def spy(self, batch, group, noise=None, now=False):
        out = real(self, batch, group, noise, now)
        told.append((self.id, group, now, out))
        return out

    monkeypatch.setattr(Algorithm, "target_actions", spy)
    return told


def counts(asked):
    return {x[:3]: sum(y[:3] == x[:3] for y in asked) for x in asked}


def weights(whole, group):
    return {k: x for k, x in whole.items() if k.startswith(f"/algorithms/{group}/")}


PAST = {"every": 5, "batch": 4, "capacity": 200, "learning_starts": 24, "random_steps": 0}


def loop_of(algorithm, env, algo=None, net=None, world=None, team=None, groups=None, reward="own"):
    """A loop without a folder; `algo` beside PAST."""
    how = {"envs": 4, "quiet": True, "compile": "off", "device": "cpu", "steps": 1000, "reward": reward}
    net = {"hidden": (8,), "memory_width": 4, "attention_width": 8, "heads": 2, **(net or {})}
    past = {} if algorithm == "ippo" else PAST
    sections = {"algo": {"rollout": 3, **past, **(algo or {})}, "net": net, "env": world or {}}
    return Loop(resolve(Settings(algorithm, env, how, sections, groups or {}, team or {})))


# --- all kinds of actions in one team ---

MIXED = {
    "maddpg": {"algo.others": "policy"},
    "maddpg, one critic a team": {**ALIKE, **RANKED},
    "maddpg, all remember": {**RECALL, "algo.n_step": 2},
    "matd3": {**RANKED},
    "matd3, one critic a team, all remember": {**RECALL, "run.reward": "team-sum"},
    "masac": {"algo.others": "policy"},
    "masac, one critic a team": {**ALIKE, "algo.critic": "team"},
    "masac, all remember": {**RECALL, **RANKED},
}


KEPT = {"listener": {"algo": {"noise_keep": 0.5}}}  # of whom that can be asked


@pytest.mark.parametrize("name", MIXED)
def test_all_kinds_of_actions_in_one_team(name, tmp_path, mine, asked):
    how = {"algorithm": name.split(",")[0], "env": "{mine}/trio.py", "options": MIXED[name], "groups": KEPT}
    whole = play(tmp_path / "whole", mine, **how)
    sought, shapes = counts(asked), {g: x.shape[2:] for _, g, _, x in asked}
    assert differing(whole, play(tmp_path / "thirds", mine, stops=STOPS, **how)) == []

    kept = Run(tmp_path / "whole").load("last")["algorithms"]
    assert list(kept) == list(CAST)
    for state in kept.values():
        assert state["actor_optimiser.steps"] == UPDATES // (2 if "matd3" in name else 1)
        assert state["critic_optimiser.steps"] == UPDATES
    times = {"clerk": 2, "speaker": 2, "listener": 2}  # by the two others
    if MIXED[name].get("algo.critic") == "team":
        times = {"speaker": 1, "listener": 1}
    when = (False, True) if "algo.others" in MIXED[name] else (False,)
    assert sought == {(how["algorithm"], g, now): n * UPDATES for g, n in times.items() for now in when}
    assert shapes == {k: x for k, x in {"speaker": (1, 3), "listener": (1, 2), "clerk": (2, 5)}.items() if k in times}
    for _, g, _, said in asked:
        if g == "listener":
            assert said.abs().max() <= 1
        else:
            assert torch.equal(said.sum(-1), torch.full(said.shape[:-1], 1.0 if g == "speaker" else 2.0))
            assert said.unique().tolist() == [0, 1]
        assert not said.requires_grad
    assert shoal.evaluate(tmp_path / "thirds", 4).returns.keys() == CAST.keys()


@pytest.mark.parametrize(("algorithm", "memory"), [("maddpg", "none"), ("matd3", "gru"), ("masac", "lstm")])
def test_a_policy_acts_for_all_of_them_as_evaluations_do(algorithm, memory, tmp_path, mine):
    """By agents' names, in the spaces' own units, with the memory passed back in; and greedily: the same once more."""
    options = {"net.memory": memory, "net.gain_actor": 1.0, **({"algo.chunk": 3} if memory != "none" else {})}
    play(tmp_path / "r", mine, algorithm=algorithm, env="{mine}/trio.py", options=options)
    policy, env = shoal.load(tmp_path / "r"), Run(tmp_path / "r").resolve("cpu").make_env(1)
    draw, players, carried = torch.Generator().manual_seed(0), policy.players, None
    frame, held = env.reset(torch.rand(1, env.noise, generator=draw)), players.memory(1, env.device)
    seen = []
    for _ in range(4):
        with torch.no_grad():
            actions, held, _ = players.act(frame, held, {}, explore=False, greedy=True)
        observed = {name: frame[g].obs[0, i].numpy() for g, names in CAST.items() for i, name in enumerate(names)}
        chosen, after = policy.act(observed, carried)
        assert str(policy.act(observed, carried)[0]) == str(chosen)
        carried = after
        assert chosen["speaker_0"] == actions["speaker"][0, 0]
        assert [chosen[c].tolist() for c in CAST["clerk"]] == actions["clerk"][0].tolist()
        limbs = torch.tensor([-0.5, 1.0]) + torch.tensor([1.5, 1.0]) * actions["listener"][0, 0]  # [-2, 1] and [0, 2]
        assert torch.allclose(torch.as_tensor(chosen["listener_0"]), limbs, atol=1e-6)
        seen.append(str(chosen))
        frame = env.step({**actions, "listener": limbs[None, None]}, torch.rand(1, env.noise, generator=draw)).frame
    assert len(set(seen)) > 1
    assert any(x.any() for x in tree_leaves(held)) == (memory != "none")


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("maddpg", ["target_actor"]), ("matd3", ["target_actor"]), ("masac", [])],
)
def test_nets_in_files_of_their_own(algorithm, more, tmp_path, mine):
    save = {"every": 0, "keep": 0, "best": "none", "nets": True}
    alike = {"run.reward": "team-mean"}  # or each agent has a critic
    play(tmp_path / "r", mine, algorithm=algorithm, env="{mine}/trio.py", options=alike, save=save)
    run = Run(tmp_path / "r")
    nets = {"actor": "actor.", "critic": "critics.", "target_critic": "target.module.", "target_actor": "target_actor.module."}
    folder, kept = run.checkpoints / "nets" / "last", run.load("last")["algorithms"]
    names = ["actor", "critic", "target_critic", *more]
    assert {p.name for p in folder.iterdir()} == {f"{g}.{n}.pt" for g in CAST for n in names}
    for g in CAST:
        for n in names:
            theirs = {k.removeprefix(nets[n]): x for k, x in kept[g].items() if k.startswith(nets[n])}
            assert theirs
            assert differing(torch.load(folder / f"{g}.{n}.pt", weights_only=True)["net"], theirs) == []


# --- beside other algorithms ---

TAG, COMM = "simple_tag", "simple_world_comm"
LSTM = {"net.memory": "lstm"}
PEERS = {  # who else plays, and what some groups have for themselves
    "ddpg": ({"agent": "ddpg"}, {}),
    "ddpg that remembers": ({"agent": "ddpg"}, {"agent": RECALL}),
    "maddpg, which asks as well": ({"agent": "maddpg"}, {"adversary": RECALL}),
    "masac that remembers": ({"agent": "masac"}, {"agent": RECALL}),
    "ippo": ({"agent": "ippo"}, {}),
    "ippo that remembers": ({"agent": "ippo"}, {"agent": LSTM}),
    "ippo, while one remembers oneself": ({"agent": "ippo"}, {"adversary": RECALL}),
    "ddqn": ({"agent": "ddqn"}, {}),
    "ddqn that remembers what was random": ({"agent": "ddqn"}, {"agent": {**RECALL, "algo.epsilon_keep": 0.5}}),
    "coma": ({"agent": "coma"}, {"agent": LSTM}),
    "qmix": ({"agent": "qmix"}, {}),
    "random": ({"agent": "random"}, {}),
    "a team of two groups": ({"adversary": "qmix"}, {}),
    "a team of two groups that remembers": ({"adversary": "coma"}, {"leadadversary": LSTM, "adversary": LSTM}),
}


@pytest.mark.parametrize("name", PEERS)
def test_beside(name, tmp_path, mine, asked, monkeypatch):
    """Trains, goes on as if never stopped, and what peers would do is asked of them and is in what is learnt."""
    team, own = PEERS[name]
    sections = {
        g: {s: {k.partition(".")[2]: v for k, v in x.items() if k.startswith(s)} for s in ("algo", "net")}
        for g, x in own.items()
    }
    learner_reward = ALIKE if {"qmix", "coma"} & set(team.values()) else {}
    how = {"algorithm": "maddpg", "env": TAG if "agent" in team else COMM, "team": team, "groups": sections}
    how["options"] = {"algo.others": "policy", **learner_reward}
    whole = play(tmp_path / "whole", mine, **how)

    players = Run(tmp_path / "whole").settings.players
    assert {p["id"] for p in players.values()} == {"maddpg", *team.values()}
    central = [g for g, p in players.items() if p["algo"].get("critic") == "world"]
    askers = {g: len([x for x in central if x != g]) for g in players}
    assert counts(asked) == {(players[g]["id"], g, now): n * UPDATES for g, n in askers.items() for now in (False, True) if n}
    assert differing(whole, play(tmp_path / "thirds", mine, stops=STOPS, **how)) == []

    real = Algorithm.target_actions
    monkeypatch.setattr(Algorithm, "target_actions", lambda *args: real(*args).roll(1, -1))
    other = play(tmp_path / "other", mine, **how)
    assert all(differing(weights(whole, g), weights(other, g)) for g in central)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, mine):
    """Those whom somebody else has trained."""
    folder = tmp_path_factory.mktemp("runs")
    play(folder / "maddpg", mine, algorithm="maddpg", env=TAG, options={**RECALL, **SMOOTH, "net.gain_actor": 1.0})
    play(folder / "ippo", mine, algorithm="ippo", env=TAG, options={"algo.rollout": 3, "net.memory": "lstm"})
    play(folder / "qmix", mine, algorithm="qmix", env=COMM, options={**ALIKE, **RECALL, "net.gain_actor": 1.0})
    play(folder / "alike", mine, algorithm="maddpg", env=COMM, options=ALIKE)
    play(folder / "apart", mine, algorithm="maddpg", env=COMM, options={})
    return folder


@pytest.mark.parametrize(("who", "seat"), [("maddpg", "agent"), ("ippo", "agent"), ("qmix", "leadadversary")])
def test_beside_the_policy_of_another_run(who, seat, tmp_path, mine, runs, asked):
    """It remembers and does not learn; half of a team is in its seat alone."""
    options = SMOOTH if who == "maddpg" else {}
    how = {"algorithm": "maddpg", "env": TAG, "options": options, "team": {seat: str(runs / who)}}
    if who == "qmix":
        how |= {"env": COMM, "options": ALIKE, "team": {**how["team"], "agent": "random"}}
    whole = play(tmp_path / "whole", mine, **how)
    assert counts(asked)[who, seat, False] == UPDATES
    assert differing(whole, play(tmp_path / "thirds", mine, stops=STOPS, **how)) == []
    players = Run(tmp_path / "whole").settings.players
    assert (players[seat]["id"], players[seat]["learns"]) == (who, False)
    theirs, mine_now = Run(runs / who).load("last")["algorithms"], Run(tmp_path / "whole").load("last")["algorithms"]
    assert differing(mine_now[seat], next(x for g, x in theirs.items() if seat in g.split(","))) == []
    assert whole[f"/collector/memory/{seat}/" + {"qmix": "hidden"}.get(who, "actor/hidden")].any()
    assert shoal.evaluate(tmp_path / "whole", 2).returns.keys() == players.keys()
    assert shoal.load(tmp_path / "whole").players.of[seat].learns is False


@pytest.mark.parametrize("then", ["resume", "evaluate"])
@pytest.mark.parametrize(
    ("who", "seat", "paid"), [("qmix", "leadadversary", {}), ("alike", "agent", {}), ("apart", "agent", ALIKE)]
)
def test_beside_a_policy_that_was_paid_otherwise(who, seat, paid, then, tmp_path, mine, runs):
    """What it was paid in its own run says what its critics are, and not what is paid here."""
    how = {"algorithm": "maddpg", "env": COMM, "options": paid, "team": {seat: str(runs / who)}}
    if then == "resume":
        assert differing(play(tmp_path / "a", mine, **how), play(tmp_path / "b", mine, stops=STOPS, **how)) == []
        return
    play(tmp_path / "a", mine, **how)
    assert seat in shoal.evaluate(tmp_path / "a", 2).returns


def test_flags_say_who_plays_and_who_remembers(tmp_path, asked):
    flags = (
        "--steps 60 --envs 4 --quiet --compile off --env.max-cycles 5 --net.hidden 8 --algo.rollout 3 --algo.every 6 "
        "--algo.batch 4 --algo.capacity 80 --algo.learning-starts 24 --eval.episodes 2 --log.tensorboard false "
        "--team.adversary maddpg --team.agent ddpg --net.adversary.memory gru --net.adversary.memory-width 4 "
        "--algo.adversary.chunk 3 --algo.agent.noise 0.5"
    )
    assert main(["train", "maddpg", TAG, *flags.split(), "--out", str(tmp_path / "r")]) == 0
    players = Run(tmp_path / "r").settings.players
    assert {g: (p["id"], p["algo"]["critic"]) for g, p in players.items()} == {
        "adversary": ("maddpg", "world"),
        "agent": ("ddpg", "own"),
    }
    assert [(p["net"]["memory"], p["algo"]["noise"]) for p in players.values()] == [("gru", 0.2), ("none", 0.5)]
    assert counts(asked).keys() == {("ddpg", "agent", False)}
    assert main(["resume", str(tmp_path / "r"), "--steps", "72", "--quiet"]) == 0
    assert Run(tmp_path / "r").load("last")["step"] == 72


# --- what is in the replay ---


LONE = {"net": {"memory": "gru"}}
GRU = {**LONE, "algo": {"chunk": 3}}


@pytest.mark.parametrize(
    ("algorithm", "team", "groups", "kept"),
    [
        ("ddpg", {"agent": "ippo"}, {"agent": LONE}, []),
        ("maddpg", {"agent": "ippo"}, {"agent": LONE}, ["agent"]),
        ("maddpg", {"agent": "ippo"}, {"agent": LONE, "adversary": {"algo": {"critic": "team"}}}, []),
        ("maddpg", {"agent": "ddpg"}, {"adversary": GRU}, ["adversary"]),
        ("ddpg", {"agent": "ddqn"}, {"agent": GRU}, ["agent"]),
        ("ddpg", {"agent": "masac"}, {"adversary": GRU, "agent": GRU}, ["adversary", "agent"]),
        ("ippo", {"agent": "masac"}, {"adversary": LONE, "agent": {"algo": PAST}}, ["adversary"]),
        ("maddpg", {"agent": "random"}, {}, []),
    ],
)
def test_peers_memory_is_kept_where_somebody_asks_for_it(algorithm, team, groups, kept):
    loop, before = loop_of(algorithm, TAG, {"rollout": 1}, team=team, groups=groups), []
    for _ in range(7):
        before.append(tree_map(torch.clone, loop.collector.memory))
        loop.iterate()
    for t, memory in enumerate(before):
        _, held = loop.replay.windows(torch.full((4,), t), torch.arange(4), 1)
        assert [g for g, m in held.items() if tree_leaves(m)] == kept
        assert all(differing(leaves(held[g]), leaves(memory[g])) == [] for g in kept)  # as it was before that step
    assert all(any(x.any() for x in tree_leaves(before[-1][g])) for g in kept)
    assert bool(loop.replay.initial_memory.store) == bool(kept)


@pytest.mark.parametrize(("who", "seat", "kind"), [("maddpg", "agent", "continuous"), ("qmix", "leadadversary", "discrete")])
def test_what_a_frozen_peer_would_do_is_what_it_did(who, seat, kind, runs):
    """It does not explore, and so its answers are in the replay: wherever a sequence begins, with the memory of then, and past
    the ends of episodes."""
    how = {"team": {seat: str(runs / who)}, "world": {"max_cycles": 5, "actions": kind}, "reward": "team-mean"}
    loop = loop_of("maddpg", COMM if who == "qmix" else TAG, **how)
    for _ in range(5):
        loop.iterate()
    batch = batch_of(*loop.replay.windows(torch.tensor([0, 2, 4, 7]), torch.arange(4), 7))
    peer, space = loop.players.of[seat], loop.env.spec[seat].action
    did = as_vector(batch.actions[seat], space)
    noise = {seat: torch.rand(7, 4, loop.env.spec[seat].n, peer.noise)}
    torch.testing.assert_close(peer.target_actions(batch, seat, noise, True), did)
    following = peer.target_actions(batch, seat, noise, False)
    goes_on = ~batch.over[:-1]
    assert goes_on.any()
    assert not goes_on.all()
    torch.testing.assert_close(following[:-1][goes_on], did[1:][goes_on])
    assert did.unique(dim=0).shape[0] > 1


# --- nets ---

TWO = {"num_good": 2}  # prey that are paid differently
NETS = {
    "pictures, maddpg": ("maddpg", "probe_image", {}, {}, {"n": 2}),
    "pictures beside numbers, masac": ("masac", "probe_image", {}, {}, {"n": 2, "vector": True}),
    "pictures beside numbers, matd3": ("matd3", "probe_image", {"delay": 1}, {"memory": "gru"}, {"n": 2, "vector": True}),
    "pictures, own critics": ("td3", "probe_image", {"delay": 1}, {}, {"n": 2}),
    "attention over agents, maddpg": ("maddpg", TAG, {}, {"attention": "critic"}, TWO),
    "attention over agents, masac": ("masac", TAG, {}, {"attention": "critic", "memory": "gru"}, TWO),
    "attention everywhere, matd3": ("matd3", "simple_spread", {"delay": 1}, {"attention": "both"}, {}),
    "attention of one's own critic": ("sac", "simple_spread", {}, {"attention": "both"}, {}),
    "a net each, maddpg": ("maddpg", "simple_spread", {}, {"share": "none"}, {}),
    "a net each, sac": ("sac", "simple_spread", {}, {"share": "none", "memory": "lstm"}, {}),
    "nets by name, ddpg": ("ddpg", "simple_spread", {}, {"share": "agent_0=a,agent_1=b,agent_2=a"}, {}),
    "nets by name, masac": ("masac", "simple_spread", {}, {"share": "agent_0=a,agent_1=b,agent_2=a", "memory": "gru"}, {}),
    "a module of one's own, maddpg": ("maddpg", TAG, {}, {"module": "{mine}/mine.py:Mine"}, TWO),
    "a module of one's own, masac": ("masac", TAG, {}, {"module": "{mine}/mine.py:Mine", "memory": "gru"}, TWO),
    "layers normalised": ("maddpg", TAG, {}, {"layer_norm": True, "hidden": (8, 8)}, TWO),
    "bfloat16, maddpg": ("maddpg", TAG, {}, {"precision": "bf16"}, {**TWO, "actions": "continuous"}),
    "bfloat16, sac": ("sac", "probe_copy", {}, {"precision": "bf16", "memory": "gru"}, {"actions": "continuous"}),
    "critics of another width": ("masac", TAG, {}, {"critic_hidden": (4, 4), "activation": "relu"}, TWO),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("reward", ["own", "team-mean"])
def test_nets_learn(name, reward, mine):
    """In three updates every weight of actors and critics has moved, and their copies have followed."""
    algorithm, env, algo, net, world = NETS[name]
    algo = {**algo, **({"chunk": 3, "burn_in": 1} if "memory" in net else {}), "target_tau": 0.5, "every": 4, "lr": 1e-2}
    net = {"gain_actor": 1.0, **{k: v.replace("{mine}", str(mine)) if isinstance(v, str) else v for k, v in net.items()}}
    loop = loop_of(algorithm, env, algo, net, world, reward=reward)
    before = [tree_map(torch.clone, dict(a.named_parameters())) for a in loop.learners]
    for _ in range(4):
        loop.iterate()
    assert min(trainer.updates_due(loop.step) for trainer in loop.trainers) >= 3
    for a, then in zip(loop.learners, before, strict=True):
        assert all(p.isfinite().all() for p in a.parameters())
        assert [k for k, p in a.named_parameters() if torch.equal(p, then[k])] == []
        assert 0 < a.target.lag() < 1
    assert loop.replay.transitions.store.keys() <= {torch.float32, torch.int64, torch.uint8, torch.bool}  # actions are float32


@pytest.mark.parametrize(("share", "sets"), [("id", 1), ("none", 3), ("agent_0=a,agent_1=b,agent_2=a", 2)])
@pytest.mark.parametrize(("reward", "critics"), [("own", 3), ("team-mean", 1)])
def test_actors_share_as_they_are_told_and_critics_as_they_are_paid(share, sets, reward, critics):
    (a,) = loop_of("maddpg", "simple_spread", net={"share": share}, reward=reward).learners
    shapes = [m.body.weights[0].shape for m in (a.actor, a.critics[0].head)]
    assert [x[0] if len(x) == 3 else 1 for x in shapes] == [sets, critics]


# --- what does not go ---

WRONG = {
    "maddpg simple_spread --net.trunk shared": "--net.trunk shared does not go with DDPG",
    "matd3 simple_spread --net.trunk shared": "--net.trunk shared does not go with TD3",
    "sac simple_spread --net.trunk shared": "--net.trunk shared does not go with SAC",
    "ddpg simple_spread --algo.noise-keep 0.5": "--algo.noise-keep is for continuous actions; those of agents are discrete",
    "maddpg simple_tag --env.actions continuous --algo.noise-keep 1": "must be between 0 and 0.9999",
    "ddpg simple_spread --algo.critic-input agent": "take --algo.critic team or world",
    "maddpg probe_image --algo.critic-input agent": "does not take pictures",
    "maddpg simple_spread --net.attention critic --algo.critic-input joined": "does not go with attention over agents",
    "maddpg simple_tag --algo.agent.capacity 1000": "the groups want replays of 1,000 and 500,000 steps",
    "maddpg simple_tag --algo.agent.rollout 8": "the groups want rollouts of 4 and 8 steps",
    "maddpg simple_spread --algo.capacity 64 --envs 64": "--algo.capacity must be",
    "maddpg probe_turns --algo.n-step 2": "it takes 1",
    "matd3 simple_spread --algo.delay 0": "--algo.delay is 0",
    "matd3 simple_spread --algo.smooth -1": "--algo.smooth is -1",
    "masac simple_spread --algo.critics 0": "--algo.critics is 0",
    "masac simple_spread --algo.alpha 0": "--algo.alpha is 0",
    "masac simple_spread --algo.noise 0.1": "there is no flag --algo.noise",
    "maddpg simple_spread --algo.gumbel 0": "--algo.gumbel is 0",
    "maddpg simple_spread --algo.others nobody": "others",
    "maddpg simple_spread --algo.random-steps -1": "--algo.random-steps is -1",
    "maddpg simple_spread --net.share agent_0=a": "--net.share",
    "maddpg simple_tag --team.agent matd": "matd3",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_go_is_one_sentence_and_no_folder(words, tmp_path, capsys):
    assert WRONG[words] in refused(capsys, "train", *words.split(), "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()
