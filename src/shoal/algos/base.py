"""What an algorithm is: it acts for the groups it is bound to, and it learns from batches.

    act(frame, memory, noise, explore) -> actions, memory, extras     changes nothing; noise none is greedy
    update(batch) -> metrics                                          device tensors, nothing is read out

An algorithm never steps a world, logs or opens a file. What learns or counts is a module or a buffer, and so is saved.
What it can take is declared in class attributes, which `fits` checks before anything starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shoal.nets.layers import MLP, NetConfig
from shoal.ops.kernels import find
from shoal.ops.schedules import Now
from shoal.spec import Batch, EnvSpec, Frame, UserError, tree_map


@dataclass(frozen=True)
class Rollout:
    """Feed: every so many steps, all that happened since, once."""

    steps: int


@dataclass(frozen=True)
class Replay:
    """Feed: after `start` environment steps, every `every` of them, `batch` sequences of `length` drawn from the past."""

    batch: int
    length: int
    start: int
    every: int
    capacity: int


class Algorithm(nn.Module, ABC):
    names: ClassVar[dict[str, dict[str, Any]]] = {}  # further names, each a setting of this one
    takes: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # kinds of actions
    pay: ClassVar[Literal["any", "common"]] = "any"  # common: a team's agents must be paid alike
    turns: ClassVar[bool] = True  # can play turn-based worlds
    mortal: ClassVar[bool] = True  # can take agents that die or arrive late
    learns: ClassVar[bool] = True
    greedy: ClassVar[bool] = True  # evaluated without noise; else it draws there as well

    @dataclass(frozen=True)
    class Config:
        pass

    id: str = ""  # the name it was asked for by
    fused: bool = False  # kernels of our own
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
        first = spec[groups[0]]
        for other in (spec[g] for g in groups[1:]):
            if (other.obs, other.action) != (first.obs, first.action):
                raise UserError(
                    f"one {type(self).__name__} cannot play {first.name!r} and {other.name!r}: their spaces differ."
                )
        self.space, self.obs = first.action, first.obs
        self.n = sum(spec[g].n for g in groups)
        self.uneven = spec.turns or any(spec[g].mortal for g in groups)  # not everybody acts all the time

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

    def tune(self, now: Now) -> None:
        """Set what is scheduled."""
        return None

    @abstractmethod
    def update(self, batch: Batch) -> dict[str, Tensor]: ...

    def target_actions(self, batch: Batch, group: str) -> Tensor:
        """What this group would do in the batch's next frames: [T, B, N, A] one-hot where discrete, else [T, B, N, D].
        Target nets where there are some, else the current policy's choice. For the critics of peers; no gradient."""
        steps, rows = batch.over.shape
        memory = tree_map(lambda x: x.expand(steps, *x.shape), self.memory(rows, batch.over.device))
        with torch.no_grad():
            actions, _, _ = self.act(batch.next, memory, None, False)
        chosen, space = actions[group], self.spec[group].action
        if space.kind == "continuous":
            return chosen
        each = chosen[..., None] if space.shape == () else chosen
        hot = [nn.functional.one_hot(each[..., d], n) for d, n in enumerate(space.sizes)]  # type: ignore[union-attr]
        return torch.cat(hot, -1).float()

    # --- several groups as one: agents are a dimension ---

    def joined(self, part: Callable[[str], Any], agents_at: int) -> Any:
        """The groups' tensors (or trees) side by side along the agents' dimension; none where they have none."""
        if len(self.groups) == 1:
            return part(self.groups[0])
        parts = [part(g) for g in self.groups]
        assert len({p is None for p in parts}) == 1, "groups that are bound together all have masks, or none has"
        return tree_map(lambda *xs: torch.cat(xs, agents_at), *parts)

    def parted(self, x: Any, agents_at: int) -> dict[str, Any]:
        """The same the other way: a tree of all agents' tensors, a tree for each group."""
        if len(self.groups) == 1:
            return {self.groups[0]: x}
        sizes = [self.spec[g].n for g in self.groups]
        return {g: tree_map(lambda t, k=k: t.split(sizes, agents_at)[k], x) for k, g in enumerate(self.groups)}

    def mask(self, batch: Batch) -> Tensor | None:
        """[T, B, N] who is in losses and statistics; none where everybody always is."""
        return self.joined(lambda g: batch.frame[g].acts, 2) if self.uneven else None


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
