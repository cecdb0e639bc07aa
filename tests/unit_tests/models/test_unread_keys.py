# SPDX-License-Identifier: Apache-2.0
"""What transformers' own model never reads is noted and carried along; what it reads is used or refused."""

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import declared_fields
from megatron.bridge.models.hf_pretrained import transformers_reads
from megatron.bridge.testing.family import different_providers
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.toy_models import make_llama

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
PUBLISHED = {
    # Qwen3-Coder-30B-A3B-Instruct
    "qwen3_moe": {
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    # LLaMA 1; axolotl and TRL; distilgpt2; dolly
    "llama_plain": {
        "max_sequence_length": 2048,
        "_flash_attn_2_enabled": True,
        "_num_labels": 1,
        "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.py", "pt": "X"}},
    },
    "deepseek_v2": {"norm_topk_prob": True, "scoring_func": "sigmoid", "moe_layer_freq": 2},
    "deepseek_v3": {"topk_method": "greedy"},
    "qwen3_next": {"use_sliding_window": True},
    "phi3": {"attention_bias": True, "embd_pdrop": 0.1},
    "gpt_oss": {"hidden_act": "gelu"},
    "qwen2": {"use_mrope": True},
}
NESTED = {
    "llama_plain": (
        {**YARN, "finetuned": True},
        "rope_parameters.finetuned",
    ),  # Yarn-Llama-2-7b-64k
    "mistral_window": (
        {**YARN, "llama_4_scaling_beta": 0.1},
        "rope_parameters.llama_4_scaling_beta",
    ),
}


def config_of(row, **changes):
    kind = model_class(ROWS[row].model)
    return kind.config_class(**{**ROWS[row].config, **changes}, architectures=[ROWS[row].model])


def read(config):
    """Return the provider of a config, and the keys that are noted."""
    bridge = AutoBridge.from_hf_config(config)
    return bridge.to_megatron_provider(load_weights=False), bridge.unread_keys


@pytest.mark.parametrize("row", PUBLISHED)
def test_keys_that_transformers_never_reads_are_noted(row, capsys):
    provider, unread = read(config_of(row, **PUBLISHED[row]))
    plain, unread_of_plain = read(config_of(row))
    assert not different_providers(provider, plain)
    assert {key.partition(".")[0] for key in unread} == set(PUBLISHED[row])
    assert unread_of_plain == {}
    printed = capsys.readouterr().err
    assert all(key in printed for key in unread)


@pytest.mark.parametrize("row", NESTED)
def test_keys_of_rotary_embeddings_that_are_never_read(row):
    parameters, key = NESTED[row]
    provider, unread = read(config_of(row, rope_parameters=parameters))
    plain, _ = read(config_of(row, rope_parameters=YARN))
    assert not different_providers(provider, plain)
    assert list(unread) == [key]


@pytest.mark.parametrize("model", ["LlamaForCausalLM", "GraniteForCausalLM", "Olmo2ForCausalLM"])
def test_a_rotated_share_that_transformers_ignores(model):
    row = next(row for row in ROWS.values() if row.model == model)
    share = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    _, unread = read(config_of(row.name, rope_parameters=share))
    assert unread == {"rope_parameters.partial_rotary_factor": 0.5}


def test_a_key_that_transformers_reads_is_refused_by_name():
    """Sliding windows of single layers: transformers' Mistral reads ``layer_types``, its bridge does not."""
    config = config_of("mistral_window", layer_types=["full_attention"] * 4, window_kind="none")
    with pytest.raises(UserError, match="layer_types") as refusal:
        read(config)
    assert "window_kind" not in str(refusal.value)


@torch.no_grad()
def logits_of_transformers(row, config):
    torch.manual_seed(1)
    model = model_class(ROWS[row].model)._from_config(config).float().eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tokens = torch.arange(1, 13).view(1, 12) % config.vocab_size
    return model(input_ids=tokens, use_cache=False).logits


def candidates(row):
    """Yield keys of other families and made-up keys, with values that no config of the row has."""
    declared = {field.hf for fields in declared_fields().values() for field in fields}
    keys = sorted(
        declared - {"dtype"}
    )  # of which transformers itself makes use before any model does
    values = (True, False, 2, 0.37, "sigmoid", [1, 0])
    picked = random.Random(f"{row} keys").sample(keys, 3)
    for key in (*picked, "some_key_of_nobody"):
        yield key, random.Random(f"{row} {key}").choice(values)


