"""`make` names what a machine lacks before it begins. The Python that it finds here is a script of ours."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LACKS = {
    "none": ("", "There is no python3: apt install python3 python3-venv"),
    "an old one": ("case $2 in *version_info*) exit 1;; esac", "python3 is older than 3.11"),
    "no venv": ("case $2 in *ensurepip*) exit 1;; esac", "python3 cannot make virtual environments: apt install python3-venv"),
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["train", "test"])
@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_named_before_anything_begins(tmp_path, lack, target):
    script, sentence = LACKS[lack]
    (tmp_path / "bin").mkdir()
    for tool in ("make", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    if script:
        (tmp_path / "bin" / "python3").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "python3").chmod(0o755)
    (tmp_path / "clone" / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/football.sh"):
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")} | {"PATH": str(tmp_path / "bin")}
    done = subprocess.run(["make", target], cwd=tmp_path / "clone", env=env, capture_output=True, text=True)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith(sentence)
    assert len(rest) == 1  # make's own
    assert done.stdout == ""
    assert not (tmp_path / "clone" / ".venv").exists()
