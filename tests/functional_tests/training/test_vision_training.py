# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on images: parallel runs give the numbers of one process, however samples share rows."""

import json
import multiprocessing
import time
from random import Random

import pytest
import torch
from transformers import AutoImageProcessor

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import paths
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import gpt_step
from megatron.bridge.training.config import CheckpointConfig, LoggerConfig
from tests import vision_run
from tests.refusals import refused
from tests.toy_run import whole_weights
from tests.workers import leave

LONG = 400  # steps of the run that is killed, more than it makes between 30 kills
LAYOUTS = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "DP2": {},
}
CELLS = [
    *(("qwen2_5_vl", layout, "padded") for layout in LAYOUTS),
    *(("qwen2_5_vl", layout, "packed") for layout in ("CP2", "PP2")),
    ("qwen2_5_vl", "TP2+SP", "padding-free"),
    ("gemma3_vl", "CP2", "packed"),
    ("gemma3_vl", "PP2", "padded"),
    *(("gemma4_vl", layout, "packed") for layout in ("CP2", "PP2", "TP2+SP")),
    ("gemma4_vl_small", "TP2+SP", "padded"),
    ("gemma4_vl_small", "CP2", "packed"),
    ("paligemma", "CP2", "packed"),
    ("paligemma", "CP2", "padded"),
    ("paligemma", "PP2", "padding-free"),
    ("qwen3_vl", "CP2", "padded"),
    ("qwen3_5_vl", "CP2", "packed"),
    ("qwen3_5_moe_vl", "PP2", "packed"),
    ("mistral3", "TP2+SP", "packed"),
    ("smolvlm", "DP2", "padded"),
    *(("nemotron_nano_vl", layout, "padded") for layout in LAYOUTS),
    *(("ministral3_vl", layout, "packed") for layout in ("TP2+SP", "CP2")),
]
IN_CI = [*CELLS[:2], *CELLS[3:5]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = vision_run.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="module")
def singles(folders):
    made = {}

    def single(name, kind):
        if (name, kind) not in made:
            made[name, kind] = vision_run.run(folders(name), kind=kind)
        return made[name, kind]

    yield single
    leave()


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [pytest.param(*cell, marks=() if cell in IN_CI else pytest.mark.slow) for cell in CELLS],
)
def test_equals_the_single_process(two_workers, folders, singles, name, layout, kind):
    expected = singles(name, kind)
    records = two_workers.run(run_cell, folders(name), layout, kind)
    first = records[0]
    assert all(record.numbers == first.numbers for record in records)
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.held_out == pytest.approx(expected.held_out, rel=1e-5)
    assert first.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    weights, single = whole_weights(records), whole_weights([expected])
    assert weights.keys() == single.keys()
    assert any(key.startswith("vision.") for key in weights)


def run_cell(folder, layout, kind):
    return vision_run.run(folder, model=LAYOUTS[layout], kind=kind)


@pytest.mark.slow
def test_loss_curves_of_four_processes_and_of_one_are_the_same(four_workers, folders):
    folder, train = folders("qwen2_5_vl"), {"train_iters": 30}
    single = vision_run.run(folder, train=train)
    leave()
    layout = LAYOUTS["TP2+SP"] | LAYOUTS["CP2"]
    assert single.losses[-1] < 0.8 * single.losses[0]
    assert four_workers.run(run_long, folder, layout, train)[0].losses == pytest.approx(
        single.losses, rel=1e-3
    )


def run_long(folder, layout, train):
    return vision_run.run(folder, model=layout, train=train)


def test_losses_of_packed_and_padded_samples_are_equal(singles):
    """One step over all samples: how they share rows changes nothing."""
    padded, free = (singles("qwen2_5_vl", kind) for kind in ("padded", "padding-free"))
    assert free.losses == pytest.approx(padded.losses, rel=1e-5)
    assert free.grad_norms == pytest.approx(padded.grad_norms, rel=1e-4)


def test_a_resumed_run_goes_on_bitwise(folders, tmp_path):
    folder = folders("qwen2_5_vl")

    def run(name, load=None, **train):
        saved = {"save": str(tmp_path / name), "save_interval": 2, "load": load}
        checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), **saved)
        return vision_run.run(folder, checkpoint=checkpoint, train={"train_iters": 4, **train})

    whole, half = run("whole"), run("half", exit_interval=2)
    rest = run("rest", load=str(tmp_path / "half"))
    assert half.losses + rest.losses == whole.losses
    found, expected = whole_weights([rest]), whole_weights([whole])
    assert all(found[name].equal(expected[name]) for name in expected)


def resumed(folder, root, iterations, model=None):
    saved = {"save": str(root), "save_interval": 2, "load": str(root)}
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), **saved)
    return vision_run.run(
        folder,
        model=model,
        checkpoint=checkpoint,
        train={"train_iters": 4, "exit_interval": iterations},
    )


