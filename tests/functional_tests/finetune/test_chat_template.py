# SPDX-License-Identifier: Apache-2.0
"""The chat template of training goes with the weights: into copies, exports, merges, adapters, and answers."""

import json

import pytest
from transformers import AutoTokenizer

from megatron.bridge.checkpoint import model_io
from megatron.bridge.cli.main import main
from megatron.bridge.data.config import PreferenceDatasetConfig
from megatron.bridge.inference.llm import LLM
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import DPOConfig
from megatron.bridge.training.dpo import dpo
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from tests.functional_tests.finetune.test_finetune import (  # noqa: F401 - fixtures
    LENGTH,
    chats,
    make_config,
    model_dir,
    tokenizer_dir,
)
from tests.workers import forget_model_parallel

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
QUESTION = [{"role": "user", "content": "who?"}]
RENDERED = "[user] who?{eos}[assistant] "


@pytest.fixture
def template_file(tmp_path):
    path = tmp_path / "trained.jinja"
    path.write_text(TEMPLATE)
    return path


def configured(base, data, run, template_file, **checkpoint):
    config = make_config(base, data, run, steps=1)
    config.dataset.packed_sequence_specs = None
    config.dataset.chat_template = template_file and str(template_file)
    config.dataset.do_validation = False
    config.validation.eval_iters = 0
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    return config


def tune(config):
    try:
        return finetune(config, forward_step)
    finally:
        forget_model_parallel()


def assert_has_template(folder):
    """transformers renders with the template of training, and so do readers of the older files."""
    hf = AutoTokenizer.from_pretrained(folder)
    rendered = hf.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert rendered == RENDERED.format(eos=hf.eos_token)
    inside = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    assert inside in (None, TEMPLATE)


def prompt_tokens(model, **options):
    """The tokens of the question as ``generate --chat``, ``chat`` and ``serve`` compute them."""
    with LLM(str(model), dtype="float32", kv_memory=1 << 24, **options) as llm:
        tokens = llm.reader.tokens(QUESTION, "the question")
        assert llm.hf.apply_chat_template(QUESTION, tokenize=False).startswith("[user]")
        return tokens


def test_fine_tuning_writes_and_uses_its_template(model_dir, chats, template_file, tmp_path):  # noqa: F811
    old = (model_dir / "chat_template.jinja").read_text()
    (model_dir / "chat_template.jinja").unlink()
    names = model_dir / "tokenizer_config.json"
    names.write_text(json.dumps({**json.loads(names.read_text()), "chat_template": old}))
    run = tmp_path / "run"
    tune(configured(model_dir, chats, run, template_file, also_save_hf_checkpoint=True))
    template_file.unlink()  # the checkpoint needs no file of the user
    assert_has_template(run / "hf_0000001")
    out = tmp_path / "out"
    assert (
        main(
            [
                "export",
                "--megatron-path",
                str(run),
                "--hf-path",
                str(out),
                "--hf-model",
                str(model_dir),
            ]
        )
        == 0
    )
    assert_has_template(out)
    again = ["export", "--megatron-path", str(run), "--hf-path", str(out)]
    again += ["--hf-model", str(model_dir)]
    assert main(again) == 1, "an earlier export is not replaced unless that is asked for"
    assert main([*again, "--overwrite"]) == 0
    described = ["--hf-path", str(tmp_path / "described")]
    assert main(["export", "--megatron-path", str(run), *described]) == 0
    assert_has_template(tmp_path / "described")
    hf = AutoTokenizer.from_pretrained(out)
    expected = hf.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert prompt_tokens(run) == expected == prompt_tokens(out)


def test_an_adapter_carries_its_template(model_dir, chats, template_file, tmp_path):  # noqa: F811
    run, merged, adapter = tmp_path / "run", tmp_path / "merged", tmp_path / "adapter"
    config = configured(model_dir, chats, run, template_file)
    config.peft = LoRA(dim=2)
    tune(config)
    assert main(["adapter", "merge", "--adapter", str(run), "--hf-path", str(merged)]) == 0
    assert main(["adapter", "export", "--adapter", str(run), "--hf-path", str(adapter)]) == 0
    again = tmp_path / "again"
    assert main(["adapter", "merge", "--adapter", str(adapter), "--hf-path", str(again)]) == 0
    for folder in (merged, adapter, again):
        assert_has_template(folder)
    assert not (adapter / "config.json").exists()  # else it would look like a model
    expected = prompt_tokens(merged)
    assert prompt_tokens(run) == expected
    assert prompt_tokens(model_dir, adapter=str(run)) == expected
    assert prompt_tokens(model_dir, adapter=str(adapter)) == expected


def test_preferences_go_on_with_the_template_of_fine_tuning(
    model_dir,  # noqa: F811
    chats,  # noqa: F811
    template_file,
    tmp_path,
):
    first, second = tmp_path / "sft", tmp_path / "dpo"
    tune(configured(model_dir, chats, first, template_file))
    pair = {
        "prompt": QUESTION,
        "chosen": [{"role": "assistant", "content": "Me."}],
        "rejected": [{"role": "assistant", "content": "You."}],
    }
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    (pairs / "training.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    config = configured(model_dir, chats, second, None, pretrained_checkpoint=str(first))
    config.dpo = DPOConfig()
    config.dataset = PreferenceDatasetConfig(
        seq_length=LENGTH, dataset_root=str(pairs), do_validation=False, do_test=False
    )
    try:
        dpo(config)
    finally:
        forget_model_parallel()
    assert model_io.trained_template(second) == TEMPLATE
    out = tmp_path / "out"
    assert (
        main(
            [
                "export",
                "--megatron-path",
                str(second),
                "--hf-path",
                str(out),
                "--hf-model",
                str(model_dir),
            ]
        )
        == 0
    )
    assert_has_template(out)


def test_the_tokenizer_s_own_template_is_not_written(model_dir, chats, tmp_path):  # noqa: F811
    tune(configured(model_dir, chats, tmp_path / "run", None))
    assert model_io.trained_template(tmp_path / "run") is None
