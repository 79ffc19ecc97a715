"""Google Research Football (Kurach et al., 2020): `football/academy_3_vs_1_with_keeper`, or a scenario's bare name.

    shoal train mappo football/academy_3_vs_1_with_keeper --env.rewards scoring,checkpoints
    shoal train mappo football/5_vs_5 --env.right 4 --env.shape ball

`make football` builds gfootball 2.10.2. Beside its scenarios there is `3_vs_3_custom`: a keeper and two players a side, all of
whom can be played, kick-off in the middle by turns, 500 steps that goals do not end.

**Who plays.** `left` and `right` players of the two teams, a group each, `left` and `right`; where only one team is played its
group is called `agents`. All others are gfootball's own. Customary on the left are an academy's attackers (3 in
3_vs_1, 2 in pass_and_shoot, 4 in counterattack, 10 in corner), 4 in 5_vs_5, 3 in 3_vs_3_custom, else 1. With fewer agents than
players an agent may change from player to player, as gfootball decides; which one it is now is in the observation. Everybody
sees the pitch as if playing from left to right, the others' half on the right, and moves accordingly.

**Actions.** 0 idle; run 1 left, 2 top left, 3 top, 4 top right, 5 right, 6 bottom right, 7 bottom, 8 bottom left; 9 long pass,
10 high pass, 11 short pass, 12 shot; 13 sprint; 14 stop running, 15 stop sprinting; 16 slide; 17 dribble, 18 stop dribbling.

**Observations**, by `representation`. Mates are the own team with oneself in it. 11 players a team have a place, though there
may be fewer.

    simple115v2   [115] x y of mates, their motion, x y of opponents, their motion (22 each, -1 where there is nobody), the
                  ball's x y z, its motion (3), whose it is (nobody, ours, theirs), which mate one is (11), game mode (7)
    extracted     [4, 72, 96] bytes, 255 at mates, opponents, the ball, oneself
    raw           [439] for each of 11 mates, then of 11 opponents: on the pitch or not, x, y, motion (2), tiredness, yellow
                  card, has the ball, role (10); zeros where there is nobody. Then which mate one is (11), the ball's x y z, its
                  motion (3), its rotation (3), whose it is (3), goals of ours and theirs, the share of the episode that is
                  left, game mode (7), the actions that last: eight directions, sprint, dribble (10)

The world's own state, for central critics, is simple115v2 without which mate one is [104], as the left team sees it, or the
only one that is played.

**Rewards.** `scoring`: 1 for a goal of ours, -1 for theirs. `scoring,checkpoints` adds 0.1 for each of ten rings round their
goal that a player carries the ball into for the first time, and for those that are left when we score, as gfootball's
CheckpointRewardWrapper does. Players of a team are then paid differently: mixers learn from their mean.

**Shaping** is paid and never reported. x and y are the ball's place, r is the reward:

    f = max(x - |y|, x / 2) for x > 0, else min(x + |y|, x / 2)
    ball              0.1 f beside the reward
    ball+possession   (f + ours - theirs + 2 r) / 4 in the reward's stead; ours, theirs: 1 where that team has the ball

A function of one's own (`--env.shape mine.py:name`) takes a player's raw observation, the dict of gfootball's documentation as
that player sees it, and its reward, and returns what is paid beside the reward.

**Ends.** Goals, a lost ball and a ball out of play terminate where the scenario says so; the time limit truncates, after
exactly as many steps as the scenario says (gfootball itself plays one more). `success` is 1 where the left team, or the only
one that is played, scored more; `goal_difference` says how many more. What is seen after a goal is the kick-off that
follows. The same seed and actions repeat exactly: the seed also decides who kicks off and which team is reckoned first.

Pictures are drawn off-screen, of one row a process; others have none.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np

from shoal.envs.rows import Row, Slots
from shoal.envs.vector import Host, HostConfig
from shoal.ids import near, own_object
from shoal.spec import Discrete, EnvSpec, Group, Shape, UserError
from shoal.spec import Slots as Block

Raw = dict[str, Any]  # what gfootball says of the pitch, as one player sees it
Shaper = Callable[[Raw, float], float]

NAMES = """
11_vs_11_competition 11_vs_11_easy_stochastic 11_vs_11_hard_stochastic 11_vs_11_kaggle 11_vs_11_stochastic 1_vs_1_easy
3_vs_3_custom 5_vs_5 academy_3_vs_1_with_keeper academy_corner academy_counterattack_easy academy_counterattack_hard
academy_empty_goal academy_empty_goal_close academy_pass_and_shoot_with_keeper academy_run_pass_and_shoot_with_keeper
academy_run_to_score academy_run_to_score_with_keeper academy_single_goal_versus_lazy test_example_multiagent
""".split()
CUSTOMARY = {  # agents on the left; the others have one
    "3_vs_3_custom": 3,
    "5_vs_5": 4,
    "academy_3_vs_1_with_keeper": 3,
    "academy_corner": 10,
    "academy_counterattack_easy": 4,
    "academy_counterattack_hard": 4,
    "academy_pass_and_shoot_with_keeper": 2,
    "academy_run_pass_and_shoot_with_keeper": 2,
    "test_example_multiagent": 3,
}
EACH = 11  # places for players of a team
ROLES, MODES = 10, 7
PLAYER = 8 + ROLES  # numbers of `raw` for a player
RINGS = 10  # checkpoints
SEEDS = 1 << 31  # that the engine knows


# --- the library -----------------------------------------------------------------------------------------------------


@cache
def library() -> SimpleNamespace:
    """The modules of gfootball that are used here; no game is started by this."""
    if importlib.util.find_spec("gfootball") is None:
        raise UserError("football is not installed: `make football` builds it (about four minutes).")
    try:
        with gym_for_a_while():
            from gfootball.env import config, football_env_core, observation_preprocessing, observation_rotation
    except ImportError as e:
        raise UserError(f"football cannot be loaded ({e}): `make football` builds it (about four minutes).") from e
    logging.getLogger("absl").setLevel(logging.ERROR)  # a line an episode
    ours = ModuleType("gfootball.scenarios.3_vs_3_custom")
    vars(ours)["build_scenario"] = three_vs_three
    sys.modules[ours.__name__] = ours
    return SimpleNamespace(config=config, core=football_env_core, maps=observation_preprocessing, rotation=observation_rotation)


@contextmanager
def gym_for_a_while() -> Iterator[None]:
    """Where there is no `gym`, a stand-in while gfootball is imported: it wants its base classes, and to register itself."""
    names = ("gym", "gym.envs", "gym.envs.registration")
    if importlib.util.find_spec("gym") is not None:
        yield
        return
    gym, envs, registration = (ModuleType(name) for name in names)
    vars(gym).update(dict.fromkeys(("Env", "Wrapper", "ObservationWrapper", "RewardWrapper"), object), envs=envs)
    vars(registration)["register"] = lambda **_: None
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(zip(names, (gym, envs, registration), strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def scenarios() -> list[str]:
    """All names: gfootball's, those that somebody put beside them, and ours."""
    found = importlib.util.find_spec("gfootball")
    folders = (found.submodule_search_locations if found else None) or ()
    beside = {path.stem for folder in folders for path in Path(folder, "scenarios").glob("*.py")} - {"__init__"}
    return sorted({*NAMES, *beside})


