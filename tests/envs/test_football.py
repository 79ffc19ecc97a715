"""Google Research Football: against numbers worked out by hand, and against gfootball's own environment and wrappers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.envs import football
from shoal.envs.football import NAMES, Football, FootballRow, by_ball, by_possession, claims, library, place, rings, scenarios
from shoal.envs.rows import Slots, arrays
from shoal.spec import Discrete, UserError


def built() -> bool:
    try:
        return library() is not None
    except UserError:
        return False


BUILT = built()
needs_football = pytest.mark.skipif(not BUILT, reason="football is not built: make football")

LEFT, TOP, RIGHT, BOTTOM, SHOT = 1, 3, 5, 7, 12
ELEVEN = [  # scenario, agents on the left, steps
    ("academy_empty_goal_close", 1, 400),
    ("academy_empty_goal", 1, 400),
    ("academy_run_to_score", 1, 400),
    ("academy_run_to_score_with_keeper", 1, 400),
    ("academy_single_goal_versus_lazy", 1, 3000),
    ("academy_3_vs_1_with_keeper", 3, 400),
    ("1_vs_1_easy", 1, 500),
    ("3_vs_3_custom", 3, 500),
    ("5_vs_5", 4, 3000),
    ("11_vs_11_stochastic", 1, 3000),
    ("test_example_multiagent", 3, 100),
]


class Play:
    """A row and what it writes to."""

    def __init__(self, id: str, **settings: Any):
        self.row = FootballRow(Football.Config(id=id, **settings))
        self.groups = [g.name for g in self.row.spec.groups]
        self.out = Slots(self.row.spec, arrays(self.row, 1), 0, "now")

    def reset(self, seed: int) -> Play:
        self.row.reset(seed, self.out)
        return self

    def step(self, *actions: Any) -> bool:
        """One action for all of a group, or one each; groups in order, the last for those that follow."""
        self.out.clear()
        spec = self.row.spec
        taken = {g.name: np.broadcast_to(actions[min(k, len(actions) - 1)], g.n) for k, g in enumerate(spec.groups)}
        return self.row.step(taken, self.out)

    def stats(self) -> dict[str, float]:
        return dict(zip(self.row.spec.stats, self.out._stats.tolist(), strict=True))

    def shoot(self, seed: int = 3) -> int:
        """Run, shoot, wait: scores in academy_empty_goal_close. The other side stands still. Steps until it is over."""
        self.reset(seed)
        for t in range(1, 100):
            if self.step(SHOT if t > 5 else RIGHT, 0):
                return t
        raise AssertionError("no end")

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        self.row.close()


# --- without the library ---------------------------------------------------------------------------------------------


def test_names_are_known_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gfootball", None)
    assert "3_vs_3_custom" in scenarios()
    assert scenarios() == sorted(NAMES)
    assert claims("academy_corner")
    assert not claims("academy_corners")
    assert not claims("CartPole-v1")
    library.cache_clear()
    with pytest.raises(UserError, match=r"football is not installed: `make football` builds it \(about four minutes\)\."):
        Football.row(Football.Config())


def test_scenarios_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"no scenario 'academy_empty_gaol' \(did you mean 'academy_empty_goal'"):
        Football.row(Football.Config(id="academy_empty_gaol"))
    with pytest.raises(UserError, match=r"no scenario 'chess'; it has 11_vs_11_competition, .*, test_example_multiagent\.$"):
        Football.row(Football.Config(id="chess"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"left": -1}, "--env.left is -1"),
        ({"right": -2}, "--env.right is -2"),
        ({"left": 0}, "somebody has to play"),
        ({"horizon": 0}, "--env.horizon is 0"),
        ({"workers": -1}, "--env.workers is -1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Football.Config(**settings)


# --- numbers by hand -------------------------------------------------------------------------------------------------


def at(x: float, y: float, owner: int = -1) -> dict[str, Any]:
    return {"ball": np.array([x, y, 0.1]), "ball_owned_team": owner, "ball_owned_player": 2, "active": 2}


@pytest.mark.parametrize(
    ("x", "y", "f"),
    [
        (0.8, 0.1, 0.7),  # x - |y|
        (0.8, -0.1, 0.7),
        (0.8, 0.42, 0.4),  # x / 2
        (-0.8, 0.1, -0.7),  # x + |y|
        (-0.8, -0.42, -0.4),  # x / 2
        (0.0, 0.3, 0.0),
        (1.0, 0.0, 1.0),
    ],
)
def test_the_place_of_the_ball(x: float, y: float, f: float) -> None:
    assert place(at(x, y)) == pytest.approx(f)
    assert by_ball(at(x, y), 1.0) == pytest.approx(0.1 * f)  # whatever the reward


@pytest.mark.parametrize(
    ("owner", "reward", "learner_reward"),
    [
        (-1, 0, 0.175),  # 0.7 / 4
        (0, 0, 0.425),  # (0.7 + 1) / 4
        (1, 0, -0.075),  # (0.7 - 1) / 4
        (0, 1, 0.925),  # (0.7 + 1 + 2) / 4
        (1, -1, -0.575),  # (0.7 - 1 - 2) / 4
    ],
)
def test_possession(owner: int, reward: float, learner_reward: float) -> None:
    assert reward + by_possession(at(0.8, 0.1, owner), reward) == pytest.approx(learner_reward)


def test_checkpoints_by_hand() -> None:
    """Rings of radius 0.99, 0.901..., down to 0.19."""
    assert rings(at(0.0, 0.0, 0), 0, 0) == 0  # a whole unit away
    assert rings(at(0.02, 0.0, 0), 0, 0) == 1
    assert rings(at(0.5, 0.0, 0), 0, 0) == 6  # 0.5 <= 0.99 - 0.0889 * 5 = 0.546; 0.457 for the next
    assert rings(at(0.5, 0.0, 0), 0, 6) == 6  # once each
    assert rings(at(0.5, 0.0, 0), 0, 8) == 8
    assert rings(at(0.82, 0.0, 0), 0, 0) == 10
    assert rings(at(0.82, 0.3, 0), 0, 0) == 8  # 0.350 <= 0.99 - 0.0889 * 7 = 0.368; 0.279 for the next
    assert rings(at(0.82, 0.0, 1), 0, 3) == 3  # theirs
    assert rings(at(0.82, 0.0, -1), 0, 3) == 3  # nobody's
    assert rings({**at(0.82, 0.0, 0), "active": 1}, 0, 3) == 3  # a mate's
    assert rings(at(-0.9, 0.0, -1), 1, 3) == 10  # a goal: all that are left
    assert rings(at(-0.9, 0.0, -1), -1, 3) == 3


# --- the scenarios ---------------------------------------------------------------------------------------------------


@needs_football
@pytest.mark.parametrize(("id", "left", "steps"), ELEVEN)
def test_scenarios_step(id: str, left: int, steps: int) -> None:
    with Play(id) as play:
        spec = play.row.spec
        assert play.row.core is None  # a row that nobody has reset has no engine
        (group,) = spec.groups
        assert (group.name, group.team, group.obs, group.action) == ("agents", "left", (115,), Discrete(19))
        assert group.agents == tuple(f"left_{i}" for i in range(left))
        assert (spec.horizon, spec.state, spec.common) == (steps, 104, True)
        play.reset(1)
        obs = play.out.obs["agents"]
        first = obs.copy()
        for _ in range(8):
            assert not play.step(RIGHT)
            assert play.out.terminated["agents"].tolist() == [False] * left
        assert np.isfinite(obs).all()
        assert (obs != first).any()


@needs_football
def test_names_are_those_of_gfootball() -> None:
    library()
    from gfootball.env import scenario_builder

    assert sorted(NAMES) == scenarios() == sorted({*scenario_builder.all_scenarios(), "3_vs_3_custom"} - {"tests"})


@needs_football
def test_customary_numbers_can_be_played() -> None:
    for id in NAMES:
        row = FootballRow(Football.Config(id=id))
        assert row.spec["agents"].n == football.CUSTOMARY.get(id, 1)


@needs_football
def test_more_players_than_there_are() -> None:
    with pytest.raises(UserError, match=r"--env.left is 5: 5_vs_5 has 4 on the left"):
        FootballRow(Football.Config(id="5_vs_5", left=5))
    with pytest.raises(UserError, match=r"--env.right is 2: 1_vs_1_easy has 1 on the right"):
        FootballRow(Football.Config(id="1_vs_1_easy", right=2))


@needs_football
def test_ours_is_three_a_side_and_kicks_off_by_turns() -> None:
    with Play("3_vs_3_custom", right=3, representation="raw") as play:
        kicks = []
        for seed in (0, 2):  # the second bit decides
            play.reset(seed)
            obs = play.out.obs["left"]
            players = obs[0, : 22 * 18].reshape(2, 11, 18)
            assert players[:, :, 0].sum(1).tolist() == [3, 3]
            assert players[:, 0, 8].tolist() == [1, 1]  # keepers
            assert obs[:, 396:407].tolist() == np.eye(3, 11).tolist()  # who is who
            kicks.append([abs(x) < 0.01 for x in players[:, 1, 1]])  # whose forward is at the ball
        assert kicks == [[False, True], [True, False]]


# --- two sides -------------------------------------------------------------------------------------------------------


@needs_football
def test_groups_of_two_sides_and_of_the_right_alone() -> None:
    both = FootballRow(Football.Config(id="5_vs_5", left=2, right=4)).spec
    assert [(g.name, g.team, g.n) for g in both.groups] == [("left", "left", 2), ("right", "right", 4)]
    assert both["right"].agents == ("right_0", "right_1", "right_2", "right_3")
    alone = FootballRow(Football.Config(id="5_vs_5", left=0, right=3)).spec
    assert [(g.name, g.team, g.agents[0]) for g in alone.groups] == [("agents", "right", "right_0")]


@needs_football
def test_each_side_sees_itself_play_from_the_left() -> None:
    with Play("5_vs_5", right=4) as play:
        play.reset(4)
        for _ in range(12):
            play.step([RIGHT, LEFT, TOP, 0], [RIGHT, RIGHT, 0, BOTTOM])
        (left, right), state = (play.out.obs[g] for g in play.groups), play.out.state
        mine, theirs = slice(0, 10), slice(44, 54)  # places of five
        assert right[0, mine] == pytest.approx(-left[0, theirs])
        assert right[0, theirs] == pytest.approx(-left[0, mine])
        assert right[0, 88:90] == pytest.approx(-left[0, 88:90])  # the ball
        assert right[0, 90] == pytest.approx(left[0, 90])  # its height
        assert right[0, [94, 95, 96]].tolist() == left[0, [94, 96, 95]].tolist()  # whose it is
        assert left[0, 22 + 2] > 0.001  # who was told to run right runs right in its own eyes
        assert right[0, 22 + 2] > 0.001
        assert left[1, 22 + 4] < -0.001
        assert state.tolist() == np.delete(left[0], range(97, 108)).tolist()


@needs_football
def test_a_goal_pays_both_sides() -> None:
    with Play("academy_empty_goal_close", left=1, right=1) as play:
        play.shoot()
        assert play.out.reward["left"].tolist() == [1.0]
        assert play.out.reward["right"].tolist() == [-1.0]
        assert play.out.terminated["left"].all()
        assert play.out.terminated["right"].all()
        assert play.stats() == {"success": 1.0, "goal_difference": 1.0}  # the left team's


@needs_football
def test_the_right_alone_reckons_its_own_goals() -> None:
    """Nobody but the right's agent moves by our will, and it stands still: gfootball's own left player scores."""
    with Play("academy_empty_goal_close", left=0, right=1, rewards="scoring,checkpoints") as play:
        play.reset(3)
        total = 0.0
        for _ in range(399):
            over = play.step(0)
            total += float(play.out.reward["agents"][0])
            if over:
                break
        assert play.out.terminated["agents"].all()
        assert total == -1.0
        assert play.stats() == {"success": 0.0, "goal_difference": -1.0}


@needs_football
@pytest.mark.parametrize(
    ("id", "left", "right", "seed"), [("5_vs_5", 4, 4, 4), ("5_vs_5", 4, 4, 5), ("academy_3_vs_1_with_keeper", 3, 1, 5)]
)
def test_all_as_gfootball_has_it(id: str, left: int, right: int, seed: int) -> None:
    """Its own environment beside ours, from the same seed with the same actions."""
    with Play(id, left=left, right=right) as play, Play(id, left=left, right=right, representation="extracted") as images:
        from gfootball.env import config, football_env, observation_preprocessing, wrappers

        play.reset(seed)
        images.reset(seed)
        own = config.Config(
            {
                "level": id,
                "players": [f"agent:left_players={left},right_players={right}"],
                "game_engine_random_seed": seed,
                "episode_number": -1,  # counted up when it is made
            }
        )
        env = football_env.FootballEnv(own)
        observation = env.reset()
        rng, compared = np.random.default_rng(0), 0
        for _ in range(30):
            vectors = wrappers.Simple115StateWrapper.convert_observation(observation, True)
            assert np.concatenate([play.out.obs[g] for g in play.groups]).tolist() == vectors.tolist()
            smm = np.moveaxis(observation_preprocessing.generate_smm(observation), 3, 1)
            seen = np.concatenate([images.out.obs[g] for g in play.groups])
            assert seen.dtype == np.uint8
            assert (seen == smm).all()
            mine = [o for side in play.row._seen(play.row.core.observation()).values() for o in side]
            for o, theirs in zip(mine, observation, strict=True):  # what a shaping function is given
                assert o.keys() == theirs.keys()
                assert all(np.array_equal(o[k], theirs[k]) for k in o)
            compared += 1
            actions = rng.integers(0, 19, left + right)
            over = play.step(actions[:left], actions[left:])
            images.step(actions[:left], actions[left:])
            observation, reward, done, _ = env.step(actions)
            assert np.concatenate([play.out.reward[g] for g in play.groups]).tolist() == reward.tolist()
            assert over == done
            if done:
                break
        assert compared >= 15
        env.close()


# --- rewards and shaping ---------------------------------------------------------------------------------------------


@needs_football
def test_checkpoints_as_gfootball_has_them() -> None:
    """Its own wrapper over the same observations, from a run on the goal that scores: 1 and ten times 0.1 in all."""
    with Play("academy_empty_goal", rewards="scoring,checkpoints") as play:
        from gfootball.env.wrappers import CheckpointRewardWrapper

        assert not play.row.spec.common
        wrapper = CheckpointRewardWrapper.__new__(CheckpointRewardWrapper)
        wrapper._collected_checkpoints, wrapper._num_checkpoints, wrapper._checkpoint_reward = {}, 10, 0.1
        for seed in (1, 2):  # the second episode begins with none
            play.reset(seed)
            wrapper._collected_checkpoints = {}
            total, times, goals = 0.0, 0, 0.0
            for _ in range(399):
                near_goal = play.out.obs["agents"][0, 88] > 0.8
                over = play.step(SHOT if near_goal else RIGHT)
                seen = play.row._seen(play.row.core.observation())["left"]
                wrapper.env = SimpleNamespace(unwrapped=SimpleNamespace(observation=lambda seen=seen: seen))
                scored = np.array([seen[0]["score"][0] - goals], np.float32)
                goals = seen[0]["score"][0]
                reward = float(play.out.reward["agents"][0])
                assert reward == pytest.approx(float(wrapper.reward(scored)[0]), abs=1e-6)
                total += reward
                times += reward > 0
                if over:
                    break
            assert total == pytest.approx(2.0, abs=1e-5)
            assert times > 5


@needs_football
def test_shaping_is_added_to_the_reward_and_never_reported() -> None:
    for shape in ("ball", "ball+possession"):
        with Play("academy_empty_goal_close", left=1, right=1, shape=shape) as play:
            assert play.row.shapes
            assert play.row.spec.common
            play.reset(3)
            owners, signs = set(), set()
            for t in range(1, 100):
                over = play.step(SHOT if t > 5 else RIGHT, 0)
                for side in ("left", "right"):
                    x, y = play.out.obs[side][0, 88:90].astype(float)
                    f = max(x - abs(y), x / 2) if x > 0 else min(x + abs(y), x / 2)
                    ours, theirs = play.out.obs[side][0, 95:97]
                    owners.add((side, float(ours - theirs)))
                    signs.add((side, float(np.sign(f))))
                    r, extra = float(play.out.reward[side][0]), float(play.out.shaping[side][0])
                    assert r in (0.0, 1.0, -1.0)  # reported as it is
                    learner_reward = r + 0.1 * f if shape == "ball" else (f + ours - theirs + 2 * r) / 4
                    assert r + extra == pytest.approx(float(learner_reward), abs=1e-6)
                if over:
                    break
            assert {("left", 1.0), ("right", -1.0)} <= owners
            assert {("left", 1.0), ("right", -1.0)} <= signs
            assert play.out.reward["left"][0] == 1
    assert not FootballRow(Football.Config()).shapes


@needs_football
def test_a_function_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def height(seen, reward):\n    return seen['ball'][2] + 100 * reward + 1000 * seen['active']\n\nx = 3\n")
    with Play("academy_empty_goal_close", shape=f"{mine}:height") as play:
        assert not play.row.spec.common
        play.shoot()
        assert play.out.shaping["agents"][0] == pytest.approx(1100 + float(play.out.obs["agents"][0, 90]))
        assert play.out.reward["agents"].tolist() == [1.0]
    for shape, says in (
        ("bal", r"\(did you mean 'ball'\?\)"),
        (f"{mine}:heigth", "did you mean 'height'"),
        (f"{mine}:x", "which is no function"),
    ):
        with pytest.raises(UserError, match=says):
            FootballRow(Football.Config(shape=shape))


# --- episodes --------------------------------------------------------------------------------------------------------


@needs_football
def test_an_empty_goal_is_scored_in() -> None:
    with Play("academy_empty_goal_close") as play:
        play.reset(3)
        assert not play.step(0)
        assert play.stats() == {"success": 0.0, "goal_difference": 0.0}
        for seed in (3, 4):
            assert 10 < play.shoot(seed) < 40
            assert play.out.reward["agents"].tolist() == [1.0]
            assert play.out.terminated["agents"].tolist() == [True]
            assert play.stats() == {"success": 1.0, "goal_difference": 1.0}
            last = play.row.core.observation()  # the kick-off that follows, not the ball in the goal
            assert last["score"] == [1, 0]
            assert play.out.obs["agents"][0, 88:91] == pytest.approx(last["ball"])
            assert play.out.state[88:91] == pytest.approx(last["ball"])


@needs_football
def test_the_time_limit_truncates_and_a_goal_at_that_very_step_terminates() -> None:
    with Play("academy_empty_goal_close") as play:
        goal = play.shoot()
    for horizon, terminated in ((goal - 1, False), (goal, True)):
        with Play("academy_empty_goal_close", horizon=horizon, representation="raw") as play:
            assert play.row.spec.horizon == horizon
            play.reset(3)
            left = 396 + 11 + 12 + 2
            assert play.out.obs["agents"][0, left] == 1
            assert play.shoot() == horizon
            assert play.out.obs["agents"][0, left] == 0
            assert play.out.terminated["agents"].tolist() == [terminated]
            assert play.out.reward["agents"].tolist() == [float(terminated)]


@needs_football
def test_a_lost_ball_terminates() -> None:
    with Play("academy_3_vs_1_with_keeper") as play:
        play.reset(1)
        for _ in range(399):
            if play.step(RIGHT):
                break
        assert play.out.terminated["agents"].all()
        assert play.out.reward["agents"].tolist() == [0.0] * 3
        assert play.stats()["success"] == 0


@needs_football
@pytest.mark.parametrize(("horizon", "steps"), [(None, 500), (510, 510)])
def test_an_episode_lasts_as_long_as_it_says(horizon: int | None, steps: int) -> None:
    with Play("1_vs_1_easy", horizon=horizon) as play:
        play.reset(0)
        overs = [play.step(0) for _ in range(steps)]
        assert overs == [False] * (steps - 1) + [True]
        assert not play.out.terminated["agents"].any()


@needs_football
def test_seeds_repeat_whatever_was_played_before() -> None:
    def episode(play: Play, seed: int) -> list[list[float]]:
        play.reset(seed)
        rng, seen = np.random.default_rng(seed), []
        for _ in range(40):
            seen.append([*play.out.obs["agents"].ravel().tolist(), *play.out.reward["agents"].tolist()])
            if play.step(rng.integers(0, 19, 3)):
                break
        return seen

    for id in ("academy_3_vs_1_with_keeper", "3_vs_3_custom"):
        with Play(id, left=3) as play, Play(id, left=3) as other:
            five, huge = episode(play, 5), episode(play, 2**30 - 2)
            assert five != huge
            assert [len(five) > 10, len(huge) > 10] == [True, True]
            episode(play, 6)
            assert episode(play, 5) == five
            assert episode(other, 2**30 - 2) == huge
            assert episode(other, 5) == five
            play.row.close()
            assert episode(play, 5) == five  # closed, and begun again


@needs_football
def test_raw_is_what_it_says() -> None:
    with Play("academy_3_vs_1_with_keeper", representation="raw") as play:
        assert play.row.spec["agents"].obs == (439,)
        play.reset(1)
        for _ in range(3):
            play.step([RIGHT, TOP, 13])
        o, obs = play.row.core.observation(), play.out.obs["agents"]
        mates, opponents = obs[0, :198].reshape(11, 18), obs[0, 198:396].reshape(11, 18)
        assert mates[:4, 0].tolist() == [1, 1, 1, 1]
        assert not mates[4:].any()
        assert opponents[:2, 0].tolist() == [1, 1]
        assert not opponents[2:].any()
        assert mates[:4, 1:3] == pytest.approx(o["left_team"])
        assert mates[:4, 3:5] == pytest.approx(o["left_team_direction"])
        assert opponents[:2, 1:3] == pytest.approx(o["right_team"])
        assert mates[:4, 5] == pytest.approx(o["left_team_tired_factor"])
        assert not mates[:, 6].any()
        assert mates[:4, 7].tolist() == [0, 1, 0, 0]  # has the ball
        assert not opponents[:, 7].any()
        assert mates[:4, 8:].argmax(1).tolist() == [0, 5, 5, 5]
        assert opponents[:2, 8:].argmax(1).tolist() == [0, 1]
        assert obs[:, 396:407].argmax(1).tolist() == [1, 2, 3]
        assert obs[0, 407:416] == pytest.approx(np.concatenate([o["ball"], o["ball_direction"], o["ball_rotation"]]))
        assert obs[0, 416:419].tolist() == [0, 1, 0]
        assert obs[0, 419:422] == pytest.approx([0, 0, 397 / 400])
        assert obs[0, 422:429].tolist() == [1, 0, 0, 0, 0, 0, 0]
        assert obs[:, 429:].tolist() == [one_of(4), one_of(2), one_of(8)]  # right, top, sprint
        blocks = play.row.spec["agents"].layout
        assert [(b.entity, b.start, b.count, b.width) for b in blocks] == [
            ("mate", 0, 11, 18),
            ("opponent", 198, 11, 18),
            ("mate", 396, 11, 1),
        ]


def one_of(k: int) -> list[float]:
    return [float(i == k) for i in range(10)]


@needs_football
def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    for replays, files in ((None, 0), (str(tmp_path / "some" / "where"), 1)):
        with Play("academy_empty_goal_close", replays=replays) as play:
            play.shoot()
        assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == files
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--env.replays is .*, which cannot be made"):
        FootballRow(Football.Config(replays=str(tmp_path / "file")))


@needs_football
def test_no_gym_is_needed() -> None:
    code = """
