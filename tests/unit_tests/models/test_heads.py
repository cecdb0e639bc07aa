# SPDX-License-Identifier: Apache-2.0
"""Models with a head in the place of the output layer, against transformers' own classes."""

import filecmp
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import heads
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused
from tests.toy_heads import CLASSES, as_transformers, expected, ids_without_padding, make
from tests.toy_models import make_llama, tokens

TOLERANCE = 1e-4


def outputs(model):
    ids = ids_without_padding()
    return model[0](input_ids=ids, position_ids=tokens()[1], attention_mask=None)


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_are_those_of_transformers_and_the_files_come_back(name, tmp_path):
    hf = make(name, tmp_path / "hf")
    assert AutoBridge.can_handle(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    wanted = expected(hf, ids_without_padding())
    ours = as_transformers(outputs(model), wanted)
    assert (ours - wanted).abs().max() <= TOLERANCE * wanted.std()
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    names = [path.name for path in (tmp_path / "hf").iterdir()]
    assert [
        n
        for n in names
        if not filecmp.cmp(tmp_path / "hf" / n, tmp_path / "out" / n, shallow=False)
    ] == []


def test_gradients_are_those_of_transformers(tmp_path):
    hf = make("Qwen2ForSequenceClassification", tmp_path / "hf")
    labels = torch.tensor([3, 1])
    hf(input_ids=ids_without_padding(), labels=labels).loss.backward()
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    torch.nn.functional.cross_entropy(outputs(model)[:, -1], labels).backward()
    with torch.no_grad():  # gradients convert as weights do
        for parameter in model[0].parameters():
            parameter.copy_(parameter.grad)
    ours = dict(bridge.export_hf_weights(model, show_progress=False))
    for name, parameter in hf.named_parameters():
        assert (ours[name] - parameter.grad).norm() <= 1e-3 * parameter.grad.norm(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_becomes_a_classifier_that_transformers_loads(tied, tmp_path):
    make_llama(tmp_path / "hf", tie_word_embeddings=tied)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider()
    provider.head, provider.num_labels = "sequence_classification", 3
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}

    from transformers import AutoModelForSequenceClassification

    hf, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    hf.config.pad_token_id = 0
    wanted = expected(hf, ids_without_padding())
    assert (outputs(model)[:, -1] - wanted).abs().max() <= TOLERANCE * wanted.std()


def test_a_bare_decoder_under_the_name_of_a_language_model_is_read(tmp_path):
    """Embedding models are published with tensors of the decoder alone."""
    hf = make("Qwen3Model", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(path.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider()
    provider.head = "embedding"
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    wanted = expected(hf, ids_without_padding())
    assert (outputs(model) - wanted).abs().max() <= TOLERANCE * wanted.std()
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "Qwen3Model"
    ]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(stored[name], weight) for name, weight in hf.state_dict().items())


def test_a_megatron_checkpoint_keeps_the_head(tmp_path):
    make("Qwen2ForSequenceClassification", tmp_path / "hf")
    AutoBridge.import_ckpt(str(tmp_path / "hf"), str(tmp_path / "megatron"))
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "hf" / name, tmp_path / "out" / name, shallow=False)


def test_a_checkpoint_of_a_classifier_without_its_head_is_refused(tmp_path):
    make("LlamaForSequenceClassification", tmp_path / "hf")
    make_llama(tmp_path / "causal")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match=r"no tensor score\.weight.*allowed_mismatched_params"):
        bridge.to_megatron_model(hf_path=tmp_path / "causal", wrap_with_ddp=False)


REFUSED = {
    "no classes": ({"head": "sequence_classification"}, "model.num_labels, which is None"),
    "classes of nothing": (
        {"num_labels": 2},
        "model.num_labels=2 has no effect without model.head",
    ),
    "classes of an embedding": (
        {"head": "embedding", "num_labels": 2},
        "model.num_labels=2 .* unset it",
    ),
    "mtp": ({"head": "embedding", "mtp_num_layers": 1}, "model.mtp_num_layers=1: unset one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_go_with_a_head_are_refused(case, tmp_path):
    make_llama(tmp_path / "hf")
    values, message = REFUSED[case]
    provider = AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron_provider(
        load_weights=False
    )
    for name, value in values.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.finalize()


def test_a_model_with_a_head_refuses_to_compute_a_language_model_loss(tmp_path):
    make("LlamaForSequenceClassification", tmp_path / "hf")
    model = AutoBridge.from_hf_pretrained(tmp_path / "hf").to_megatron_model(wrap_with_ddp=False)
    ids, positions = tokens()
    with pytest.raises(UserError, match="head_step"):
        model[0](input_ids=ids, position_ids=positions, attention_mask=None, labels=ids)


def test_a_classifier_of_images_is_not_taken_for_one_of_texts():
    config = SimpleNamespace(architectures=["Gemma3ForSequenceClassification"], model_type="gemma3")
    assert not AutoBridge.supports(config)
    with refused("Gemma3ForSequenceClassification is not supported"):
        AutoBridge.from_hf_config(config)


def test_names_of_classes_go_into_the_config():
    source = {"model_type": "qwen3", "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    provider = SimpleNamespace(head="token_classification", num_labels=2, label_names=["O", "LOC"])
    changed = heads.changed_keys(provider, source)
    assert changed["id2label"] == {"0": "O", "1": "LOC"}
    assert changed["label2id"] == {"O": 0, "LOC": 1}
    provider.label_names = None
    assert "id2label" not in heads.changed_keys(provider, source)


@torch.no_grad()
def test_an_adapter_with_a_head_is_one_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    make("LlamaForSequenceClassification", tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    lora = LoRA(dim=4, modules_to_save=["output_layer"])
    model = lora(bridge.to_megatron_model(wrap_with_ddp=False))
    for parameter in model[0].parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.05 * parameter.requires_grad)
    model[0].eval()
    bridge.save_hf_adapter(model, tmp_path / "adapter", lora, str(tmp_path / "hf"))
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    theirs = peft.PeftModelForSequenceClassification.from_pretrained(
        base, tmp_path / "adapter"
    ).eval()
    wanted = theirs(input_ids=ids_without_padding()).logits
    assert (outputs(model)[:, -1] - wanted).abs().max() <= TOLERANCE
    assert (
        json.loads((tmp_path / "adapter/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    )
