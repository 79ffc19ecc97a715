"""Collectors pick treasures up and carry each to the deposit of its kind; deposits move too, and come to meet them.

All are paid 5 for every pickup and every delivery. A collector loses 5 for each other collector it overlaps and 0.1 of its
distance to where it should go: the nearest treasure when its hands are empty, else the deposit of what it holds. A deposit
loses 0.1 of its distance to the nearest collector with its kind, or to the middle of all collectors when none has it.
Nobody is pushed. This is `mpe2`'s collect_treasure_v1 (Iqbal & Sha, 2019), which OpenAI did not have.

Treasures are looked at one after the other: the first collector in order that touches it with empty hands takes it. A
treasure that is gone at the beginning of a step comes back in that step, anywhere and of any kind, and can be taken in the
next. One who takes a treasure while touching the right deposit delivers it at once. State, beside the world's own:

    held [B, collectors]  kind in hand, -1 for none    kind [B, treasures]    here [B, treasures]  not picked up
    picked, delivered [B]  in the last step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import Body, at_least
from shoal.envs.mpe.world import Parts, Scenario, length
from shoal.spec import UserError

KINDS = (  # colours of the kinds: blue, orange, green, red, purple, brown
    (0.212, 0.408, 0.776),
    (0.945, 0.553, 0.0),
    (0.169, 0.627, 0.173),
    (0.839, 0.149, 0.157),
    (0.58, 0.404, 0.741),
    (0.549, 0.337, 0.294),
)
AWAY = -999.0  # where treasures are that were picked up
WITHIN = 0.95  # treasures lie in [-WITHIN, WITHIN]


def shade(color: Color, by: float) -> Color:
    return color[0] * by, color[1] * by, color[2] * by


class CollectTreasure(Scenario):
    @dataclass(frozen=True)
    class Config(Scenario.Config):
        num_collectors: int = 6  # agents that carry
        num_deposits: int = 2  # agents that take delivery; each of a kind of its own, 6 at most
        num_treasures: int = 6  # treasures in play

        def __post_init__(self) -> None:
            at_least(self, 1, "num_collectors", "num_deposits", "num_treasures")
            if self.num_deposits > len(KINDS):
                raise UserError(f"--env.num-deposits is {self.num_deposits}: there are {len(KINDS)} kinds of treasure.")

    openai = False
    teams = {"collector": "team", "deposit": "team"}
    stats_over = {"picked": "sum", "delivered": "sum", "collisions": "sum", "held": "mean", "treasures": "mean"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        c = self.config
        who = [Body(f"collector_{i}", 0.05, False, (0.85,) * 3, accel=1.5, max_speed=1.0) for i in range(c.num_collectors)]
        for i in range(c.num_deposits):
            who.append(Body(f"deposit_{i}", 0.075, False, shade(KINDS[i], 0.35), accel=1.5, max_speed=1.0, mass=2.25))
        return who, [Body(f"treasure_{i}", 0.025, False, within=WITHIN) for i in range(c.num_treasures)]

    def setup(self) -> None:
        c = self.config
        self.team, self.stores = list(range(c.num_collectors)), list(range(c.num_collectors, c.num_collectors + c.num_deposits))
        self.noise_begin = 2 * (c.num_collectors + c.num_deposits) + 3 * c.num_treasures
        self.noise_step = 3 * c.num_treasures
        self.kinds = self.index(range(c.num_deposits))
        takes = torch.zeros(c.num_collectors + c.num_deposits, c.num_deposits, dtype=self.dtype, device=self.device)
        takes[c.num_collectors :] = torch.eye(c.num_deposits)
        self.itself = torch.eye(len(takes), dtype=self.dtype, device=self.device)  # puts an agent first in its own order
        self.takes = takes.expand(self.rows, -1, -1)  # which kind an agent takes delivery of, one-hot
        super().setup()

    def place(self, noise: Tensor) -> State:
        n, c = 2 * len(self.agents), self.config
        fresh = noise[:, n:].unflatten(1, (c.num_treasures, 3))  # a kind and a place each
        who, where = self.scatter(noise[:, :n]), self.scatter(fresh[..., 1:].flatten(1), WITHIN)
        nothing = torch.zeros(self.rows, dtype=self.dtype, device=self.device)
        return {
            "pos": torch.cat((who, where), 1),
            "held": torch.full((self.rows, c.num_collectors), -1, device=self.device),
            "kind": self.choose(fresh[..., 0], c.num_deposits),
            "here": torch.ones(self.rows, c.num_treasures, dtype=torch.bool, device=self.device),
            "picked": nothing,
            "delivered": nothing.clone(),
        }

    def react(self, w: State, noise: Tensor) -> State:
        c = self.config
        held, kind, here = w["held"], w["kind"], w["here"]
        # pickup, treasure after treasure; those that are gone are too far away to be touched
        empty, taken = held < 0, []
        for touch in self.contacts(w, self.marks, self.team).unbind(1):  # [B, collectors] each
            able = touch & empty
            takes = able & (able.cumsum(1) == 1)  # the first who is able
            empty = empty ^ takes
            taken.append(takes)
        took = torch.stack(taken, 1)  # [B, treasures, collectors]
        gone = took.any(-1)  # [B, treasures]
        held = torch.where(took.any(1), (took * kind[..., None]).sum(1), held)
        # delivery
        touch = self.contacts(w, self.team, self.stores) & (held[..., None] == self.kinds)  # [B, collectors, deposits]
        handed = touch.any(-1)
        # what was gone before this step comes back
        fresh = noise.unflatten(1, (c.num_treasures, 3))  # a place and a kind each
        where = torch.where(here[..., None], self.places(w, self.marks), self.scatter(fresh[..., :2].flatten(1), WITHIN))
        return {
            **w,
            "pos": torch.cat((self.places(w, self.everyone), where.masked_fill(gone[..., None], AWAY)), 1),
            "held": held.masked_fill(handed, -1),
            "kind": torch.where(here, kind, self.choose(fresh[..., 2], c.num_deposits)),
            "here": ~gone,
            "picked": gone.sum(-1).to(self.dtype),
            "delivered": handed.sum(-1).to(self.dtype),
        }

    def sees(self, w: State) -> dict[str, Parts]:
        us, c = self.everyone, len(self.team)
        own, here = self.places(w, us), w["here"].to(self.dtype)
        holds = (w["held"][..., None] == self.kinds).to(self.dtype)  # [B, collectors, kinds]
        kinds = (w["kind"][..., None] == self.kinds).to(self.dtype)  # [B, treasures, kinds]
        # everybody's table of what there is to see, in each agent's own order and then shifted to where it stands
        carries = pad(holds, (0, 0, 0, len(self.stores)))
        order = (self.distances(w, us, us) - self.itself).argsort(-1)[..., 1:]  # [B, agents, others]
        others = self._rows(torch.cat((own, w["vel"], self.takes, carries), -1), order)
        others = others - pad(own, (0, others.shape[-1] - 2))[:, :, None]
        order = self.distances(w, us, self.marks).argsort(-1)  # [B, agents, treasures] those that are gone come last
        treasures = self._rows(torch.cat((self.places(w, self.marks), kinds, here[..., None]), -1), order)
        treasures = (treasures - pad(own, (0, treasures.shape[-1] - 2))[:, :, None])[..., :-1] * treasures[..., -1:]
        blocks: Parts = [("self", self.places(w, us)), ("self", w["vel"]), ("agent", others), ("treasure", treasures)]
        mine, theirs = [(name, x[:, :c]) for name, x in blocks], [(name, x[:, c:]) for name, x in blocks]
        return {"collector": [*mine[:2], ("self", holds), *mine[2:]], "deposit": theirs}

    def _rows(self, table: Tensor, order: Tensor) -> Tensor:
        """table [B, m, w] in each agent's order [B, n, k]: [B, n, k, w]."""
        index = order.flatten(1)[..., None].expand(-1, -1, table.shape[-1])
        return table.gather(1, index).unflatten(1, order.shape[1:])

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        team, stores, never = self.team, self.stores, float("inf")
        match = w["held"][..., None] == self.kinds  # [B, collectors, deposits]
        apart = self.distances(w, team, stores)
        bumps = (self.contacts(w, team, team).sum(-1) - 1).to(self.dtype)
        # distances to where each should go
        search = self.distances(w, team, self.marks).amin(-1) * w["here"].any(-1, keepdim=True)  # 0: nothing to look for
        way = torch.where(w["held"] < 0, search, (apart * match).sum(-1))
        middle = length(self.places(w, stores) - self.places(w, team).mean(1, keepdim=True))
        wait = torch.where(match.any(1), apart.masked_fill(~match, never).amin(1), middle)
        gain = (w["picked"] + w["delivered"])[:, None] * 5
        stats = {
            "picked": w["picked"],
            "delivered": w["delivered"],
            "collisions": bumps.sum(-1) / 2,  # pairs
            "held": (w["held"] >= 0).sum(-1).to(self.dtype),
            "treasures": w["here"].sum(-1).to(self.dtype),
        }
        return torch.cat((gain - way * 0.1 - bumps * 5, gain - wait * 0.1), 1), stats

    def colors(self, w: State, row: int) -> dict[int, Color]:
        treasures = {i: KINDS[kind] for i, kind in zip(self.marks, w["kind"][row].tolist(), strict=True)}
        held = zip(self.team, w["held"][row].tolist(), strict=True)
        return treasures | {i: shade(KINDS[kind], 0.85) for i, kind in held if kind >= 0}
