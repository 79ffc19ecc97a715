"""Alice tells Bob a secret over a public channel; both have a key, and Eve, who has none, listens.

The secret is one of two words, the key another draw of the same two. Alice sees secret and key and speaks; Bob sees key
and speech; Eve the speech. What Bob and Eve say is their reconstruction. With e(x) the squared error of x's message, Eve
is paid -e(Eve), Alice and Bob e(Eve) - e(Bob); silence counts as no error. Nobody moves. This is `mpe2`'s
simple_crypto_v3; OpenAI paid the same. Messages take a step: the answer to Alice's word comes one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.envs.base import State
from shoal.envs.drawing import Color
from shoal.envs.mpe.bodies import BLUE, GREEN, GREY, RED, Body
from shoal.envs.mpe.world import Parts, Scenario

EVE, BOB, ALICE = 0, 1, 2


class SimpleCrypto(Scenario):
    words = 4
    goals = 2  # the secret and the key
    teams = {"eve": "eve", "bob": "good", "alice": "good"}
    common = True
    stats_over = {"bob_error": "mean", "eve_error": "mean", "bob_right": "mean", "eve_right": "mean"}

    def cast(self) -> tuple[list[Body], list[Body]]:
        still = {"collides": False, "movable": False, "silent": False}
        agents = [Body("eve_0", color=RED, **still), Body("bob_0", color=GREY, **still), Body("alice_0", color=GREY, **still)]
        return agents, [Body(f"landmark_{i}", collides=False, color=c) for i, c in enumerate((GREEN, BLUE))]

    def sees(self, w: State) -> dict[str, Parts]:
        secret, key = self.code[w["goal"]].split(1, 1)  # [B, 1, words] each
        heard = w["comm"][:, ALICE:]
        return {
            "eve": [("message", heard)],
            "bob": [("key", key), ("message", heard)],
            "alice": [("secret", secret), ("key", key)],
        }

    def rewards(self, w: State) -> tuple[Tensor, dict[str, Tensor]]:
        said, secret = w["comm"][:, :ALICE], w["goal"][:, :1]  # [B, 2, words], [B, 1]
        error = (said - self.code[secret]).square().sum(-1) * (said != 0).any(-1)  # [B, 2]
        eve, bob = error[:, EVE], error[:, BOB]
        right = (said.argmax(-1) == secret).to(self.dtype)
        stats = {"bob_error": bob, "eve_error": eve, "bob_right": right[:, BOB], "eve_right": right[:, EVE]}
        return torch.stack((-eve, eve - bob, eve - bob), 1), stats

    def colors(self, w: State, row: int) -> dict[int, Color]:
        secret, key = w["goal"][row].tolist()  # Bob shows the secret, Alice the key
        return {BOB: self.landmarks[secret].color, ALICE: self.landmarks[key].color}
