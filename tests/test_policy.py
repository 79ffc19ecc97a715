"""What a run learnt, acting by agent name: with memory, late arrivals, images and named observations, and mistakes."""

from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.spec import UserError
from shoal.training.collect import play, to_space
from shoal.tree import tree_leaves, tree_map

QUICK = {"envs": 8, "steps": 240, "quiet": True, "eval": {"episodes": 2}, "log": {"tensorboard": False}, "compile": "off"}


def trained(folder, env, net=None, **config):
    net = {"hidden": (16,), "memory_width": 8, "gain_actor": 5.0, **(net or {})}
    return shoal.train("mappo", env, env=config, net=net, algo={"rollout": 10, "lr": 1e-2}, out=folder / "r", **QUICK)


RECALLING = [
    ("probe_memory", {"n": 2}, {"memory": "gru"}),
    ("probe_memory", {"n": 2}, {"memory": "lstm", "share": "none"}),
    ("probe_deaths", {}, {"memory": "gru"}),
    ("probe_deaths", {}, {"memory": "lstm"}),
    ("simple_tag", {"max_cycles": 6}, {"memory": "gru"}),
    ("probe_teams", {"pair": "continuous", "lone": "multi"}, {"memory": "gru"}),
]


def named(spec, frame, row):
    """What a loop by names would hold of a row: the living alone."""
    out = {}
    for g in spec.groups:
        obs, alive = frame[g.name].obs, frame[g.name].alive[row]
        for i in alive.nonzero()[:, 0].tolist():
            out[g.agents[i]] = {k: x[row, i].numpy() for k, x in obs.items()} if isinstance(obs, dict) else obs[row, i].numpy()
    return out


def by_name(spec, tree, row=0):
    """Agent -> its part of {group: a tree of [B, N, ...]}."""
    return {
        a: tree_leaves(tree_map(lambda x, i=i: x[row, i], tree[g.name])) for g in spec.groups for i, a in enumerate(g.agents)
    }


def alike(xs, ys):
    return all(torch.allclose(torch.as_tensor(x), torch.as_tensor(y), atol=1e-5) for x, y in zip(xs, ys, strict=True))


def follow(policy, world, steps):
    """Play rows together as evaluations do, and each by itself through names: every step the same actions and the same memory.
    Returns how often memory was another than that of who begins, and how many arrived late."""
    spec, draw = world.spec, torch.Generator().manual_seed(7)
    uniform = lambda: torch.rand(world.rows, world.noise, generator=draw)  # noqa: E731
    frame, memory = world.reset(uniform()), policy.players.memory(world.rows, world.device)
    kept: list[Any] = [None] * world.rows
    recalled = late = 0
    for t in range(steps):
        begins = t % spec.horizon == 0
        late += 0 if begins else sum(int(frame[g.name].start.sum()) for g in spec.groups)
        with torch.no_grad():
            actions, memory, _ = policy.players.act(frame, memory, {}, explore=False, greedy=True)
        chosen = {g.name: to_space(g.action, actions[g.name]) for g in spec.groups}
        for row in range(world.rows):
            seen = named(spec, frame, row)
            active, kept[row] = policy.act(seen, None if begins else kept[row])
            assert active.keys() == seen.keys()
            wanted, mine, theirs = by_name(spec, chosen, row), by_name(spec, kept[row].state), by_name(spec, memory, row)
            fresh = by_name(spec, policy.act(seen)[1].state)
            for name in seen:
                assert alike([active[name]], wanted[name]), (t, row, name)
                assert alike(mine[name], theirs[name]), (t, row, name)
                recalled += not alike(mine[name], fresh[name])
        frame = play(world, actions, uniform()).frame
    return recalled, late


@pytest.fixture(scope="module", params=RECALLING, ids=lambda p: " ".join(map(str, (p[0], *p[1].values(), *p[2].values()))))
def recalling(request, tmp_path_factory):
    env, config, net = request.param
    run = trained(tmp_path_factory.mktemp("runs"), env, net, **config)
    return shoal.load(run), shoal.make(env, rows=6, **config)


def test_memory_that_is_passed_back_acts_as_evaluations_do(recalling):
    policy, world = recalling
    recalled, late = follow(policy, world, 2 * world.spec.horizon)
    assert recalled > 0
    assert (late > 0) == world.spec.groups[0].mortal


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    return shoal.load(trained(tmp_path_factory.mktemp("runs"), "probe_deaths", {"memory": "gru"}))


def hidden(memory):
    return memory.state["agents"]["actor"]["hidden"][0]


def observations(policy, names, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=policy.spec["agents"].obs).astype(np.float32) for name in names}