def claims(id: str) -> bool:
    return id in scenarios()


names = scenarios


def three_vs_three(builder: Any) -> None:
    """A keeper and two players a side, who kick off by turns; built as 5_vs_5 is."""
    from gfootball.scenarios import Team, e_PlayerRole_CF, e_PlayerRole_CM, e_PlayerRole_GK

    game = builder.config()
    game.game_duration, game.deterministic = 500, False
    game.left_team_difficulty = game.right_team_difficulty = 0.05
    teams = (Team.e_Left, Team.e_Right) if builder.EpisodeNumber() % 2 == 0 else (Team.e_Right, Team.e_Left)
    for team, x in zip(teams, (0.0, -0.05), strict=True):
        builder.SetTeam(team)
        builder.AddPlayer(-1.0, 0.0, e_PlayerRole_GK)
        builder.AddPlayer(x, 0.02, e_PlayerRole_CF)
        builder.AddPlayer(-0.15, -0.1, e_PlayerRole_CM)


# --- what players see ------------------------------------------------------------------------------------------------


def one_hot(k: int, n: int) -> np.ndarray:
    """All zeros for -1."""
    return (np.arange(n) == k).astype(np.float32)


def pitch(o: Raw) -> tuple[np.ndarray, np.ndarray]:
    """What comes before and after the active player in simple115v2: [97] and [7]."""
    teams = np.full((4, 2 * EACH), -1.0)
    for row, name in zip(teams, ("left_team", "left_team_direction", "right_team", "right_team_direction"), strict=True):
        row[: o[name].size] = o[name].ravel()
    before = (teams.ravel(), o["ball"], o["ball_direction"], one_hot(o["ball_owned_team"] + 1, 3))
    return np.concatenate(before), one_hot(o["game_mode"], MODES)


