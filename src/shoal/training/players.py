"""Making those who play a world: algorithms that learn, and policies of other runs that only act. What they do together is
`Players` in `training/collect.py`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shoal.algos.base import Algorithm, Replay, Rollout, Seat
from shoal.algos.observations import refuse_without_state
from shoal.algos.optimiser import Optimiser
from shoal.flags import build
from shoal.ids import Entry, catalog, find
from shoal.spec import EnvSpec, UserError
from shoal.training import checkpoint, trust
from shoal.training.collect import Players
from shoal.training.regrouped import RegroupedPolicy, learnt_group
from shoal.training.run import Run
from shoal.training.seeds import generator
from shoal.training.settings import Resolved, RunConfig, Settings, check_groups, group_config, seats

SELF = "the run itself"


def make_players(settings: Settings, spec: EnvSpec, seed: int, device: torch.device, kernels: bool = False) -> Players:
    """An algorithm for every group: new ones that learn, and policies of other runs that only act."""
    check_groups(settings, spec)
    asked = seats(settings, spec)
    algorithms = [frozen_policy(Run(who), spec, g, device, kernels=kernels) for g, who in asked.items() if _is_run(who)]
    learning = {g: _algorithm(who, settings) for g, who in asked.items() if not _is_run(who)}
    algorithms += [_make(e, settings, spec, groups, seed, device, kernels) for groups, e in bound(learning, spec)]
    return Players(spec, in_order(algorithms, spec))


def decide_reward(resolved: Resolved, spec: EnvSpec) -> Resolved:
    """What `--reward auto` means here: the team's mean where somebody learns who needs agents that are paid alike and these are
    not, else their own."""
    if resolved.run.reward != "auto":
        return resolved
    mean = not spec.common and needs_common_pay(resolved.settings, spec)
    return resolved.decided(reward="team-mean" if mean else "own")


def needs_common_pay(settings: Settings, spec: EnvSpec) -> bool:
    """Whether somebody learns who needs agents that are paid alike."""
    learning = [_algorithm(who, settings) for who in seats(settings, spec).values() if not _is_run(who)]
    return any(e.load().reward == "common" for e in learning)


def common_pay(learners: list[Algorithm], spec: EnvSpec, reward: str) -> list[str]:
    """A sentence where learners are paid alike because one needs it, though these agents are not."""
    names = dict.fromkeys(type(a).__name__ for a in learners if a.reward == "common")
    if not names or spec.common or reward == "own":
        return []
    paid = reward.removeprefix("team-")
    return [f"{' and '.join(names)} needs agents that are paid alike: all learn from their team's {paid} (--reward {reward})."]


def recorded_players(run: Run, spec: EnvSpec, device: torch.device, kernels: bool = False) -> Players:
    """Those who played a run, as it recorded them; their weights are in its checkpoints."""
    played = recorded_groups(run, [g.name for g in spec.groups])
    return Players(spec, in_order([_recorded(run, spec, groups, device, kernels) for groups in played], spec))


def bound(entries: dict[str, Entry], spec: EnvSpec) -> list[tuple[tuple[str, ...], Entry]]:
    """Which groups one instance plays: each its own, but those of a team together where the algorithm is a team's."""
    together: dict[Any, list[str]] = {}
    for g, entry in entries.items():
        key = (entry.id, str(entry.path), spec[g].team) if entry.load().unit == "team" else g
        together.setdefault(key, []).append(g)
    return [(tuple(groups), entries[groups[0]]) for groups in together.values()]


def in_order(algorithms: list[Algorithm], spec: EnvSpec) -> list[Algorithm]:
    """By the first group that each plays."""
    names = [g.name for g in spec.groups]
    return sorted(algorithms, key=lambda a: names.index(a.groups[0]))


def recorded_groups(run: Run, names: list[str]) -> list[tuple[str, ...]]:
    """Which of these groups one instance played."""
    together: dict[Any, list[str]] = {}
    for g in names:
        player = run.settings.players.get(g)
        if player is None:
            raise UserError(f"the run {run.path} has no group {g!r}: it has {', '.join(run.settings.players) or 'none'}.")
        together.setdefault(tuple(player.get("bound", (g,))) if player["learns"] else g, []).append(g)
    return [tuple(groups) for groups in together.values()]


