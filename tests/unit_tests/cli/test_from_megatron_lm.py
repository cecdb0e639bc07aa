# SPDX-License-Identifier: Apache-2.0
"""Command lines of Megatron-LM as configs.

``tests/fixtures/megatron_lm_commands.tsv`` has a name, the number of processes and the arguments of public
training scripts of Megatron-LM (examples/ and tests/functional_tests/), with fictitious paths.
"""

from pathlib import Path

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.cli.migrate.megatron_lm import SETTINGS, TABLES, translate
from megatron.bridge.cli.migrate.megatron_lm_config import build
from megatron.bridge.models.conversion.model_bridge import function_fields
from megatron.bridge.recipes.catalog import find
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.errors import UserError

LINES = (
    Path(__file__).parents[2].joinpath("fixtures/megatron_lm_commands.tsv").read_text().splitlines()
)
COMMANDS = {
    name: (int(ranks), command) for name, ranks, command in (line.split("\t") for line in LINES)
}
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
RUN = "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --eval-iters 0 --mock-data "
NULL = "--tokenizer-type NullTokenizer --vocab-size 127 "


def _config(command, ranks=None):
    return build(translate(command, ranks))


@pytest.mark.parametrize("name", COMMANDS)
def test_public_command_lines_build_and_resolve(name):
    ranks, command = COMMANDS[name]
    config = _config(command, ranks)
    text = config.to_yaml()
    assert ConfigContainer.from_yaml(text).to_yaml() == text
    config.resolve(ranks)


BIASES = "attention_output_bias"  # False says the same as None without biases of linear layers
LATENT = {
    "rope_type",
    "rope_parameters",
    "latent_layernorm_epsilon",
    "moe_router_pre_softmax",
    "num_query_groups",
}
"""Other spellings: YaRN's numbers are fields of Megatron-Core; the others change nothing with sigmoid scores and
latent attention."""

NEMOTRON_H = {
    *("position_embedding_type", "rotary_percent", "rotary_base", "mamba_smallest_step"),
    *("moe_router_score_function", "moe_router_enable_expert_bias"),
}
"""The scripts rotate, which the published models do not; these have no experts."""
GPT_OSS = {
    *(
        "position_embedding_type",
        "rope_parameters",
        "max_position_embeddings",
    ),  # of the script's --enable-gpt-oss
    *(
        "window_attn_skip_freq",
        "ffn_hidden_size",
    ),  # 2 for [1, 0, 1, 0, ...]; there are no dense layers
}