def test_who_arrives_late_begins_with_a_fresh_memory(deaths):
    memory = None
    for k in range(3):
        _, memory = deaths.act(observations(deaths, ["agent_0", "agent_2"], k), memory)
    both = observations(deaths, ["agent_0", "agent_1", "agent_2"], 9)
    _, after = deaths.act(both, memory)
    _, fresh = deaths.act(both)
    assert torch.equal(hidden(after)[1], hidden(fresh)[1])
    assert not torch.equal(hidden(after)[0], hidden(fresh)[0])


def test_who_is_gone_and_comes_back_begins_anew(deaths):
    names = ["agent_0", "agent_1", "agent_2"]
    _, memory = deaths.act(observations(deaths, names, 1))
    _, memory = deaths.act(observations(deaths, names[:2], 2), memory)
    last = observations(deaths, names, 3)
    _, after = deaths.act(last, memory)
    _, fresh = deaths.act(last)
    assert torch.equal(hidden(after)[2], hidden(fresh)[2])
    assert not torch.equal(hidden(after)[1], hidden(fresh)[1])


def test_memory_none_begins_an_episode(deaths):
    """And what was passed in is left as it was: a step can be taken twice."""
    names = ["agent_0", "agent_1", "agent_2"]
    first = deaths.act(observations(deaths, names))
    _, memory = first
    before = hidden(memory).clone()
    one, other = (deaths.act(observations(deaths, names, 5), memory) for _ in range(2))
    assert torch.equal(hidden(one[1]), hidden(other[1]))
    assert torch.equal(hidden(memory), before)
    assert not torch.equal(hidden(one[1]), before)
    again = deaths.act(observations(deaths, names))
    assert again[0] == first[0]
    assert torch.equal(hidden(again[1]), before)


def test_lists_and_numbers_of_any_kind_are_observations(deaths):
    names = ["agent_0", "agent_1", "agent_2"]
    seen = observations(deaths, names)
    as_lists = {k: x.tolist() for k, x in seen.items()}
    as_doubles = {k: x.astype(np.float64) for k, x in seen.items()}
    mixed = {names[0]: as_lists[names[0]], names[1]: seen[names[1]], names[2]: as_doubles[names[2]]}
    for same in (as_lists, as_doubles, mixed):
        active, memory = deaths.act(same)
        assert active == deaths.act(seen)[0]
        assert torch.allclose(hidden(memory), hidden(deaths.act(seen)[1]))


def test_who_waits_for_a_turn_keeps_its_memory(tmp_path):
    """Observations name who moves alone, as a loop over turns has them."""
    policy, world = shoal.load(trained(tmp_path, "probe_turns", {"memory": "gru"})), shoal.make("probe_turns")
    frame, memory, kept = world.reset(torch.zeros(1, world.noise)), policy.players.memory(1, world.device), None
    for _ in range(6):
        with torch.no_grad():
            actions, memory, _ = policy.players.act(frame, memory, {}, explore=False, greedy=True)
        moves = dict(zip(world.spec["agents"].agents, frame["agents"].active[0].tolist(), strict=True))
        _, kept = policy.act({name: x for name, x in named(world.spec, frame, 0).items() if moves[name]}, kept)
        assert torch.allclose(hidden(kept), memory["agents"]["actor"]["hidden"][0], atol=1e-5)
        frame = play(world, actions, torch.zeros(1, world.noise)).frame


def test_who_does_not_learn_does_not_act_at_random(tmp_path):
    """Whatever it did when it was saved: sampled, it draws from what it learnt."""
    algo = {"rollout": 10, "random_steps": 240, "log_std": -5.0}
    run = shoal.train("ippo", "probe_copy", env={"actions": "continuous"}, algo=algo, out=tmp_path / "r", **QUICK)
    policy, world = shoal.load(run), shoal.make("probe_copy", rows=6, actions="continuous")
    frame, memory = world.reset(torch.rand(6, world.noise)), policy.players.memory(6, world.device)
    with torch.no_grad():
        noise = policy.players.noise(torch.Generator().manual_seed(0), 6)
        sample, greedy = (policy.players.act(frame, memory, noise, explore=True, greedy=g)[0]["agents"] for g in (False, True))
    assert (sample - greedy).abs().max() < 0.1


# --- images, and observations with names ---


