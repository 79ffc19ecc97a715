"""Learning in a loop of the user's own: `shoal.learner`, `shoal.samples`, and that an update of theirs is that of a run."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.spec import Box, Discrete, EnvSpec, Group, MultiDiscrete, UserError
from shoal.training.loop import Loop
from shoal.training.seeds import generator
from shoal.training.settings import Settings, resolve
from shoal.tree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
STEPS, ROWS, SEED = 4000, 6, 3
GRU, SMALL = {"memory": "gru", "hidden": (8,), "memory_width": 8}, {"hidden": (8,)}
CONTINUOUS, COMMON = {"actions": "continuous"}, {"reward": "team-mean"}
PAST = {"learning_starts": 60, "batch": 8, "capacity": 2000, "rollout": 5, "every": 15}


def pair(algo, env, settings=None, net=None, world=None, run=None):
    """A loop, and a learner of the same settings."""
    sections = {"algo": settings or {}, "net": net or SMALL, "env": world or {}}
    asked = {"envs": ROWS, "quiet": True, "steps": STEPS, "compile": "off", "seed": SEED, **(run or {})}
    loop = Loop(resolve(Settings(algo, env, asked, sections)))
    spec = loop.learners[0].spec  # as they are paid
    return loop, shoal.learner(algo, spec, algo=sections["algo"], net=sections["net"], steps=STEPS, seed=SEED)


def assert_same(learner, loop):
    for mine, theirs in zip(learner.players.algorithms, loop.players.algorithms, strict=True):
        state = theirs.state_dict()
        assert len(state) > 10
        assert [k for k, x in mine.state_dict().items() if not torch.equal(x, state[k])] == []


def arrays_of(batch, spec):
    """A batch as users have it, in numpy's arrays."""
    by_group = {}
    for prefix, frame in (("", batch.frame), ("next_", batch.next)):
        for k in ("obs", "alive", "active", "start", "legal"):
            by_group[prefix + k] = {g: getattr(v, k) for g, v in frame.views.items()}
    mortal = any(g.mortal for g in spec.groups)
    unsaid = {"alive": mortal, "next_alive": mortal, "next_start": mortal, "active": spec.turns, "next_active": spec.turns}
    by_group = {k: x for k, x in by_group.items() if unsaid.get(k, True) and all(y is not None for y in x.values())}
    by_group |= {"action": batch.actions, "reward": batch.learner_reward}
    by_group["terminated"] = {g: r.terminated for g, r in batch.results.items()}
    for k in {k for extras in batch.extras.values() for k in extras}:
        by_group[k] = {g: extras[k] for g, extras in batch.extras.items()}
    if len(spec.groups) == 1:
        by_group = {k: x.popitem()[1] for k, x in tree_map(lambda x: x, by_group).items()}
    states = {"state": batch.frame.state, "next_state": batch.next.state}
    worlds = {"over": batch.over, "weight": batch.weight, "filled": batch.filled, **states}
    return {**tree_map(lambda x: x.numpy(), {**by_group, **worlds}), "memory": batch.memory}


def heard_of(loop):
    """What every update of a loop is given, and the generator's state before it draws."""
    heard, update = [], loop.update

    def listen(learner, batch):
        heard.append((tree_map(torch.clone, batch), loop.update_noise.get_state()))
        return update(learner, batch)

    loop.update = listen
    for trainer in loop.trainers:
        trainer.update = listen
    return heard


ROLLOUTS = [
    ("ppo", "CartPole-v1", {"rollout": 20, "epochs": 2}),
    ("ppo", "probe_copy", {"rollout": 8, "epochs": 2, "noise_keep": 0.5}, None, CONTINUOUS),
    ("ppo", "probe_turns", {"rollout": 10, "epochs": 2}),
    ("ppo", "probe_illegal", {"rollout": 8, "epochs": 2}, None, {"actions": "multi"}),
    ("ppo", "probe_image", {"rollout": 4, "epochs": 1, "minibatches": 2}, {**SMALL, "convolutions": "4x3/2"}, {"vector": True}),
    ("ippo", "simple_tag", {"epochs": 2}),
    ("mappo", "simple_spread", {"critic_input": "agent", "epochs": 2}, {**SMALL, "trunk": "shared"}),
    ("mappo", "probe_deaths", {"rollout": 6, "epochs": 2}, GRU),
    ("mappo", "probe_leave", {"rollout": 8, "epochs": 2}, None, None, COMMON),
    ("maa2c", "simple_spread", {"critic_slices": 3, "normalise_reward": True}),
    ("coma", "simple_speaker_listener", {}, GRU, None, COMMON),
]


