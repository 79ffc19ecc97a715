"""`distrax.Categorical` over the last axis of some logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


class Categorical:
    def __init__(self, logits: jax.Array):
        self.logits = jax.nn.log_softmax(logits, axis=-1)

    def sample(self, *, seed: jax.Array) -> jax.Array:
        return jax.random.categorical(seed, self.logits, axis=-1)

    def log_prob(self, value: jax.Array) -> jax.Array:
        chosen = jax.nn.one_hot(value, self.logits.shape[-1], dtype=self.logits.dtype)
        return jnp.where(chosen == 0, 0.0, self.logits * chosen).sum(-1)  # no 0 * -inf where an action is barred

    def entropy(self) -> jax.Array:
        p = jnp.exp(self.logits)
        return -jnp.where(p == 0, 0.0, p * self.logits).sum(-1)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1)