@pytest.mark.parametrize(
    ("name", "recipe", "published"),
    [
        ("gpt3_175b", "gpt3_175b_pretrain_config", {"max_position_embeddings"}),
        ("mixtral_8x7b", "mixtral_8x7b_pretrain_config", set()),
        (
            "llama3_8b_fp8",
            "llama3_8b_pretrain_config",
            {"rotary_base", "layernorm_zero_centered_gamma"},
        ),
        ("qwen2.5_0.5b", "qwen25_500m_pretrain_config", {"layernorm_epsilon"}),
        (
            "qwen2.5_7b",
            "qwen25_7b_pretrain_config",
            {"layernorm_epsilon", "max_position_embeddings"},
        ),
        ("qwen3_4b", "qwen3_4b_pretrain_config", set()),
        ("qwen3_32b", "qwen3_32b_pretrain_config", set()),
        ("qwen3_8b", "qwen3_8b_pretrain_config", {"layernorm_epsilon"}),
        ("qwen3_30b_a3b", "qwen3_30b_a3b_pretrain_config", {"layernorm_epsilon", BIASES}),
        (
            "llama3.2_1b",
            "llama32_1b_pretrain_config",
            {"max_position_embeddings", "rope_parameters"},
        ),
        ("deepseek_r1", "deepseek_v3_pretrain_config", {"layernorm_epsilon", *LATENT}),
        ("kimi_k2", "kimi_k2_pretrain_config", {"layernorm_epsilon", *LATENT}),
        ("qwen3_0.6b", "qwen3_600m_pretrain_config", {"layernorm_epsilon"}),
        ("qwen3_235b_a22b", "qwen3_235b_a22b_pretrain_config", {"layernorm_epsilon", BIASES}),
        ("qwen_2p5_3b", "qwen25_3b_pretrain_config", set()),
        ("qwen_2p5_32b", "qwen25_32b_pretrain_config", set()),
        (
            "qwen_2p5_math_7b",
            "qwen25_7b_pretrain_config",
            {"rotary_base", "max_position_embeddings"},
        ),
        (
            "llama3.1_8b",
            "llama31_8b_pretrain_config",
            {"max_position_embeddings", "rope_parameters"},
        ),
        ("llama3p1_8b_instruct", "llama31_8b_pretrain_config", {"add_qkv_bias", "rope_parameters"}),
        (
            "mixtral_8x22b_tp2pp8ep8vpp1_release",
            "mixtral_8x22b_pretrain_config",
            {"rotary_base", "max_position_embeddings"},
        ),
        (
            "mixtral_8x7b_tp1pp4ep8vpp8_release",
            "mixtral_8x7b_pretrain_config",
            {"rotary_base", "max_position_embeddings"},
        ),
        (
            "deepseek_v2_lite",
            "deepseek_v2_lite_pretrain_config",
            {"max_position_embeddings", "moe_router_group_score", *LATENT},  # there is one group
        ),
        ("gpt_oss_20b", "gpt_oss_20b_pretrain_config", GPT_OSS),
        ("nemotron_h_8b", "nemotronh_8b_pretrain_config", NEMOTRON_H),
        ("nemotron_h_4b", "nemotronh_4b_pretrain_config", NEMOTRON_H),
    ],
)
def test_the_model_is_that_of_the_recipe(name, recipe, published):
    """``published`` names what the public script sets to another value than the model's own config."""
    ranks, command = COMMANDS[name]
    found, wanted = (
        _comparable(model) for model in (_config(command, ranks).model, find(recipe)().model)
    )
    different = {key for key in wanted if found[key] != wanted[key]}
    # Megatron-LM says in other words what rope_parameters says, or a factor of 1
    assert different - {"rope_scaling", "seq_len_interpolation_factor"} <= published


def _comparable(model):
    """The fields that decide what a model computes, with the defaults of Megatron-Core filled in."""
    values = {name: getattr(model, name) for name in function_fields() if hasattr(model, name)}
    values["kv_channels"] = model.kv_channels or model.hidden_size // model.num_attention_heads
    if model.multi_latent_attention:
        del values["kv_channels"]
    values["moe_ffn_hidden_size"] = model.moe_ffn_hidden_size or (
        model.num_moe_experts and model.ffn_hidden_size
    )
    for name in ("attention_bias", "mlp_bias"):
        values[name] = (
            model.add_bias_linear if getattr(model, name) is None else getattr(model, name)
        )
    if isinstance(frequency := model.window_attn_skip_freq, list) and not any(frequency):
        values["window_attn_skip_freq"] = None
    del values["vocab_size"]  # that of the tokenizer
    return values


def test_settings_of_a_command_line():
    command = (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes=2 pretrain_gpt.py \\\n"
        + TINY
        + "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights \\\n --num-experts 4 "
        "--moe-layer-freq '[0]*1+[1]*1' --tensor-model-parallel-size 2 --bf16 --fp8-format=hybrid "
        "--micro-batch-size 3 --train-iters 5 --lr 1e-3 --data-path 30 corpus/a 70 corpus/b "
        "--recompute-modules mlp --override-opt_param-scheduler --no-save-rng --seed 7"
    )
    config = _config(command)
    model, dataset = config.model, config.dataset
    assert (model.ffn_hidden_size, model.gated_linear_unit, model.add_bias_linear) == (
        128,
        True,
        False,
    )
    assert (model.share_embeddings_and_output_weights, model.moe_layer_freq) == (False, [0, 1])
    assert (model.recompute_modules, config.rng.seed, dataset.random_seed) == (["mlp"], 7, 7)
    assert (dataset.blend, dataset.split) == ((["corpus/a", "corpus/b"], [30, 70]), "969,30,1")
    assert (config.mixed_precision.bf16, config.mixed_precision.fp8) == (True, "hybrid")
    assert config.train.global_batch_size == 3 * 16 // 2
    assert config.scheduler.override_opt_param_scheduler
    assert not config.checkpoint.save_rng


