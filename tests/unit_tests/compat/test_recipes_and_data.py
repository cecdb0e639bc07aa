# SPDX-License-Identifier: Apache-2.0
"""What scripts call to build configs and datasets."""

import json
from importlib import import_module

import pytest
import torch

from megatron.bridge import recipes
from megatron.bridge.data.builders import FinetuningDatasetBuilder, HFDatasetBuilder
from megatron.bridge.data.builders.hf_dataset import HFDatasetBuilder as SameBuilder
from megatron.bridge.data.config import PackedSequenceSpecs
from megatron.bridge.data.finetuning import prepare_finetuning_batch
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.recipe import Recipe
from megatron.bridge.recipes.utils.dataset_utils import get_blend_fields_from_data_paths
from megatron.bridge.recipes.utils.finetune_utils import default_peft_config
from megatron.bridge.recipes.utils.optimizer_utils import (
    distributed_fused_adam_with_cosine_annealing,
    distributed_fused_adam_with_cosine_annealing_samples,
    distributed_muon_with_cosine_annealing,
)
from megatron.bridge.utils.errors import UserError
from tests.toy_run import run_toy

RECIPES = {
    "deepseek.deepseek_v2": "deepseek_v2_lite_pretrain_config deepseek_v2_pretrain_config",
    "deepseek.deepseek_v3": "deepseek_v3_pretrain_config deepseek_v3_pretrain_config_32nodes",
    "gemma.gemma2": "gemma2_2b_pretrain_config gemma2_27b_finetune_config",
    "gemma.gemma3": "gemma3_1b_pretrain_config gemma3_1b_finetune_config",
    "gemma3_vl.gemma3_vl": "gemma3_vl_4b_finetune_config gemma3_vl_27b_finetune_config",
    "glm.glm45": "glm45_355b_pretrain_config glm45_air_106b_finetune_config",
    "glm_vl.glm_45v": "glm_45v_finetune_config",
    "gpt.gpt3_175b": "gpt3_175b_pretrain_config",
    "gpt_oss.gpt_oss": "gpt_oss_20b_pretrain_config gpt_oss_120b_finetune_config",
    "kimi.kimi_k2": "kimi_k2_pretrain_config",
    "llama.llama2": "llama2_7b_pretrain_config",
    "llama.llama3": "llama32_1b_pretrain_config llama3_8b_low_precision_pretrain_config",
    "ministral3.ministral3": "ministral3_3b_finetune_config ministral3_14b_finetune_config",
    "moonlight.moonlight_16b": "moonlight_16b_pretrain_config moonlight_16b_finetune_config",
    "nemotron_vl.nemotron_nano_v2_vl": "nemotron_nano_v2_vl_12b_finetune_config",
    "nemotronh.nemotron_3_nano": "nemotron_3_nano_pretrain_config",
    "nemotronh.nemotron_nano_v2": "nemotron_nano_9b_v2_pretrain_config",
    "nemotronh.nemotronh": "nemotronh_4b_pretrain_config nemotronh_56b_finetune_config",
    "olmoe.olmoe_7b": "olmoe_7b_pretrain_config olmoe_7b_finetune_config",
    "qwen.qwen2": "qwen2_7b_pretrain_config qwen25_14b_finetune_config",
    "qwen.qwen3": "qwen3_600m_pretrain_config qwen3_32b_finetune_config",
    "qwen.qwen3_moe": "qwen3_30b_a3b_pretrain_config qwen3_235b_a22b_finetune_config",
    "qwen.qwen3_next": "qwen3_next_80b_a3b_pretrain_config",
    "qwen_vl.qwen25_vl": "qwen25_vl_3b_finetune_config",
    "qwen_vl.qwen3_vl": "qwen3_vl_8b_pretrain_config qwen3_vl_30b_a3b_finetune_config",
}


@pytest.mark.parametrize("module", RECIPES)
def test_recipe_is_in_the_module_of_its_model(module):
    members = vars(import_module(f"megatron.bridge.recipes.{module}"))
    for name in RECIPES[module].split():
        assert isinstance(members[name], Recipe)
        assert members[name] is getattr(recipes, name)


