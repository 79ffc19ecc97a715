"""PettingZoo's interfaces, with small games of which every number is known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from shoal.envs.pettingzoo import AECRow, ParallelRow, PettingZoo, ZooRow, claims, made, modules, row_of
from shoal.envs.rows import Slots, arrays
from shoal.ids import find
from shoal.spec import Box, Discrete, UserError
from shoal.tree import tree_leaves

pettingzoo = pytest.importorskip("pettingzoo")
spaces = pytest.importorskip("gymnasium.spaces")
from pettingzoo.utils import parallel_to_aec  # noqa: E402

UNIT = spaces.Box(-1, 1, (2,), np.float32)
ABC = "agents=a+b+c"


class Play(pettingzoo.ParallelEnv):
    """Follows a script: for each step who is there after it, who terminated, who was truncated; pays 10 a step and the action.
    An agent sees (its number, the step)."""

    metadata = {"name": "play", "render_modes": ["rgb_array"]}
    possible_agents = ["walker_0", "walker_1", "walker_2"]
    first = ["walker_0", "walker_1", "walker_2"]
    script: list[tuple[str, str, str]] = [("", "", "012")]
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return UNIT

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def name(self, digits: str) -> list[str]:
        return [a for a in self.possible_agents if a[-1] in digits]

    def observation_of(self, agent: str) -> Any:
        return np.array([int(agent[-1]), self.t], np.float32)

    def info(self, agent: str) -> dict[str, Any]:
        return {}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.seed, self.got = 0, seed, []
        self.agents = list(self.first)
        return {a: self.observation_of(a) for a in self.agents}, {a: self.info(a) for a in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        there, terminated, truncated = (self.name(x) for x in self.script[self.t])
        self.got.append(actions)
        self.t += 1
        before, self.agents = self.agents, there
        who = list(dict.fromkeys(before + there))
        pay = {a: 10.0 * self.t + actions[a] for a in before}
        return (
            {a: self.observation_of(a) for a in who},
            pay,
            {a: a in terminated for a in who},
            {a: a in truncated for a in who},
            {a: self.info(a) for a in who},
        )

    def render(self) -> Any:
        return np.full((4, 4, 3), self.t, np.uint8)


class Driver:
    """A row with arrays of its own, as a `RowRunner` steps it."""

    def __init__(self, row: ZooRow):
        self.row, self.whole = row, arrays(row, 1)
        self.now, self.new = (Slots(row.spec, self.whole, 0, frame) for frame in ("now", "new"))
        for x in tree_leaves([list(self.now.obs.values()), list(self.new.obs.values())]):
            x.fill(77)  # what was there before

    def reset(self, seed: int = 1) -> Slots:
        self.row.reset(seed, self.new)
        return self.new

    def step(self, **actions: Any) -> bool:
        self.now.clear()
        given = {g.name: np.zeros((g.n, *g.action.shape), np.int64) for g in self.row.spec.groups}
        return self.row.step({**given, **{k: np.array(v) for k, v in actions.items()}}, self.now)


def listed(x: dict[str, np.ndarray]) -> list[Any]:
    return x["agents"].tolist()


def play(script: list[tuple[str, str, str]], first: str = "012", base: type = Play, **attributes: Any) -> Any:
    cls = type("Game", (base,), {"script": script, "first": [f"walker_{i}" for i in first], **attributes})
    return cls()


# --- at once ---------------------------------------------------------------------------------------------------------


def test_deaths_are_masked_and_the_last_reward_is_not_lost() -> None:
    game = play([("02", "1", ""), ("", "2", "0")])
    d = Driver(ParallelRow(game))
    new = d.reset(seed=9)
    assert game.seed == 9
    assert listed(new.obs) == [[0, 0], [1, 0], [2, 0]]
    assert listed(new.alive) == listed(new.active) == listed(new.start) == [True, True, True]
    now = d.now

    assert d.step(agents=[1, 2, 3]) is False
    assert game.got[-1] == {"walker_0": 1, "walker_1": 2, "walker_2": 3}
    assert listed(now.reward) == [11, 12, 13]
    assert listed(now.terminated) == [False, True, False]
    assert listed(now.alive) == listed(now.active) == [True, False, True]
    assert listed(now.start) == [False, False, False]
    assert listed(now.obs) == [[0, 1], [1, 1], [2, 1]]  # what the dead saw last

    assert d.step(agents=[1, 2, 3]) is True
    assert game.got[-1] == {"walker_0": 1, "walker_2": 3}
    assert game.agents == []
    assert listed(now.reward) == [21, 0, 23]
    assert listed(now.terminated) == [False, False, True]  # once; and the other was truncated
    assert listed(now.alive) == [True, False, False]  # and is still there for whoever observes it
    assert listed(now.obs) == [[0, 2], [0, 0], [2, 2]]


def test_who_leaves_without_terminating_was_truncated() -> None:
    d = Driver(ParallelRow(play([("02", "", "1"), ("2", "", ""), ("", "2", "2")])))
    d.reset()
    assert not d.step()
    assert listed(d.now.terminated) == [False, False, False]
    assert listed(d.now.alive) == [True, False, True]
    assert not d.step()  # walker_0 is gone without a word
    assert listed(d.now.terminated) == [False, False, False]
    assert listed(d.now.alive) == [False, False, True]
    assert listed(d.now.reward) == [20, 0, 20]
    assert d.step()  # both at once: terminated wins
    assert listed(d.now.terminated) == [False, False, True]
    assert listed(d.now.alive) == [False, False, False]


def test_those_who_come_late_start_then() -> None:
    d = Driver(ParallelRow(play([("01", "", ""), ("01", "", ""), ("", "", "01")], first="0")))
    new = d.reset()
    assert listed(new.alive) == listed(new.start) == [True, False, False]
    assert listed(new.obs) == [[0, 0], [0, 0], [0, 0]]
    d.step()
    assert listed(d.now.alive) == [True, True, False]
    assert listed(d.now.start) == [False, True, False]
    assert listed(d.now.reward) == [10, 0, 0]
    assert listed(d.now.obs) == [[0, 1], [1, 1], [0, 0]]
    d.step(agents=[0, 4, 0])
    assert listed(d.now.start) == [False, False, False]
    assert listed(d.now.reward) == [20, 24, 0]
    assert d.step()
    assert listed(d.now.alive) == [True, True, False]


def test_one_may_come_as_the_last_one_goes() -> None:
    d = Driver(ParallelRow(play([("1", "0", ""), ("", "1", "")], first="0")))
    d.reset()
    assert d.step() is False
    assert listed(d.now.alive) == [False, True, False]
    assert d.step() is True


def test_a_reward_that_is_not_mentioned_is_none() -> None:
    class Silent(Play):
        def step(self, actions: dict[str, int]) -> Any:
            seen, pay, *rest = super().step(actions)
            del pay["walker_1"]
            return seen, pay, *rest

    d = Driver(ParallelRow(play([("", "", "012")], base=Silent)))
    d.reset()
    assert d.step()
    assert listed(d.now.reward) == [10, 0, 10]


def test_nobody_terminates_twice() -> None:
    class Lingering(Play):
        def step(self, actions: dict[str, int]) -> Any:
            seen, pay, terminated, *rest = super().step(actions)
            return seen, pay, {**terminated, "walker_1": True}, *rest

    d = Driver(ParallelRow(play([("02", "1", ""), ("02", "", ""), ("", "", "02")], base=Lingering)))
    d.reset()
    terminated = []
    for _ in range(3):
        d.step()
        terminated.append(listed(d.now.terminated))
    assert terminated == [[False, True, False], [False, False, False], [False, False, False]]


def test_a_promise_to_stay() -> None:
    d = Driver(ParallelRow(play([("012", "", ""), ("", "", "012")]), mortal=False))
    assert not d.row.spec["agents"].mortal
    d.reset()
    assert not d.step()
    assert d.step()
    assert d.now.alive == {}
    assert listed(d.now.obs) == [[0, 2], [1, 2], [2, 2]]
    d = Driver(ParallelRow(play([("02", "1", "")]), mortal=False))
    d.reset()
    with pytest.raises(UserError, match=r"'walker_1' left play early: set --env.mortal true"):
        d.step()


def test_one_agent_alone_is_not_mortal() -> None:
    alone = play([("", "0", "")], first="0", possible_agents=["walker_0"])
    row = ParallelRow(alone)
    assert not row.spec["agents"].mortal
    assert row.spec.common
    assert not ParallelRow(play([])).spec.common


def test_strangers_are_refused() -> None:
    d = Driver(ParallelRow(play([("", "", "")], first="07")))
    with pytest.raises(UserError, match="'walker_7' came into play which is not among its possible_agents"):
        d.reset()
    with pytest.raises(UserError, match="has no possible_agents"):
        ParallelRow(play([], possible_agents=[]))


# --- masks -----------------------------------------------------------------------------------------------------------


class Seen(Play):
    """The mask is in the observation: action number `step` is forbidden, and to walker_2 everything."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(observation=UNIT, action_mask=spaces.Box(0, 1, (5,), np.int8))

    def mask(self, agent: str) -> np.ndarray:
        return np.array([i != self.t and agent != "walker_2" for i in range(5)], np.int8)

    def observation_of(self, agent: str) -> Any:
        return {"observation": super().observation_of(agent), "action_mask": self.mask(agent)}