import sys
sys.modules["gym"] = None  # not to be had
import numpy as np
from shoal.envs.football import Football
from shoal.envs.rows import Slots, arrays
row = Football.row(Football.Config())
out = Slots(row.spec, arrays(row, 1), 0, "now")
row.reset(0, out)
row.step({"agents": np.array([5])}, out)
assert sys.modules["gym"] is None and "gym.envs" not in sys.modules
print("played", out.obs["agents"].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "played (1, 115)\n", done.stderr
    assert done.stderr == ""


# --- in the framework ------------------------------------------------------------------------------------------------


@needs_football
@pytest.mark.parametrize("id", ["football/academy_empty_goal_close", "academy_empty_goal_close"])
def test_it_is_made_by_its_name(id: str) -> None:
    env = shoal.make(id, rows=2, workers=0, right=1, horizon=6)
    frame = env.reset(torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64))
    assert frame["right"].obs.shape == (2, 1, 115)
    assert frame.state is not None
    assert frame.state.shape == (2, 104)
    for t in range(6):
        outcome = env.step({g: torch.full((2, 1), RIGHT) for g in ("left", "right")}, torch.full((2, env.noise), 0.5 + t / 100))
    assert outcome.over.tolist() == [True, True]
    assert not outcome.results["left"].terminated.any()
    assert outcome.next["left"].obs[0, 0, 2] > outcome.frame["left"].obs[0, 0, 2]  # ran; and begins again
    assert outcome.stats["success"].tolist() == [0, 0]
    env.close()


