"""Scores, and the commands that reach them.

    python benchmarks/scores.py                     all of them, into benchmarks/results/scores.json
    python benchmarks/scores.py mappo-spread-20M    one of them
    python benchmarks/scores.py --show              what there is, with the commands

Each is trained by the command line as anybody would, with seeds from 10 on, which no setting was chosen with; then its last
checkpoint is played greedily for 1,000 episodes from seeds that training never saw (`shoal eval`). Where two teams learn, each
is also set against a random opponent. PPO's family has three seeds on the particle worlds, at once, and budgets for an H200;
`--device cpu` takes hours. The value learners, COMA and the actor-critics with replay have two there, and minutes on two CPU
cores. The others have one seed, and are for the CPU: Box2D and football are stepped there.
`make readme` puts the results into docs/scores.md, and five of them into README.md. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "scores.json"
EPISODES = 1000
FIRST_SEED = 10
COMMON = "--algo.lr-schedule linear --algo.entropy 0.01 --algo.gamma 0.95 --eval.episodes 400"


@dataclass(frozen=True)
class Score:
    train: str  # the words after `shoal train`
    wanted: dict[str, float]  # metric -> what every seed must reach; empty: reported
    teams: tuple[str, ...] = ()  # each is also played against random ones
    beside: str = ""  # what others have published, on the same scale
    seeds: int = 3


LANDER = "--envs 32 --algo.rollout 256 --algo.lr 1e-3 --algo.gamma 0.999 --algo.lam 0.98 --algo.epochs 4 --algo.minibatches 32 "


def one(words: str, wanted: float, zoo: str) -> Score:
    """PPO on a task of one agent, one seed; beside it what rl-baselines3-zoo's PPO reached, in so many steps."""
    entropy = "" if "--algo.entropy" in words else " --algo.entropy 0"
    train = f"ppo {' '.join(words.split())}{entropy} --algo.lr-schedule linear --eval.episodes 32"
    return Score(train, {"return/agents": wanted}, beside=f"rl-baselines3-zoo {zoo}", seeds=1)


REPLAY = (
    "--envs 64 --reward team-mean --net.activation relu --net.hidden 128,128 --algo.rollout 5 --algo.every 25 "
    "--algo.batch 512 --algo.lr 1e-3 --algo.lr-schedule linear --algo.epsilon-steps 200k --eval.episodes 400"
)
COUNTERFACTUAL = (
    "--envs 64 --reward team-mean --net.activation relu --net.hidden 128,128 --net.gain 1 --algo.lr 1e-3 "
    "--algo.lr-schedule linear --algo.critic-slices 5 --algo.target-every 20 "
    "--algo.advantage-scope group --algo.entropy 0.03 --eval.episodes 400"
)


WIDE = "--net.activation relu --net.hidden 128,128"
PENDULUM = (
    "--algo.rollout 4 --algo.every 1 --algo.batch 128 --algo.learning-starts 1000 --algo.random-steps 1000 "
    "--algo.capacity 100k --algo.lr 1e-3"
)
SOFT = (
    "--algo.rollout 8 --algo.every 1 --algo.batch 256 --algo.learning-starts 5000 --algo.random-steps 5000 --algo.capacity 500k"
)


def values(words: str, wanted: float, zoo: str) -> Score:
    """DDQN on a task of one agent, one seed; beside it what rl-baselines3-zoo's DQN reached, in so many steps."""
    common = "--envs 8 --algo.rollout 8 --algo.batch 128 --algo.lr-schedule linear --algo.capacity 100k --eval.episodes 100"
    train = f"ddqn {' '.join(words.split())} {common}"
    return Score(train, {"return/agents": wanted}, beside=f"rl-baselines3-zoo {zoo}", seeds=1)


ACTORS = (
    "--envs 64 --net.activation relu --net.hidden 128,128 --algo.rollout 5 --algo.every 25 --algo.batch 512 --algo.lr 1e-3 "
    "--algo.lr-schedule linear --algo.gamma 0.95 --eval.episodes 400"
)


def actors(words: str, wanted: float, zoo: str) -> Score:
    """DDPG, TD3 or SAC on a task of one agent, one seed; beside it what rl-baselines3-zoo reached, in so many steps."""
    common = f"--envs 4 --algo.lr-schedule linear {WIDE} --eval.episodes 50"
    return Score(f"{' '.join(words.split())} {common}", {"return/agents": wanted}, beside=f"rl-baselines3-zoo {zoo}", seeds=1)


