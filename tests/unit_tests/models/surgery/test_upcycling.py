# SPDX-License-Identifier: Apache-2.0
"""Upcycled models compute what the dense ones do, in transformers and here."""

import pytest
import torch
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from tests.toy_models import randomise

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DENSE = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "MixtralForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM", "MixtralForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
}
TOKENS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=DENSE)
def dense(request, tmp_path):
    """The folder of a dense model, its logits, and the class with experts."""
    config_name, model_name, sparse_name = DENSE[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**SIZES, tie_word_embeddings=True)
    model = getattr(transformers, model_name)(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "dense")
    with torch.no_grad():
        return tmp_path / "dense", model(TOKENS).logits, sparse_name


def upcycled(folder, output, *options):
    words = ["upcycle", "--hf-model", str(folder), "--hf-path", str(output), *options]
    return main(words)


@pytest.mark.parametrize(
    ("experts", "active", "granularity"), [(4, 2, 1), (4, 1, 1), (8, 4, 4), (8, 2, 2)]
)
def test_outputs_are_those_of_the_dense_model(dense, tmp_path, experts, active, granularity):
    folder, logits, sparse_name = dense
    sizes = ["--experts", experts, "--active", active, "--granularity", granularity]
    assert upcycled(folder, tmp_path / "moe", *map(str, sizes)) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "moe", output_loading_info=True
    )
    assert type(model).__name__ == sparse_name
    assert not any(info.values())
    with torch.no_grad():
        outputs = model.eval()(TOKENS).logits
    assert (outputs - logits).abs().max() <= 1e-5 * logits.std()


def test_the_bridge_reads_it_and_groups_have_routers_of_their_own(dense, tmp_path):
    folder, logits, _ = dense
    assert (
        upcycled(folder, tmp_path / "moe", "--experts", "8", "--active", "4", "--granularity", "2")
        == 0
    )
    provider = AutoBridge.from_hf_pretrained(tmp_path / "moe").to_megatron_provider()
    assert (provider.num_moe_experts, provider.moe_router_topk) == (8, 4)
    assert provider.moe_ffn_hidden_size == 32
    model = provider.provide_distributed_model(wrap_with_ddp=False)[0].eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        outputs = model(TOKENS, positions, None)[..., :96]
    assert (outputs - logits).abs().max() <= 1e-4 * logits.std()
    state = PreTrainedCausalLM(tmp_path / "moe").state
    router = next(state[name] for name in state if name.endswith(".gate.weight"))
    assert torch.equal(router[0::2], router[1::2])
    assert len(router[0::2].unique(dim=0)) == 4


def test_sizes_that_do_not_fit_are_named(dense, tmp_path, capsys):
    folder, _, _ = dense
    sizes = ["--experts", "6", "--active", "9", "--granularity", "4"]
    assert upcycled(folder, tmp_path / "moe", *sizes) == 1
    errors = capsys.readouterr().err
    for words in ("--experts 6", "--active 9", "--granularity 4", "--experts"):
        assert words in errors
    assert not (tmp_path / "moe").exists()


def test_other_architectures_are_named(tmp_path, capsys):
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=96)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    assert upcycled(tmp_path / "gpt2", tmp_path / "moe", "--experts", "2", "--active", "1") == 1
    assert "model_type=gpt2" in capsys.readouterr().err
