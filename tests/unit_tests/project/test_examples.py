# SPDX-License-Identifier: Apache-2.0
"""Each family has examples, and their pages agree with the code."""

import json
import re

import pytest

from scripts.docs import family_pages
from tests.families.rows import ROWS
from tests.families.vision.rows import ROWS as VISION_ROWS
from tests.unit_tests.project.tree import ROOT

PAGES = family_pages.pages()


# families without a text model of their own: the examples train on text
WITH_IMAGES_ONLY = {"internvl", "llava"}
# the same for families that are made of parts of others
MADE_OF_OTHERS = {row.model for row in ROWS.values() if row.brief}


def test_every_family_has_examples():
    models = ROOT / "src/megatron/bridge/models"
    bridges = [path for path in models.glob("*/*_bridge.py") if path.parent.name != "conversion"]
    named = {
        path: set(re.findall(r'register_bridge\("(\w+)"', path.read_text())) for path in bridges
    }
    families = {path.parent.name for path in bridges if not named[path] <= MADE_OF_OTHERS}
    assert {page.parent.name for page in PAGES} == families - WITH_IMAGES_ONLY
    assert [page.parent.name for page in PAGES if not list(page.parent.glob("*.json"))] == []


def test_the_list_of_examples_has_every_family():
    listed = re.findall(r"\(models/(\w+)/README\.md\)", (ROOT / "examples/README.md").read_text())
    assert listed == [page.parent.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_page_is_current(page):
    part, body = family_pages.generated(page)
    assert part.is_current(body), "run `make examples` and commit examples/models"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_recipe_trains_the_model_that_is_named(page):
    """The model on the hub is the one whose tokenizer and numbers the recipe has."""
    from megatron.bridge.recipes.catalog import find

    stem, model = family_pages.START.search(page.read_text()).groups()
    assert find(f"{stem}_finetune_config")(dataset_root="x").tokenizer.tokenizer_model == model


def test_every_architecture_of_transformers_has_a_toy():
    """All but those whose class is on the hub, that need images, or that are made of parts of others."""
    from megatron.bridge import AutoBridge

    toys = {
        json.loads(path.read_text())["architectures"][0]
        for path in (ROOT / "examples/models").glob("*/*.json")
    }
    without = (
        set(AutoBridge.list_supported_models()) - toys - {row.model for row in VISION_ROWS.values()}
    )
    assert without - MADE_OF_OTHERS == {"DeciLMForCausalLM", "MinistralForCausalLM"}
