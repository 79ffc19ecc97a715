"""What a checkpoint holds, looked over before anything is taken from it: a run goes on from what fits, or not at all.

Most of it has the form of the loop's own state: the same names, types, shapes and dtypes. The rest (metrics so far, the parts
of the replay, how long the logs were) is looked at by itself here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.envs.base import World
from shoal.spec import Box, UserError
from shoal.training import checkpoint

if TYPE_CHECKING:
    from shoal.training.loop import Loop

LOOSE = ("algorithms", "means", "noted", "last_train", "logs", "replay")  # of no fixed form, or restored by others
MOST = 1 << 60  # steps that anybody counts


def refuse_strange(loop: Loop, own: dict[str, Any], state: dict[str, Any], source: str) -> None:
    """Refuse, in a sentence, a checkpoint that this loop, whose own state is given, cannot go on from."""
    problem = next(_problems(loop, own, state), None)
    if problem is not None:
        raise UserError(f"the checkpoint {source} does not fit its run: {problem}.")


def _problems(loop: Loop, own: dict[str, Any], state: dict[str, Any]) -> Iterator[str]:
    mine, theirs = ({k: x for k, x in s.items() if k not in LOOSE} for s in (own, state))
    theirs = {
        **{k: mine[k] for k in ("lessons", "return_limits")},
        "evaluation_due": False,
        **theirs,
    }  # older files have none of these
    collector = theirs.get("collector")
    if isinstance(collector, dict) and isinstance(episode_stats := collector.get("tally"), dict):
        episode_stats.setdefault("earned", episode_stats.get("reward"))
    native = isinstance(loop.env, World)
    if not native and isinstance(theirs.get("collector"), dict):  # an episode's actions are as many as there were steps
        mine["collector"] = {k: x for k, x in mine["collector"].items() if k != "env"}
        theirs["collector"] = {k: x for k, x in theirs["collector"].items() if k != "env"}
    yield from checkpoint.misfits(mine, theirs)
    yield from _counts(loop, state)
    yield from _limits(state)
    env = state["collector"].get("env")
    yield from _clock(loop.env, env) if native else _played(loop.env.get_state(), env)
    yield from _metrics(state, loop.means.sizes)
    yield from _logs(loop.folder.path, state.get("logs"), loop.branched)
    if loop.replay is not None and not loop.branched and "replay" in state:
        yield from _replay(loop, own["replay"], state)


def _counts(loop: Loop, state: dict[str, Any]) -> Iterator[str]:
    lap = loop.rollout * loop.env.rows
    if not 0 <= state["step"] < MOST or state["step"] % lap:
        yield f"its step is {state['step']}, and an iteration has {lap}"
    if not (math.isfinite(state["seconds"]) and state["seconds"] >= 0):
        yield f"its seconds are {state['seconds']}"
    if math.isnan(state["best"]) or not 0 <= state["evaluations"] < MOST:
        yield f"its best score is {state['best']}, of {state['evaluations']} evaluations"
    for trainer in state.get("lessons", {}).values():
        if not 0 <= trainer["since"] <= state["step"] or trainer["since"] % lap or not 0 <= trainer["done"] < MOST:
            yield f"its replay began at step {trainer['since']}, after {trainer['done']} updates"


def _limits(state: dict[str, Any]) -> Iterator[str]:
    """What rewards came to so far, of which the largest may be infinite."""
    for whose, limit in (state.get("return_limits") or {}).items():
        seen = limit["seen"]
        finite = all(bool(x.isfinite()) for name, x in seen.items() if name != "reward")
        if not finite or bool((seen["count"] < 0) | ((seen["count"] == 0) & (seen["size"] != 0))):
            yield f"the sums of the rewards of {whose!r} are no numbers"


def _clock(env: World, state: dict[str, Tensor]) -> Iterator[str]:
    clock, most = state["clock"], env.spec.horizon or MOST
    if bool((clock < 0).any() | (clock > most).any()):
        yield "its episodes are under way for longer than they can last"
    if any(x.is_floating_point() and bool(x.isnan().any()) for x in state.values()):
        yield "its world holds what is no number"


def _played(mine: dict[str, Any], theirs: Any) -> Iterator[str]:
    """The state of worlds elsewhere: where it has the episodes' actions, [steps, N, ...] for each group of each row."""
    if not isinstance(theirs, dict) or set(theirs) != set(mine):
        yield "its worlds are saved in another form than here"
        return
    for k in ("seeds", "seen", "steps", "clock"):
        yield from checkpoint.misfits(mine.get(k), theirs.get(k), k)
    if "actions" not in mine:
        return
    rows = theirs["actions"]
    if not isinstance(rows, list) or len(rows) != len(mine["actions"]) or not all(isinstance(r, dict) for r in rows):
        yield "the actions of its episodes are not those of so many rows"
        return
    for row in rows:
        if not all(isinstance(x, Tensor) and x.dim() > 1 for x in row.values()) or len({len(x) for x in row.values()}) > 1:
            yield "the actions of an episode are not as many for all groups"


