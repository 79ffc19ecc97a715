"""Which agents are a group, and which groups are a team.

Agents with equal spaces and one name stem (`adversary_0` -> `adversary`) are a group. The only group is called `agents`. Agents
of one stem with unequal spaces are several groups, numbered: `wolf_0`, `wolf_1`. The user can say it instead:

    --regroup a=walker_0,walker_1 b=walker_2    group=agent,agent: every agent is in one group
    --env.teams red=a+b,blue=c                  team=group+group: a group that is not named is a team of its own
    --env.teams all                             one team
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.flags import lists
from shoal.ids import near
from shoal.spec import UserError


def group_agents(text: str, agents: list[Any], spaces: dict[Any, Any]) -> dict[str, list[Any]]:
    """Group -> its agents: as `text` (--regroup) says, else by name stem. `spaces` are equal for agents that may share a
    group."""
    return read_groups(text, agents, spaces) if text else _groups_by_stem(agents, spaces)


def team_of_groups(text: str, groups: list[str]) -> dict[str, str]:
    """Group -> its team, as `text` (--env.teams) says."""
    if text.strip() == "all":
        return dict.fromkeys(groups, "team" if len(groups) > 1 else groups[0])
    team_of = {g: g for g in groups}
    for team, words in lists(text, "--env.teams").items():
        for word in words:
            if word not in groups:
                raise UserError(f"--env.teams has {word!r}{near(word, groups)}: the groups are {', '.join(groups)}.")
            team_of[word] = team
    return team_of


def stem(name: str) -> str:
    """adversary_0 -> adversary"""
    return re.sub(r"[_-]?\d+$", "", name) or name


def _groups_by_stem(agents: list[Any], spaces: dict[Any, Any]) -> dict[str, list[Any]]:
    found: dict[str, dict[Any, list[Any]]] = {}  # stem -> spaces -> agents
    for a in agents:
        found.setdefault(stem(str(a)), {}).setdefault(spaces[a], []).append(a)
    if sum(map(len, found.values())) == 1:
        return {"agents": agents}
    named = [
        (name if len(by_spaces) == 1 else f"{name}_{k}", members)
        for name, by_spaces in found.items()
        for k, members in enumerate(by_spaces.values())
    ]
    if len(dict(named)) < len(named):
        raise UserError(f"the agents {', '.join(map(str, agents))} do not fall into groups by their names: say --regroup.")
    return dict(named)


def read_groups(text: str, agents: list[Any], spaces: dict[Any, Any]) -> dict[str, list[Any]]:
    """What --regroup says: group -> its agents."""
    named = {str(a): a for a in agents}
    groups, placed = words_of(text), set()
    for group, words in groups.items():
        for word in words:
            if word not in named:
                raise UserError(f"--regroup has {word!r}{near(word, named)}: the agents are {', '.join(named)}.")
            if word in placed:
                raise UserError(f"--regroup has {word!r} twice: every agent is in one group.")
            if spaces[named[word]] != spaces[named[words[0]]]:
                raise UserError(f"--regroup has {words[0]!r} and {word!r} in {group!r}, whose spaces are not equal.")
            placed.add(word)
    missing = [name for name in named if name not in placed]
    if missing:
        raise UserError(f"--regroup leaves out {', '.join(missing)}: every agent is in one group.")
    return {group: [named[w] for w in words] for group, words in groups.items()}


def words_of(text: str) -> dict[str, list[str]]:
    """`a=x,y b=z`: names, and the names that each stands for. Runs made before --regroup have `a=x+y,b=z`."""
    groups: dict[str, list[str]] = {}
    text = re.sub(r",\s+", ",", text)
    for word in re.sub(r",(?=[^\s=,+]+=)", " ", text).replace("+", ",").split():
        group, _, agents = word.partition("=")
        members = [a for a in agents.split(",") if a]
        if not re.fullmatch(r"[A-Za-z_]\w{,63}", group) or not members:
            raise UserError(
                f"--regroup is {text!r:.200}: it takes GROUP=AGENT,AGENT GROUP=AGENT, such as fast=agent_0 slow=agent_1."
            )
        if hasattr(nn.ModuleDict, group) or group == "training":
            raise UserError(
                f"--regroup has a group {group!r}, which PyTorch's modules call something of theirs: choose another name."
            )
        if group in groups:
            raise UserError(f"--regroup has the group {group!r} twice.")
        groups[group] = members
    return groups


def text_of(regroup: Any) -> str:
    """What --regroup takes, of a text or of group -> agents."""
    if isinstance(regroup, Mapping):
        regroup = " ".join(f"{g}={','.join([a] if isinstance(a, str) else map(str, a))}" for g, a in regroup.items())
    if not isinstance(regroup, str):
        raise UserError(f"regroup is {regroup!r:.60}: it takes a text as --regroup does, or a dict of groups and their agents.")
    return regroup
