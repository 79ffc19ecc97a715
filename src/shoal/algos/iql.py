"""IQL (Tan, 1993; Tampuu et al., 2017): every agent learns values of its own choices, the others are a part of the world.

It is `algos/ddqn.py` for teams: agents share a net and have ids (`--net.share`), each is paid its own reward or its team's
(`--reward`), and learns towards its own next value. What others learn meanwhile moves the world under it; a mixer (`vdn`,
`qmix`) divides the team's pay among those who earned it. Knobs and departures are those of `algos/ddqn.py`.

Metrics, for each group: those of `algos/ddqn.py`
"""

from __future__ import annotations

from shoal.algos.ddqn import DDQN


class IQL(DDQN):
    names = {}
