# SPDX-License-Identifier: Apache-2.0
"""Adapters to the format of ``peft`` and back, and into exported models."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.hf_adapter import peft_for
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.toy_adapters import DECODER, adapted, batch, exported, make, reference, shake
from tests.toy_models import LLAMA, make_llama, tokens


def logits(model):
    ids, _, positions = batch()
    with torch.no_grad():
        return model[0](input_ids=ids, position_ids=positions, attention_mask=None)


CASES = {
    "lora": ("llama", LoRA(dim=4, alpha=8)),
    "dora": ("llama", DoRA(dim=4, alpha=8, use_rslora=True)),
    "canonical": ("llama", CanonicalLoRA(target_modules=["linear_q", "linear_v"], dim=4, alpha=8)),
    "patterns": (
        "llama",
        LoRA(
            target_modules=["*.layers.0.*.linear_qkv", "linear_fc2", "output_layer"],
            dim=4,
            dim_by_module={"*.layers.1.*": 2},
            alpha_by_module={"output_layer": 3},
        ),
    ),
    "mixtral": ("mixtral", LoRA(dim=4, alpha=8)),
    "router": (
        "qwen3_moe",
        LoRA(target_modules=["router", "linear_fc1", "linear_fc2"], dim=4, alpha=8),
    ),
    "second layers": ("mixtral", LoRA(target_modules=["linear_fc2"], dim=4, alpha=8)),
    "expert parts": ("qwen3_moe", CanonicalLoRA(dim=4, alpha=8)),
    "mixers": (
        "nemotron_h",
        LoRA(
            target_modules=["in_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            dim=4,
            alpha=8,
        ),
    ),
    "shared keys": ("gemma4", LoRA(dim=4, alpha=8)),
    "parts of shared keys": ("gemma4", CanonicalLoRA(dim=4, alpha=8)),
    "mixers among attention": (
        "bamba",
        LoRA(target_modules=["in_proj", "out_proj", "linear_qkv"], dim=4, alpha=8),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_it_with_equal_logits(models, tmp_path, case):
    kind, method = CASES[case]
    bridge, model = adapted(models(kind), method, ddp=False)
    shake(bridge, model, tmp_path / "shaken")
    bridge.save_hf_adapter(model, tmp_path / "adapter", method, show_progress=False)
    theirs = reference(kind, tmp_path / "adapter", share=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(batch()[0]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_it_comes_back_bit_for_bit(models, tmp_path, case):
    kind, method = CASES[case]
    bridge, model = adapted(models(kind), method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    found = peft_for(bridge, tmp_path / "adapter")
    assert type(found) is type(method)
    again_bridge, again = adapted(models(kind), found, ddp=False)
    again_bridge.load_hf_adapter(again, tmp_path / "adapter")
    ours, theirs = exported(bridge, model), exported(again_bridge, again)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 9, "^model.*up_proj": 7},
        },
    ],
)
def test_what_peft_made_is_imported(models, tmp_path, patterns):
    """Projections that Megatron fuses have factors of their own there."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **patterns
    )
    theirs = get_peft_model(make("llama"), config)
    theirs.save_pretrained(tmp_path)
    bridge, _ = adapted(models("llama"), LoRA(dim=2), ddp=False)
    method = peft_for(bridge, tmp_path)
    assert isinstance(method, CanonicalLoRA)
    bridge, model = adapted(models("llama"), method, ddp=False)
    bridge.load_hf_adapter(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(model), theirs.eval()(batch()[0]).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "method", [LoRA(dim=4, alpha=8), DoRA(dim=4, alpha=8), CanonicalLoRA(dim=4, alpha=8)]
)
def test_merged_export_is_what_peft_merges(models, tmp_path, method):
    bridge, model = adapted(models("llama"), method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = (
            reference("llama", tmp_path / "adapter", share=False).merge_and_unload().state_dict()
        )
    for name, weight in bridge.export_hf_weights(model, show_progress=False):
        torch.testing.assert_close(weight, theirs[name], rtol=1e-6, atol=1e-6)


def test_merged_model_on_disk_and_base_beside_it(models, tmp_path):
    from transformers import AutoModelForCausalLM

    bridge, model = adapted(models("llama"), LoRA(dim=4, alpha=8), ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    bridge.save_hf_pretrained(model, tmp_path / "merged", show_progress=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), merged(batch()[0]).logits, rtol=1e-5, atol=1e-5)
    bridge.save_hf_pretrained(
        model, tmp_path / "base", show_progress=False, merge_adapter_weights=False
    )
    base = make("llama").state_dict()
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict().items()
    ):
        assert torch.equal(tensor, base[name])


def test_modules_to_save_are_written_whole(models, tmp_path):
    method = LoRA(target_modules=["linear_qkv"], dim=4, modules_to_save=["output_layer"])
    bridge, model = adapted(models("llama"), method, ddp=False)
    with torch.no_grad():
        model[0].output_layer.weight.mul_(1.5)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "modules_to_save"
    ] == ["lm_head"]
    theirs = reference("llama", tmp_path / "adapter", share=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(batch()[0]).logits, rtol=1e-5, atol=1e-5)