def record(players: Players) -> dict[str, dict[str, Any]]:
    """Who plays each group, for a run's config.json."""
    return {
        g: {
            "id": a.id,
            "learns": a.learns,
            "bound": list(a.bound),
            "common": a.spec.common,  # whether it was paid as its team was: critics are made by it
            "algo": dataclasses.asdict(a.config),
            "net": dataclasses.asdict(a.net),
        }
        for g, a in players.of.items()
    }


def trusted(runs: Iterable[str | Path], team: dict[str, str] | None = None) -> None:
    """Trust the code of these runs, and of those that play."""
    playing = [who for who in (team or {}).values() if _is_run(who) and (Path(who) / "config.json").is_file()]
    for run in (*runs, *playing):
        trust.accept(Run(run).path)


def _is_run(who: str) -> bool:
    return who not in catalog("algos") and os.path.isdir(who)


def _algorithm(who: str, settings: Settings) -> Entry:
    try:
        return find("algos", who)
    except UserError as e:
        asked = who in settings.team.values()
        raise UserError(f"{who!r} is neither an algorithm nor a run's folder: {e}" if asked else str(e)) from None


def _make(
    entry: Entry,
    settings: Settings,
    spec: EnvSpec,
    groups: tuple[str, ...],
    seed: int,
    device: torch.device,
    kernels: bool = False,
) -> Algorithm:
    config, net = group_config(settings, entry, groups[0])
    for other in groups[1:]:
        if group_config(settings, entry, other) != (config, net):
            raise UserError(f"one {entry.id} plays {' and '.join(groups)}: settings of one group alone do not go with it.")
    steps = build(RunConfig, {k: v for k, v in settings.run.items() if k == "steps"}, "run").steps
    algorithm = entry.load()(Seat(spec, groups, config, net, generator(seed, "nets", *groups), device, kernels, steps))
    refuse_without_state(algorithm)
    algorithm.id = str(entry.path) if entry.module.startswith("shoal_user_") else entry.id
    return algorithm


def _recorded(run: Run, spec: EnvSpec, groups: tuple[str, ...], device: torch.device, kernels: bool = False) -> Algorithm:
    """Who played these groups of a run; it may have been made for more than it played."""
    player = run.settings.players[groups[0]]
    trust.require(run.path, player)  # no environment is run
    alike = spec.common or run.settings.run.get("reward", "own") != "own"
    spec = dataclasses.replace(spec, common=player.get("common", alike))  # as it was paid then
    settings = Settings(player["id"], run.settings.env, players=dict.fromkeys(player.get("bound", groups), player))
    algorithm = _make(find("algos", player["id"]), settings, spec, tuple(player.get("bound", groups)), 0, device, kernels)
    algorithm.learns, algorithm.groups = player["learns"], groups  # type: ignore[misc]
    return algorithm


def frozen_players(run: Run, spec: EnvSpec, device: torch.device, which: str, team: dict[str, str]) -> Players:
    """A run's policies, all to play and none to learn; `team` sets others in their place."""
    asked = seats(Settings(SELF, run.settings.env, team=team), spec)
    algorithms = []
    for group, who in asked.items():
        if who == SELF:
            algorithms.append(_seated(run, spec, group, device, which))
        elif _is_run(who):
            algorithms.append(_seated(Run(who), spec, group, device, "auto"))
        else:
            entry = _algorithm(who, Settings(SELF, "", team=team))
            if entry.load().learns:
                raise UserError(f"{who!r} has learnt nothing: give --team.{group} a run's folder, or random.")
            algorithms.append(_make(entry, Settings(who, ""), spec, (group,), 0, device))
    return Players(spec, algorithms)


def _seated(run: Run, spec: EnvSpec, group: str, device: torch.device, which: str) -> Algorithm:
    """What a run learnt for these agents, whatever group they were in then."""
    learnt = learnt_group(run.spec, spec, group, str(run.path))
    if learnt is None:
        return frozen_policy(run, spec, group, device, which)
    return RegroupedPolicy(frozen_policy(run, run.spec, learnt, device, which), spec, group).eval()