class Told(Play):
    """The same, in the info."""

    mask = Seen.mask

    def info(self, agent: str) -> dict[str, Any]:
        return {"action_mask": self.mask(agent)}


@pytest.mark.parametrize("base", [Seen, Told])
def test_masks(base: type) -> None:
    d = Driver(ParallelRow(play([("02", "1", ""), ("", "", "02")], base=base)))
    group = d.row.spec["agents"]
    assert group.masked
    assert group.obs == (2,)
    free, no_0, no_1 = [True] * 5, [False, *[True] * 4], [True, False, *[True] * 3]
    new = d.reset()
    assert listed(new.legal) == [no_0, no_0, free]  # nothing allowed: everything
    assert listed(new.obs) == [[0, 0], [1, 0], [2, 0]]
    d.step()
    assert listed(d.now.legal) == [no_1, free, free]
    assert listed(d.now.obs) == [[0, 1], [1, 1], [2, 1]]


def test_masks_of_several_choices() -> None:
    class Several(Told):
        def action_space(self, agent: str) -> Any:
            return spaces.MultiDiscrete([2, 3])

        def mask(self, agent: str) -> Any:
            return {"0": (np.array([0, 1]), np.array([1, 0, 1])), "1": np.array([0, 0, 0, 0, 1]), "2": np.ones(4)}[agent[-1]]

    game = play([], base=Several, possible_agents=["walker_0", "walker_1"], first="01")
    assert listed(Driver(ParallelRow(game)).reset().legal) == [[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]
    with pytest.raises(UserError, match="has 4 entries, and the agent 5 choices"):
        Driver(ParallelRow(play([], base=Several))).reset()


# --- groups, teams, spaces -------------------------------------------------------------------------------------------


class Mixed(Play):
    possible_agents = ["wolf_0", "wolf_1", "wolf_2", "sheep"]
    first = possible_agents
    sizes = {"wolf_0": 3, "wolf_1": 2, "wolf_2": 3, "sheep": 3}

    def observation_of(self, agent: str) -> Any:
        return np.zeros(2, np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(self.sizes[agent])


def groups_of(row: ZooRow) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(g.name, g.team, g.agents) for g in row.spec.groups]


def test_groups_by_stem_and_spaces() -> None:
    assert groups_of(ParallelRow(Play())) == [("agents", "agents", ("walker_0", "walker_1", "walker_2"))]
    row = ParallelRow(Mixed())
    assert groups_of(row) == [
        ("wolf_0", "wolf_0", ("wolf_0", "wolf_2")),
        ("wolf_1", "wolf_1", ("wolf_1",)),
        ("sheep", "sheep", ("sheep",)),
    ]
    assert row.spec["wolf_1"].action == Discrete(2)
    assert not row.spec.common


def test_groups_and_teams_as_the_user_says() -> None:
    game = play([("", "", "012")])
    d = Driver(ParallelRow(game, groups="b=walker_2,a=walker_1+walker_0", teams="red=a+b"))
    assert groups_of(d.row) == [("b", "red", ("walker_2",)), ("a", "red", ("walker_1", "walker_0"))]
    d.reset()
    assert d.step(a=[1, 2], b=[3])
    assert game.got == [{"walker_1": 1, "walker_0": 2, "walker_2": 3}]
    assert d.now.reward["a"].tolist() == [11, 12]
    assert d.now.reward["b"].tolist() == [13]
    assert d.now.obs["a"].tolist() == [[1, 1], [0, 1]]


def test_a_promise_of_equal_pay() -> None:
    d = Driver(ParallelRow(play([("02", "1", ""), ("02", "", ""), ("02", "", "")]), common=True))
    assert d.row.spec.common
    d.reset()
    d.step(agents=[1, 1, 1])
    d.step(agents=[1, 2, 1])  # the dead are not paid
    with pytest.raises(UserError, match=r"walker_0 and walker_1 and walker_2 of play are not always paid alike"):
        d.step(agents=[1, 1, 2])
    d = Driver(ParallelRow(play([("012", "", "")]), "a=walker_0,b=walker_1+walker_2", common=True))
    d.reset()
    d.step(a=[1], b=[2, 2])  # alike within a team


def test_actions_are_read_as_the_space_wants() -> None:
    class Numbers(Play):
        def action_space(self, agent: str) -> Any:
            return spaces.Box(-np.inf, np.inf, (1, 2), np.float64)

        def step(self, actions: dict[str, Any]) -> Any:
            self.did = actions
            return super().step(dict.fromkeys(actions, 0))

    game = play([("", "", "012")], base=Numbers)
    d = Driver(ParallelRow(game))
    assert d.row.spec["agents"].action == Box((-1.0, -1.0), (1.0, 1.0))
    assert d.row.notes == ("2 of 2 action dimensions have no bounds of their own and are taken as [-1, 1].",)
    d.reset()
    d.step(agents=np.array([[0.5, -0.5]] * 3, np.float32))
    assert game.did["walker_2"].tolist() == [[0.5, -0.5]]
    assert game.did["walker_2"].dtype == np.float64


# --- state, horizon, pictures ----------------------------------------------------------------------------------------


class Stated(Play):
    max_cycles = 7

    def state(self) -> Any:
        return np.array([[1, 2], [3, self.t]])


def test_the_state_is_the_environments_own() -> None:
    d = Driver(ParallelRow(play([("", "", "012")], base=Stated)))
    assert d.row.spec.state == 4
    assert d.row.spec.horizon == 7
    new = d.reset()
    assert new.state is not None
    assert new.state.tolist() == [1, 2, 3, 0]
    d.step()
    assert d.now.state is not None
    assert d.now.state.tolist() == [1, 2, 3, 1]
    assert ParallelRow(play([], base=Stated), state=False).spec.state is None
    assert ParallelRow(Play()).spec.state is None
    assert ParallelRow(Play()).spec.horizon is None
    picture = play([], base=Stated, state=lambda self: np.zeros((8, 8, 3), np.uint8))
    assert ParallelRow(picture).spec.state is None


def test_a_state_that_goes_with_the_agents() -> None:
    class Fragile(Stated):
        def state(self) -> Any:
            return np.array([self.agents.index("walker_0"), self.t])

    d = Driver(ParallelRow(play([("02", "1", ""), ("", "", "02")], base=Fragile)))
    d.reset()
    d.step()
    assert d.step()
    assert d.now.state is not None
    assert d.now.state.tolist() == [0, 1]  # the one before
    d = Driver(ParallelRow(play([("2", "0", ""), ("", "", "2")], base=Fragile)))
    d.reset()
    with pytest.raises(UserError, match=r"play has no state after a while \(ValueError.*set --env.state false"):
        d.step()
    d = Driver(ParallelRow(play([("012", "", "")], base=Stated, state=lambda self: np.zeros(4 + self.t))))
    d.reset()
    with pytest.raises(UserError, match="has 5 numbers and began with 4"):
        d.step()


def test_pictures() -> None:
    row = ParallelRow(Play())
    picture = row.picture()
    assert picture is not None
    assert picture.shape == (4, 4, 3)


# --- in turn ---------------------------------------------------------------------------------------------------------


class Turns(pettingzoo.AECEnv):
    """a, b, c move in turn. A move pays its number to the mover and half of it to c; number 3 kills b, 4 ends it for all.
    After `limit` moves all are truncated. An agent sees (its place, moves so far); it may not repeat the last number."""

    metadata = {"name": "turns"}
    possible_agents = ["a", "b", "c"]
    limit = 6
    max_cycles = 2
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(observation=UNIT, action_mask=spaces.Box(0, 1, (5,), np.int8))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def observe(self, agent: str) -> Any:
        mine = agent == self.agent_selection
        mask = [mine and i != self.last_move for i in range(5)]
        return {
            "observation": np.array([self.possible_agents.index(agent), self.t], np.float32),
            "action_mask": np.array(mask, np.int8),
        }

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.t, self.last_move = 0, -1
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {a: {} for a in self.agents}
        self.agent_selection = "a"

    def step(self, action: int) -> None:
        me = self.agent_selection
        if self.terminations[me] or self.truncations[me]:
            self._was_dead_step(action)
            return
        self.t, self.last_move = self.t + 1, action
        self._clear_rewards()
        self.rewards[me] += action
        if "c" in self.rewards:
            self.rewards["c"] += action / 2
        if action == 3 and "b" in self.agents:
            self.terminations["b"] = True
        if action == 4:
            self.terminations = dict.fromkeys(self.agents, True)
        if self.t >= self.limit:
            self.truncations = dict.fromkeys(self.agents, True)
        order = [a for a in self.agents if not self.terminations[a]] or self.agents
        later = [a for a in order if a > me] or order
        self.agent_selection = later[0]
        self._accumulate_rewards()
        self._deads_step_first()


def move(d: Driver, number: int) -> bool:
    return d.step(agents=[number] * 3)


def test_agents_move_in_turn() -> None:
    d = Driver(AECRow(Turns(), ABC))
    spec = d.row.spec
    assert spec.turns
    assert spec.horizon == 6
    assert spec["agents"].mortal
    assert spec["agents"].masked
    new = d.reset()
    assert listed(new.alive) == listed(new.start) == [True, True, True]
    assert listed(new.active) == [True, False, False]
    assert listed(new.obs) == [[0, 0], [1, 0], [2, 0]]
    assert listed(new.legal) == [[True] * 5] * 3

    now = d.now
    assert move(d, 2) is False
    assert listed(now.reward) == [2, 0, 1]
    assert listed(now.active) == [False, True, False]
    assert listed(now.start) == [False, False, False]
    assert listed(now.obs) == [[0, 1], [1, 1], [2, 1]]
    assert listed(now.legal) == [[True] * 5, [True, True, False, True, True], [True] * 5]
    assert move(d, 1) is False
    assert listed(now.reward) == [0, 1, 0.5]
    assert move(d, 2) is False
    assert listed(now.reward) == [0, 0, 3]
    assert listed(now.active) == [True, False, False]


def test_the_dead_are_stepped_through() -> None:
    d = Driver(AECRow(Turns(), ABC))
    d.reset()
    assert move(d, 3) is False  # a kills b, and c is next
    now = d.now
    assert listed(now.reward) == [3, 0, 1.5]
    assert listed(now.terminated) == [False, True, False]
    assert listed(now.alive) == [True, False, True]
    assert listed(now.active) == [False, False, True]
    assert listed(now.obs) == [[0, 1], [1, 1], [2, 1]]
    assert move(d, 2) is False
    assert listed(now.active) == [True, False, False]
    assert listed(now.terminated) == [False, False, False]
    assert listed(now.obs) == [[0, 2], [0, 0], [2, 2]]
    assert move(d, 4) is True
    assert listed(now.reward) == [4, 0, 2]
    assert listed(now.terminated) == [True, False, True]
    assert listed(now.alive) == listed(now.active) == [False, False, False]
    assert listed(now.obs) == [[0, 3], [0, 0], [2, 3]]
    assert listed(d.reset().active) == [True, False, False]


def test_a_limit_truncates_all() -> None:
    d = Driver(AECRow(play_turns(limit=2), ABC))
    d.reset()
    assert not move(d, 1)
    assert move(d, 2)
    assert listed(d.now.reward) == [0, 2, 1]
    assert listed(d.now.terminated) == [False, False, False]
    assert listed(d.now.alive) == [True, True, True]
    assert listed(d.now.active) == [False, False, False]


def play_turns(**attributes: Any) -> Any:
    return type("Game", (Turns,), attributes)()


def test_what_is_paid_as_the_dead_leave() -> None:
    class Heirs(Turns):
        def step(self, action: int | None) -> None:
            super().step(action)  # type: ignore[arg-type]
            if action is None and "c" in self.rewards:
                self.rewards["c"] += 5

    d = Driver(AECRow(Heirs(), ABC))
    d.reset()
    assert not move(d, 3)
    assert listed(d.now.reward) == [3, 0, 1.5 + 5]


def test_the_dead_must_leave() -> None:
    class Stuck(Turns):
        def step(self, action: int | None) -> None:
            if action is not None:
                super().step(action)

    d = Driver(AECRow(Stuck(), ABC))
    d.reset()
    with pytest.raises(UserError, match="the dead of turns do not leave"):
        move(d, 4)


def test_a_game_at_once_played_in_turn_pays_the_same() -> None:
    script = [("012", "", ""), ("02", "1", ""), ("", "0", "2")]
    at_once, in_turn = Driver(ParallelRow(play(script))), Driver(row_of(parallel_to_aec(play(script))))
    assert isinstance(in_turn.row, AECRow)
    at_once.reset()
    in_turn.reset()
    movers = []
    for present in ([0, 1, 2], [0, 1, 2], [0, 2]):
        over = at_once.step(agents=[1, 2, 3])
        total, ended = np.zeros(3), np.zeros(3, bool)
        for k, mover in enumerate(present):
            movers.append(mover)
            assert in_turn.step(agents=[1, 2, 3]) == (over and k == len(present) - 1)
            total += in_turn.now.reward["agents"]
            ended |= in_turn.now.terminated["agents"]
        assert total.tolist() == listed(at_once.now.reward)
        assert ended.tolist() == listed(at_once.now.terminated)
        assert listed(in_turn.now.alive) == listed(at_once.now.alive)
        assert listed(in_turn.now.obs) == listed(at_once.now.obs)
    assert movers == [0, 1, 2, 0, 1, 2, 0, 2]


# --- the library -----------------------------------------------------------------------------------------------------


def config(id: str, **settings: Any) -> PettingZoo.Config:
    return PettingZoo.Config(workers=0, id=id, **settings)


def test_what_it_claims() -> None:
    assert claims("sisl.multiwalker_v9")
    assert claims("classic.tictactoe_v3")
    assert not any(
        map(claims, ["simple_tag", "CartPole-v1", "multiwalker_v9", "mpe2.simple_v3", "sisl.multiwalker", "sisl.x_v1.y"])
    )
    assert find("envs", "pettingzoo/sisl.multiwalker_v9").settings == {"id": "sisl.multiwalker_v9"}
    assert {"sisl.multiwalker_v9", "classic.tictactoe_v3", "butterfly.pistonball_v6"} <= set(modules("pettingzoo"))


@pytest.mark.parametrize(
    ("id", "settings", "sentence"),
    [
        ("sisl.multiwalker_v8", {}, r"pettingzoo has no 'sisl.multiwalker_v8' \(did you mean 'sisl.multiwalker_v9'"),
        ("", {}, "pettingzoo has no ''; it has "),
        ("classic.tictactoe_v3", {"turns": False}, "can only move in turn"),
        (
            "classic.tictactoe_v3",
            {"args": "screen_hight=3"},
            r"'screen_hight', which .* does not know \(did you mean 'screen_height'",
        ),
        ("classic.tictactoe_v3", {"args": "x"}, "--env.args is 'x': it takes name=value"),
    ],
)
def test_what_cannot_be_made(id: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        PettingZoo.row(config(id, **settings))


def test_what_is_not_installed() -> None:
    with pytest.raises(UserError, match="no_such_zoo is not installed: pip install no_such_zoo"):
        modules("no_such_zoo")
    hidden = without("pygame", "pettingzoo.classic.tictactoe_v3", "pettingzoo.classic.tictactoe")
    with hidden, pytest.raises(UserError, match=r"pettingzoo.classic.tictactoe_v3 needs pygame, which is not installed"):
        PettingZoo.row(config("classic.tictactoe_v3"))


@contextmanager
def without(module: str, *users: str) -> Iterator[None]:
    """As if a module were not there, for others that import it anew."""
    kept = {k: sys.modules.pop(k) for k in list(sys.modules) if any(k == u or k.startswith(u + ".") for u in users)}
    hidden = sys.modules.get(module)

    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    finder: Any = Finder()
    sys.modules.pop(module, None)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(kept | ({module: hidden} if hidden is not None else {}))


def test_an_environment_that_fails_to_be_made() -> None:
    def make(size: int = 1) -> None:
        raise ValueError("too small")

    with pytest.raises(UserError, match="mine could not be made: ValueError: too small"):
        made(make, config("mine", args="size=2"), False)


def test_tic_tac_toe() -> None:
    """x takes the left column while o takes the middle one."""
    d = Driver(PettingZoo.row(config("classic.tictactoe_v3", groups="x=player_1,o=player_2")))  # type: ignore[arg-type]
    assert [(g.name, g.team, g.obs, g.action) for g in d.row.spec.groups] == [
        ("x", "x", (18,), Discrete(9)),
        ("o", "o", (18,), Discrete(9)),
    ]
    assert d.row.spec.turns
    assert d.row.spec.common  # one agent a team
    d.reset()
    free = [True] * 9
    for t, square in enumerate([0, 3, 1, 4, 2]):
        before = d.new if t == 0 else d.now
        mover, other = ("x", "o") if t % 2 == 0 else ("o", "x")
        assert (before.active[mover].tolist(), before.active[other].tolist()) == ([True], [False])
        free[square] = False
        assert d.step(**{mover: [square]}) is (t == 4)
        if t < 4:
            assert d.now.legal[other].tolist() == [free]
            assert d.now.legal[mover].tolist() == [[True] * 9]
            assert (d.now.reward["x"].tolist(), d.now.reward["o"].tolist()) == ([0], [0])
    assert (d.now.reward["x"].tolist(), d.now.reward["o"].tolist()) == ([1], [-1])
    assert (d.now.terminated["x"].tolist(), d.now.terminated["o"].tolist()) == ([True], [True])
    d.row.close()


def test_connect_four_is_an_image() -> None:
    row = PettingZoo.row(config("classic.connect_four_v3"))
    assert row.spec["agents"].obs == (2, 6, 7)
    assert row.images is np.float32
    d = Driver(row)  # type: ignore[arg-type]
    d.reset()
    d.step(agents=[3, 3])
    seen = d.now.obs["agents"]  # [N, C, H, W]; a player's own pieces come first
    assert seen.sum() == 2
    assert (seen[0, 0, 5, 3], seen[1, 1, 5, 3]) == (1, 1)


def test_multiwalker() -> None:
    pytest.importorskip("Box2D")
    row = PettingZoo.row(config("sisl.multiwalker_v9", args="n_walkers=2,max_cycles=3"))
    group = row.spec["agents"]
    assert (group.agents, group.obs) == (("walker_0", "walker_1"), (31,))
    assert group.action == Box((-1.0,) * 4, (1.0,) * 4)
    assert row.spec.horizon == 3
    d = Driver(row)  # type: ignore[arg-type]
    d.reset()
    still = np.zeros((2, 4), np.float32)
    assert [d.step(agents=still) for _ in range(3)] == [False, False, True]


def test_as_a_world() -> None:
    """Rows of a turn-based game through the whole contract, and taken up again."""
    world = PettingZoo(config("classic.tictactoe_v3"), rows=3)
    noise = torch.rand(6, 3, world.noise, generator=torch.Generator().manual_seed(0))
    frame = world.reset(noise[0])
    for t in range(1, 4):
        legal, active = frame["agents"].legal, frame["agents"].active
        assert legal is not None
        assert active.sum(1).tolist() == [1, 1, 1]
        out = world.step({"agents": legal.long().argmax(-1)}, noise[t])
        frame = out.frame
    state = world.get_state()
    again = PettingZoo(config("classic.tictactoe_v3"), rows=3)
    resumed = again.set_state(state)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(resumed), tree_leaves(frame), strict=True))
    world.close()
    again.close()