def test_others_may_read_it(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=2), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    (tmp_path / "file").touch()
    assert {it.stat().st_mode for it in (tmp_path / "adapter").iterdir()} == {
        (tmp_path / "file").stat().st_mode
    }


def test_without_adapters_there_is_nothing_to_write(models, tmp_path):
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(models("llama"))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    with pytest.raises(UserError, match="no adapters to write"):
        bridge.save_hf_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_half_of_an_expert_is_refused(models, tmp_path):
    bridge, model = adapted(
        models("mixtral"), LoRA(target_modules=["linear_fc1"], dim=4), ddp=False
    )
    with pytest.raises(UserError, match="the second layer of its expert has none"):
        bridge.save_hf_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("wider", [{"intermediate_size": 64}, {"num_key_value_heads": 4}])
def test_an_adapter_of_a_wider_base_is_refused(models, tmp_path, wider):
    make_llama(tmp_path / "other", **{**DECODER, **wider})
    bridge, model = adapted(tmp_path / "other", LoRA(dim=4), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    bridge, model = adapted(models("llama"), peft_for(bridge, tmp_path / "adapter"), ddp=False)
    before = exported(bridge, model)
    with pytest.raises(
        UserError, match=r"of shape \[.*\] where this model needs \[.*\]: give the base"
    ):
        bridge.load_hf_adapter(model, tmp_path / "adapter")
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in exported(bridge, model).items()
    )


def test_layers_that_peft_takes_for_experts_are_refused(family_case, tmp_path):
    bridge, model = adapted(family_case("glm4_moe").checkpoint, LoRA(dim=4), ddp=False)
    with pytest.raises(UserError, match=r"layers of experts are also called \w+: leave it out"):
        bridge.save_hf_adapter(model, tmp_path / "adapter")


def test_peft_loads_experts_beside_shared_ones(family_case, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case = family_case("glm4_moe")
    method = LoRA(
        target_modules=["*.experts.linear_fc1", "*.experts.linear_fc2", "linear_proj"], dim=4
    )
    bridge, model = adapted(case.checkpoint, method, ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(case.checkpoint), tmp_path / "adapter"
    )
    ids, _, positions = batch()
    with torch.no_grad():
        ours = model[0](ids % 101, positions, None)
        torch.testing.assert_close(ours, theirs.eval()(ids % 101).logits, rtol=1e-5, atol=2e-5)


def test_another_description_is_refused(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    with pytest.raises(UserError, match="is not what the model's adapters were made with"):
        bridge.save_hf_adapter(model, tmp_path / "adapter", LoRA(dim=8))


def _drop(tensors):
    for name in [name for name in tensors if "layers.0.self_attn.q_proj.lora_" in name]:
        del tensors[name]


def _add(tensors):
    for factor in ("lora_A", "lora_B"):
        name = f"base_model.model.model.layers.0.mlp.up_proj.{factor}.weight"
        tensors[name.replace("layers.0", "layers.9")] = tensors[name].clone()


def _unshare(tensors):
    tensors[next(name for name in tensors if "k_proj.lora_A" in name)] += 1


@pytest.mark.parametrize(
    ("change", "message"), [(_drop, "lacks"), (_add, "also holds"), (_unshare, "use CanonicalLoRA")]
)
def test_other_tensors_are_refused(models, tmp_path, change, message):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    before = exported(bridge, model)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        bridge.load_hf_adapter(model, tmp_path / "adapter")
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in exported(bridge, model).items()
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused(models, tmp_path, name):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    file = tmp_path / "adapter" / name
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{name} is .*"):
        bridge.load_hf_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [7]),
        ("of_tomorrow", 1),
    ],
)
def test_what_an_adapter_has_that_is_not_read_is_refused(models, tmp_path, key, value):
    bridge, model = adapted(models("llama"), LoRA(dim=4), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    for read in (
        lambda: peft_for(bridge, tmp_path / "adapter"),
        lambda: bridge.load_hf_adapter(model, file.parent),
    ):
        with pytest.raises(
            UserError, match=f"has {key}=.*, which cannot be read: merge it instead"
        ):
            read()


def test_another_scaling_is_refused(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=4, alpha=8), ddp=False)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 9}))
    with pytest.raises(UserError, match=r"rank, alpha and use_rslora \(4, 9, False\)"):
        bridge.load_hf_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("module", ["word_embeddings", "final_layernorm"])
@pytest.mark.parametrize("name", ["Qwen2", "Gemma2"])
def test_trained_modules_of_a_tied_model_are_those_of_peft(name, module, tmp_path):
    peft = pytest.importorskip("peft")
    settings = {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True}
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = LoRA(dim=2, modules_to_save=[module])(bridge.to_megatron_model(wrap_with_ddp=False))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1 * parameter.requires_grad)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids, positions = tokens()
    with torch.no_grad():
        ours = model[0].eval()(input_ids=ids, position_ids=positions, attention_mask=None)
        expected = theirs(input_ids=ids).logits
    assert (ours - expected).abs().max() <= 1e-4 * expected.std()