def frozen_policy(
    run: Run, spec: EnvSpec, group: str, device: torch.device, which: str = "auto", kernels: bool = False
) -> Algorithm:
    """What a run learnt for the group of this name."""
    theirs = run.spec
    if group not in (names := [g.name for g in theirs.groups]):
        raise UserError(f"the run {run.path} has no group {group!r}: it has {', '.join(names)}.")
    mine, other = spec[group], theirs[group]
    if (mine.obs, mine.action, mine.n) != (other.obs, other.action, other.n):
        raise UserError(
            f"the run {run.path} learnt a {group!r} of {other.n} agents, observation {other.obs} and {other.action}; "
            f"here it is {mine.n}, {mine.obs} and {mine.action}."
        )
    groups = next(gs for gs in recorded_groups(run, names) if group in gs)
    made_for = run.settings.players[group].get("bound", groups)
    if missing := [g for g in made_for if g not in [x.name for x in spec.groups]]:
        raise UserError(f"the run {run.path} learnt {', '.join(made_for)} as one, and {', '.join(missing)} is not here.")
    policy = _recorded(run, spec, groups, device, kernels)
    restore(policy, read_policy(run, which), str(run.path))
    trust.sign(run.path)
    policy.learns, policy.groups = False, (group,)  # type: ignore[misc]
    return policy.eval()


def policy_name(run: Run, which: str = "auto") -> str:
    """The checkpoint whose policies are meant: the best where there is one, else the last."""
    if which != "auto":
        return which
    return "best" if (run.checkpoints / "best.pt").exists() else "last"


def read_policy(run: Run, which: str = "auto") -> dict[str, Any]:
    return _read(run.find(policy_name(run, which)))


def _read(path: Path) -> dict[str, Any]:
    state = checkpoint.read(path)
    for sentence in checkpoint.age_of(path):
        _remark(sentence)
    return state


@cache
def _remark(sentence: str) -> None:
    """Once, however many groups are read from the file."""
    print(f"shoal: {sentence}", file=sys.stderr)


def restore_players(players: Players, state: dict[str, Any], source: str) -> None:
    for a in players.algorithms:
        restore(a, state, source)


def restore(algorithm: Algorithm, state: dict[str, Any], source: str, leave: tuple[str, ...] = ()) -> None:
    """Load one algorithm's weights and all it counts, or say what does not fit. Modules named in `leave` stay as they are."""
    key = ",".join(algorithm.groups)
    theirs = state["algorithms"].get(key)
    if theirs is None:
        have = ", ".join(map(str, state["algorithms"]))
        raise UserError(f"the checkpoint of {source} has no group {key!r}: it has {have}.")
    mine = algorithm.state_dict()
    if not isinstance(theirs, dict):
        raise UserError(f"the checkpoint of {source} holds no weights for the group {key!r}.")
    theirs = checkpoint.renamed(theirs, mine)
    theirs = {**theirs, **{k: x for k, x in mine.items() if k.startswith(leave)}} if leave else theirs
    problems = checkpoint.misfits(mine, theirs)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"the checkpoint of {source} does not fit the group {key!r}: {problems[0]}{more}.")
    if not all(bool(x.isfinite().all()) for x in theirs.values()):
        raise UserError(f"the checkpoint of {source} holds weights of the group {key!r} that are not finite.")
    algorithm.load_state_dict(theirs)


def load_weights(players: Players, source: str) -> None:
    """Start the learners from another run's weights and normalisers; optimisers begin anew, and so do the statistics of rewards
    where that run had none."""
    path = Path(source)
    state = _read(path) if os.path.isfile(path) else read_policy(Run(source))
    for a in players.algorithms:
        if a.learns:
            theirs = state["algorithms"].get(",".join(a.groups)) or {}
            anew = () if any(str(k).startswith("reward_norm.") for k in theirs) else ("reward_norm.",)
            optimisers = (n for n, m in a.named_modules() if isinstance(m, Optimiser))
            restore(a, state, source, leave=(*optimisers, *anew))


def rollout_episodes(algorithms: list[Algorithm]) -> int | None:
    """How many episodes of each row are in a rollout, where they may end early; none: whatever there is in its steps."""
    asked = {a.feed.episodes for a in algorithms if a.learns and isinstance(a.feed, Rollout)}
    if len(asked) > 1:
        raise UserError(
            "one group wants rollouts of whole episodes and another of steps, and episodes may end early here: give both one "
            "--algo.episodes."
        )
    return asked.pop() if asked else None


def rollout_steps(algorithms: list[Algorithm]) -> int:
    """The loop owns one rollout of the whole world: those who learn must agree on its length. Who learns from a replay follows
    who does not."""
    for kind in (Rollout, Replay):
        lengths = {a.feed.steps for a in algorithms if a.learns and isinstance(a.feed, kind)}
        if len(lengths) > 1:
            raise UserError(
                f"the groups want rollouts of {' and '.join(map(str, sorted(lengths)))} steps: give them one --algo.rollout."
            )
        if lengths:
            return lengths.pop()
    return 25
