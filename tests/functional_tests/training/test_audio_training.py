# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on audio: steps equal those of a loop with transformers, layouts equal one process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.config import CheckpointConfig, OptimizerConfig
from tests import toy_audio, vision_run
from tests.toy_run import whole_weights
from tests.workers import leave

pytestmark = pytest.mark.skipif(not toy_audio.HAS_AUDIO, reason=toy_audio.NO_AUDIO)

NAMES = ("qwen2_audio", "voxtral")
SOUNDS = [(0.5, 16_000, 1), (0.9, 44_100, 2), (0.31, 8_000, 1), (0.99, 16_000, 1)]
HEARD = [[0], [1, 2], [], [3], [2], [0, 3], [], [1]]  # of each record
LAYOUTS = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "DP2": {},
}
CELLS = [
    *((name, layout, "padded") for name in NAMES for layout in LAYOUTS),
    *((name, layout, "packed") for name in NAMES for layout in ("CP2", "PP2")),
    ("voxtral", "TP2+SP", "padding-free"),
]
IN_CI = [CELLS[0], CELLS[1], CELLS[7], CELLS[8]]
ALL = {"micro_batch_size": 2, "global_batch_size": len(HEARD)}  # each step sees all records


def write(name: str, folder: Path) -> Path:
    """The toy ``name`` and, in ``data``, its records; returns ``folder``."""
    toy_audio.save(name, folder, weights=True)
    data = folder / "data"
    data.mkdir()
    files = [
        toy_audio.recording(data, f"{place}.wav", *facts, seed=10 * place)
        for place, facts in enumerate(SOUNDS)
    ]
    for stem, records in (("training", HEARD), ("validation", HEARD[:4])):
        lines = [
            json.dumps(_record([files[sound] for sound in sounds])) + "\n" for sounds in records
        ]
        (data / f"{stem}.jsonl").write_text("".join(lines))
    return folder


def _record(files: list[str]) -> dict:
    parts = [{"type": "audio", "audio": file} for file in files]
    question = {"type": "text", "text": f"How many{'?' * len(files)}"}
    answer = {"role": "assistant", "content": f"I hear {len(files)}."}
    return {"messages": [{"role": "user", "content": [*parts, question]}, answer]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def singles(folders):
    made = {}

    def single(name, kind):
        if (name, kind) not in made:
            made[name, kind] = vision_run.run(folders[name], kind=kind)
        return made[name, kind]

    yield single
    leave()


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [pytest.param(*cell, marks=() if cell in IN_CI else pytest.mark.slow) for cell in CELLS],
)
def test_equals_the_single_process(two_workers, folders, singles, name, layout, kind):
    expected = singles(name, kind)
    records = two_workers.run(run_cell, folders[name], layout, kind)
    first = records[0]
    assert all(record.numbers == first.numbers for record in records)
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.held_out == pytest.approx(expected.held_out, rel=1e-5)
    assert first.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    weights, single = whole_weights(records), whole_weights([expected])
    assert weights.keys() == single.keys()
    assert any(key.startswith("vision.audio_tower") for key in weights)


def run_cell(folder, layout, kind):
    return vision_run.run(folder, model=LAYOUTS[layout], kind=kind)


def their_losses(name: str, folder: Path, config: OptimizerConfig, steps: int) -> list[float]:
    """The mean loss of all trained tokens before each step of a loop with transformers and AdamW."""
    model = getattr(transformers, toy_audio.ROWS[name].model).from_pretrained(
        folder, dtype=torch.float32
    )
    # as where transformers builds the model; weights that it loads instead lose this
    model.model.audio_tower.embed_positions.requires_grad_(False)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    rest = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
    samples = list(_their_samples(name, folder))
    total = sum(int(trained.sum()) for _, trained in samples)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = 0.0
        for inputs, trained in samples:
            part = loss_of(model, inputs, trained).sum() / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        losses.append(loss)
    return losses


def loss_of(model: torch.nn.Module, inputs: dict, trained: torch.Tensor) -> torch.Tensor:
    """The loss of each trained token."""
    logits = model(**inputs).logits[0, :-1]
    labels = inputs["input_ids"][0, 1:]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")[trained]


def _their_samples(name: str, folder: Path) -> Iterator[tuple[dict, torch.Tensor]]:
    """Inputs by transformers' processors, and which targets are trained."""
    rules = MediaRules(str(folder), str(folder / "data"))
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1000, media=rules))
    for line in (folder / "data/training.jsonl").open():
        record = json.loads(line)
        sample = encoder([("here", record)]).samples[0]
        inputs = toy_audio.their_inputs(name, folder, record["messages"], folder / "data")
        yield inputs, torch.from_numpy(sample.trained[1:])


