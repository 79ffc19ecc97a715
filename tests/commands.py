"""What tests of refusals share: a command that is refused in one sentence, and a folder that stays as it was."""

import re

from shoal.cli import main


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys, *words):
    assert main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"shoal: [^\n]+\.\n", err)
    return err