OF_PEFT = {
    "output layer": {"target_modules": ["lm_head", "q_proj"]},
    "DoRA on the output layer": {"target_modules": ["lm_head", "o_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding alone": {"target_modules": ["embed_tokens"]},
    "both": {
        "target_modules": ["embed_tokens", "lm_head", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"embed_tokens": 2},
    },
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved norm": {"target_modules": ["o_proj"], "modules_to_save": ["model.norm"]},
}


def make_with_peft(folder, base=None, **settings):
    """Write an adapter with random values into ``folder``, and return the model of ``peft``."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base or make("llama"), config).eval()
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data.add_(0.1 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", OF_PEFT)
@torch.no_grad()
def test_embeddings_and_output_layers_of_peft_are_loaded(case, models, tmp_path):
    """``peft`` also stores the base's weights of these layers."""
    theirs = make_with_peft(tmp_path, **OF_PEFT[case])
    expected = theirs(batch()[0]).logits
    bridge = AutoBridge.from_hf_pretrained(models("llama"))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    peft_for(bridge, tmp_path)(model, training=False)
    bridge.load_hf_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    merged = dict(bridge.export_hf_weights(model, show_progress=False))
    for name, weight in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-5, atol=1e-5)


def test_an_output_layer_of_another_base_is_refused(models, tmp_path):
    make_with_peft(tmp_path, **OF_PEFT["output layer"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.base_layer.weight"][0, 0] += 1
    save_file(tensors, file)
    bridge = AutoBridge.from_hf_pretrained(models("llama"))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    peft_for(bridge, tmp_path)(model, training=False)
    with pytest.raises(UserError, match=r"another lm_head.weight than this base model has: give"):
        bridge.load_hf_adapter(model, tmp_path)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_half_a_tie_is_refused(target, tmp_path):
    settings = {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    base.save_pretrained(tmp_path / "hf")
    make_with_peft(tmp_path / "adapter", base, target_modules=[target, "q_proj"])
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=rf"changes (model\.)?{target} alone.*tie_word_embeddings"):
        peft_for(bridge, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "DoRA on an embedding"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
            r"other weights for model\.layers\.0\.input_layernorm",
        ),
    ],
)
def test_what_layers_cannot_hold_is_refused(settings, message, models, tmp_path):
    make_with_peft(tmp_path, **settings)
    with pytest.raises(UserError, match=message):
        peft_for(AutoBridge.from_hf_pretrained(models("llama")), tmp_path)


def test_modules_to_save_without_weights_are_refused(models, tmp_path):
    make_with_peft(tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": ["lm_head"]}))
    with pytest.raises(UserError, match=r"modules_to_save=\['lm_head'\] but no weights"):
        peft_for(AutoBridge.from_hf_pretrained(models("llama")), tmp_path)


@torch.no_grad()
def test_trained_modules_of_a_tied_model_come_back(tmp_path):
    settings = {**LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(
        tmp_path / "hf"
    )
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    LoRA(dim=2, modules_to_save=["word_embeddings"])(model)
    model[0].embedding.word_embeddings.weight.mul_(1.5)
    bridge.save_hf_adapter(model, tmp_path / "adapter", show_progress=False)
    again = bridge.to_megatron_model(wrap_with_ddp=False)
    peft_for(bridge, tmp_path / "adapter")(again, training=False)
    bridge.load_hf_adapter(again, tmp_path / "adapter")
    ids, positions = tokens()
    outputs = [
        chunks[0].eval()(input_ids=ids, position_ids=positions, attention_mask=None)
        for chunks in (model, again)
    ]
    assert torch.equal(*outputs)


MALFORMED = {
    "rank NaN": ({"r": float("nan")}, "r=nan"),
    "huge rank": ({"r": 10**9}, "rank 1000000000"),
    "no rank": ({"r": None}, "r=None"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
    "targets": ({"target_modules": 5}, "target_modules=5"),
    "endless pattern": ({"rank_pattern": {"(a+)+b": 2}}, r"rank_pattern='\(a\+\)\+b'"),
    "broken pattern": ({"alpha_pattern": {"(": 2}}, r"alpha_pattern='\('"),
}


@pytest.fixture
def written_adapter(models, tmp_path):
    bridge, model = adapted(models("llama"), LoRA(dim=4, alpha=8), ddp=False)
    shake(bridge, model, tmp_path / "adapter")
    return bridge, tmp_path / "adapter"


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_settings_are_named(case, written_adapter):
    bridge, folder = written_adapter
    changes, message = MALFORMED[case]
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        peft_for(bridge, folder)


@pytest.mark.parametrize("case", ["half of a pair", "integers", "NaN"])
def test_malformed_tensors_are_named(case, written_adapter):
    bridge, folder = written_adapter
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    if case == "half of a pair":
        del tensors[name]
    elif case == "integers":
        tensors[name] = tensors[name].int()
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        peft_for(bridge, folder)
