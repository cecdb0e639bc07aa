# SPDX-License-Identifier: Apache-2.0
"""Each deliberate difference from transformers exists, is noted at loading, and is the only one."""

import pytest
import torch
import torch.nn.functional as F

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.deviations import DEVIATIONS, deviations_of
from tests.families.rows import ROWS
from tests.toy_models import make_llama
from tests.unit_tests.models.test_more_families import provider_of

PADDING = 5


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


@pytest.mark.parametrize("tied", [False, True])
def test_a_padding_token_in_a_text_has_a_gradient_in_its_row_alone(tmp_path, capsys, tied):
    given = {"pad_token_id": PADDING, "eos_token_id": PADDING, "tie_word_embeddings": tied}
    model = make_llama(tmp_path, **given)
    bridge = AutoBridge.from_hf_pretrained(str(tmp_path))
    provider = bridge.to_megatron_provider()
    assert "padding_idx" in capsys.readouterr().err
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    tokens = torch.tensor([[7, PADDING, 9, PADDING, 11, 3]])
    targets = torch.tensor([1, 2, 3, 4, 6, 8])
    F.cross_entropy(model(tokens).logits[0], targets).backward()
    logits = chunk(tokens, torch.arange(6)[None], None)
    F.cross_entropy(logits[0, :, : model.config.vocab_size].float(), targets).backward()
    expected = model.model.embed_tokens.weight.grad
    measured = chunk.embedding.word_embeddings.weight.grad[: len(expected)]
    others = torch.arange(len(expected)) != PADDING
    rounding = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(measured[others], expected[others], rtol=1e-4, atol=rounding)
    assert not torch.allclose(measured[PADDING], expected[PADDING], rtol=1e-2)
    assert bool(expected[PADDING].any()) == tied, "a tied row has a gradient as an output"


def test_a_padding_token_that_is_no_text_is_not_noted(tmp_path):
    make_llama(tmp_path, pad_token_id=PADDING, eos_token_id=2)
    assert not names_of(AutoBridge.from_hf_pretrained(str(tmp_path)).hf_config)
