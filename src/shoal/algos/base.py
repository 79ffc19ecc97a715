"""What an algorithm is: it acts for the groups it is bound to, and it learns from batches.

    act(frame, memory, noise, explore) -> actions, memory, extras     changes nothing; noise none is greedy
    update(batch) -> metrics                                          device tensors, nothing is read out

An algorithm never steps a world, logs or opens a file. What learns or counts is a module or a buffer, and so is saved.
What it can take is declared in class attributes, which `fits` checks before anything starts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.nets.layers import MLP, NetConfig
from shoal.ops import losses
from shoal.ops.kernels import find
from shoal.ops.schedules import Now
from shoal.ops.values import as_vector, first_choice
from shoal.spec import Batch, Box, EnvSpec, Frame, UserError, View, tree_leaves, tree_map, where_rows

AfterDeath = Literal["auto", "team", "own"]


@dataclass(frozen=True)
class Rollout:
    """Feed: every so many steps, all that happened since, once."""

    steps: int


@dataclass(frozen=True)
class Replay:
    """Feed: after `start` environment steps, for every `every` of them, an update on `batch` sequences of `length` steps that
    are drawn from the last `capacity`. Counted in environment steps, all rows together."""

    batch: int
    length: int
    start: int
    every: float
    capacity: int
    steps: int = 1  # of each row between updates
    alpha: float | None = None  # drawn in proportion to priority ** alpha; none: evenly
    beta: float = 0.4  # how far their weights make up for that at first; wholly at the run's end
    whole: bool = False  # sequences are whole episodes


class Algorithm(nn.Module, ABC):
    names: ClassVar[dict[str, dict[str, Any]]] = {}  # further names, each a setting of this one
    takes: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # kinds of actions
    pay: ClassVar[Literal["any", "common"]] = "any"  # common: a team's agents must be paid alike
    turns: ClassVar[bool] = True  # can play turn-based worlds
    mortal: ClassVar[bool] = True  # can take agents that die or arrive late
    learns: ClassVar[bool] = True
    greedy: ClassVar[bool] = True  # evaluated without noise; else it draws there as well
    unit: ClassVar[Literal["group", "team"]] = "group"  # what one instance plays; groups of a team may have unlike spaces

    @dataclass(frozen=True)
    class Config:
        pass

    id: str = ""  # the name it was asked for by
    fused: bool = False  # kernels of our own
    as_one: bool = False  # its agents have one value, their team's, in which the dead count as nothing
    remark: str | None = None  # a sentence for whoever starts a run: what a setting costs
    feed: Rollout | Replay

    def __init__(
        self,
        spec: EnvSpec,
        groups: tuple[str, ...],
        config: Any,
        net: NetConfig,
        generator: torch.Generator,  # for first weights, on the CPU: the same on every device
        device: str | torch.device = "cpu",
    ):
        super().__init__()
        fits(type(self), spec, groups)
        self.spec, self.groups, self.config, self.net = spec, groups, config, net
        self.bound = groups  # those it was made for; it may come to play fewer
        first = spec[groups[0]]
        for other in (spec[g] for g in groups[1:]):
            if self.unit == "group" and (other.obs, other.action) != (first.obs, first.action):
                raise UserError(
                    f"one {type(self).__name__} cannot play {first.name!r} and {other.name!r}: their spaces differ."
                )
        self.space, self.obs = first.action, first.obs
        self.n = sum(spec[g].n for g in groups)
        self.has_inactive = spec.turns or any(spec[g].mortal for g in groups)  # not everybody acts all the time
        self.returns_after_death = returns_after_death(
            spec, groups, getattr(config, "after_death", "own")
        )  # returns go on after an agent's death

    @property
    def nets(self) -> dict[str, nn.Module]:
        """Its nets by name, for those who want them in files of their own."""
        return dict(self.named_children())

    def fuse(self) -> None:
        """Take kernels of our own wherever there is one."""
        self.fused = True
        for m in self.modules():
            if isinstance(m, MLP | Optimiser):
                m.fuse()

    # --- acting ---

    noise: int = 0  # uniform numbers an agent takes to act

    def memory(self, rows: int, device: torch.device) -> dict[str, Any]:
        """Zero memory for each group: a tree of [B, N, ...]."""
        return {g: {} for g in self.groups}

    @abstractmethod
    def act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, explore: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Actions, new memory and what the update wants to know of the moment, for each group."""

    # --- learning ---

    def draws(self, steps: int, rows: int) -> int:
        """Uniform numbers an update of [steps, rows] takes, in `batch.noise`."""
        return 0

    def set_schedules(self, now: Now) -> None:
        """Set what is scheduled."""
        return None

    def variant(self) -> int:
        """Asked before an update where tensors can be looked at: which kind of update it will be, if there are several."""
        return 0

    def update_statistics(self, batch: Batch) -> None:
        """What was collected just now, for those who learn from a replay: their statistics move here."""
        return None

    @abstractmethod
    def update(self, batch: Batch) -> dict[str, Tensor]: ...

    peers: Mapping[str, Algorithm] = {}  # who plays each group of the world, itself among them

    @property
    def needs_peers(self) -> bool:
        """Whether its update asks its peers what they would do."""
        return False

    @torch.no_grad()
    def target_actions(self, batch: Batch, group: str, noise: dict[str, Tensor] | None = None, now: bool = False) -> Tensor:
        """What this group would do in the batch's next frames: [T, B, N, A] one-hot where discrete, else [T, B, N, D]. By the
        target's actor where there is one, else by the policy as it acts; `now`: by the policy, in the batch's own frames. For
        the critics of peers; no gradient. noise: for each of its groups [T, B, N, K], none: greedily."""
        rows, device = batch.over.shape[1], batch.over.device
        memory = {g: batch.memory.get(g, m) for g, m in self.memory(rows, device).items() if g in self.groups}
        if not tree_leaves(memory):
            chosen = self.target_act(batch.frame if now else batch.next, memory, noise, not now)[0][group]
        else:
            steps = []
            for t in range(len(batch.over)):
                frame, following, u = tree_map(lambda x: x[t], (batch.frame, batch.next, noise))  # noqa: B023
                actions, memory, _ = self.target_act(frame, begun(frame, memory), u, not now)
                if not now:
                    actions, _, _ = self.target_act(following, begun(following, memory), u, True)
                steps.append(actions[group])
            chosen = torch.stack(steps)
        return as_vector(chosen, self.spec[group].action)

    def target_act(
        self, frame: Frame, memory: dict[str, Any], noise: dict[str, Tensor] | None, target: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]:
        """As `act`, without exploring; `target`: by target nets, where there are some."""
        return self.act(frame, memory, noise, False)

    # --- several groups as one: agents are a dimension ---

    def cat_groups(self, part: Callable[[str], Any], agents_at: int) -> Any:
        """The groups' tensors (or trees) side by side along the agents' dimension; none where they have none."""
        if len(self.groups) == 1:
            return part(self.groups[0])
        parts = [part(g) for g in self.groups]
        assert len({p is None for p in parts}) == 1, "groups that are bound together all have masks, or none has"
        return tree_map(lambda *xs: torch.cat(xs, agents_at), *parts)

    def split_groups(self, x: Any, agents_at: int) -> dict[str, Any]:
        """The same the other way: a tree of all agents' tensors, a tree for each group."""
        if len(self.groups) == 1:
            return {self.groups[0]: x}
        sizes = [self.spec[g].n for g in self.groups]
        return {g: tree_map(lambda t, k=k: t.split(sizes, agents_at)[k], x) for k, g in enumerate(self.groups)}

    def mask(self, batch: Batch) -> Tensor | None:
        """[T, B, N] who is in policy losses and statistics; none where everybody always is."""
        return self.cat_groups(lambda g: batch.frame[g].active, 2) if self.has_inactive else None

    # --- where an agent's return ends ---

    def ends(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[T, B, N] who terminated, and whose trace is cut: the episode is over, or the agent is gone from the next frame.
        Where returns go on after death, both are the team's: nobody of it goes on; or nobody is there in the next frame."""
        if self.returns_after_death:
            each = {g: self._team_ends(batch, g) for g in self.groups}
            terminated, cut = (self.cat_groups(lambda g, k=k: each[g][k], 2) for k in (0, 1))  # type: ignore[misc]
        else:
            terminated = self.cat_groups(lambda g: batch.results[g].terminated, 2)
            cut = batch.over[..., None].expand_as(terminated)
            cut = cut | ~self.cat_groups(lambda g: batch.next[g].alive, 2) if self.has_inactive else cut
        return terminated if self.config.time_limit else terminated | cut, cut

    def earned(self, batch: Batch) -> Tensor:
        """[T, B, N] what was paid. Where returns go on after death the dead earn the mean of what the living of their team are
        paid: a world may pay the living alone, or the dead something that is not theirs."""
        if not self.returns_after_death:
            return self.cat_groups(batch.learner_reward.__getitem__, 2)

        def part(g: str) -> Tensor:
            alive, learner_reward = (
                self._of_team(g, lambda h: batch.frame[h].alive),
                self._of_team(g, batch.learner_reward.__getitem__),
            )
            return batch.learner_reward[g].where(batch.frame[g].alive, losses.masked_mean(learner_reward, alive, (2,)))

        return self.cat_groups(part, 2)

    def valued(self, batch: Batch) -> Tensor | None:
        """[T, B, N] whose values are learnt; none where everybody's always are. Where returns go on after death: everybody's
        while somebody of the team is there, of those who have not arrived yet as well; in turn-based worlds in own turns."""
        if not self.returns_after_death or self.spec.turns:
            return self.mask(batch)
        return self.cat_groups(
            lambda g: self._of_team(g, lambda h: batch.frame[h].alive).any(-1, keepdim=True).expand_as(batch.frame[g].alive), 2
        )

    def next_frame(self, batch: Batch) -> Frame:
        """The true next frames, as values see them. Where returns go on after death, agents that were cut off with their team's
        episode are there, with their last observations, and the dead have one choice, the first."""
        if not self.values_dead:
            return batch.next
        views = dict(batch.next.views)
        for g in self.groups:
            then, last, space = batch.next[g], self._cut_off(batch, g), self.spec[g].action
            alive, legal = then.alive | last, None
            if not isinstance(space, Box):
                first = first_choice(space, alive.device)
                legal = alive[..., None] | first if then.legal is None else then.legal.where(alive[..., None], first)
            views[g] = replace(then, alive=alive, active=then.active | last, legal=legal)
        return Frame(views, batch.next.state)

    def turn_tp1(self, batch: Batch) -> Tensor:
        """[T, B, N] whose V(next) says something: those to move, and the gone, who left a last observation; where returns go on
        after death these are none but who was cut off with the team."""
        if self.returns_after_death:
            return self.cat_groups(lambda g: batch.next[g].active | self._cut_off(batch, g), 2)
        return self.cat_groups(lambda g: batch.next[g].active | ~batch.next[g].alive, 2)

    def taken(self, batch: Batch, group: str) -> Tensor:
        """[T, B, N] or [T, B, N, D] what a group did; where returns go on after death the dead took their one choice."""
        action = batch.actions[group]
        return where_rows(batch.frame[group].alive, action, torch.zeros_like(action)) if self.values_dead else action

    def remembering(self, view: View) -> Tensor:
        """[..., N] whose memory goes on: that of those who act. Where values of the dead are learnt, theirs as well, of the
        zeros that they see: one that stood still would make them worth what their last living moment was."""
        return view.active | ~view.alive if self.values_dead else view.active

    @property
    def values_dead(self) -> bool:
        """Whether every agent has a value of its own, which goes on after its death."""
        return self.returns_after_death and not self.as_one

    def _of_team(self, group: str, part: Callable[[str], Tensor]) -> Tensor:
        """Tensors of all groups of a group's team, whoever plays them, side by side: [T, B, all agents]."""
        parts = [part(g.name) for g in self.spec.teams[self.spec[group].team]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _team_ends(self, batch: Batch, group: str) -> tuple[Tensor, Tensor]:
        """[T, B, N] whether nobody of a group's team goes on, and whether its episode is over or nobody is there any more."""
        ended = ~self._of_team(group, lambda g: goes_on(batch, g)).any(-1, keepdim=True)
        left = ~self._of_team(group, lambda g: batch.next[g].alive).any(-1, keepdim=True)
        shape = batch.frame[group].alive.shape
        return ended.expand(shape), (batch.over[..., None] | left).expand(shape)

    def _cut_off(self, batch: Batch, group: str) -> Tensor:
        """[T, B, N] who is gone because its team's episode was cut off: what it saw last is worth what was to come."""
        lived = batch.frame[group].alive & ~batch.next[group].alive
        return self._team_ends(batch, group)[1] & lived & ~batch.results[group].terminated


def goes_on(batch: Batch, group: str) -> Tensor:
    """[T, B, N] who of a group has a next moment that may be worth something: whoever was or is there and did not terminate,
    and who was born again at once."""
    now, then = batch.frame[group], batch.next[group]
    return (now.alive | then.alive) & (~batch.results[group].terminated | then.start)


def returns_after_death(spec: EnvSpec, groups: tuple[str, ...], after_death: str) -> bool:
    """Whether an agent's return goes on after its death, until its team's episode ends: where agents can die, teams are more
    than one, and their pay is common."""
    if after_death == "team" and not spec.common:
        raise UserError(
            "--algo.after-death team is for agents that are paid alike: ask for --reward team-mean or --reward team-sum."
        )
    crowd = any(sum(g.n for g in spec.teams[spec[x].team]) > 1 for x in groups)
    return after_death != "own" and spec.common and crowd and any(spec[g].mortal for g in groups)


def begun(frame: Frame, memory: dict[str, Any]) -> dict[str, Any]:
    """Memory is zero where an agent starts."""
    return {g: where_rows(frame[g].start, tree_map(torch.zeros_like, m), m) for g, m in memory.items()}


def fits(cls: type[Algorithm], spec: EnvSpec, groups: Iterable[str]) -> None:
    """Refuse, in a sentence, a world that the algorithm cannot take."""
    name = cls.__name__
    for g in groups:
        kind = spec[g].action.kind
        if kind not in cls.takes:
            raise UserError(f"{name} takes {' and '.join(cls.takes)} actions; those of {g!r} are {kind}.")
        if spec[g].mortal and not cls.mortal:
            raise UserError(f"{name} cannot take agents that die or arrive late, as those of {g!r} do.")
    if spec.turns and not cls.turns:
        raise UserError(f"{name} cannot play turn-based worlds.")
    if cls.pay == "common" and not spec.common:
        raise UserError(f"{name} needs agents that are paid alike: ask for --reward team-mean or --reward team-sum.")


MOST_COUNT = 10**12


def bounded(config: Any, bounds: dict[str, tuple[float, float]], positive: Iterable[str] = ()) -> None:
    """Refuse, in a sentence, settings that are out of bounds; those that are none, or that there are not, are let be."""
    for name, (low, high) in {**bounds, **dict.fromkeys(positive, (1e-30, 1e30))}.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > MOST_COUNT:
            raise UserError(f"--algo.{name.replace('_', '-')} is {value}: it must be at most {MOST_COUNT:g}.")
        if value is not None and not low <= value <= high:
            most = "at least 0" if high == 1e30 else f"between {low:g} and {high:g}"
            must = "more than zero" if low == 1e-30 else most
            raise UserError(f"--algo.{name.replace('_', '-')} is {value}: it must be {must}.")


# --- one place descends ----------------------------------------------------------------------------------------------


class Optimiser(nn.Module):
    """AdamW over the parameters of some modules, laid end to end in one vector.

    One vector makes zeroing, clipping, stepping (and summing across machines) one operation each. Adam's moments and the
    rate are buffers: saved with the modules, restored in place, so that a captured graph goes on pointing at them.
    """

    first: Tensor
    second: Tensor
    steps: Tensor
    rate: Tensor
    broken: Tensor

    def __init__(self, modules: Iterable[nn.Module], rate: float, decay: float = 0.0, clip: float | None = None):
        super().__init__()
        params = [p for m in modules for p in m.parameters() if p.requires_grad]
        if not params:
            raise UserError("there is nothing to learn: the net has no parameters that want gradients.")
        device = params[0].device
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        at = 0
        for p in params:
            p.data = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.clip, self.decay = clip, decay
        self.register_buffer("first", torch.zeros_like(flat))
        self.register_buffer("second", torch.zeros_like(flat))
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("rate", torch.tensor(rate, device=device))
        self.register_buffer("broken", torch.zeros((), dtype=torch.bool, device=device))
        self._params, self._flat = tuple(params), (flat,)  # in tuples: the modules' own parameters, not others to save
        self._kernel: Callable[..., Tensor] | None = None

    @property
    def vector(self) -> Tensor:
        """All parameters, end to end."""
        return self._flat[0]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """What is computed meanwhile has no gradients of these parameters, and need not make them."""
        for p in self._params:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self._params:
                p.requires_grad_(True)

    def fuse(self) -> None:
        """Take one kernel for the step, where there is one."""
        if self._flat[0].dtype == torch.float32:
            self._kernel = find("adamw", self._flat[0].device)

    def descend(self, loss: Tensor, count: Tensor | int, keep: Tensor | None = None) -> Tensor:
        """One step down the mean `loss / count`, where `loss` is a sum over `count` active samples. The step is taken only
        where `keep` is true, and never along a gradient that is not finite; that is remembered in `broken`, and no
        further step is taken. Returns the norm of the gradient before clipping."""
        mean = loss / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
        grads = torch.autograd.grad(mean, self._params, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            grad = torch.cat([g.reshape(-1) for g in grads])
            if self._kernel is not None:
                state = self.first, self.second, self.steps, self.rate, self.broken
                return self._kernel(self._flat[0], grad, *state, keep, self.clip, self.decay)
            norm = grad.norm()
            if self.clip is not None:
                grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
            self.broken |= ~norm.isfinite()
            stop = self.broken if keep is None else self.broken | ~keep
            adamw(
                list(self._flat),
                [grad],
                [self.first],
                [self.second],
                [],
                [self.steps],
                fused=True,
                found_inf=stop.float(),
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.rate,
                weight_decay=self.decay,
                eps=1e-5,
                maximize=False,
            )
        return norm


class Target(nn.Module):
    """A copy of what an optimiser moves, that follows: once in `every` updates by the share `tau`. Hard: 200 and 1; soft: 1 and
    0.01."""

    updates: Tensor

    def __init__(self, module: nn.Module, optimiser: Optimiser, every: int, tau: float):
        super().__init__()
        self.module, self.every, self.tau = copy.deepcopy(module), every, tau
        params = [p for p in self.module.parameters() if p.requires_grad]
        self.module.requires_grad_(False).eval()
        flat, at = optimiser.vector.clone(), 0
        for p in params:
            p.data = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        assert at == flat.numel(), "a target follows all that its optimiser moves"
        self.register_buffer("updates", torch.zeros((), dtype=torch.long, device=flat.device))
        self._flat, self._ahead = (flat,), (optimiser.vector,)
        self._pairs = tuple(zip(self.module.buffers(), module.buffers(), strict=True))

    def train(self, mode: bool = True) -> Target:
        """It never is: a user's module judges as it acts."""
        return super().train(False)

    @torch.no_grad()
    def follow(self, stepped: Tensor | None = None) -> None:
        """`stepped`: whether the optimiser took a step, a bool tensor; where not, the clock stands still. None: it did."""
        self.updates += 1 if stepped is None else stepped
        active = stepped  # none: always
        if self.every > 1:
            due = self.updates % self.every == 0
            active = due if stepped is None else due & stepped
        self._flat[0].lerp_(self._ahead[0], self.tau if active is None else active * self.tau)
        for mine, theirs in self._pairs:
            mine.copy_(theirs if active is None else theirs.where(active, mine))

    @torch.no_grad()
    def lag(self) -> Tensor:
        """How far behind it is: the norm of the difference over that of the weights."""
        return torch.dist(self._ahead[0], self._flat[0]) / (self._ahead[0].norm() + 1e-8)