def test_a_run_changes_its_layout_in_the_middle(two_workers, folders, singles, tmp_path):
    folder = folders("qwen2_5_vl")
    whole = resumed(folder, tmp_path / "whole", 4)
    leave()
    first = two_workers.run(resumed, folder, tmp_path / "half", 2, LAYOUTS["TP2+SP"])[0]
    rest = two_workers.run(resumed, folder, tmp_path / "half", 4, LAYOUTS["CP2"])[0]
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-5)


def train_to_the_end(folder, root):
    saved = {"save": str(root), "save_interval": 1, "most_recent_k": 2, "load": str(root)}
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), **saved)
    record = vision_run.run(
        folder, checkpoint=checkpoint, train={"train_iters": LONG}, kind="packed"
    )
    torch.save(whole_weights([record]), root.with_suffix(".pt"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_thirty_times_ends_bitwise(folders, tmp_path):
    folder, random = folders("qwen2_5_vl"), Random(0)
    train_to_the_end(folder, tmp_path / "whole")
    context, root = multiprocessing.get_context("spawn"), tmp_path / "killed"
    kills = 0
    while not root.with_suffix(".pt").is_file():
        before = paths.latest_iteration(root) if root.is_dir() else None
        job = context.Process(target=train_to_the_end, args=(folder, root))
        job.start()
        while (
            job.is_alive()
            and kills < 30
            and (not root.is_dir() or paths.latest_iteration(root) == before)
        ):
            time.sleep(0.01)
        job.join(random.uniform(0, 0.3) if kills < 30 else None)
        kills += job.is_alive()
        job.kill()
        job.join()
    assert kills == 30
    found, expected = (torch.load(tmp_path / f"{name}.pt") for name in ("killed", "whole"))
    assert all(found[name].equal(expected[name]) for name in expected)


def test_an_export_has_the_limits_of_images_that_the_run_had(folders, tmp_path):
    folder = folders("qwen2_5_vl")
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), save=str(tmp_path / "run"))
    limits = {"min_pixels": 100, "max_pixels": 640, "fps": 1.5, "max_frames": 64}
    vision_run.run(folder, checkpoint=checkpoint, dataset=limits, train={"train_iters": 1})
    AutoBridge.from_hf_pretrained(folder).export_ckpt(
        tmp_path / "run", tmp_path / "out", show_progress=False
    )
    size = AutoImageProcessor.from_pretrained(tmp_path / "out").size
    assert (size["shortest_edge"], size["longest_edge"]) == (100, 640)
    videos = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert (videos["fps"], videos["max_frames"], videos["do_sample_frames"]) == (1.5, 64, True)


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        ({"freeze_vision_model": True}, "tower"),
        ({"freeze_vision_projection": True}, "projector"),
        ({"freeze_language_model": True}, "decoder"),
    ],
)
def test_frozen_parts_stay_bitwise(folders, model, frozen):
    record = vision_run.run(folders("qwen2_5_vl"), model=model)
    start = vision_run.first_weights(folders("qwen2_5_vl"), model)
    final = whole_weights([record])
    changed = {part_of(name) for name, weight in final.items() if not weight.equal(start[name])}
    assert changed == {"tower", "projector", "decoder"} - {frozen}


def part_of(name):
    if not name.startswith("vision."):
        return "decoder"
    return "projector" if "merger" in name else "tower"


def test_adapters_train_on_both_parts(folders):
    targets = ["linear_qkv", "vision.visual.blocks.*.attn.qkv"]
    record = vision_run.run(folders("qwen2_5_vl"), peft=LoRA(dim=2, target_modules=targets))
    adapters = [name for name in whole_weights([record]) if "adapter" in name]
    assert {part_of(name) for name in adapters} == {"tower", "decoder"}
    assert record.losses[-1] < record.losses[0]


def test_the_text_step_refuses_images(folders):
    with refused("gpt_step", "vlm_step"):
        vision_run.run(folders("qwen2_5_vl"), step=gpt_step.forward_step)


ASKED = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "How many?"}],
    }
]


@pytest.mark.parametrize(
    "layout", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]
)
def test_the_last_sample_of_a_run_is_what_its_checkpoint_answers(
    two_workers, folders, tmp_path, layout
):
    """The engine has the run's limits of images from the checkpoint."""
    folder = folders("qwen2_5_vl")
    two_workers.run(sampled_run, folder, tmp_path, layout)
    said = [
        json.loads(line)["answer"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()
    ]
    found, usual = (answered(path, folder / "data") for path in (tmp_path / "run", folder))
    assert said[-1] == found[0]
    assert found[1] < usual[1]


def sampled_run(folder, out, layout):
    logger = LoggerConfig(log_dir=str(out), sample_prompts=[ASKED], sample_max_new_tokens=8)
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), save=str(out / "run"))
    limits = {"max_pixels": 192}
    vision_run.run(
        folder,
        model=layout,
        dataset=limits,
        checkpoint=checkpoint,
        logger=logger,
        train={"train_iters": 2},
    )


def answered(path, root):
    """Text of an answer, and tokens of its question."""
    with LLM(str(path), media_root=str(root)) as llm:
        completion = llm.chat(ASKED, Sampling(max_new_tokens=8))
        return llm.hf.decode(completion.tokens), len(completion.prompt_tokens)