@pytest.mark.parametrize("kind", ["padded", "padding-free"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_of_a_loop_with_transformers(folders, name, kind):
    found = vision_run.run(folders[name], kind=kind, train=ALL)
    config = vision_run.config(folders[name]).optimizer
    expected = their_losses(name, folders[name], config, 3)
    assert found.losses == pytest.approx(expected, rel=1e-5)
    assert found.losses[-1] < found.losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_recomputed_tower_learns_the_same(folders, singles, name):
    recomputed = vision_run.run(folders[name], model={"recompute_vision_model": True})
    assert recomputed.losses == singles(name, "padded").losses
    assert recomputed.grad_norms == singles(name, "padded").grad_norms


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        ({"freeze_vision_model": True}, "tower"),
        ({"freeze_vision_projection": True}, "projector"),
        ({"freeze_language_model": True}, "decoder"),
    ],
)
def test_frozen_parts_stay_bitwise(folders, model, frozen):
    record = vision_run.run(folders["voxtral"], model=model)
    start = vision_run.first_weights(folders["voxtral"], model)
    final = whole_weights([record])
    changed = {part_of(name) for name, weight in final.items() if not weight.equal(start[name])}
    assert changed == {"tower", "projector", "decoder"} - {frozen}


def part_of(name):
    if not name.startswith("vision."):
        return "decoder"
    return "projector" if "multi_modal_projector" in name else "tower"


def test_a_resumed_run_goes_on_bitwise(folders, tmp_path):
    folder = folders["qwen2_audio"]

    def run(name, load=None, **train):
        saved = {"save": str(tmp_path / name), "save_interval": 2, "load": load}
        checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), **saved)
        return vision_run.run(folder, checkpoint=checkpoint, train={"train_iters": 4, **train})

    whole, half = run("whole"), run("half", exit_interval=2)
    rest = run("rest", load=str(tmp_path / "half"))
    assert half.losses + rest.losses == whole.losses
    found, expected = whole_weights([rest]), whole_weights([whole])
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_train_from_the_command_line(folders, name, tmp_path, capfd):
    recipe = {
        "qwen2_audio": "qwen2_audio_7b_finetune_config",
        "voxtral": "voxtral_mini_3b_finetune_config",
    }[name]
    folder = str(folders[name])
    command = ["train", "--recipe", recipe, "--hf-model", folder, "--data", f"{folder}/data"]
    sizes = ["model.seq_length=256", "dataset.seq_length=256", "train.global_batch_size=8"]
    steps = ["train.train_iters=1", "validation.eval_iters=0", "mixed_precision=fp32"]
    saved = [f"checkpoint.save={tmp_path / 'run'}"]
    try:
        assert main([*command, *sizes, *steps, *saved]) == 0
    finally:
        leave()
    shown = capfd.readouterr()
    config = vision_run.config(folders[name]).optimizer
    (expected,) = their_losses(name, folders[name], config, 1)
    assert f"lm loss {expected:.4f}" in shown.out + shown.err
    assert "8 recordings" in shown.out + shown.err


@pytest.mark.parametrize("name", NAMES)
def test_an_export_loads_in_transformers_and_goes_on(folders, name, tmp_path):
    folder = folders[name]
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), save=str(tmp_path / "run"))
    first = vision_run.run(folder, checkpoint=checkpoint, train=ALL)
    AutoBridge.from_hf_pretrained(folder).export_ckpt(
        tmp_path / "run", tmp_path / "out", show_progress=False
    )
    kind = getattr(transformers, toy_audio.ROWS[name].model)
    _, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "out").to_dict() == (
        transformers.AutoFeatureExtractor.from_pretrained(folder).to_dict()
    )
    config = vision_run.config(folder).optimizer
    expected = their_losses(name, tmp_path / "out", config, 1)
    again = vision_run.run(tmp_path / "out", train={**ALL, "train_iters": 1})
    assert again.losses == pytest.approx(expected, rel=1e-5)
    assert again.losses[0] < first.losses[-1]


@pytest.mark.parametrize(
    ("name", "tower"),
    [
        ("qwen2_audio", "vision.audio_tower.layers.*.self_attn.q_proj"),
        ("voxtral", "vision.multi_modal_projector.*"),
    ],
)
def test_adapters_load_in_peft(folders, name, tower, tmp_path):
    folder = folders[name]
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder), save=str(tmp_path / "run"))
    lora = LoRA(dim=2, target_modules=["linear_qkv", tower])
    record = vision_run.run(folder, checkpoint=checkpoint, train=ALL, peft=lora)
    assert record.losses[-1] < record.losses[0]
    export = ["adapter", "export", "--adapter", tmp_path / "run", "--hf-path", tmp_path / "adapter"]
    assert main([str(word) for word in export]) == 0
    kind = getattr(transformers, toy_audio.ROWS[name].model)
    model = PeftModel.from_pretrained(
        kind.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter"
    )
    trained = [part for part, weight in model.named_parameters() if "lora_B" in part]
    assert any("audio_tower" in part or "multi_modal_projector" in part for part in trained)
    samples = list(_their_samples(name, folder))
    total = sum(int(trained.sum()) for _, trained in samples)
    loss = sum(loss_of(model, *sample).sum() for sample in samples) / total
    resumed = CheckpointConfig(
        pretrained_checkpoint=str(folder), load=str(tmp_path / "run"), finetune=True
    )
    again = vision_run.run(folder, checkpoint=resumed, train={**ALL, "train_iters": 1}, peft=lora)
    assert again.losses == pytest.approx([float(loss)], rel=1e-5)
