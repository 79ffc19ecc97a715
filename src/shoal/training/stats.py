"""What a run keeps on the device between two lines of its log: sums over finished episodes, means of the learners' metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.envs.base import Environment
from shoal.ops.losses import EACH
from shoal.spec import Batch, UserError
from shoal.tree import tree_map


class EpisodeStats:
    """What the episodes that ended since the last line added up to, kept on the device."""

    def __init__(self, env: Environment):
        self.spec, device = env.spec, env.device
        zero = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=device)  # noqa: E731
        self.carry = {g.name: zero(env.rows, g.n) for g in env.spec.groups}  # of the episodes that are under way
        self.carry.update({f"stat/{s}": zero(env.rows) for s in env.spec.stats})
        self.carry["length"] = zero(env.rows)
        self.done = {k: zero(*x.shape[1:]) for k, x in self.carry.items()}
        self.episodes = zero()
        self.reward = {g.name: zero(g.n) for g in env.spec.groups}  # all that was earned, ended or not, since the last take
        self.earned = {g.name: zero(g.n) for g in env.spec.groups}  # the same since the last take_earned

    def count(self, batch: Batch) -> None:
        """Where a row was `lost` its episode was cut off by an accident, and is left out. A row's steps are added up episode by
        episode: the k-th to be seen here into slot k, the one under way among them, without a look at the data."""
        rewards, over, stats, lost = {g: r.reward for g, r in batch.results.items()}, batch.over, batch.stats, batch.lost
        slot = over.long().cumsum(0) - over.long()  # [T, B] ends before this step
        ended, row = over.long().sum(0), torch.arange(over.shape[1], device=over.device)  # so many slots are whole
        whole = torch.arange(len(over) + 1, device=over.device)[:, None] < ended  # [T + 1, B]
        if lost is not None:
            whole &= torch.zeros_like(whole, dtype=torch.long).scatter_add_(0, slot, (over & lost).long()) == 0
        shown = {f"stat/{s}": stats[s] * over if how == "last" else stats[s] for s, how in self.spec.stats.items()}
        for name, x in {"length": torch.ones_like(over, dtype=torch.float64), **rewards, **shown}.items():
            wide = (...,) + (None,) * (x.dim() - 2)
            sums = self.carry[name].new_zeros(len(over) + 1, *x.shape[1:])
            sums[0] = self.carry[name]
            sums.scatter_add_(0, slot[wide].expand_as(x), x.double())
            self.carry[name].copy_(sums[ended, row])  # the next is under way
            if name == "length":
                lengths = sums.clamp(min=1)
            elif self.spec.stats.get(name.removeprefix("stat/")) == "mean":
                sums = sums / lengths
            self.done[name] += torch.where(whole[wide], sums, 0).sum((0, 1))
        for name, reward in rewards.items():
            total = reward.double().sum((0, 1)) / over.shape[1]
            self.reward[name] += total
            self.earned[name] += total
        self.episodes += whole.sum()

    def take(self) -> dict[str, Tensor]:
        """Means since the last take, as metrics; then begin anew. NaN where no episode ended."""
        n = torch.where(self.episodes > 0, self.episodes, torch.nan)
        out = {"episodes": self.episodes.clone(), "episode_length": self.done["length"] / n}
        for g in self.spec.groups:
            out.update(returns_of(g.name, self.done[g.name][None] / n))
            out[f"reward_total/{g.name}"] = self.reward[g.name].clone()
        out.update({name: self.done[f"stat/{name}"] / n for name in self.spec.stats})
        for x in (*self.done.values(), *self.reward.values(), self.episodes):
            x.zero_()
        return out

    def take_earned(self) -> Tensor:
        """What every agent earned in a row since the last call, in the world's order of groups; then begin anew."""
        out = torch.cat(list(self.earned.values()))
        for x in self.earned.values():
            x.zero_()
        return out

    def drop(self, rows: Tensor) -> None:
        """Forget the episodes under way in these rows [B]: they will not be ended."""
        for x in self.carry.values():
            x[rows] = 0

    def state_dict(self) -> dict[str, Any]:
        sums = {"carry": self.carry, "done": self.done, "reward": self.reward, "earned": self.earned}
        return tree_map(torch.clone, {**sums, "episodes": self.episodes})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = {"carry": self.carry, "done": self.done, "reward": self.reward, "earned": self.earned}
        for name, mine in sums.items():
            for k, x in mine.items():
                x.copy_(state.get(name, state["reward"])[k])  # a checkpoint of before had no `earned`
        self.episodes.copy_(state["episodes"])