@pytest.mark.parametrize("case", ROLLOUTS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_an_update_on_a_rollout_is_that_of_a_run(case):
    """Bit for bit, three of them, in all that is learnt or counted; generators go on alike."""
    loop, learner = pair(*case)
    heard = heard_of(loop)
    assert_same(learner, loop)
    for k in range(3):
        learner.step = loop.step
        loop.iterate()
        metrics = learner.update(shoal.samples(learner, arrays_of(heard[-1][0], learner.spec)))
        assert_same(learner, loop)
        assert list(metrics) == [",".join(a.groups) for a in loop.learners]
        assert learner.updates == k + 1
    assert len(heard) == 3 * len(loop.learners)


REPLAYS = [
    ("ddqn", "CartPole-v1", {**PAST, "noisy": True, "prioritised": True, "n_step": 3}),
    ("iql", "probe_leave", {**PAST, "chunk": 4, "burn_in": 1}, GRU, None, COMMON),
    ("qmix", "simple_spread", PAST, None, None, COMMON),
    ("maddpg", "simple_spread", PAST, None, CONTINUOUS),
    ("matd3", "simple_spread", {**PAST, "delay": 2}, None, CONTINUOUS),
    ("sac", "Pendulum-v1", PAST),
    ("coma", "simple_spread", {"replay": 20, "batch": 3}, None, None, COMMON),
]


@pytest.mark.parametrize("case", REPLAYS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_an_update_on_what_was_drawn_is_that_of_a_run(case):
    """The same of those with a replay: of what was collected they learn statistics alone."""
    loop, learner = pair(*case)
    heard, collect, collected = heard_of(loop), loop.collector.collect, []
    loop.collector.collect = lambda steps: collected.append(collect(steps)) or collected[-1]
    while learner.updates < 5:
        learner.step = loop.step
        loop.iterate()
        learner.update_statistics(shoal.samples(learner, arrays_of(collected.pop(), learner.spec)))
        for batch, draws in heard:
            mine = torch.Generator().set_state(draws)
            metrics = learner.update(shoal.samples(learner, arrays_of(batch, learner.spec), mine))
            assert ("priority" in metrics["agents"]) == case[2].get("prioritised", False)
        heard.clear()
        assert_same(learner, loop)


@pytest.mark.parametrize("case", [ROLLOUTS[0], ROLLOUTS[7]], ids=lambda case: case[0])
def test_a_loop_by_hand_ends_where_a_run_ends(case):
    """What acts, steps the same world by the same draws and hands over what came of it learns what a run does: `act` counts
    steps, schedules go by them, and what is left out is completed."""
    loop, learner = pair(*case)
    world, draws = shoal.make(case[1], ROWS), generator(SEED, "collect")
    frame, memory, start = world.reset(torch.rand(ROWS, world.noise, generator=draws)), None, None
    mortal = world.spec.groups[0].mortal
    for _ in range(3):
        loop.iterate()
        came = torch.rand(case[2]["rollout"], ROWS, world.noise, generator=draws)
        noise, steps, first = learner.players.noise(draws, len(came), ROWS), [], memory
        for t, u in enumerate(came):
            learner.players.noise = lambda *_, t=t: {"agents": noise["agents"][t]}  # noqa: B023
            now = frame["agents"]
            given = {"alive": now.alive, "start": now.start} if mortal else {"start": start}
            decision = learner.act(now.obs, memory, **given)
            outcome = world.step({"agents": decision.actions}, u)
            result, then = outcome.results["agents"], outcome.next["agents"]
            memory, frame, start = decision.memory, outcome.frame, outcome.over
            ends = {"reward": result.reward, "terminated": result.terminated, "next_obs": then.obs}
            if result.shaping is not None:
                ends["reward"] = result.reward + result.shaping
            # in this world the last life ends with the episode, and somebody is there until then
            ends |= {"next_alive": then.alive, "next_start": then.start} if mortal else {}
            ends |= {} if mortal else {"truncated": outcome.over[:, None] & ~result.terminated}
            steps.append({**decision.record, **ends})
        del learner.players.noise
        arrays = {k: torch.stack([s[k] for s in steps]) for k in steps[0]}
        learner.update(shoal.samples(learner, {**arrays, "memory": first}))
        assert_same(learner, loop)
        assert learner.step == loop.step


# --- what is left out, and in which form things come ---


def spec_of(n=1, obs=(3,), action=None, names=("agents",), mortal=False, masked=False, **more):
    action = action or Discrete(2)
    groups = (Group(g, g, tuple(f"{g}_{i}" for i in range(n)), obs, action, (), mortal, masked) for g in names)
    return EnvSpec(tuple(groups), **more)


def zeros(*shape):
    return np.zeros(shape, np.float32)


def test_what_is_left_out():
    """Two mortal agents. The first is terminated in step 1, the second cut off in step 2, where the episode ends, and so it is
    still there to be seen. In the next episode the second arrives in step 4."""
    ends, off, there = (
        torch.tensor(x, dtype=torch.bool)[:, None]
        for x in (
            [[0, 0], [1, 0], [0, 0], [0, 0], [0, 0]],
            [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]],
            [[1, 1], [1, 1], [0, 1], [1, 0], [1, 1]],
        )
    )
    obs, mortal = zeros(5, 1, 2, 3), shoal.learner("ippo", spec_of(2, mortal=True), algo={"rollout": 5}, net=SMALL)
    arrays = {
        "obs": obs,
        "next_obs": obs,
        "action": zeros(5, 1, 2).astype(int),
        "reward": zeros(5, 1, 2),
        "log_prob": obs[..., 0],
    }
    batch = shoal.samples(mortal, {**arrays, "terminated": ends, "truncated": off, "alive": there})["agents"].batch
    assert batch.over[:, 0].tolist() == [False, False, True, False, False]
    assert batch.next["agents"].alive[:, 0].int().tolist() == [[1, 1], [0, 1], [0, 1], [1, 0], [1, 1]]
    assert batch.frame["agents"].start[:, 0].int().tolist() == [[1, 1], [0, 0], [0, 0], [1, 0], [0, 1]]
    assert not batch.next["agents"].start.any()
    assert torch.equal(batch.frame["agents"].active, there)
    now_there = shoal.samples(mortal, {**arrays, "terminated": ends, "alive": there, "next_alive": ~ends})["agents"].batch
    assert now_there.next["agents"].start[:, 0].int().tolist() == [[0, 0], [0, 0], [1, 0], [0, 1], [0, 0]]
    everybody = shoal.learner("ippo", spec_of(2), algo={"rollout": 5}, net=SMALL)
    batch = shoal.samples(everybody, {**arrays, "terminated": ends | off})["agents"].batch
    assert not batch.over.any()
    assert batch.next["agents"].alive.all()
    assert batch.learner_reward["agents"] is batch.results["agents"].reward


def test_whoever_is_gone_is_forbidden_nothing():
    """Of a mask the whole of which is false, in a dimension of choices, the whole counts as true."""
    learner = shoal.learner("ippo", spec_of(1, action=MultiDiscrete((2, 3)), masked=True), algo={"rollout": 1}, net=SMALL)
    mask = np.array([[[0, 1, 0, 0, 0]]])
    rest = {"action": zeros(1, 1, 2).astype(int), "reward": zeros(1, 1), "terminated": zeros(1, 1), "log_prob": zeros(1, 1)}
    given = {"obs": zeros(1, 1, 3), "next_obs": zeros(1, 1, 3), "legal": mask, "next_legal": mask * 0}
    samples = shoal.samples(learner, {**given, **rest})["agents"]
    assert samples.legal.tolist() == [[[[False, True, True, True, True]]]]
    assert samples.next_legal.all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_decisions_come_in_the_form_of_observations(library):
    def array(*shape):
        return zeros(*shape) if library == "numpy" else torch.zeros(shape)

    kind = np.ndarray if library == "numpy" else torch.Tensor
    box = Box((0.0, -4.0), (2.0, 4.0))
    one = shoal.learner("ppo", spec_of(action=box), net=SMALL)
    for obs, shape in ((array(5, 3), (5,)), (array(5, 1, 3), (5, 1))):
        decision = one.act(obs)
        assert isinstance(decision.actions, kind)
        assert isinstance(decision.record["log_prob"], kind)
        assert decision.record["obs"] is obs
        assert tuple(decision.actions.shape) == tuple(decision.record["action"].shape) == (*shape, 2)
        assert tuple(decision.record["log_prob"].shape) == tuple(decision.record["start"].shape) == shape
        action = torch.as_tensor(decision.record["action"]).clamp(-1, 1)  # clipped and scaled to the bounds on the way out
        torch.testing.assert_close(
            torch.as_tensor(decision.actions), (action + 1) * 0.5 * torch.tensor([2.0, 8]) + torch.tensor([0.0, -4])
        )
    assert set(one.act({"agents": array(5, 3)}).actions) == {"agents"}
    two = shoal.learner("ippo", spec_of(2, names=("a", "b")), net=SMALL, team={"b": "random"})
    decision = two.act({"a": array(5, 2, 3), "b": array(5, 2, 3)}, start=np.ones(5))
    assert {g: tuple(x.shape) for g, x in decision.actions.items()} == {"a": (5, 2), "b": (5, 2)}
    assert list(decision.record["log_prob"]) == ["a"]
    assert [a.groups for a in two.algorithms] == [("a",)]


def test_playing_greedily_leaves_what_is_learnt_as_it_is():
    learner = shoal.learner("ddqn", spec_of(), net=SMALL, algo={"epsilon_keep": 0.9})
    draws = learner.noise.get_state()
    greedy = [learner.act(zeros(64, 3), explore=False).actions for _ in range(2)]
    assert learner.step == 0
    assert torch.equal(learner.noise.get_state(), draws)
    assert (greedy[0] == greedy[1]).all()
    explored = learner.act(zeros(64, 3))
    assert learner.step == 64
    assert 0 < explored.actions.mean() < 1
    with pytest.raises(UserError, match="`memory` is none that `act` gave of 5 rows"):
        learner.act(zeros(5, 3), explored.memory)


def test_memory_is_passed_on():
    """None begins episodes, as `start` does; what is passed on goes on."""
    learner = shoal.learner("ppo", spec_of(), net={**GRU, "gain_actor": 1.0})
    obs = zeros(3, 3) + np.arange(3)
    first = learner.act(obs, explore=False)
    assert first.record["start"].all()
    on = learner.act(obs, first.memory, explore=False)
    assert not on.record["start"].any()
    again = learner.act(obs, first.memory, start=np.array([True, False, True]), explore=False)
    hidden = [x.memory["agents"]["actor"]["hidden"] for x in (first, on, again)]
    assert (hidden[0] != hidden[1]).all()
    torch.testing.assert_close(hidden[2], torch.stack((hidden[0][0], hidden[1][1], hidden[0][2])))


def test_schedules_go_by_the_steps_that_were_acted_in():
    """They are set with the first step after an update; epsilon falls from 1 to 0.5 over 100 steps."""
    algo = {"epsilon_last": 0.5, "epsilon_steps": 100, "rollout": 1, "n_step": 1, "batch": 2}
    learner, epsilons = shoal.learner("ddqn", spec_of(), net=SMALL, algo=algo), []
    step = {"action": zeros(1, 2).astype(int), "reward": zeros(1, 2), "terminated": zeros(1, 2)}
    for _ in range(3):
        for _ in range(2):
            learner.act(zeros(20, 3))
            epsilons.append(round(float(learner.algorithms[0].epsilon), 6))
        learner.update(shoal.samples(learner, {"obs": zeros(1, 2, 3), "next_obs": zeros(1, 2, 3), **step}))
    assert epsilons == [1.0, 1.0, 0.8, 0.8, 0.6, 0.6]
    learner.step = 100
    assert learner.algorithms[0].epsilon == 0.5


def test_what_goes_on_is_saved():
    """One that was saved after an update, and one that went on, learn alike."""

    def iterate(learner):
        decision, ends = learner.act(zeros(4, 3) + np.arange(4)[:, None]), {"reward": zeros(4), "terminated": np.ones(4)}
        step = {**decision.record, **ends, "next_obs": zeros(4, 3)}
        learner.update(shoal.samples(learner, {k: x[None] for k, x in step.items()}))

    made = [
        shoal.learner("ppo", spec_of(), net=SMALL, algo={"rollout": 1, "minibatches": 2}, steps=40, seed=k) for k in range(2)
    ]
    iterate(made[0])
    made[1].load_state_dict(tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, made[0].state_dict()))
    for learner in made:
        iterate(learner)
        iterate(learner)
    one, other = (tree_leaves(x.state_dict()) for x in made)
    assert len(one) == len(other) > 20
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(one, other, strict=True))
    assert made[1].step == 12