def _metrics(state: dict[str, Any], sizes: dict[str, int]) -> Iterator[str]:
    """What was added up since the last line, and that line."""
    means, noted, last = (state.get(k) for k in ("means", "noted", "last_train"))
    if not isinstance(means, dict) or not all(isinstance(means.get(k), dict) for k in ("names", "sums")):
        yield "the metrics since its last line are missing"
        return
    for whose, names in means["names"].items():
        sums = means["sums"].get(whose)
        if not isinstance(names, list) or not all(isinstance(n, str) for n in (whose, *names)):
            yield f"the metrics of {whose!r} have no names"
        elif names and checkpoint.misfits(torch.zeros(len(names) + 1, dtype=torch.float64), sums):
            yield f"the metrics of {whose!r} are not as many as their names"
    by_agent = means.get("each", {})  # older files have none
    for whose, each in by_agent.items() if isinstance(by_agent, dict) else {"": by_agent}.items():
        form = torch.zeros(2, sum(sizes.get(g, 0) for g in str(whose).split(",")), dtype=torch.float64)
        if not isinstance(each, dict) or any(not isinstance(k, str) or checkpoint.misfits(form, x) for k, x in each.items()):
            yield f"the metrics of the agents of {whose!r} are not theirs"
    lists = isinstance(noted, dict) and all(isinstance(k, str) and isinstance(xs, list) for k, xs in noted.items())
    if not lists or not all(isinstance(x, Tensor) and not x.dim() for xs in noted.values() for x in xs):  # type: ignore[union-attr]
        yield "the metrics of hooks since its last line are no numbers"
    if not isinstance(last, dict) or not all(isinstance(k, str) and _told(k, x) for k, x in last.items()):
        yield "its last line of metrics is none"


def _told(name: str, x: Any) -> bool:
    """Whether it is what a line of metrics has: a number, none, or a list of these."""
    if isinstance(x, list):
        return all(_told("", y) for y in x if not isinstance(y, list)) and not any(isinstance(y, list) for y in x)
    return (x is None or type(x) in (int, float)) and not (name.startswith("reward_total/") and x is not None)


def _logs(folder: Path, marks: Any, branched: bool) -> Iterator[str]:
    """How long the logs were: whole lines of what there is now. Shorter ones would have a hole where a branch goes on; those
    that were deleted begin anew."""
    if not isinstance(marks, dict) or set(marks) != {"metrics.jsonl", "train.log"}:
        yield "it does not say how long the logs were"
        return
    for name, size in marks.items():
        if type(size) is not int or not 0 <= size < MOST:
            yield f"{name} was {size!r} long"
            continue
        now = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if branched and 0 < now < size:
            yield "the logs end before it: it is of another branch"
        elif 0 < size <= now:
            with (folder / name).open("rb") as f:
                f.seek(size - 1)
                if f.read(1) != b"\n":
                    yield f"{name} has no line that ends at {size}"


def _replay(loop: Loop, own: dict[str, Any], state: dict[str, Any]) -> Iterator[str]:
    """What it names of the replay: parts that follow each other up to now, from before the oldest step that is still held."""
    assert loop.replay is not None
    saved, since = state["replay"], next((x["since"] for x in state.get("lessons", {}).values()), 0)
    form = {"count": 0, "spans": [], "state": own}
    if problems := checkpoint.misfits(form, {**saved, "spans": []} if isinstance(saved, dict) else saved, "replay"):
        yield from problems
        return
    count, spans = (state["step"] - since) // loop.env.rows, saved.get("spans")
    if saved["count"] != count or int(saved["state"]["count"]) != count:
        yield f"its replay is of {saved['count']} steps a row, and {count} were made"
    if not isinstance(spans, list) or not all(
        isinstance(s, list | tuple) and len(s) == 2 and all(type(x) is int for x in s) and 0 <= s[0] < s[1] for s in spans
    ):
        yield "the parts of its replay are no spans of steps"
        return
    ends = [s[1] for s in spans]
    if count and (not spans or ends[-1] != count or spans[0][0] > max(0, count - loop.replay.steps)):
        yield "parts of its replay are not named"
    elif any(end != s[0] for end, s in zip(ends, spans[1:], strict=False)) or (spans and not count):
        yield "the parts of its replay do not follow each other"


def refuse_foreign_actions(loop: Loop) -> None:
    """Refuse a replay in which somebody chose what there is not."""
    assert loop.replay is not None
    _, _, actions, learner_reward, _, _ = loop.replay.transitions.unpacked(loop.replay.transitions.store)
    for g in loop.env.spec.groups:
        if not isinstance(g.action, Box):
            sizes = torch.tensor(g.action.sizes, device=actions[g.name].device)
            chosen = actions[g.name] if g.action.shape else actions[g.name][..., None]
            if bool((chosen < 0).any() | (chosen >= sizes).any()):
                raise UserError(f"the replay that was saved with this run has actions of {g.name!r} that there are not.")
        if not bool(learner_reward[g.name].isfinite().all()):
            raise UserError(f"the replay that was saved with this run has rewards of {g.name!r} that are no numbers.")