class MetricMeans:
    """Means of metrics since the last line, summed on the device: nothing is read until a line is written. `sizes`: of groups
    whose agents may be told apart."""

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.names: dict[str, list[str]] = {}  # whose -> the names of what it sums
        self.sums: dict[str, Tensor] = {}  # whose -> the sums, and at the end how many there were
        self.each: dict[str, dict[str, Tensor]] = {}  # whose -> name -> of each agent the sum, and over how many, [2, N]

    def add(self, whose: str, metrics: dict[str, Tensor]) -> None:
        apart = {k: x for k, x in metrics.items() if k.endswith(EACH)}
        for name, sums in apart.items():
            each = self.each.setdefault(whose, {})
            if name not in each:
                each[name] = torch.zeros_like(sums, dtype=torch.float64)
            each[name] += sums
        metrics = {k: x for k, x in metrics.items() if k not in apart}
        names = self.names.setdefault(whose, list(metrics))
        if set(names) != set(metrics):
            raise UserError(
                f"the metrics of {whose} were {', '.join(names)} and now are {', '.join(metrics)}: they must stay the same."
            )
        if not metrics:
            return
        device = next((x.device for x in metrics.values() if isinstance(x, Tensor)), None)
        values = torch.stack([torch.as_tensor(metrics[k], dtype=torch.float64, device=device) for k in names])
        if whose not in self.sums:
            self.sums[whose] = values.new_zeros(len(values) + 1)
        self.sums[whose] += torch.nn.functional.pad(values, (0, 1), value=1)

    def take(self) -> dict[str, Tensor]:
        """The means, each under the names of all its groups; then begin anew. NaN where nothing was added since."""
        out = {}
        for whose, names in ((w, n) for w, n in self.names.items() if w in self.sums):
            means = self.sums[whose][:-1] / self.sums[whose][-1]
            out.update({f"{g}/{name}": x for g in whose.split(",") for name, x in zip(names, means, strict=True)})
            self.sums[whose].zero_()
        for whose, each in self.each.items():
            agents = [f"{g}/{i}" for g in whose.split(",") for i in range(self.sizes[g])]
            for name, x in each.items():
                out.update({f"{a}/{name.removesuffix(EACH)}": y for a, y in zip(agents, x[0] / x[1], strict=True)})
                x.zero_()
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"names": dict(self.names), "sums": tree_map(torch.clone, self.sums), "each": tree_map(torch.clone, self.each)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        for x in (*self.sums.values(), *(x for each in self.each.values() for x in each.values())):
            x.zero_()
        for whose, each in state.get("each", {}).items():  # a checkpoint of before had none
            for name, sums in each.items():
                self.each.setdefault(whose, {}).setdefault(name, torch.zeros_like(sums, device=device)).copy_(sums)
        for whose, names in state["names"].items():
            self.names[whose] = list(names)
            if not names:
                continue
            self.sums.setdefault(whose, torch.zeros_like(state["sums"][whose], device=device)).copy_(state["sums"][whose])


def returns_of(group: str, returns: Tensor) -> dict[str, Tensor]:
    """Episode returns [episodes, N] under their three names, so that nobody mixes scales."""
    mean = returns.mean(0)
    out = {f"return/{group}": mean.mean(), f"return_sum/{group}": mean.sum()}
    out.update({f"return/{group}/{i}": x for i, x in enumerate(mean)})
    return out
