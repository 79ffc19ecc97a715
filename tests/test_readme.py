"""README.md and docs/*.md: tables are current, links lead somewhere, commands exist; the README is short."""

import importlib.util
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shoal.cli import HELP
from shoal.ids import catalog

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKER = r"<!-- (.+?): made by scripts/readme.py -->"


def each_page(function):
    return pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))(function)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("readme_script", ROOT / "scripts" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page
def test_tables_are_current(script, page):
    assert page in script.pages()
    text = page.read_text()
    assert script.current(text) == text, "run `make readme`"


def test_every_table_has_one_place(script):
    text = "".join(page.read_text() for page in PAGES)
    assert sorted(re.findall(MARKER, text)) == sorted(script.TABLES)
    assert sorted(re.findall(r"<!-- end of (.+?) -->", text)) == sorted(script.TABLES)


@pytest.mark.parametrize(("kind", "page"), [("envs", "environments"), ("algos", "algorithms")])
def test_tables_name_everything(kind, page):
    tables = [line for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if line.startswith("| `")]
    named = {word for line in tables for word in re.findall("`([^`]+)`", line.split(" | ")[0])}
    assert {entry.form for entry in catalog(kind).values()} - named == set()


def test_readme_names_every_algorithm():
    text = (ROOT / "README.md").read_text()
    assert [i for i in catalog("algos") if f"`{i}`" not in text] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        to = urlsplit(link)
        if to.scheme:
            continue
        target = (page.parent / to.path).resolve() if to.path else page
        if not target.exists() or (to.fragment and to.fragment not in anchors(target)):
            dead.append(link)
    return dead


@each_page
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    alive = "# A title, here\n[a](page.md) [b](#a-title-here) [c](https://x.y/z) `[d](no.md)`\n"
    page.write_text(alive + "![e](no.gif) [f](page.md#no) [g](#no)\n")
    assert dead_links(page) == ["no.gif", "page.md#no", "#no"]


def test_index_lists_every_page():
    links = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted([*links, "README.md"]) == [page.name for page in PAGES[1:]]


@each_page
def test_commands_exist(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\S+)", text, re.MULTILINE) + re.findall(r"`make ([\w-]+)`", text)
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    verbs = re.findall(r"(?:^|`)shoal (\w+)", text, re.MULTILINE)
    known = re.findall(r"shoal (\w+)|\| (\w+)", HELP)
    assert set(verbs) - {word for pair in known for word in pair} - {"VERB"} == set()


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^make (\S+)", text, re.MULTILINE) == ["train", "test"]
