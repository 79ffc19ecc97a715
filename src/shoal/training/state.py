"""Exact resume: all that a loop holds, as a checkpoint has it, and back. Keys of the file keep their first names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.ids import slug
from shoal.spec import UserError
from shoal.training.players import restore_players
from shoal.training.replay import break_off
from shoal.training.seeds import restore_generator
from shoal.training.validate import refuse_foreign_actions, refuse_strange

if TYPE_CHECKING:
    from shoal.training.loop import Loop


def loop_state(loop: Loop) -> dict[str, Any]:
    return {
        "shoal": 1,
        "env": slug(loop.resolved.settings.env),
        "algo": slug(loop.resolved.settings.algo),
        "step": loop.step,
        "seconds": loop.seconds,
        "best": loop.best,
        "evaluations": loop.evaluations,
        "evaluation_sum": loop.evaluation_sum.clone(),
        "evaluation_due": loop.evaluation_due,
        "algorithms": {",".join(a.groups): a.state_dict() for a in loop.players.algorithms},
        "collector": loop.collector.state_dict(),
        "update_noise": loop.update_noise.get_state(),
        "means": loop.means.state_dict(),
        "noted": {k: [x.clone() for x in xs] for k, xs in loop.hooks.metrics.items()},
        "lessons": {",".join(x.algorithm.groups): {"since": x.since, "done": x.done} for x in loop.trainers},
        "return_limits": loop.overestimation.state_dict(),
        "last_train": loop.last_train,
        "logs": loop.logger.mark() if hasattr(loop, "logger") else dict(loop.logs_at),
    }


def load_loop_state(loop: Loop, state: dict[str, Any], source: str = "last") -> None:
    """Take over what a checkpoint holds, or refuse it in a sentence. Nothing is written."""
    refuse_strange(loop, {**loop_state(loop), "replay": replay_state(loop)}, state, f"{source!r} of {loop.folder.path}")
    restore_players(loop.players, state, str(loop.folder.path))
    loop.step, loop.seconds, loop.best = state["step"], state["seconds"], state["best"]
    loop.evaluations, loop.last_train = state["evaluations"], state["last_train"]
    loop.evaluation_due = state.get("evaluation_due", False)
    loop.evaluation_sum.copy_(state["evaluation_sum"])
    loop.collector.load_state_dict(state["collector"])
    restore_generator(loop.update_noise, state["update_noise"])
    loop.means.load_state_dict(state["means"], loop.env.device)
    loop.overestimation.load_state_dict(state.get("return_limits"))
    loop.hooks.metrics = {k: list(xs) for k, xs in state["noted"].items()}
    for x in loop.trainers:
        counts = state.get("lessons", {}).get(",".join(x.algorithm.groups), {"since": 0, "done": 0})  # older files have none
        x.since, x.done = counts["since"], counts["done"]
    if loop.replay is not None:
        _load_replay(loop, state)
    loop.restored, loop.logs_at = True, state["logs"]


def _load_replay(loop: Loop, state: dict[str, Any]) -> None:
    assert loop.replay is not None
    if loop.branched:
        for x in loop.trainers:
            x.restart(loop.step)
        most = max(x.start for x in loop.trainers)
        loop.remarks.append(
            f"The replay begins empty, as only the last checkpoint has one: {most:,} steps fill it, then learning goes on."
        )
        return
    if (saved := state.get("replay")) is None:
        raise UserError(
            f"the last checkpoint of {loop.folder.path} names no replay, as only one that was saved as the last does: "
            "go on with an empty one by --from."
        )
    loop.segments.load(loop.replay, saved["spans"], saved["count"])
    load_replay_state(loop, saved["state"])
    refuse_foreign_actions(loop)
    if loop.env.begun_anew is not None and loop.step:
        break_off(loop.replay, loop.trainers, loop.env.begun_anew)
        loop.segments.spans.clear()  # what is on disk goes on as if nothing had happened: it is written anew


def replay_state(loop: Loop) -> dict[str, Any]:
    """What is known of the replay, beside its contents."""
    if loop.replay is None:
        return {}
    samplers = {",".join(x.algorithm.groups): x.sampler.state_dict() for x in loop.trainers}
    return {"count": loop.replay.count.clone(), "samplers": samplers}


def load_replay_state(loop: Loop, state: dict[str, Any]) -> None:
    if loop.replay is not None:
        loop.replay.count.copy_(state["count"])
        for x in loop.trainers:
            x.sampler.load_state_dict(state["samplers"][",".join(x.algorithm.groups)])


def saved_replay(loop: Loop) -> dict[str, Any]:
    """Write what is new in the replay, and name it for the last checkpoint."""
    if loop.replay is None:
        return {}
    count = (loop.step - loop.trainers[0].since) // loop.env.rows
    spans = loop.segments.save(loop.replay, count)
    return {"replay": {"count": count, "spans": spans, "state": replay_state(loop)}}


def set_later_aside(loop: Loop) -> None:
    """Set aside what came after the checkpoint from which the run goes on."""
    moved = loop.folder.set_aside(loop.step)
    names = [p.stem for p in moved]
    if "best" in names:
        loop.best = float("-inf")
    folder = moved[0].parent.relative_to(loop.folder.path) if moved else ""
    where = f"; what came after it ({', '.join(names)}) is in {folder} now" if moved else ""
    loop.remarks.append(f"Goes on from step {loop.step:,}{where}.")