def has_transformers_class(row):
    return hasattr(transformers, ROWS[row].model)


SAMPLE = random.Random(7).sample(sorted(filter(has_transformers_class, ROWS)), 12)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in SAMPLE else pytest.mark.slow)
        for row in filter(has_transformers_class, ROWS)
    ],
)
def test_random_keys_are_refused_only_if_they_change_numbers(row):
    """With a key that is noted, transformers computes the same numbers; a key that it does not read is not refused."""
    expected = logits_of_transformers(row, config_of(row))
    for key, value in candidates(row):
        try:
            config = config_of(row, **{key: value})
        except Exception:  # transformers itself refuses the value
            continue
        try:
            _, unread = read(config)
        except UserError:
            reads = transformers_reads.unread_keys(config.to_dict(), [key])
            assert reads == [], f"{key}={value!r} is refused, but transformers never reads it"
            continue
        if key in unread:
            assert torch.equal(logits_of_transformers(row, config), expected), (key, value)


def test_an_export_has_the_keys(tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=2)
    path = tmp_path / "hf" / "config.json"
    rope = {**YARN, "finetuned": True}
    config = {**json.loads(path.read_text()), **PUBLISHED["llama_plain"], "rope_parameters": rope}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert (tmp_path / "out" / "config.json").read_bytes() == path.read_bytes()
    AutoBridge.import_ckpt(tmp_path / "hf", tmp_path / "megatron", show_progress=False)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "again", show_progress=False)
    assert (tmp_path / "again" / "config.json").read_bytes() == path.read_bytes()


# ---- vision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("", "mm_hidden_size", 1024),  # LLaVA
        ("", "audio_config", {"layers": 2}),
        ("vision_config.", "windows", 3),
        ("vision_config.", "in_chans", 4),
        ("text_config.", "max_sequence_length", 64),
    ],
)
def test_keys_of_the_parts_of_a_vision_language_model(vision_case, tmp_path, part, key, value):
    config = json.loads((vision_case("qwen2_5_vl").checkpoint / "config.json").read_text())
    target = config[part.rstrip(".")] if part else config
    target[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    bridge.to_megatron_provider(load_weights=False)
    assert [name.removeprefix(part).partition(".")[0] for name in bridge.unread_keys] == [key]


# ---- tensors --------------------------------------------------------------------------------------------------------


def save_with(folder, row, changes, config=None):
    """Save a row's random model with some tensors added, renamed or converted."""
    model = harness.hf_model(ROWS[row])
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = changes(load_file(path))
    save_file(tensors, path, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    return path


def round_trip(folder, output, **options):
    bridge = AutoBridge.from_hf_pretrained(folder, **options)
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, output, show_progress=False)
    return model


FOREIGN = {
    # every Pythia stores its causal mask
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
    },
    "llama_plain": {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8),  # an old buffer
        "vision_tower.patch.weight": torch.rand(4, 4),
    },
    "qwen3_moe": {"model.layers.0.mlp.shared_expert.up_proj.weight": torch.rand(4, 4)},
}


@pytest.mark.parametrize("row", FOREIGN)
def test_tensors_that_transformers_does_not_load_are_carried(tmp_path, row, capsys):
    path = save_with(tmp_path / "hf", row, lambda tensors: tensors | FOREIGN[row])
    round_trip(tmp_path / "hf", tmp_path / "out")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    _, info = model_class(ROWS[row].model).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert "transformers' model does not load" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_prefix_of_a_wrapper_is_removed_on_request(tmp_path, prefix):
    def wrap(tensors):
        return {prefix + name: value for name, value in tensors.items()}

    path = save_with(tmp_path / "hf", "llama_plain", wrap)
    with pytest.raises(UserError, match=rf"strip_prefix='{prefix}'"):
        AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron_model(wrap_with_ddp=False)
    round_trip(tmp_path / "hf", tmp_path / "out", strip_prefix=prefix)
    written, stored = load_file(tmp_path / "out" / path.name), load_file(path)
    assert {prefix + name for name in written} == stored.keys()
    assert all(torch.equal(written[name], stored[prefix + name]) for name in written)
    with pytest.raises(UserError, match=r"strip_prefix='model\.module\.': no tensor"):
        round_trip(tmp_path / "hf", tmp_path / "no", strip_prefix="model.module.")


