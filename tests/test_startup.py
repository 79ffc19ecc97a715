"""What a start does not wait for: modules that must not be loaded yet. Which, never how long: machines are busy."""

import json
import subprocess
import sys

import pytest

# asked of every start; torch itself brings some more than one would think (torch.distributed, unittest, multiprocessing)
HEAVY = (
    "torch._dynamo torch._inductor torch._functorch.aot_autograd torch.utils.tensorboard torch.onnx sympy networkx "
    "matplotlib PIL tensorflow tensorboard google.protobuf absl grpc wandb imageio scipy pandas gymnasium pettingzoo mpe2 rich "
    "IPython setuptools pkg_resources numpy.testing pytest"
).split()

FIRST = """
import json, sys
from shoal.cli import main
from shoal.training.loop import Loop

def iterate(loop, whole=Loop.iterate):
    whole(loop)
    print(json.dumps([loop.step, sorted(sys.modules)]))
    loop.stop("seen")

Loop.iterate = iterate
sys.exit(main(["train", "mappo", "simple_spread", *sys.argv[1:]]))
"""


def loaded(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_loads_nothing_but_itself():
    (line,) = loaded("import json, sys; import shoal; print(json.dumps(sorted(sys.modules)))")
    modules = json.loads(line)
    assert "shoal" in modules
    assert [m for m in ("torch", "numpy", "inspect", *HEAVY) if m in modules] == []


def test_the_api_loads_no_tool():
    (line,) = loaded("import json, sys; import shoal.api; print(json.dumps(sorted(sys.modules)))")
    modules = json.loads(line)
    assert "shoal.api" in modules
    assert [m for m in modules if m.startswith("shoal.tools")] == []


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_loads_no_torch(word):
    *_, line = loaded(f"import json, sys; from shoal.cli import main; main([{word!r}]); print(json.dumps(sorted(sys.modules)))")
    modules = json.loads(line)
    assert "shoal.cli" in modules
    assert [m for m in ("torch", "numpy", "subprocess", *HEAVY) if m in modules] == []


def test_the_first_update_waits_for_nothing_heavy(tmp_path):
    """With all that a run does by default: an evaluation, a checkpoint and TensorBoard's events before it."""
    lines = loaded(FIRST, "--steps", 3200, "--envs", 16, "--eval.episodes", 4, "--out", tmp_path / "r")
    (seen,) = [line for line in lines if line.startswith("[")]
    step, modules = json.loads(seen)
    assert step == 400
    assert "torch" in modules
    assert [m for m in (*HEAVY, "shoal.tools") if m in modules] == []  # `shoal train` loads no tool
    assert list((tmp_path / "r" / "tb").glob("events.out.tfevents.*"))
    assert (tmp_path / "r" / "checkpoints" / "last.pt").exists()
