# SPDX-License-Identifier: Apache-2.0
"""The Llama family under parallel layouts: the same logits, and the same bytes back, on every rank count."""

import errno
import filecmp
import os
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained import safetensors_writer
from megatron.bridge.models.hf_pretrained.model_folder import RECORD
from megatron.bridge.utils.errors import UserError
from tests.toy_models import LLAMA_VARIANTS, make_llama, tokens

TOLERANCE = 1e-4

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
# overlapped sends: batched ones mix up the two neighbours when they are the same process
VP2 = {
    **PP2,
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}
TWO = {"tp2": TP2, "sp2": SP2, "pp2": PP2, "vp2": VP2, "dp2": {}}
FOUR = {
    "tp2pp2": {**TP2, **PP2},
    "tp2dp2": TP2,
    "tp4": {"tensor_model_parallel_size": 4},
    "pp4": {"pipeline_model_parallel_size": 4},
}


def build(directory, layout):
    """Bridge and model of this rank under ``layout``."""
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    for name, value in layout.items():
        setattr(provider, name, value)
    if provider.num_attention_heads % provider.tensor_model_parallel_size:
        provider.make_query_groups_divisible_by = provider.tensor_model_parallel_size
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


def full_logits(model, ids, positions):
    """Logits [rows, sequence, vocabulary] on the last stage, None on the others; one row a microbatch."""
    found = []

    def step(rows, chunk):
        row = next(rows)
        output = chunk(
            input_ids=ids[row : row + 1], position_ids=positions[row : row + 1], attention_mask=None
        )

        def keep(logits):
            found.append(gather_vocabulary(logits.detach()))
            return logits.sum(), {}

        return output, keep

    config = get_model_config(model[0])
    length = ids.shape[1]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(len(ids))) for _ in model],
        model=model,
        num_microbatches=len(ids),
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
    )
    assert config is not None
    return torch.cat(found) if found else None


def gather_vocabulary(logits):
    parts = [
        torch.empty_like(logits)
        for _ in range(parallel_state.get_tensor_model_parallel_world_size())
    ]
    torch.distributed.all_gather(
        parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    return torch.cat(parts, dim=-1)


def convert_and_compare(directory, output, layout, expected):
    """Runs on every rank: logits against the reference, weights streamed and saved; returns the worst logit."""
    bridge, model = build(directory, layout)
    logits = full_logits(model, *tokens())
    worst = 0.0
    if logits is not None:
        worst = ((logits[..., : expected.shape[-1]] - expected).abs().max() / expected.std()).item()
    streamed = {
        name: weight.double().sum().item() for name, weight in bridge.export_hf_weights(model)
    }
    bridge.save_hf_pretrained(model, output, show_progress=False)
    return worst, streamed


def check(pool, tmp_path, layout, **changes):
    hf = make_llama(tmp_path / "hf", **changes)
    with torch.no_grad():
        expected = hf(input_ids=tokens()[0]).logits
    results = pool.run(convert_and_compare, tmp_path / "hf", tmp_path / "out", layout, expected)
    assert max(worst for worst, _ in results) <= TOLERANCE
    sums = {name: weight.double().sum().item() for name, weight in hf.state_dict().items()}
    if changes.get("tie_word_embeddings"):
        del sums["lm_head.weight"]  # not stored, so not exported
    assert all(streamed == sums for _, streamed in results)
    assert_same_files(tmp_path / "hf", tmp_path / "out")


def assert_same_files(source, exported):
    names = sorted(path.name for path in source.iterdir())
    assert sorted([*names, RECORD]) == sorted(path.name for path in exported.iterdir())
    assert [
        name for name in names if not filecmp.cmp(source / name, exported / name, shallow=False)
    ] == []


@pytest.mark.parametrize("layout", TWO)
def test_two_processes(two_workers, tmp_path, layout):
    """The variants are rows of ``test_family_layouts.py``."""
    check(two_workers, tmp_path, TWO[layout], **LLAMA_VARIANTS["tied"])


@pytest.mark.parametrize("layout", FOUR)
def test_four_processes(four_workers, tmp_path, layout):
    # two query groups: four-way tensor parallelism works on heads of padding
    check(four_workers, tmp_path, FOUR[layout], **LLAMA_VARIANTS["tied"], attention_bias=True)


def test_fewer_query_groups_than_ranks(four_workers, tmp_path):
    check(four_workers, tmp_path, FOUR["tp4"], num_attention_heads=8, num_key_value_heads=2)


def import_checkpoint(directory, megatron, layout):
    bridge, model = build(directory, layout)
    bridge.save_megatron_model(model, megatron)


def export_checkpoint(directory, megatron, output, layout):
    bridge = AutoBridge.from_hf_pretrained(directory)
    model = bridge.load_megatron_model(megatron, mp_overrides=layout, wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, output, show_progress=False)


@pytest.mark.parametrize(
    ("first", "second", "variant"),
    [("tp2", "pp2", "plain"), ("pp2", "tp2", "tied"), ("vp2", "sp2", "tied")],
)
def test_across_layouts_through_a_megatron_checkpoint(
    two_workers, tmp_path, first, second, variant
):
    make_llama(tmp_path / "hf", **LLAMA_VARIANTS[variant])
    two_workers.run(import_checkpoint, tmp_path / "hf", tmp_path / "megatron", TWO[first])
    layout = {name: value for name, value in TWO[second].items() if "p2p" not in name}
    two_workers.run(
        export_checkpoint, tmp_path / "hf", tmp_path / "megatron", tmp_path / "out", layout
    )
    assert_same_files(tmp_path / "hf", tmp_path / "out")


def message_of_refusal(directory, output):
    try:
        bridge, model = build(directory, TP2)
        bridge.save_hf_pretrained(model, output, show_progress=False)
    except UserError as error:
        return str(error)
    return None


def test_all_ranks_refuse_together(two_workers, tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    messages = two_workers.run(message_of_refusal, tmp_path / "hf", tmp_path / "out")
    assert len(set(messages)) == 1
    assert "model.safetensors" in messages[0]
    assert "remove it" in messages[0]


def bytes_read(directory):
    bridge, _ = build(directory, TP2)
    return bridge.hf_pretrained.state.bytes_read


def test_each_rank_reads_its_own_slices_only(two_workers, tmp_path):
    make_llama(tmp_path / "hf")
    size = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert all(read < 0.55 * size for read in two_workers.run(bytes_read, tmp_path / "hf"))


def export_with_one_full_disk(directory, output):
    bridge, model = build(directory, {**PP2})
    if torch.distributed.get_rank() == 1:
        safetensors_writer.os = SimpleNamespace(
            pwrite=full, open=os.open, close=os.close, O_WRONLY=os.O_WRONLY
        )
    try:
        bridge.save_hf_pretrained(model, output, show_progress=False)
    except UserError as error:
        return str(error)
    finally:
        safetensors_writer.os = os
    return None


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_for_one_rank_stops_all(two_workers, tmp_path):
    make_llama(tmp_path / "hf")
    messages = two_workers.run(export_with_one_full_disk, tmp_path / "hf", tmp_path / "out")
    assert all("the disk is full" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def some_tasks(directory):
    bridge, model = build(directory, TP2)
    tasks = [
        task
        for task in bridge.get_conversion_tasks(model)
        if "layers.1.self_attention" in task.global_param_name
    ]
    return [
        name
        for name, _ in bridge.export_hf_weights(model, show_progress=False, conversion_tasks=tasks)
    ]


def test_a_choice_of_tasks_is_exported(two_workers, tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=2)
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "oqkv"]
    assert two_workers.run(some_tasks, tmp_path / "hf") == [names, names]