def test_each_tensor_goes_back_in_its_own_dtype(tmp_path, capsys):
    """As transformers loads them: bf16 and fp16 weights under a float32 config, and one float64 tensor."""
    dtypes = [torch.bfloat16, torch.float16, torch.float32]

    def mix(tensors):
        return {
            name: value.to(dtypes[index % 3]) for index, (name, value) in enumerate(tensors.items())
        }

    path = save_with(tmp_path / "hf", "llama_plain", mix, {"dtype": "float32"})
    (model,) = round_trip(tmp_path / "hf", tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert "rounded" not in capsys.readouterr().err


def test_what_is_more_precise_than_the_model_is_rounded_with_a_note(tmp_path, capsys):
    save_with(tmp_path / "hf", "llama_plain", lambda tensors: tensors, {"dtype": "bfloat16"})
    (model,) = round_trip(tmp_path / "hf", tmp_path / "out")
    assert "are rounded" in capsys.readouterr().err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    (ours,) = (
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("final_layernorm.weight")
    )
    assert torch.equal(ours, theirs.model.norm.weight)


def stacks_experts(row):
    """Return whether transformers stacks the experts that checkpoints of the row's family store one by one."""
    conversions = conversion_mapping.get_checkpoint_conversion_mapping(
        ROWS[row].config.get("model_type") or model_class(ROWS[row].model).config_class.model_type
    )
    return any("experts" in str(conversion.target_patterns) for conversion in conversions or ())


FIRST_ROWS = list({row.model: name for name, row in reversed(ROWS.items())}.values())
# Kimi Linear's three convolutions become one tensor, which is not read
STACKED = [
    row
    for row in filter(has_transformers_class, FIRST_ROWS)
    if stacks_experts(row) and row != "kimi_linear"
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row in ("mixtral", "granitemoe") else pytest.mark.slow)
        for row in STACKED
    ],
)
def test_checkpoints_with_the_names_of_modules(row, tmp_path):
    """Experts that transformers stacked; routers and other tensors that it renamed."""
    hf = harness.hf_model(ROWS[row])
    hf.save_pretrained(tmp_path / "hf", save_original_format=False)
    (model,) = round_trip(tmp_path / "hf", tmp_path / "out")
    files = ("model.safetensors", "config.json")
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = hf.float().eval()(input_ids=tokens, use_cache=False).logits
        logits = model.eval()(
            input_ids=tokens, position_ids=torch.arange(8)[None], attention_mask=None
        )
    difference = (logits[..., : expected.shape[-1]] - expected).abs().max()
    assert difference <= 1e-4 * expected.std()


# ---- pytorch_model.bin ----------------------------------------------------------------------------------------------


def pickle_weights(folder, shards):
    """Replace a model's safetensors by pickled files, as transformers wrote them before version 5."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    path.unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names = sorted(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"pytorch_model-{index + 1:05d}-of-{shards:05d}.bin"
        part = names[index::shards]
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_become_safetensors(tmp_path, shards):
    save_with(tmp_path / "hf", "llama_plain", lambda tensors: tensors)
    stored = pickle_weights(tmp_path / "hf", shards)
    round_trip(tmp_path / "hf", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    assert not list((tmp_path / "out").glob("*.bin*"))


class Attack:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": Attack()}, "contains more than tensors"),
        ({"model": {"weight": torch.ones(2)}}, "is not a state dict of tensors: it has model"),
        (b"not a file of PyTorch", "is not a complete PyTorch file|contains more than tensors"),
    ],
)
def test_pickled_files_that_are_not_read(tmp_path, content, message, capsys):
    save_with(tmp_path / "hf", "llama_plain", lambda tensors: tensors)
    pickle_weights(tmp_path / "hf", 1)
    path = tmp_path / "hf" / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=message):
        round_trip(tmp_path / "hf", tmp_path / "out")
    assert "this ran" not in "".join(capsys.readouterr())
    assert not (tmp_path / "out").exists()