# --- mpe2 ------------------------------------------------------------------------------------------------------------


def test_what_mpe2_claims() -> None:
    from shoal.envs.mpe2 import claims as claims_mpe2

    assert all(map(claims_mpe2, ["simple_v3", "simple_tag_v3", "collect_treasure_v1"]))
    assert not any(map(claims_mpe2, ["simple_tag", "simple", "sisl.multiwalker_v9"]))


@pytest.mark.parametrize("name", ["simple_tag", "simple_spread", "simple_world_comm", "simple_speaker_listener"])
def test_mpe2_is_the_world_that_we_have(name: str) -> None:
    pytest.importorskip("mpe2")
    from shoal.envs.mpe2 import MPE2

    id = name + ("_v4" if name == "simple_speaker_listener" else "_v3")
    theirs = MPE2.row(MPE2.Config(workers=0, id=id)).spec
    ours = find("envs", name).load()().spec
    assert theirs.horizon == ours.horizon == 25
    assert len(theirs.groups) == len(ours.groups)
    for a, b in zip(theirs.groups, ours.groups, strict=True):
        assert (a.name, a.agents, a.obs, a.action, a.mortal) == (b.name, b.agents, b.obs, b.action, b.mortal)


def test_mpe2_steps_as_ours_does() -> None:
    """From the same state, with the same actions: the same rewards and observations, through both adapters."""
    pytest.importorskip("mpe2")
    from shoal.envs.mpe2 import MPE2

    d = Driver(MPE2.row(MPE2.Config(workers=0, id="simple_tag_v3")))  # type: ignore[arg-type]
    ours = find("envs", "simple_tag").load()(rows=1, dtype=torch.float64)
    d.reset(seed=5)
    world = d.row.env.unwrapped.world
    noise = torch.zeros(1, ours.noise)
    ours.reset(noise)
    state = ours.get_state()
    bodies = [*world.agents, *world.landmarks]
    state["pos"] = torch.tensor(np.stack([b.state.p_pos for b in bodies]))[None]
    state["vel"] = torch.tensor(np.stack([a.state.p_vel for a in world.agents]))[None]
    assert state.keys() == ours.get_state().keys()
    ours.set_state(state)
    compared = 0
    for t in range(25):
        moves = {"adversary": [t % 5, 1, 2], "agent": [3]}
        over = d.step(**moves)
        out = ours.step({k: torch.tensor([v]) for k, v in moves.items()}, noise)
        assert over == bool(out.over)
        for g in ("adversary", "agent"):
            assert d.now.reward[g] == pytest.approx(out.results[g].reward[0].numpy(), abs=1e-5)
            assert d.now.obs[g] == pytest.approx(out.next[g].obs[0].numpy(), abs=1e-5)
            compared += 1
    assert compared == 50
    assert over