def test_evaluation_of_several_sets():
    config = _config(
        TINY
        + RUN.replace("--mock-data", "")
        + NULL
        + "--train-data-path corpus/a --valid-data-path corpus/b corpus/c "
        "--multiple-validation-sets --validation-set-names code text --skip-train "
        "--eval-micro-batch-size 2 --eval-global-batch-size 4"
    )
    assert config.train.skip_train
    assert config.validation.sets == {"code": "corpus/b", "text": "corpus/c"}
    assert config.validation.eval_micro_batch_size == 2
    assert config.validation.eval_global_batch_size == 4
    assert config.dataset.blend_per_split == ((["corpus/a"], None), None, None)


def test_what_is_not_translated_is_named():
    found = translate(
        TINY + RUN + NULL + "--use-mcore-models --sequence-parallel --spec a b --split 9,1,0"
    ).translation
    assert set(found.missing) == {"--spec"}
    assert {"--use-mcore-models", "--sequence-parallel", "--split"} <= set(found.implied)
    assert not any(key.startswith("model.sequence") for key in found.settings)
    assert found.settings["tokenizer.vocab_size"] == "128"


@pytest.mark.parametrize(
    ("extra", "key", "way_out"),
    [
        ("--num-layer 3", "--num-layer ", "num-layers"),
        ("--swiglu yes", "--swiglu", "remove"),
        ("--moe-layer-freq import_os", "--moe-layer-freq=import_os", "[0]*3+[1]*58"),
        ("--save $RUN_FOLDER/x --load ${ARGS[@]}", "$RUN_FOLDER, $ARGS[@]", "export"),
        (
            "--pipeline-model-parallel-size two",
            "--pipeline-model-parallel-size=two",
            "whole number",
        ),
        ("--save 'x", "command line", "quotes"),
    ],
)
def test_mistakes(extra, key, way_out, monkeypatch):
    monkeypatch.delenv("RUN_FOLDER", raising=False)
    with pytest.raises(UserError) as caught:
        translate(TINY + RUN + "--num-layers-per-virtual-pipeline-stage 1 " + extra)
    assert key in str(caught.value)
    assert way_out in str(caught.value)


def test_weights_in_low_precision():
    """Where the weights are gathered and where they are kept, as Megatron-LM sets both by one argument."""
    fp8 = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
    found = translate(f"{TINY}{RUN}{fp8}").translation.settings
    for key in (
        "model.fp8_param",
        "ddp.fp8_param_gather",
        "ddp.reuse_grad_buf_for_mxfp8_param_ag",
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag",
    ):
        assert found[key] == "true"
    fp4 = "--fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather"
    found = translate(f"{TINY}{RUN}{fp4}").translation.settings
    assert found["model.fp4_param"] == found["ddp.fp4_param_gather"] == "true"


def test_tokenizers():
    """A type is optional; a value that is missing is no crash."""
    line = TINY + RUN + "--tokenizer-model org/name --group-query-attention --num-query-groups"
    settings = translate(line).translation
    assert settings.settings["tokenizer.tokenizer_model"] == "org/name"
    assert settings.settings["model.num_query_groups"] == "1"
    found = translate(TINY + RUN + "--merge-file merges.txt --trust-remote-code").translation
    assert found.settings["tokenizer.tokenizer_model"] == "openai-community/gpt2"
    assert "--merge-file" in found.implied
    assert "--vocab-file" not in found.implied.keys() | found.missing.keys()
    assert found.settings["tokenizer.trust_remote_code"] == "true"


def test_a_batch_size_that_depends_on_the_processes_is_asked_for():
    with pytest.raises(UserError, match="--world-size"):
        translate(TINY + "--micro-batch-size 2")


