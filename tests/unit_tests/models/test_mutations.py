# SPDX-License-Identifier: Apache-2.0
"""A damaged or misdescribed checkpoint is refused by name, before anything is loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.toy_models import make_llama

Q = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make_llama(directory, num_hidden_layers=2)
    return directory


@pytest.fixture
def hf(original, tmp_path):
    """A copy to damage."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def index(hf):
    return json.loads((hf / "model.safetensors.index.json").read_text())


def edit(hf, name, change):
    """Replace tensor ``name`` by what ``change`` returns: {name: tensor}."""
    where = index(hf)
    file = where["weight_map"].pop(name)
    tensors = load_file(hf / file)
    new = change(tensors.pop(name))
    save_file({**tensors, **new}, hf / file, metadata={"format": "pt"})
    where["weight_map"] |= dict.fromkeys(new, file)
    (hf / "model.safetensors.index.json").write_text(json.dumps(where))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def edit_config(hf, **changes):
    path = hf / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard_of(hf, name):
    return hf / index(hf)["weight_map"][name]


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[:-10])


MUTATIONS = {
    "dropped": (lambda hf: edit(hf, Q, lambda _: {}), f"tensor {Q} is missing from the checkpoint"),
    "renamed": (
        lambda hf: edit(hf, Q, lambda t: {Q.replace("q_proj", "q_prog"): t}),
        rf"tensor {Q} is missing .* did you mean model.layers.1.self_attn.q_prog.weight",
    ),
    "adapter": (
        lambda hf: edit(
            hf, Q, lambda t: {Q: t, "model.layers.1.self_attn.q_proj.lora_A.weight": t.clone()}
        ),
        "tensor model.layers.1.self_attn.q_proj.lora_A.weight of the checkpoint has no Megatron parameter",
    ),
    "wrapper": (
        lambda hf: edit(hf, Q, lambda t: {f"module.{Q}": t}),
        r"strip_prefix='module\.' \(--strip-prefix\)",
    ),
    "a bias that the config leaves out": (
        lambda hf: edit(hf, Q, lambda t: {Q: t, Q.replace("weight", "bias"): t[:, 0].clone()}),
        r"q_proj.bias of the checkpoint has no Megatron parameter; add_qkv_bias or add_bias_linear makes it",
    ),
    "transposed": (
        lambda hf: edit(hf, DOWN, lambda t: {DOWN: t.T.contiguous()}),
        rf"tensor {DOWN} in model-.* has shape \[72, 48\], the config requires \[48, 72\]",
    ),
    "reshaped": (
        lambda hf: edit(hf, Q, lambda t: {Q: t[:-16].clone()}),
        f"tensor {Q} .* has shape",
    ),
    "8-bit floats": (
        lambda hf: edit(hf, Q, lambda t: {Q: t.to(torch.float8_e4m3fn)}),
        f"tensor {Q} in .* is float8_e4m3fn, which holds quantized values",
    ),
    "integers": (
        lambda hf: edit(hf, Q, lambda t: {Q: t.to(torch.int8)}),
        f"tensor {Q} in .* is int8",
    ),
    "missing shard": (
        lambda hf: shard_of(hf, Q).unlink(),
        r"lacks model-0000.*, which model.safetensors.index",
    ),
    "truncated shard": (
        lambda hf: truncate(shard_of(hf, Q)),
        r"model-0000.* is truncated: \d+ bytes of \d+",
    ),
    "empty shard": (
        lambda hf: shard_of(hf, Q).write_bytes(b""),
        "is not a complete safetensors file",
    ),
    "not a shard": (
        lambda hf: shard_of(hf, Q).write_bytes(b"\xff" * 64),
        "is not a complete safetensors file",
    ),
    "index names a tensor that is not there": (
        lambda hf: (hf / "model.safetensors.index.json").write_text(
            json.dumps(
                {"weight_map": {**index(hf)["weight_map"], "ghost": index(hf)["weight_map"][Q]}}
            )
        ),
        "tensor ghost is not in model-0000",
    ),
    "broken index": (
        lambda hf: (hf / "model.safetensors.index.json").write_text("{"),
        "index.json is damaged",
    ),
    "no weights": (
        lambda hf: [path.unlink() for path in hf.glob("model*")],
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "unsupported key": (
        lambda hf: edit_config(hf, quantization_config={"bits": 4}),
        "quantization_config.quant_method=None is not supported",
    ),
    "unknown activation": (
        lambda hf: edit_config(hf, hidden_act="snake"),
        "hidden_act='snake' is not supported",
    ),
    "tied": (
        lambda hf: edit_config(hf, tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens",
    ),
    "rope kind": (
        lambda hf: edit_config(hf, rope_parameters={"rope_type": "axial", "rope_theta": 1e4}),
        "rope_parameters.rope_type='axial' is not one of",
    ),
    "rope without its factor": (
        lambda hf: edit_config(hf, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "factor",
    ),
    "a factor of zero": (
        lambda hf: edit_config(
            hf, rope_parameters={"rope_type": "linear", "factor": 0, "rope_theta": 1e4}
        ),
        "factor=0 must be a number above 0",
    ),
    "factors the wrong way round": (
        lambda hf: edit_config(hf, rope_parameters=LLAMA3 | {"low_freq_factor": 5.0}),
        "rope_parameters.low_freq_factor=5.0 must not be above high_freq_factor=4.0",
    ),
    "a base that is true": (
        lambda hf: edit_config(hf, rope_theta=True),
        "rope_theta=True must be a number",
    ),
    "a size that is true": (
        lambda hf: edit_config(hf, num_hidden_layers=True),
        "num_hidden_layers=True must be",
    ),
    "no epsilon": (
        lambda hf: edit_config(hf, rms_norm_eps=0),
        "rms_norm_eps=0 must be a number above 0",
    ),
    "more heads": (
        lambda hf: edit_config(hf, num_key_value_heads=6),
        "k_proj.weight in .* has shape",
    ),
    "odd heads": (
        lambda hf: edit_config(hf, num_attention_heads=7),
        r"transformers refuses .*config.json: ValueError: The hidden size \(48\) is not a multiple of",
    ),
    "wrong type": (
        lambda hf: edit_config(hf, hidden_size="wide"),
        "transformers refuses .*config.json: TypeError: Field 'hidden_size' expected int, got str",
    ),
    "groups that do not divide the heads": (
        lambda hf: edit_config(hf, num_key_value_heads=4),
        "num_key_value_heads=4 does not divide num_attention_heads=6",
    ),
    "factors of another head width": (
        lambda hf: edit_config(
            hf,
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [2.0],
                "original_max_position_embeddings": 32,
            },
        ),
        "rope_parameters.short_factor has 1 numbers, the heads have 8 pairs",
    ),
    "head width": (lambda hf: edit_config(hf, head_dim=8), "q_proj.weight in .* has shape"),
    "more layers": (lambda hf: edit_config(hf, num_hidden_layers=3), "model.layers.2.* is missing"),
    "fewer layers": (
        lambda hf: edit_config(hf, num_hidden_layers=1),
        "model.layers.1.* has no Megatron parameter",
    ),
    "biases": (lambda hf: edit_config(hf, attention_bias=True), "q_proj.bias is missing"),
    "vocabulary": (
        lambda hf: edit_config(hf, vocab_size=100),
        "embed_tokens.weight in .* has shape",
    ),
    "integer dtype": (lambda hf: edit_config(hf, dtype="int8"), "dtype=.*int8 is not supported"),
    "broken config": (
        lambda hf: (hf / "config.json").write_text("{"),
        "config.json is not valid JSON",
    ),
    "other architecture": (
        lambda hf: edit_config(hf, architectures=["LlamaForCausalML"]),
        "architecture LlamaForCausalML is not supported; did you mean LlamaForCausalLM",
    ),
    "architecture in a string": (
        lambda hf: edit_config(hf, architectures="LlamaForCausalLM"),
        "architectures='LlamaForCausalLM' must be a list of names",
    ),
    "NaN": (
        lambda hf: edit_config(hf, attention_dropout=float("nan")),
        "NaN is no number that a model can have",
    ),
    "theta below zero": (
        lambda hf: edit_config(hf, rope_parameters={"rope_type": "default", "rope_theta": -1}),
        "rope_theta=-1 must be a number above 0",
    ),
    "theta in words": (
        lambda hf: edit_config(hf, rope_parameters={"rope_type": "default", "rope_theta": "x"}),
        "rope_theta='x' must be a number above 0",
    ),
    "no heads": (
        lambda hf: edit_config(hf, num_attention_heads=0),
        "num_attention_heads=0 must be at least 1",
    ),
    "no groups": (
        lambda hf: edit_config(hf, num_key_value_heads=0),
        "num_key_value_heads=0 must be at least 1",
    ),
    "no layers": (
        lambda hf: edit_config(hf, num_hidden_layers=0),
        "num_hidden_layers=0 must be at least 1",
    ),
    "width below zero": (
        lambda hf: edit_config(hf, hidden_size=-48),
        "hidden_size=-48 must be at least 1",
    ),
    "no architecture": (
        lambda hf: edit_config(hf, architectures=None),
        "the config names no architecture",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_refused(name, hf):
    mutate, message = MUTATIONS[name]
    mutate(hf)
    with pytest.raises(UserError, match=message):
        AutoBridge.from_hf_pretrained(hf).to_megatron_model(wrap_with_ddp=False)


def test_a_tied_checkpoint_called_untied_is_refused(tmp_path):
    make_llama(tmp_path, num_hidden_layers=1, tie_word_embeddings=True)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is missing from the checkpoint"):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)


def test_the_unmutated_checkpoint_loads(hf):
    assert AutoBridge.can_handle(hf)
    AutoBridge.from_hf_pretrained(hf).to_megatron_model(wrap_with_ddp=False)


def test_an_allowed_mismatch_keeps_the_parameter(hf, capsys):
    edit(hf, "lm_head.weight", lambda tensor: {"lm_head.weight": tensor[:50].clone()})
    bridge = AutoBridge.from_hf_pretrained(hf)
    model = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
    before = model[0].output_layer.weight.clone()
    with pytest.raises(UserError, match=r"lm_head\.weight in"):
        bridge.load_hf_weights(model)
    bridge.load_hf_weights(model, allowed_mismatched_params=["output_layer.*"])
    assert torch.equal(model[0].output_layer.weight, before)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}/absent", "absent does not exist: give the directory of a model, or a hub id"),
        ("{tmp}", "is not a Hugging Face model: it has no config.json"),
        ("{tmp}/file", "is a file: give the directory of the model, or a hub id"),
        ("nobody/nothing", "neither a local directory nor"),
        ("not a model", "neither a local directory nor"),
    ],
)
def test_a_path_that_is_not_a_model(path, message, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        AutoBridge.from_hf_pretrained(path.format(tmp=tmp_path))
    assert not AutoBridge.can_handle(path.format(tmp=tmp_path))


def test_misspelt_options_are_refused(hf):
    with pytest.raises(
        UserError, match="from_hf_pretrained takes no option revison; did you mean revision"
    ):
        AutoBridge.from_hf_pretrained(hf, revison="main")