@pytest.mark.parametrize(("vector", "memory"), [(False, "none"), (True, "none"), (True, "gru")])
def test_images_and_named_observations_act_as_evaluations_do(tmp_path, vector, memory):
    policy = shoal.load(trained(tmp_path, "probe_image", {"memory": memory}, n=2, vector=vector))
    world = shoal.make("probe_image", rows=6, n=2, vector=vector)
    follow(policy, world, 16)
    frame = world.reset(torch.rand(6, world.noise))
    seen = named(world.spec, frame, 0)
    picture = seen["agent_0"]["picture"] if vector else seen["agent_0"]
    assert (picture.dtype, picture.shape) == (np.uint8, (1, 8, 8))
    assert {type(a) for a in policy.act(seen)[0].values()} == {int}
    assert policy.act({"agent_1": seen["agent_1"]})[0] == {"agent_1": policy.act(seen)[0]["agent_1"]}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    policy = shoal.load(trained(tmp_path_factory.mktemp("runs"), "probe_image", n=2, vector=True))
    return policy, lambda **parts: {"picture": np.zeros((1, 8, 8), np.uint8), "asks": np.zeros(2, np.float32), **parts}


def test_a_named_part_of_a_wrong_shape_is_a_sentence(pictures):
    policy, seen = pictures
    for part, wrong, shape in (("picture", np.zeros((8, 8), np.uint8), "8, 8"), ("asks", [0.0], "1,")):
        with pytest.raises(
            UserError, match=rf"^the observation of 'agent_0' has shape \({shape}\); this policy takes \(.*\)\.$"
        ):
            policy.act({"agent_0": seen(**{part: wrong}), "agent_1": seen()})


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda seen: {"picture": seen["picture"]}, id="a part is missing"),
        pytest.param(lambda seen: {**seen, "pictures": seen["picture"]}, id="a part is unknown"),
        pytest.param(lambda seen: seen["picture"], id="no names"),
        pytest.param(lambda seen: None, id="nothing"),
    ],
)
def test_named_parts_that_are_not_those_asked_for_are_a_sentence(pictures, wrong):
    policy, seen = pictures
    with pytest.raises(UserError, match=r"'agent_0'.*picture.*asks"):
        policy.act({"agent_0": wrong(seen()), "agent_1": seen()})


# --- masks and mistakes ---


def test_masks_are_kept_to(tmp_path):
    policy = shoal.load(trained(tmp_path, "probe_illegal", {"memory": "gru"}))
    world = shoal.make("probe_illegal", rows=4)
    frame = world.reset(torch.rand(4, world.noise))
    n = sum(world.spec.groups[0].action.sizes)
    for row in range(4):
        seen, (name, other) = named(world.spec, frame, row), world.spec.groups[0].agents
        for choice in range(n):
            active, _ = policy.act(seen, masks={name: np.arange(n) == choice, other: np.ones(n)})
            assert active[name] == choice
    with pytest.raises(UserError, match=rf"trained with masks, and there is none for '{other}'"):
        policy.act(seen, masks={name: np.ones(n)})
    with pytest.raises(UserError, match="allows no choice at all"):
        policy.act(seen, masks={name: np.zeros(n)})
    with pytest.raises(UserError, match=rf"the mask of '{name}' has shape \(1,\); this policy takes \({n},\)"):
        policy.act(seen, masks={name: [True]})


def test_mistakes_are_sentences(deaths):
    names = ["agent_0", "agent_1", "agent_2"]
    seen = observations(deaths, names)
    wrong = [
        ({**seen, "agent_0": [0.0] * 3}, r"^the observation of 'agent_0' has shape \(3,\); this policy takes \(10,\)\.$"),
        ({**seen, "agent_2": [0.0] * 3}, r"^the observation of 'agent_2' has shape \(3,\)"),
        ({**seen, "agent_0": {"obs": seen["agent_0"]}}, "^the observation of 'agent_0' .* this policy takes "),
        (
            {**seen, "agent_9": seen["agent_0"]},
            r"^there is no agent 'agent_9' \(did you mean .*\): this policy plays agent_0, agent_1, agent_2\.$",
        ),
    ]
    for given, words in wrong:
        with pytest.raises(UserError, match=words):
            deaths.act(given)
    with pytest.raises(UserError, match="there is no agent 'bob'"):
        deaths.act(seen, masks={"bob": [True, True]})


@pytest.mark.parametrize("wrong", [[0.0] * 3, [0.0, [1.0]], ["a"] * 10], ids=["shape", "ragged", "words"])
def test_a_mistake_is_said_of_who_made_it(deaths, wrong):
    with pytest.raises(UserError, match="observation of 'agent_1'"):
        deaths.act({"agent_1": wrong})


def test_which_checkpoint_acts_can_be_said(tmp_path):
    run = trained(tmp_path, "probe_memory", {"memory": "gru"})
    weights = {k: shoal.load(run, k).players.algorithms[0].state_dict() for k in ("last", "best")}
    for name, mine in weights.items():
        theirs = run.load(name)["algorithms"]["agents"]
        assert all(torch.equal(x, theirs[k]) for k, x in mine.items())
    with pytest.raises(UserError, match="has no checkpoint '7'"):
        shoal.load(run, "7")