@needs_football
def test_what_a_row_saw_is_found_again() -> None:
    """Rows in workers: played again from their seeds and actions, they stand where they stood."""
    env = shoal.make("football/5_vs_5", rows=2, workers=1, right=4)
    env.reset(torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64))
    for t in range(10):
        actions = {g: torch.arange(8).reshape(2, 4) + t for g in ("left", "right")}
        frame = env.step(actions, torch.full((2, env.noise), 0.5)).frame
    again = env.set_state(env.get_state())
    assert torch.equal(again["left"].obs, frame["left"].obs)
    assert torch.equal(again["right"].obs, frame["right"].obs)
    assert env.news == []
    env.close()


@needs_football
def test_it_is_trained_on(tmp_path: Path) -> None:
    run = shoal.train(
        "mappo",
        "football/academy_3_vs_1_with_keeper",
        steps=100,
        envs=2,
        seed=0,
        out=str(tmp_path / "run"),
        quiet=True,
        env={"workers": 0, "horizon": 20, "shape": "ball", "representation": "raw"},
        net={"attention": "both"},
        eval={"episodes": 1},
    )
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 100
    assert last["return/agents"] == 0.0  # nobody scores, and shaping is not reported
    assert last["success"] == 0.0


@needs_football
@pytest.mark.slow
def test_a_picture_is_drawn_and_play_stays_the_same() -> None:
    """In a process of its own, for one that draws is never given back."""
    code = """
import numpy as np
from shoal.envs.football import Football
from shoal.envs.rows import Slots, arrays
played = {}
for drawn in (False, True):
    rows = [Football.row(Football.Config(id="academy_3_vs_1_with_keeper"), drawn) for _ in range(2)]
    outs = [Slots(row.spec, arrays(row, 1), 0, "now") for row in rows]
    for episode in range(2):
        for row, out in zip(rows, outs):
            row.reset(5, out)
            for t in range(6):
                row.step({"agents": np.array([5, 12, 3])}, out)
                picture = row.picture()
                if not drawn or row is rows[1]:
                    assert picture is None
                else:
                    assert picture.shape == (720, 1280, 3) and picture.dtype == np.uint8
                    red, green, blue = picture[200:600].reshape(-1, 3).mean(0)
                    assert green > red > blue, (red, green, blue)  # grass in the sun
        played[drawn, episode] = [out.obs["agents"].tolist() for out in outs]
    for row in rows:
        row.close()
assert len({str(x) for x in played.values()}) == 1
print("drawn")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("drawn\n"), done.stderr
