# SPDX-License-Identifier: Apache-2.0
"""Each deliberate difference from transformers exists, is noted at loading, and is the only one."""

import pytest
import torch

from megatron.bridge.models.conversion.deviations import DEVIATIONS, deviations_of
from tests.families.rows import ROWS
from tests.unit_tests.models.test_more_families import provider_of


def names_of(config):
    return {deviation.name for deviation in deviations_of(config)}


@pytest.mark.parametrize(
    ("row", "changes", "names"),
    [
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, set()),
        ("qwen3_moe", {"router_aux_loss_coef": 0.01}, {"losses of routers"}),
        ("phimoe_long_rope", {"router_aux_loss_coef": 0.0}, {"long texts of Phi-3.5-MoE"}),
        (
            "phimoe_long_rope",
            {"router_aux_loss_coef": 0.0, "input_jitter_noise": 0.01},
            {"long texts of Phi-3.5-MoE", "noise of Phi-3.5-MoE"},
        ),
    ],
)
def test_notes_are_those_of_the_model(row, changes, names, capsys):
    provider = provider_of(row, **changes)
    assert names_of(provider.hf_config) == names
    shown = " ".join(capsys.readouterr().err.split())
    for deviation in DEVIATIONS:
        is_shown = deviation.is_noted and deviation.name in names
        assert (deviation.note() in shown) == is_shown


def test_long_texts_of_phimoe_differ():
    """transformers' frequencies do not change beyond the original context; the published code's do."""
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

    provider = provider_of("phimoe_long_rope")
    (chunk,) = provider.meta_model()
    length = ROWS["phimoe_long_rope"].config["rope_parameters"]["original_max_position_embeddings"]
    rope = PhimoeRotaryEmbedding(provider.hf_config)
    for count, same in ((length, True), (length + 1, False)):
        cosines, _ = rope(torch.zeros(1), torch.arange(count)[None])
        angles = chunk.rotary_pos_emb.get_freqs_non_repeated(count).float()
        ours = angles.cos() * chunk.rotary_pos_emb.attention_factor
        assert torch.allclose(cosines[0, :, : ours.size(1)], ours, atol=1e-5) == same