def tag(predators: str, prey: str) -> Score:
    """The experiment of MADDPG's paper: who has the critic of all agents, predators or prey. They learn together."""
    return Score(f"{predators} simple_tag --team.agent {prey} --steps 1M {ACTORS} --save.best none", {}, seeds=2)


SCORES = {
    "mappo-spread": Score(
        f"mappo simple_spread --steps 100M --envs 4096 --algo.lr 2e-3 {COMMON} --net.hidden 128,128",
        {"return/agents": -7.8},
        beside="HARL about -6.8, MAPPO's repository -7.5, XuanCe -11.6",
    ),
    "mappo-spread-20M": Score(
        f"mappo simple_spread --steps 20M --envs 1024 --algo.epochs 10 --algo.lr 2e-3 {COMMON} --net.hidden 128,128",
        {"return/agents": -7.8},
        beside="MAPPO's repository -7.5 (20M)",
    ),
    "ippo-spread-20M": Score(
        f"ippo simple_spread --steps 20M --envs 1024 --algo.epochs 10 --algo.lr 2e-3 {COMMON} --net.hidden 128,128",
        {"return/agents": -9.0},
        beside="EPyMARL -9.8 (20M)",
    ),
    "maa2c-spread-50M": Score(
        f"maa2c simple_spread --steps 50M --envs 1024 --algo.lr 2e-3 {COMMON} --net.hidden 128,128",
        {},
        beside="EPyMARL -9.2 (20M)",
    ),
    "mappo-speaker-listener": Score(
        f"mappo simple_speaker_listener --steps 20M --envs 4096 --algo.lr 1e-3 {COMMON}",
        {"return/listener": -11.5},
        beside="EPyMARL -10.7 (20M), HARL -13",
    ),
    "mappo-tag": Score(
        f"mappo simple_tag --steps 50M --envs 4096 --algo.lr 1e-3 {COMMON} --save.best none",
        {},
        ("adversary", "agent"),
        "MARLlib 22.2 against -29.3",
    ),
    "mappo-adversary": Score(
        f"mappo simple_adversary --steps 50M --envs 4096 --algo.lr 1e-3 {COMMON} --save.best none",
        {},
        ("adversary", "agent"),
        "MARLlib agent 8.7, adversary -15.8",
    ),
    "qmix-spread": Score(
        f"qmix simple_spread --steps 2.5M {REPLAY} --net.gain 0.6 --algo.target-every 2000",
        {"return/agents": -9.5},
        beside="EPyMARL -8.6 (2M), JaxMARL -17",
        seeds=2,
    ),
    "vdn-spread": Score(
        f"vdn simple_spread --steps 2.5M {REPLAY} --net.gain 0.6 --algo.target-every 1 --algo.target-tau 0.01",
        {"return/agents": -10.0},
        beside="EPyMARL -9.3 (2M), JaxMARL -11, XuanCe -13.1",
        seeds=2,
    ),
    "iql-spread": Score(
        f"iql simple_spread --steps 1.5M {REPLAY} --net.gain-actor 1 --algo.target-every 1 --algo.target-tau 0.01",
        {"return/agents": -11.0},
        beside="EPyMARL -9.6 (2M), JaxMARL -13, XuanCe -19.5",
        seeds=2,
    ),
    "coma-spread": Score(
        f"coma simple_spread --steps 4M {COUNTERFACTUAL} --net.share none",
        {"return/agents": -17.0},
        beside="EPyMARL -21.6, -15.7 without sharing (20M)",
        seeds=2,
    ),
    "qmix-speaker-listener": Score(
        f"qmix simple_speaker_listener --steps 800k {REPLAY} --net.gain 0.6 --algo.target-every 500",
        {"return/listener": -13.0},
        beside="EPyMARL -11.6 (2M)",
        seeds=2,
    ),
    "coma-speaker-listener": Score(
        f"coma simple_speaker_listener --steps 2M {COUNTERFACTUAL}",
        {"return/listener": -16.0},
        beside="EPyMARL -30 (20M)",
        seeds=2,
    ),
    "maddpg-spread": Score(
        f"maddpg simple_spread --env.actions continuous --reward team-mean --steps 2.5M {ACTORS}",
        {"return/agents": -9.5},
        beside="HARL -9.2 (5M), XuanCe -9.7 (10M), EPyMARL -11.1, discrete (2M)",
        seeds=2,
    ),
    "matd3-spread": Score(
        f"matd3 simple_spread --env.actions continuous --reward team-mean --steps 2.5M {ACTORS}",
        {"return/agents": -9.0},
        beside="HARL -8.5 (5M), XuanCe -11.2 (10M)",
        seeds=2,
    ),
    "masac-spread": Score(
        f"masac simple_spread --env.actions continuous --reward team-mean --steps 1.5M {ACTORS}",
        {"return/agents": -11.0},
        beside="XuanCe -12.8 (10M)",
        seeds=2,
    ),
    "maddpg-spread-discrete": Score(
        f"maddpg simple_spread --reward team-mean --steps 1.5M {ACTORS}",
        {"return/agents": -11.0},
        beside="EPyMARL -11.1 (2M)",
        seeds=2,
    ),
    "maddpg-speaker-listener": Score(
        f"maddpg simple_speaker_listener --steps 1M {ACTORS}",
        {"return/listener": -13.0},
        beside="EPyMARL -13.6 (2M)",
        seeds=2,
    ),
    "tag-maddpg-maddpg": tag("maddpg", "maddpg"),
    "tag-maddpg-ddpg": tag("maddpg", "ddpg"),
    "tag-ddpg-maddpg": tag("ddpg", "maddpg"),
    "tag-ddpg-ddpg": tag("ddpg", "ddpg"),
    "ddpg-pendulum": actors(f"ddpg Pendulum-v1 --steps 30k {PENDULUM} --algo.noise-steps 20k", -170, "-152 (20k)"),
    "td3-pendulum": actors(f"td3 Pendulum-v1 --steps 30k {PENDULUM} --algo.noise-steps 20k", -170, "-152 (20k)"),
    "sac-pendulum": actors(f"sac Pendulum-v1 --steps 30k {PENDULUM}", -170, "-157 (20k)"),
    "sac-mountain-car-continuous": actors(
        f"sac MountainCarContinuous-v0 --steps 40k {SOFT} --algo.gamma 0.995 --algo.noise-keep 0.95 --algo.alpha 0.1 "
        "--algo.alpha-auto false --algo.lr 5e-4",
        90,
        "94.7 (50k)",
    ),
    "sac-lunar-lander-continuous": actors(
        f"sac gymnasium/LunarLanderContinuous-v3 --steps 200k {SOFT} --algo.lr 1e-3", 240, "260 (500k)"
    ),
    "sac-bipedal-walker": actors(
        f"sac gymnasium/BipedalWalker-v3 --steps 300k {SOFT} --algo.gamma 0.98 --algo.target-tau 0.02 --algo.lr 7e-4",
        280,
        "298 (500k)",
    ),
    "ddqn-cartpole": values(
        f"CartPole-v1 --steps 100k --algo.every 2 --algo.lr 1e-3 {WIDE} --algo.epsilon-steps 10k --algo.epsilon-last 0.04 "
        "--algo.target-every 200 --algo.learning-starts 1000 --eval.every 2000 --stop-score 500",
        500,
        "500 (50k)",
    ),
    "ddqn-acrobot": values(
        f"Acrobot-v1 --steps 200k --algo.every 4 --algo.lr 1e-3 {WIDE} --algo.epsilon-steps 30k --algo.target-every 250 "
        "--algo.learning-starts 1000",
        -85,
        "-76.6 (100k)",
    ),
    "ddqn-mountain-car": values(
        "MountainCar-v0 --steps 200k --algo.every 4 --algo.lr 1e-3 --algo.n-step 3 --algo.epsilon-steps 60k "
        "--algo.epsilon-keep 0.95 --algo.target-every 300 --algo.learning-starts 1000",
        -120,
        "-100.8 (120k)",
    ),
    "ddqn-lunar-lander": values(
        "gymnasium/LunarLander-v3 --steps 400k --algo.every 4 --algo.lr 6e-4 --algo.n-step 3 --algo.epsilon-steps 60k "
        f"--algo.target-every 500 {WIDE}",
        200,
        "154 (100k)",
    ),
    "ppo-cartpole": one(
        "CartPole-v1 --steps 200k --envs 32 --algo.rollout 64 --algo.lr 1e-3 --algo.epochs 10", 500, "500 (100k)"
    ),
    "ppo-acrobot": one(
        "Acrobot-v1 --steps 1M --envs 64 --algo.rollout 128 --algo.lr 1e-3 --algo.entropy 0.01", -85, "-73.5 (1M)"
    ),
    "ppo-mountain-car": one(
        "MountainCar-v0 --steps 2M --envs 64 --algo.rollout 200 --algo.lr 1e-3 --algo.epochs 10 --algo.entropy 0.01",
        -110,
        "-110.4 (1M)",
    ),
    "ppo-pendulum": one(
        "Pendulum-v1 --steps 500k --envs 32 --algo.rollout 128 --algo.lr 1e-3 --algo.epochs 10 --algo.gamma 0.9",
        -250,
        "-172 (100k)",
    ),
    "ppo-mountain-car-continuous": one(
        "MountainCarContinuous-v0 --steps 320k --envs 16 --algo.rollout 1000 --algo.lr 1e-3 --algo.epochs 10 "
        "--algo.minibatches 16 --algo.noise-keep 0.95",
        85,
        "88.3 (20k)",
    ),
    "ppo-lunar-lander": one(f"gymnasium/LunarLander-v3 --steps 1M {LANDER} --algo.entropy 0.01", 220, "242 (1M)"),
    "ppo-lunar-lander-continuous": one(f"gymnasium/LunarLanderContinuous-v3 --steps 1M {LANDER}", 220, "271 (1M)"),
    "ppo-bipedal-walker": one(
        "gymnasium/BipedalWalker-v3 --steps 2M --envs 64 --algo.rollout 256 --algo.lr 5e-4 --algo.epochs 10 "
        "--algo.minibatches 32 --algo.log-std -0.5 --algo.normalise-reward",
        250,
        "288 (5M)",
    ),
    "mappo-empty-goal-close": Score(
        "mappo football/academy_empty_goal_close --steps 60k --envs 16 --algo.rollout 64 --algo.lr 1e-3 --algo.epochs 8 "
        "--algo.minibatches 4 --algo.entropy 0.01 --eval.episodes 32",
        {"success": 0.95},
        seeds=1,
    ),
}