def simple115(seen: list[Raw], horizon: int) -> np.ndarray:
    before, after = pitch(seen[0])
    return np.stack([np.concatenate((before, one_hot(o["active"], EACH), after)) for o in seen])


def extracted(seen: list[Raw], horizon: int) -> np.ndarray:
    return np.moveaxis(library().maps.generate_smm(seen), -1, 1)  # [N, H, W, C] -> [N, C, H, W]


def raw(seen: list[Raw], horizon: int) -> np.ndarray:
    o = seen[0]
    teams = np.zeros((2, EACH, PLAYER))
    for k, name in enumerate(("left_team", "right_team")):
        n = len(o[name])
        owner = one_hot(o["ball_owned_player"] if o["ball_owned_team"] == k else -1, n)
        parts = [o[f"{name}_active"], o[name], o[f"{name}_direction"], o[f"{name}_tired_factor"], o[f"{name}_yellow_card"]]
        teams[k, :n] = np.column_stack([*parts, owner, np.eye(ROLES)[o[f"{name}_roles"]]])
    balls = (o["ball"], o["ball_direction"], o["ball_rotation"], one_hot(o["ball_owned_team"] + 1, 3))
    game = (o["score"], [steps_left(o) / horizon], one_hot(o["game_mode"], MODES))
    return np.stack(
        [np.concatenate((teams.ravel(), one_hot(o["active"], EACH), *balls, *game, o["sticky_actions"])) for o in seen]
    )


def steps_left(o: Raw) -> int:
    return o["steps_left"] - 1  # gfootball plays one step more than the scenario says


PLACES = (("mate", 0, 2), ("mate", 22, 2), ("opponent", 44, 2), ("opponent", 66, 2), ("mate", 97, 1))
RECORDS = (("mate", 0, PLAYER), ("opponent", EACH * PLAYER, PLAYER), ("mate", 2 * EACH * PLAYER, 1))
VIEWS: dict[str, tuple[Callable[[list[Raw], int], np.ndarray], Shape, tuple[tuple[str, int, int], ...]]] = {
    "simple115v2": (
        simple115,
        (115,),
        PLACES,
    ),  # how it is made, its shape, which numbers are players: from where, how many each
    "extracted": (extracted, (4, 72, 96), ()),
    "raw": (raw, (439,), RECORDS),
}


# --- what they are paid ----------------------------------------------------------------------------------------------


def rings(o: Raw, reward: float, had: int) -> int:
    """Checkpoints that a player has after a step, of which it had so many before."""
    if reward == 1:
        return RINGS
    if o["ball_owned_team"] == 0 and o["ball_owned_player"] == o["active"]:
        distance = ((o["ball"][0] - 1) ** 2 + o["ball"][1] ** 2) ** 0.5
        while had < RINGS and distance <= 0.99 - 0.8 / (RINGS - 1) * had:
            had += 1
    return had


def place(o: Raw) -> float:
    """f(x, y): from -1 where the ball is in our goal to 1 in theirs."""
    x, y = o["ball"][0], abs(o["ball"][1])
    return float(max(x - y, x / 2) if x > 0 else min(x + y, x / 2))


def by_ball(o: Raw, reward: float) -> float:
    return 0.1 * place(o)


