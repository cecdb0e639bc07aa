# SPDX-License-Identifier: Apache-2.0
"""The table of supported models is the registry's."""

from scripts.docs import supported_models
from tests.families.rows import ROWS
from tests.families.vision.rows import ROWS as VISION_ROWS
from tests.unit_tests.project.tree import tracked


def test_table_is_current():
    assert supported_models.PART.is_current(supported_models.table()), (
        "run `make models` and commit docs/models.md"
    )


def test_deviations_are_current():
    assert supported_models.DEVIATIONS.is_current(supported_models.deviations()), (
        "run `make models` and commit docs/models.md"
    )


def test_each_row_is_one_line():
    """Bridges whose docstring goes on after the first paragraph, too."""
    lines = supported_models.table().splitlines()
    assert [line for line in lines if (line[:1], line[-1:]) != ("|", "|")] == []


def test_every_architecture_has_a_row_in_the_family_test():
    from megatron.bridge import AutoBridge

    rows = {row.model for row in (*ROWS.values(), *VISION_ROWS.values())}
    assert set(AutoBridge.list_supported_models()) == rows


def test_a_family_is_short():
    """At most 50 lines for each bridge of a module, 110 with experts, latent attention or learned positions (whose
    configs have names of their own for everything); what is more belongs to a shared block."""
    files = [
        path
        for path in tracked("src/megatron/bridge/models/*/*_bridge.py")
        if "conversion" not in path.parts
    ]
    assert files
    text = {path.name: path.read_text() for path in files}
    long = ("expert", "latent", "learned_absolute")
    each = {name: 110 if any(word in body for word in long) else 50 for name, body in text.items()}
    limits = {
        name: each[name] * max(1, body.count("@register_bridge")) for name, body in text.items()
    }
    assert [name for name, body in text.items() if len(body.splitlines()) > limits[name]] == []