def shoal(words: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", "shoal.cli", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"shoal {shlex.join(words)} failed.")
    return done.stdout


def measure(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Train all seeds and play them."""
    score, out = SCORES[name], folder / name
    quick = ["--device", device, "--log.tensorboard", "false", "--quiet"]
    several = ["--seeds", str(score.seeds)] if score.seeds > 1 else []
    seeds = range(FIRST_SEED, FIRST_SEED + score.seeds)
    shoal(["train", *score.train.split(), "--seed", str(FIRST_SEED), *several, "--out", str(out), *quick])
    runs_at = {seed: out / f"seed{seed}" if several else out for seed in seeds}
    settings = {"": (), **{f"{t} random": (t,) for t in score.teams}, **({"all random": score.teams} if score.teams else {})}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        games = {(seed, s): pool.submit(play, run, who) for seed, run in runs_at.items() for s, who in settings.items()}
    runs = []
    for seed, run in runs_at.items():
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        played = {s: games[seed, s].result() for s in settings}
        runs.append({"seed": seed, "steps": last["step"], "seconds": last["time"], "played": played})
        print(f"{name} seed {seed}: {last['time']:.0f} s, {played}", flush=True)
    versions = json.loads((runs_at[FIRST_SEED] / "versions.json").read_text())
    return {"command": f"shoal train {score.train}", "device": versions["device"], "episodes": EPISODES, "runs": runs}


def play(run: Path, random: tuple[str, ...]) -> dict[str, list[float]]:
    """Metric -> mean and half of its 95 % interval."""
    teams = [word for t in random for word in (f"--team.{t}", "random")]
    words = ["eval", str(run), "--checkpoint", "last", "--episodes", str(EPISODES), "--json", *teams]
    told = json.loads(shoal(words))["metrics"]
    kept = [k for k in told if (k.startswith("return/") and k.count("/") == 1) or k in ("success", "touches")]
    return {k: [told[k]["mean"], told[k]["interval"]] for k in kept}


def misses(name: str, result: dict[str, Any]) -> list[str]:
    """The seeds that did not reach what is wanted, in words."""
    return [
        f"{name} seed {r['seed']}: {metric} is {r['played'][''][metric][0]:.2f}, and {least} is wanted"
        for metric, least in SCORES[name].wanted.items()
        for r in result["runs"]
        if r["played"][""][metric][0] < least
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="folder for the runs; a temporary one unless told")
    parser.add_argument("--json", default=str(RESULTS), help="results are added to this file")
    args = parser.parse_args()
    for name in args.names:
        if name not in SCORES:
            parser.error(f"there is no score {name!r}; there are {', '.join(SCORES)}")
    if args.show:
        print("\n".join(f"{name}\n    shoal train {s.train} --seeds {s.seeds}" for name, s in SCORES.items()))
        return 0
    path, missed = Path(args.json), []
    with tempfile.TemporaryDirectory() as made:
        for name in args.names or SCORES:
            result = measure(name, args.device, Path(args.out or made))
            known = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**known, name: result}, indent=1) + "\n")
            missed += misses(name, result)
    print("\n".join(missed), file=sys.stderr, end="\n" if missed else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