def by_possession(o: Raw, reward: float) -> float:
    owner = o["ball_owned_team"]
    return (place(o) + (owner == 0) - (owner == 1) + 2 * reward) / 4 - reward


SHAPES: dict[str, Shaper | None] = {"none": None, "ball": by_ball, "ball+possession": by_possession}


def shaper(text: str) -> Shaper | None:
    if text in SHAPES:
        return SHAPES[text]
    if ":" not in text:
        raise UserError(
            f"--env.shape is {text!r}{near(text, SHAPES)}: it takes {', '.join(SHAPES)} or a function of yours as file.py:name."
        )
    function = own_object(text, "--env.shape")
    if not callable(function):
        raise UserError(f"--env.shape is {text!r}, which is no function.")
    return function


# --- the row ---------------------------------------------------------------------------------------------------------


class FootballRow(Row):
    def __init__(self, config: Any, drawn: bool = False):
        if config.id not in (names := scenarios()):
            close = near(config.id, names)
            raise UserError(f"football has no scenario {config.id!r}{close or '; it has ' + ', '.join(names)}.")
        self.config, self.drawn, self.core = config, drawn, None  # type: Any, bool, Any
        self.shaper = shaper(config.shape)
        self.shapes = self.shaper is not None
        wanted = {"left": CUSTOMARY.get(config.id, 1) if config.left == "auto" else config.left, "right": config.right}
        self.settings = library().config.Config(
            {
                "level": config.id,
                "players": [f"agent:left_players={wanted['left']},right_players={wanted['right']}"],
                "tracesdir": folder(config.replays),
                "dump_full_episodes": config.replays is not None,
                "game_engine_random_seed": 0,
            }
        )
        scenario = self.settings.ScenarioConfig()
        self.horizon = config.horizon or scenario.game_duration
        self._set_duration()
        for side, n in wanted.items():
            if n > (most := getattr(scenario, f"controllable_{side}_players")):
                raise UserError(f"--env.{side} is {n}: {config.id} has {most} on the {side} that can be played.")
        sides = [side for side, n in wanted.items() if n]
        self.sides = {side: side if len(sides) == 2 else "agents" for side in sides}  # -> its group
        self.see, shape, blocks = VIEWS[config.representation]
        layout = tuple(Block(entity, start, EACH, width) for entity, start, width in blocks)
        groups = tuple(
            Group(group, side, tuple(f"{side}_{i}" for i in range(wanted[side])), shape, Discrete(19), layout)
            for side, group in self.sides.items()
        )
        alike = config.rewards == "scoring" and config.shape in SHAPES
        stats = {"success": "last", "goal_difference": "last"}
        self.spec = EnvSpec(groups, state=104, common=alike, horizon=self.horizon, stats=stats)

    def _set_duration(self) -> None:
        """Have every scenario that is built from now on last as long as we say."""
        build = self.settings.NewScenario

        def built(inc: int = 1) -> None:
            build(inc)
            self.settings.ScenarioConfig().game_duration = self.horizon

        self.settings.NewScenario = built

    def reset(self, seed: int, out: Slots) -> None:
        if self.core is None:
            self.core = library().core.FootballEnvCore(self.settings)
            self.draws = self.drawn and not library().core._active_rendering
            if self.draws:
                self._draw()
        self.settings["game_engine_random_seed"] = seed % SEEDS
        self.settings["reverse_team_processing"] = bool(seed & 1)
        self.settings["episode_number"] = seed >> 1 & 1  # scenarios that kick off by turns go by it
        self.core.reset()
        self.rings = {group.name: [0] * group.n for group in self.spec.groups}
        self._write(self._seen(self.core.observation()), out)

    def step(self, actions: dict[str, np.ndarray], out: Slots) -> bool:
        turned = library().rotation.flip_single_action
        moves = [
            int(a) if side == "left" else turned(int(a), self.settings)
            for side, group in self.sides.items()
            for a in actions[group]
        ]
        o, scored, ended, _ = self.core.step(moves)
        seen = self._seen(o)
        self._write(seen, out)
        for side, group in self.sides.items():
            out.terminated[group][:] = ended  # never by time: gfootball's own limit is a step beyond ours
            for i, mine in enumerate(seen[side]):
                reward = float(scored if side == "left" else -scored)
                if self.config.rewards != "scoring":
                    had, self.rings[group][i] = self.rings[group][i], rings(mine, reward, self.rings[group][i])
                    reward += 0.1 * (self.rings[group][i] - had)
                out.reward[group][i] = reward
                if self.shaper is not None:
                    out.shaping[group][i] = self.shaper(mine, reward)
        ours, theirs = next(iter(seen.values()))[0]["score"]
        out.stat("success", ours > theirs)
        out.stat("goal_difference", ours - theirs)
        return bool(ended or steps_left(o) <= 0)

    def _seen(self, o: Raw) -> dict[str, list[Raw]]:
        """Side -> what each of its agents sees."""
        seen = {}
        for side in self.sides:
            view = o if side == "left" else library().rotation.flip_observation(o, self.settings)
            shared = {
                k: v for k, v in view.items() if not k.endswith(("_controlled_player", "_sticky_actions", "_designated_player"))
            }
            shared["designated"] = view["left_team_designated_player"]
            each = zip(view["left_agent_controlled_player"], view["left_agent_sticky_actions"], strict=True)
            seen[side] = [{**shared, "active": active, "sticky_actions": np.array(sticky)} for active, sticky in each]
        return seen

    def _write(self, seen: dict[str, list[Raw]], out: Slots) -> None:
        for side, group in self.sides.items():
            out.obs[group][...] = self.see(seen[side], self.horizon)
        assert out.state is not None
        out.state[...] = np.concatenate(pitch(next(iter(seen.values()))[0]))

    def picture(self) -> np.ndarray | None:
        if self.core is None or not self.draws:
            return None
        self.core.render("human")
        self.core.disable_render()
        return np.ascontiguousarray(self.core._observation["frame"])  # what `render` returns has red and blue exchanged

    def _draw(self) -> None:
        """Change over to an engine that draws. It falls over unless it is told so at every reset; then it draws on demand."""
        core = self.core
        with quiet():
            core.render("human")
        begin, game = core._reset, core._env.game_config

        def begun(animations: bool, inc: int) -> None:
            game.render = True
            begin(False, inc)
            game.render = False

        core._reset = begun

    def close(self) -> None:
        if self.core is not None:
            self.core.close()
            self.core = None


