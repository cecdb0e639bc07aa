# SPDX-License-Identifier: Apache-2.0
"""The row of pad_token_id has the gradients that transformers' embedding gives it."""

import pytest
import torch
import torch.nn.functional as F

from megatron.bridge import AutoBridge
from tests.families.own_models import model_class
from tests.families.rows import ONE_FOR_EACH
from tests.toy_models import make_llama
from tests.unit_tests.models.test_more_families import provider_of

PADDING = 5
TOKENS = torch.tensor([[7, PADDING, 9, PADDING, 11, 3]])
TARGETS = torch.tensor([1, 2, 3, 4, 6, 8])


def gradients_of(provider, vocab_size):
    """The gradient of the embedding of a bridged model, without rows of padding."""
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    logits = chunk(TOKENS, torch.arange(TOKENS.size(1))[None], None)
    F.cross_entropy(logits[0, :, :vocab_size].float(), TARGETS).backward()
    return chunk.embedding.word_embeddings.weight.grad[:vocab_size]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_those_of_transformers(tmp_path, tied):
    given = {"pad_token_id": PADDING, "eos_token_id": PADDING, "tie_word_embeddings": tied}
    model = make_llama(tmp_path, **given)
    F.cross_entropy(model(TOKENS).logits[0], TARGETS).backward()
    expected = model.model.embed_tokens.weight.grad
    assert bool(expected[PADDING].any()) == tied, "a tied row has a gradient as an output"

    provider = AutoBridge.from_hf_pretrained(str(tmp_path)).to_megatron_provider()
    measured = gradients_of(provider, len(expected))
    rounding = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=rounding)


def test_the_row_is_trained_if_the_user_asks_for_it(tmp_path):
    model = make_llama(tmp_path, pad_token_id=PADDING, tie_word_embeddings=False)
    model.model.embed_tokens.padding_idx = None
    F.cross_entropy(model(TOKENS).logits[0], TARGETS).backward()
    expected = model.model.embed_tokens.weight.grad
    assert expected[PADDING].any()

    provider = AutoBridge.from_hf_pretrained(str(tmp_path)).to_megatron_provider()
    provider.embedding_padding_idx = None
    measured = gradients_of(provider, len(expected))
    rounding = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize(("token", "row"), [(None, None), (0, 0), (-1, 100), (10**6, None)])
def test_ids_are_read_as_torch_reads_them(token, row):
    assert provider_of("gemma", pad_token_id=token).embedding_padding_idx == row
    if row is not None:
        assert torch.nn.Embedding(101, 2, padding_idx=token).padding_idx == row


@pytest.mark.parametrize("architecture", ONE_FOR_EACH)
def test_each_architecture_has_the_row_that_transformers_has(architecture):
    provider = provider_of(ONE_FOR_EACH[architecture].name, pad_token_id=PADDING)
    with torch.device("meta"):
        model = model_class(architecture)(provider.hf_config)
    assert provider.embedding_padding_idx == model.get_input_embeddings().padding_idx
