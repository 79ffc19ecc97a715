"""The README's tables are current and its commands exist."""

import importlib.util
import re
from pathlib import Path

from shoal.cli import HELP
from shoal.ids import catalog

ROOT = Path(__file__).parent.parent


def test_tables_are_current():
    spec = importlib.util.spec_from_file_location("readme_script", ROOT / "scripts" / "readme.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "README.md").read_text()
    assert script.current(text) == text, "run `make readme`"
    for kind in ("envs", "algos"):
        for entry in catalog(kind).values():
            assert f"| `{entry.form}` |" in text


def test_commands_and_links_exist():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile
    for verb in re.findall(r"^shoal (\w+)", text, re.MULTILINE):
        assert f"shoal {verb}" in HELP
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