# --- what is refused, in a sentence ---

WHOLE = {
    **{"obs": zeros(2, 5, 2, 3), "next_obs": zeros(2, 5, 2, 3), "action": zeros(2, 5, 2).astype(int)},
    **{"reward": zeros(2, 5, 2), "terminated": zeros(2, 5, 2), "log_prob": zeros(2, 5, 2)},
}
REFUSED = [
    ({"reward": None}, "there is no `reward` of 'agents', which is needed here"),
    ({"log_prob": None}, "there is no `log_prob` of 'agents', which is needed here"),
    ({"observation": WHOLE["obs"]}, "there is no array 'observation': there are obs, next_obs, action"),
    ({"next_ob": WHOLE["obs"]}, r"there is no array 'next_ob' \(did you mean 'next_obs'"),
    ({"reward": zeros(2, 5)}, r"`reward` of 'agents' is \[2, 5\]: it must be \[T, B, N\], here \[2, 5, 2\]"),
    ({"next_obs": zeros(2, 5, 2, 4)}, r"`next_obs` of 'agents' is \[2, 5, 2, 4\]: it must be \[T, B, N, 3\]"),
    ({"obs": zeros(5, 3)}, r"`obs` of 'agents' is \[5, 3\]: it must be \[T, B, N, 3\]"),
    ({"action": zeros(2, 5, 2)}, "`action` of 'agents' has fractions, and choices are whole numbers"),
    ({"reward": {"agent": zeros(2, 5, 2)}}, r"`reward` has no group 'agent' \(did you mean 'agents'\?\)"),
    ({"reward": "much"}, "`reward` is no array of numbers"),
    ({"obs": [[1.0], [2.0, 3.0]]}, "`obs` is no array of numbers"),
    ({"obs": 3.0}, "`obs` has too few dimensions: it begins with T, B"),
    ({"over": zeros(2, 5, 2)}, r"`over` is \[2, 5, 2\]: it must be \[2, 5\] here"),
    ({"weight": zeros(2)}, r"`weight` is \[2\]: it must be \[5\] here"),
    ({"alive": zeros(2, 5, 2)}, r"`alive` says nothing of 'agents', whose spec is without Group\(mortal=True\)"),
    ({"legal": zeros(2, 5, 2, 2)}, r"whose spec is without Group\(masked=True\)"),
    ({"active": zeros(2, 5, 2)}, r"whose spec is without EnvSpec\(turns=True\)"),
    ({"state": zeros(2, 5, 7)}, "`state` says nothing in a world whose spec has no state"),
    ({"truncated": np.tile([1.0, 0.0], (2, 5, 1))}, "cuts agents of 'agents' off whose row goes"),
    ({"reward": zeros(2, 5, 2) * np.nan}, "`reward` of 'agents' has numbers that are not finite"),
    ({"obs": zeros(2, 5, 2, 3) + np.inf}, "`obs` of 'agents' has numbers that are not finite"),
    ({"memory": {"agents": {"actor": 3}}}, "`memory` is none that `act` gave of 5 rows"),
]


