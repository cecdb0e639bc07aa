# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction under parallel layouts: its gradients, and the same bytes back."""

import pytest

from megatron.bridge import AutoBridge
from tests.families import harness, next_tokens, qwen3_next_tokens
from tests.families.row import Row
from tests.families.rows import ROWS


def check(pool, tmp_path, layout, family=next_tokens):
    case = family.make_reference(tmp_path)
    found = pool.run(harness.numbers_and_bytes, case, layout, tmp_path / "out")
    assert not any(found), "\n".join(
        dict.fromkeys(problem for problems in found for problem in problems)
    )


@pytest.mark.parametrize("layout", ["tp2", "pp2", "vp2", "ep2"])
def test_two_processes(two_workers, tmp_path, layout):
    check(two_workers, tmp_path, layout)


def one_in_ci(wanted, *others):
    return [wanted, *(pytest.param(layout, marks=pytest.mark.slow) for layout in others)]


@pytest.mark.parametrize("layout", one_in_ci("tp2", "pp2", "vp2"))
def test_qwen3_next(two_workers, tmp_path, layout):
    check(two_workers, tmp_path, layout, qwen3_next_tokens)


@pytest.mark.parametrize("layout", ["tp2pp2", "tp2ep2"])
def test_four_processes(four_workers, tmp_path, layout):
    check(four_workers, tmp_path, layout)


# ---- a checkpoint, or a model, without the layers ---------------------------------------------------------------


@pytest.fixture(scope="module")
def as_saved(tmp_path_factory):
    row = ROWS["deepseek_v3"]
    declared = Row(row.name, row.model, {**row.config, "num_nextn_predict_layers": 1})
    return harness.make_reference(declared, tmp_path_factory.mktemp("as_saved"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return next_tokens.make_reference(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("layout", one_in_ci("pp2", "tp2", "ep2"))
def test_a_checkpoint_that_transformers_saved(two_workers, as_saved, tmp_path, layout):
    assert two_workers.run(harness.numbers_and_bytes, as_saved, layout, tmp_path / "out") == [
        [],
        [],
    ]


def without_the_layers(case, layout, folder):
    """Files that differ after two ways through a model that a user built without the layers."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    for name, value in harness.settings(
        provider, harness.LAYOUTS[layout], {"mtp_num_layers": None}
    ).items():
        setattr(provider, name, value)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, folder / "out", show_progress=False)
    bridge.save_megatron_model(model, folder / "megatron")
    bridge.export_ckpt(folder / "megatron", folder / "streamed", show_progress=False)
    return [harness.different_files(case, folder / name) for name in ("out", "streamed")]


@pytest.mark.parametrize("layout", one_in_ci("ep2", "tp2", "pp2"))
def test_layers_left_out_are_carried_over(two_workers, whole, tmp_path, layout):
    assert two_workers.run(without_the_layers, whole, layout, tmp_path) == [[[], []]] * 2