def test_variables_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LAYERS", "6")
    found = translate("--num-layers $LAYERS --hidden-size ${HIDDEN:-256} " + RUN).translation
    assert (found.settings["model.num_layers"], found.settings["model.hidden_size"]) == ("6", "256")


def test_the_command_writes_a_config_that_train_reads(tmp_path, capsys):
    """The block of docs/faq.md, with a small model."""
    script = tmp_path / "command.txt"
    script.write_text("torchrun --nproc_per_node 1 pretrain_gpt.py " + TINY + RUN + NULL)
    output = tmp_path / "run.yaml"
    assert main(["from-megatron-lm", str(script), "--output", str(output)]) == 0
    assert "--num-layers: model.num_layers=2" in capsys.readouterr().err
    assert main(["train", "--config", str(output), "--dry-run", "--summary"]) == 0
    assert main(["from-megatron-lm", TINY + RUN, "--overrides"]) == 0
    assert "model.num_layers=2" in capsys.readouterr().out.splitlines()
    assert main(["from-megatron-lm", str(tmp_path / "none")]) == 1


def test_each_argument_is_in_one_table():
    groups = [
        SETTINGS,
        *TABLES["implied"].values(),
        *TABLES["missing"].values(),
        *TABLES["renamed"].values(),
    ]
    names = [name for group in groups for name in group]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("argument", ["--num-layers=-2", "--kv-channels=0", "--clip-grad=-1"])
def test_numbers_that_no_run_accepts_are_refused(argument):
    name, _, value = argument.partition("=")
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    with pytest.raises(UserError) as caught:
        translate(f"pretrain_gpt.py {sizes} {argument}")
    assert name in str(caught.value)
    assert value in str(caught.value)


YAML = """
language_model:
  num_layers: ${YAML_LAYERS}
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  kv_channels: null
  add_bias_linear: False
  bias_swiglu_fusion: True
  activation_func: swiglu
  normalization: RMSNorm
  layernorm_zero_centered_gamma: True
  gated_linear_unit: False
  persist_layer_norm: False
  num_moe_experts: 4
  moe_router_topk: 2
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: True
  bf16: True
  pipeline_dtype: null
  batch_p2p_comm: True
  tp_comm_overlap: False
  tp_comm_atomic_ag: True
untie_embeddings_and_output_weights: True
swiglu: True
position_embedding_type: rope
group_query_attention: False
seq_length: 32
max_position_embeddings: 32
micro_batch_size: 1
global_batch_size: 8
train_iters: 5
lr: 1.e-3
eval_iters: 0
save: null
save_interval: 100
profile: False
profile_ranks: [0]
mock_data: True
tokenizer_type: NullTokenizer
vocab_size: 127
bert_binary_head: True
"""
SAME_AS_YAML = (
    TINY
    + RUN
    + NULL
    + "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2 --normalization RMSNorm "
    "--apply-layernorm-1p --num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope"
)


def test_a_yaml_file_is_the_command_line_with_its_values(tmp_path, monkeypatch):
    monkeypatch.setenv("YAML_LAYERS", "2")
    path = tmp_path / "gpt_config.yaml"
    path.write_text(YAML)
    from_file = _config(f"torchrun --nproc-per-node 2 pretrain_gpt.py --yaml-cfg {path}")
    assert from_file.to_yaml() == _config(SAME_AS_YAML, 2).to_yaml()


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("lr: 1", "--bf16", ["--bf16", "--yaml-cfg"]),
        ("lr: ${UNSET_NAME}", "", ["UNSET_NAME", "export"]),
        ("language_model: {activation_func: tanh}", "", ["activation_func=tanh", "swiglu"]),
        ("other_model: {num_layers: 2}", "", ["other_model", "language_model"]),
        ("[1, 2]", "", ["keys"]),
        ("no_such_thing: 3", "", ["--no-such-thing"]),
    ],
)
def test_a_wrong_yaml_file_is_one_sentence(text, more, words, tmp_path):
    path = tmp_path / "gpt_config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        _config(f"--yaml-cfg {path} {more}")
    assert all(word in str(raised.value) for word in words), raised.value