@pytest.mark.parametrize(("wrong", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_arrays_that_do_not_fit_are_refused(wrong, sentence):
    learner = shoal.learner("ippo", spec_of(2), algo={"rollout": 2}, net=GRU)
    start = {"start": np.ones((2, 5))}
    assert learner.update(shoal.samples(learner, {**WHOLE, **start}))["agents"]["policy_loss"].isfinite()
    with pytest.raises(UserError, match=sentence):
        shoal.samples(learner, {**WHOLE, **start, **wrong})


def test_whole_episodes_of_rows_that_end_early():
    """Two episodes of at most three steps: what a row plays after them is left out, and fewer are refused."""
    spec = EnvSpec(spec_of().groups, horizon=3)
    learner = shoal.learner("ppo", spec, algo={"episodes": 2, "minibatches": 1}, net=SMALL)
    ends = np.array([[0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]]).T.astype(float)  # [T, B]
    arrays = {"obs": zeros(6, 2, 3), "next_obs": zeros(6, 2, 3), "action": zeros(6, 2).astype(int), "reward": zeros(6, 2)}
    arrays |= {"terminated": ends, "log_prob": zeros(6, 2)}
    samples = shoal.samples(learner, arrays)
    batch = samples["agents"].batch
    assert batch.filled.T.int().tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert samples["agents"].active[..., 0].sum() == 10
    assert learner.update(samples)["agents"]["policy_loss"].isfinite()
    padding = {**arrays, "obs": arrays["obs"].copy(), "reward": arrays["reward"].copy()}
    padding["obs"][4:, 0], padding["reward"][4:, 0] = 1e6, 1e6
    one, other = (shoal.learner("ppo", spec, algo={"episodes": 2, "minibatches": 1}, net=SMALL) for _ in range(2))
    one.update(shoal.samples(one, arrays))
    other.update(shoal.samples(other, padding))
    a, b = (tree_leaves(x.state_dict()["algorithms"]) for x in (one, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(UserError, match="so many whole episodes of each row must have ended in these steps"):
        shoal.samples(learner, {**arrays, "terminated": ends * 0})


def test_what_else_is_refused():
    spec, whole = spec_of(2), WHOLE
    learner = shoal.learner("ippo", spec, algo={"rollout": 2}, net=SMALL)
    samples = shoal.samples(learner, whole)
    for odd in (whole, {}, None):
        with pytest.raises(UserError, match="update takes what shoal"):
            learner.update(odd)
    with pytest.raises(
        UserError, match="samples are a learner's, for its statistics and settings are in them, and this is EnvSpec"
    ):
        shoal.samples(spec, whole)
    with pytest.raises(UserError, match="arrays come in a dict by name, and not in a list"):
        shoal.samples(learner, [whole])
    with pytest.raises(UserError, match="ippo of agents takes its own samples of 2 steps, and was given another learner's"):
        shoal.learner("ippo", spec, algo={"rollout": 2}).update(samples)
    with pytest.raises(UserError, match="takes its own samples of 2 steps, and was given samples of 1 steps"):
        learner.update(shoal.samples(learner, {k: x[:1] for k, x in whole.items()}))
    remembers = shoal.learner("ippo", spec, algo={"rollout": 2}, net=GRU)
    for start in (None, zeros(2, 5), np.eye(2, 5)):
        with pytest.raises(UserError, match="these learners remember from step to step: hand over `start`, and, unless"):
            shoal.samples(remembers, {**whole, "start": start})
    with pytest.raises(
        UserError, match=r"qmix needs agents that are paid alike: pay each its team's mean, and say EnvSpec\(common"
    ):
        shoal.learner("qmix", spec)
    with pytest.raises(UserError, match="a shaper is a run's"):
        shoal.learner("ippo", spec, algo={"shaper": "math:fsum"})
    with pytest.raises(UserError, match="spec is 'simple_spread': it takes an EnvSpec"):
        shoal.learner("ippo", "simple_spread")
    with pytest.raises(UserError, match="--steps is 0: it must be at least 1"):
        shoal.learner("ippo", spec, steps=0)
    with pytest.raises(UserError, match=r"there is no `state`, \[T, B, 4\], which is needed here"):
        shoal.samples(shoal.learner("ippo", spec_of(2, state=4), algo={"rollout": 2}), whole)
    both = shoal.learner("ippo", spec_of(2, names=("a", "b")))
    with pytest.raises(UserError, match="`obs` takes a dict with an array for each group: a, b"):
        both.act(zeros(5, 2, 3))
    with pytest.raises(UserError, match="there is no `obs` of 'b', which is needed here"):
        both.act({"a": zeros(5, 2, 3)})
    named = shoal.learner("ippo", spec_of(1, obs={"far": (2,), "near": (3,)}), net=SMALL)
    assert named.act({"far": zeros(5, 2), "near": zeros(5, 3)}).actions.shape == (5,)
    with pytest.raises(UserError, match="`obs` of 'agents' is a dict of far, near, and there is no 'near'"):
        named.act({"agents": {"far": zeros(5, 2)}})


# --- the example ---


def test_the_example_learns_and_stands_in_the_docs():
    pytest.importorskip("gymnasium")
    path = ROOT / "examples" / "foreign_loop.py"
    place = importlib.util.spec_from_file_location("foreign_loop", path)
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    lengths, metrics = module.train(7_000)
    assert np.mean(lengths[:20]) < 40
    assert np.mean(lengths[-20:]) > 100
    assert metrics["agents"]["entropy"] < 0.65
    text = path.read_text()
    assert text[text.index("def train") : text.index("\n\n\nif __name__")] in (ROOT / "docs" / "policies.md").read_text()