@contextmanager
def quiet() -> Iterator[None]:
    """What the engine prints by itself, that it has no screen, is dropped."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def folder(path: str | None) -> str:
    """Where gfootball may write; it wants such a place though it leaves nothing there unless told to."""
    if path is None:
        return tempfile.gettempdir()
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--env.replays is {path!r}, which cannot be made: {e}.") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"--env.replays is {path!r}, where nothing can be written.")
    return path


class Football(Host):
    rest: ClassVar[str] = "SCENARIO"

    @dataclass(frozen=True)
    class Config(HostConfig):
        id: str = "academy_empty_goal_close"  # scenario
        left: Literal["auto"] | int = "auto"  # players on the left that are played; auto: as many as is customary
        right: int = 0  # players on the right that are played; the others, and theirs, are gfootball's own
        representation: Literal["simple115v2", "extracted", "raw"] = "simple115v2"  # what they see
        rewards: Literal["scoring", "scoring,checkpoints"] = "scoring"  # what they are paid for
        shape: str = "none"  # paid beside that and never reported: none, ball, ball+possession, or a function's file.py:name
        horizon: int | None = None  # steps after which an episode is cut off; none: the scenario's own
        replays: str | None = None  # folder for gfootball's own record of every episode; none: nothing is written

        def __post_init__(self) -> None:
            HostConfig.__post_init__(self)
            for name in ("left", "right"):
                if (n := getattr(self, name)) != "auto" and n < 0:
                    raise UserError(f"--env.{name} is {n}: it takes a number of players.")
            if self.left == self.right == 0:
                raise UserError("--env.left and --env.right are 0: somebody has to play.")
            if self.horizon is not None and self.horizon < 1:
                raise UserError(f"--env.horizon is {self.horizon}: it must be at least 1.")

    @classmethod
    def row(cls, config: Any, drawn: bool = False) -> Row:
        return FootballRow(config, drawn)
