# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows exists: every block is executed or dry-run, links lead somewhere.

``tests/pages.py`` says which; tests/functional_tests/project/test_pages.py executes.
"""

import re
import sys
import tomllib

import pytest
import yaml

from scripts.docs import pictures
from tests import commands
from tests.pages import blocks, pages, undefined_names, wrong_keywords
from tests.unit_tests.project.tree import ROOT, tracked

PAGES = pages()


def named(page):
    return str(page.relative_to(ROOT))


def shell():
    """Every shell command that is not executed, with where it stands."""
    for page in PAGES:
        for block in blocks(page):
            for words in (
                block.commands() if (block.language, block.way) == ("bash", "dry-run") else []
            ):
                yield pytest.param(words, id=f"{block.name} {' '.join(words)[:50]}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_is_executed_or_dry_run(page):
    assert [block.way for block in blocks(page)].count(
        ""
    ) == 0  # raises with the name of the first that is not


@pytest.mark.parametrize("words", shell())
def test_commands_would_run(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = dict(vars(sys.modules["__main__"]))
    commands.dry_run(words)
    assert vars(sys.modules["__main__"]) == ours, (
        "without its file, torch cannot be imported any further"
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_of_python_blocks_exist(page):
    source = [block for block in blocks(page) if block.language == "python"]
    assert undefined_names(source) == []
    assert wrong_keywords(source) == []


def settings():
    for page in PAGES:
        for block in blocks(page):
            if (block.language, block.way) == ("yaml", "dry-run"):
                yield pytest.param(block, id=block.name)


@pytest.mark.parametrize("block", settings())
def test_yaml_is_settings(block, tmp_path):
    """Applied to a recipe like ``--config FILE``."""
    file = tmp_path / "settings.yaml"
    file.write_text(block.text)
    apply(file, "_target_" in yaml.safe_load(block.text))


def apply(file, whole):
    """Settings that need a package or a GPU that is not here are applied, and not validated."""
    from megatron.bridge.cli.support.options import add_recipe_options
    from megatron.bridge.cli.support.parser import Parser
    from megatron.bridge.cli.support.train_job import prepare

    parser = Parser()
    add_recipe_options(parser)
    recipe = [] if whole else ["--recipe", "smollm2_135m_pretrain_config"]
    job = prepare(parser.parse_args([*recipe, "--config", str(file)]))
    assert job.changes or whole


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    broken = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_files_that_pages_name_exist():
    named = {
        (page, path)
        for page in PAGES
        for path in re.findall(
            r"`((?:tests|scripts|examples|benchmarks|docs)/[\w./-]+\.\w+)`", page.read_text()
        )
    }
    assert (
        sorted(f"{page.name}: {path}" for page, path in named if not (ROOT / path).exists()) == []
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_sentences_exist(page):
    """`make docs` is a target of the Makefile, and `.ci/run` a file that can be executed."""
    text = page.read_text()
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    listed = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert targets <= listed
    scripts = set(re.findall(r"`((?:\.ci|scripts)/[\w./-]+)[` ]", text))
    assert [path for path in sorted(scripts) if not (ROOT / path).exists()] == []


def test_where_things_are():
    """Paths are relative to the repository or to the package; a folder of one name is somewhere in the package."""
    package = ROOT / "src/megatron/bridge"
    folders = {path.name for path in package.rglob("*") if path.is_dir()}
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*(?:\.py)?)`", (ROOT / name).read_text()))
        assert named
        there = {path for path in named if (package / path).exists() or (ROOT / path).exists()}
        assert [
            path for path in sorted(named - there) if path.removesuffix("/") not in folders
        ] == []


def test_navigation_names_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in tracked("docs/*.md")]
    assert [page for page in pages if page not in navigation] == []


def test_version_of_python_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.12"
    assert "Python 3.12" in (ROOT / "README.md").read_text()


def test_pictures_are_as_drawn():
    for name, draw in pictures.PICTURES.items():
        shown = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert shown == draw(), "run `make pictures` and commit docs/pictures"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 8)])
def test_schedules_wait_as_long_as_the_page_says(stages, microbatches):
    """The formulas of docs/parallelism.md, against the schedules that its picture shows."""
    plain = [
        pictures.one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)
    ]
    bubble = (stages - 1) / microbatches
    assert pictures.idle(plain, 1, {"F": 1.0, "B": 2.0}) == pytest.approx(bubble)
    for parts in (2, 4):
        mixed = [
            pictures.interleaved(stage, stages, microbatches, parts) for stage in range(stages)
        ]
        assert pictures.idle(mixed, parts, {"F": 1 / parts, "B": 2 / parts}) == pytest.approx(
            bubble / parts
        )


def test_every_picture_is_described():
    """Whoever cannot see a picture reads what it shows."""
    for page in PAGES:
        for description in re.findall(r"!\[([^\]]*)\]", page.read_text()):
            assert len(description.split()) >= 5, f"{named(page)}: {description!r}"
