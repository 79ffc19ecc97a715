"""A loop of your own that steps the world, with a learner of Shoal's in it (`python examples/foreign_loop.py`)."""

import gymnasium as gym
import numpy as np

import shoal
from shoal.spec import Discrete, EnvSpec, Group


def train(total=30_000):
    spec = EnvSpec((Group("agents", "agents", ("cart",), obs=(4,), action=Discrete(2)),), horizon=500)
    learner = shoal.learner("ppo", spec, steps=total, algo={"rollout": 128})
    carts = [gym.make("CartPole-v1") for _ in range(8)]
    obs, lengths, clock = np.stack([cart.reset(seed=k)[0] for k, cart in enumerate(carts)]), [], np.zeros(8)
    while learner.step < learner.steps:
        steps = []
        for _ in range(128):
            decision = learner.act(obs)
            came = [cart.step(int(a)) for cart, a in zip(carts, decision.actions, strict=True)]
            next_obs, reward, terminated, truncated = (np.stack(x) for x in list(zip(*came, strict=True))[:4])
            ends = {"reward": reward, "terminated": terminated, "truncated": truncated, "next_obs": next_obs}
            steps.append({**decision.record, **ends})
            over, clock = terminated | truncated, clock + 1
            obs = np.stack([cart.reset()[0] if o else x for cart, x, o in zip(carts, next_obs, over, strict=True)])
            lengths, clock = [*lengths, *clock[over]], clock * ~over
        metrics = learner.update(shoal.samples(learner, {k: np.stack([s[k] for s in steps]) for k in steps[0]}))
    return lengths, metrics


if __name__ == "__main__":
    lengths, metrics = train()
    print(f"steps upright: {np.mean(lengths[-20:]):.0f} (begun with {np.mean(lengths[:20]):.0f})")
    print({name: round(float(x), 4) for name, x in metrics["agents"].items()})