def test_optimizer_in_steps(tmp_path):
    """A run takes both configs as they are."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        precision="fp32", lr_warmup_iters=1, lr_decay_iters=4, max_lr=1e-2, weight_decay=0.2
    )
    assert optimizer.min_lr == pytest.approx(1e-3)
    assert optimizer.use_distributed_optimizer
    record = run_toy({"train": {"train_iters": 2}, "optimizer": optimizer, "scheduler": scheduler})
    assert len(record.losses) == 2


def test_weight_decay_that_increases():
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        weight_decay=0.2, weight_decay_incr_style="linear", end_weight_decay=0.1
    )
    assert optimizer.bf16
    assert (scheduler.start_weight_decay, scheduler.end_weight_decay) == (0.033, 0.1)


def test_optimizer_in_samples():
    _, scheduler = distributed_fused_adam_with_cosine_annealing_samples(
        lr_warmup_samples=16, lr_decay_samples=64
    )
    assert (scheduler.lr_warmup_samples, scheduler.lr_decay_samples) == (16, 64)
    assert scheduler.lr_warmup_iters == 0


def test_muon():
    optimizer, scheduler = distributed_muon_with_cosine_annealing(
        muon_momentum=0.9, muon_num_ns_steps=3, max_lr=2e-4
    )
    assert (optimizer.optimizer, optimizer.muon_num_ns_steps) == ("dist_muon", 3)
    assert scheduler.lr_decay_style == "cosine"


def test_blend_fields(tmp_path):
    assert get_blend_fields_from_data_paths(mock=True) == (None, None, "1,1,1")
    blend, per_split, split = get_blend_fields_from_data_paths(["30", "one", "70", "two"])
    assert (list(blend[0]), list(blend[1]), per_split, split) == (
        ["one", "two"],
        [30.0, 70.0],
        None,
        "9999,8,2",
    )
    _, per_split, split = get_blend_fields_from_data_paths(
        train_data_path=["a"], valid_data_path=["b"], test_data_path=["c"]
    )
    assert split is None
    assert len(per_split) == 3


def test_default_adapters():
    assert default_peft_config("lora", dim=8) == LoRA(dim=8)
    assert isinstance(default_peft_config("DoRA"), DoRA)
    assert default_peft_config(None) is default_peft_config("none") is None
    with pytest.raises(UserError, match=r"peft_scheme=ia3.*lora, dora"):
        default_peft_config("ia3")


# ---------------------------------------------------------------------------------------------------------- batches


def test_microbatches_of_a_global_batch():
    tokens = torch.arange(12).view(6, 2)
    batch = {"tokens": tokens, "names": list("abcdef"), "step": 3}
    parts, length = prepare_finetuning_batch(iter([batch]), 3, 99)
    parts = list(parts)
    assert length == 2
    assert torch.equal(torch.cat([part["tokens"] for part in parts]), tokens)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert {part["step"] for part in parts} == {3}
    assert prepare_finetuning_batch(None, 3, 99) == (None, 99)
    with pytest.raises(UserError, match=r"6 rows.*num_microbatches=4"):
        prepare_finetuning_batch(iter([batch]), 4, 99)


# ---------------------------------------------------------------------------------------------------------- datasets


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer of transformers with a token for each character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate("abcdefgh 012345\n")}
    inner = Tokenizer(models.WordLevel(vocabulary | {"<eos>": 16}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


RECORDS = [{"input": f"a{index}", "output": f" b{index}"} for index in range(6)]


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_builder_of_a_folder(tmp_path, tokenizer):
    write_records(tmp_path / "training.jsonl", RECORDS)
    write_records(tmp_path / "validation.jsonl", RECORDS[:2])
    builder = FinetuningDatasetBuilder(
        dataset_root=tmp_path, tokenizer=tokenizer, seq_length=16, do_test=False
    )
    train, valid, test = builder.build()
    assert (len(train), len(valid), test) == (6, 2, None)
    assert train[0]["tokens"].shape == (16,)
    packed, *_ = FinetuningDatasetBuilder(
        tmp_path,
        tokenizer.name_or_path,
        seq_length=16,
        max_train_samples=4,
        packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=16),
        do_validation=False,
        do_test=False,
    ).build()
    assert 1 <= len(packed) < 4


def test_builder_of_the_hub(tmp_path, tokenizer):
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path)
    assert SameBuilder is HFDatasetBuilder
    train, valid, test = HFDatasetBuilder(
        str(tmp_path),
        tokenizer,
        process_example_fn=lambda record: {
            "prompt": record["input"],
            "completion": record["output"],
        },
        seq_length=16,
        val_proportion=0.3,
        rewrite=False,
    ).build()
    assert len(train) + len(valid) == 6
    assert test is None
    with pytest.raises(UserError, match=r"hf_kwargs=.*save_to_disk"):
        HFDatasetBuilder(str(tmp_path), tokenizer, hf_kwargs={"name": "x"})
    with pytest.raises(TypeError, match=r"seq_len'"):
        HFDatasetBuilder(str(tmp_path), tokenizer, seq_len=3)
