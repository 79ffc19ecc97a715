"""Memory: what an agent carries from step to step. A GRU (Cho et al., 2014) or an LSTM (Hochreiter and Schmidhuber, 1997).

The state is a tree of [..., N, H]. It is zeroed where an agent starts, and held where one does not act: who waits for its turn
neither forgets nor learns. A sequence's inputs go through their weights at once; the rest is a step at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.nets.config import NetConfig
from shoal.nets.layers import affine
from shoal.spec import UserError
from shoal.tree import tree_map, where_rows

State = dict[str, Tensor]

NO_MEMORY = (
    "--net.memory needs an algorithm that hands its nets their memory, and this one does not: take --net.memory none, or carry "
    "it from step to step in `memory`, as algos/onpolicy.py does."
)


class Memory(nn.Module):
    def __init__(self, width_in: int, agents: tuple[str, ...], net: NetConfig, generator: torch.Generator):
        super().__init__()
        self.lstm, self.width, self.n = net.memory == "lstm", net.memory_width, len(agents)
        gates = (4 if self.lstm else 3) * self.width
        self.inward = affine(width_in, gates, agents, net, generator)
        self.inner = affine(self.width, gates, agents, net, generator)

    def zero(self, rows: int, device: torch.device) -> State:
        parts = ("hidden", "cell") if self.lstm else ("hidden",)
        return {k: torch.zeros(rows, self.n, self.width, device=device) for k in parts}

    def step(self, x: Tensor, state: State, start: Tensor | None = None, active: Tensor | None = None) -> State:
        """One step from `state`: x [..., N, F], start and active [..., N]."""
        return self._step(self.inward(x), state, start, active)

    def forward(self, x: Tensor, state: State | None, start: Tensor | None, active: Tensor | None) -> State:
        """The states after each of the steps x [T, B, N, F], from the state before the first; without `start` x is one step."""
        if state is None:
            raise UserError(NO_MEMORY)
        if start is None:
            return self._step(self.inward(x), state, None, active)
        after = []
        for t, gates in enumerate(self.inward(x).unbind()):
            state = self._step(gates, state, start[t], None if active is None else active[t])
            after.append(state)
        return tree_map(lambda *xs: torch.stack(xs), *after)

    def _step(self, gates: Tensor, state: State, start: Tensor | None, active: Tensor | None) -> State:
        if start is not None:
            state = tree_map(lambda x: x.masked_fill(start[..., None], 0), state)
        new = self._cell(gates, state)
        return new if active is None else where_rows(active, new, state)

    def _cell(self, gates: Tensor, state: State) -> State:
        h, inner = state["hidden"], self.inner(state["hidden"])
        if self.lstm:
            i, f, o, g = (gates + inner).chunk(4, -1)
            cell = f.sigmoid() * state["cell"] + i.sigmoid() * g.tanh()
            return {"hidden": o.sigmoid() * cell.tanh(), "cell": cell}
        r, z, n = gates.chunk(3, -1)
        inner_r, inner_z, inner_n = inner.chunk(3, -1)
        new = (n + (r + inner_r).sigmoid() * inner_n).tanh()
        return {"hidden": new.lerp(h, (z + inner_z).sigmoid())}  # (1 - z) new + z h
