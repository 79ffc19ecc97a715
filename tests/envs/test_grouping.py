"""Agents to groups, and groups to teams: by names and spaces, and as the user says."""

from __future__ import annotations

import pytest

from shoal.envs.grouping import group_agents, stem, team_of_groups
from shoal.spec import UserError

WOLVES = {"wolf_0": 3, "wolf_1": 2, "wolf_2": 3, "sheep": 3}  # agent -> its spaces, here a number of choices


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adversary_0", "adversary"), ("agent12", "agent"), ("player-1", "player"), ("good_agent_3", "good_agent"), ("7", "7")],
)
def test_stem(name: str, expected: str) -> None:
    assert stem(name) == expected


def test_the_only_group_is_called_agents() -> None:
    assert group_agents("", ["walker_0", "walker_1"], {"walker_0": 3, "walker_1": 3}) == {"agents": ["walker_0", "walker_1"]}


def test_groups_by_stem_and_spaces() -> None:
    assert group_agents("", list(WOLVES), WOLVES) == {"wolf_0": ["wolf_0", "wolf_2"], "wolf_1": ["wolf_1"], "sheep": ["sheep"]}


def test_agents_need_not_be_strings() -> None:
    assert group_agents("", [0, 1], {0: 3, 1: 2}) == {"0": [0], "1": [1]}
    assert group_agents("a=1,b=0", [0, 1], {0: 3, 1: 2}) == {"a": [1], "b": [0]}


def test_two_groups_of_one_name_are_refused() -> None:
    spaces = {"wolf_0": 3, "wolf_1": 2, "wolf_1_0": 3}  # wolf_1 is the second group of the stem wolf, and a stem itself
    with pytest.raises(UserError, match=r"do not fall into groups by their names: say --regroup"):
        group_agents("", list(spaces), spaces)


def test_groups_as_the_user_says() -> None:
    for text in ("b=wolf_1 a=wolf_2,wolf_0 c=sheep", "b=wolf_1,a=wolf_2+wolf_0,c=sheep"):  # the second as runs before had it
        groups = group_agents(text, list(WOLVES), WOLVES)
        assert list(groups.items()) == [("b", ["wolf_1"]), ("a", ["wolf_2", "wolf_0"]), ("c", ["sheep"])]  # the user's order


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a=wolf_0,wolf_2 b=wolf_1", "--regroup leaves out sheep: every agent is in one group."),
        ("a=wolf_0,wolf_1,wolf_2 b=sheep", "--regroup has 'wolf_0' and 'wolf_1' in 'a', whose spaces are not equal."),
        ("a=wolf_0,wolf_0 b=sheep", "--regroup has 'wolf_0' twice: every agent is in one group."),
        ("a=wolf_0 a=sheep", "--regroup has the group 'a' twice."),
        ("a=wolf_0 b=shep", "--regroup has 'shep' (did you mean 'sheep'?): the agents are wolf_0, wolf_1, wolf_2, sheep."),
        ("a", "--regroup is 'a': it takes GROUP=AGENT,AGENT GROUP=AGENT, such as fast=agent_0 slow=agent_1."),
        ("a-b=sheep", "--regroup is 'a-b=sheep': it takes GROUP=AGENT,AGENT GROUP=AGENT, such as fast=agent_0 slow=agent_1."),
    ],
)
def test_groups_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as e:
        group_agents(text, list(WOLVES), WOLVES)
    assert str(e.value) == sentence


def test_teams() -> None:
    assert team_of_groups("", ["a", "b"]) == {"a": "a", "b": "b"}
    assert team_of_groups("red=a+b", ["a", "b", "c"]) == {"a": "red", "b": "red", "c": "c"}
    assert team_of_groups("all", ["a", "b"]) == {"a": "team", "b": "team"}
    assert team_of_groups("all", ["agents"]) == {"agents": "agents"}
    with pytest.raises(UserError, match=r"--env.teams has 'wolf' \(did you mean 'wolf_1' or 'wolf_0'\?\): the groups are"):
        team_of_groups("red=wolf", ["wolf_0", "wolf_1"])
