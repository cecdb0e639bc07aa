# SPDX-License-Identifier: Apache-2.0
"""Changed configs and damaged tensors of vision-language models: refused, or computed as transformers does."""

import copy
import json
import os
import shutil

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.families import harness as text_harness
from tests.families.mutations import WITHOUT_EFFECT
from tests.families.own_models import model_class
from tests.families.vision import harness
from tests.families.vision.rows import ROWS

PARTS = ("", "text_config", "vision_config")


def changes(config):
    """(part, key, value) of one change each."""
    for part in PARTS:
        values = config[part] if part else config
        for key, value in values.items():
            if key in WITHOUT_EFFECT or key in PARTS:
                continue
            for other in others(value):
                yield part, key, other
        yield part, "a_key_of_tomorrow", 1


def others(value):
    """Some values beside the one that is there."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 2 + 0.25]
    if isinstance(value, str):
        return ["relu", "nonsense"]
    return []


def changed(config, part, key, value):
    config = copy.deepcopy(config)
    (config[part] if part else config)[key] = value
    return config


def ours(directory, case, samples):
    """Logits of the bridged model, None if it refuses."""
    try:
        bridge = AutoBridge.from_hf_pretrained(directory)
        model = bridge.to_megatron_model(wrap_with_ddp=False)
        with torch.no_grad():
            return torch.cat([run(model[0].eval(), sample, case) for sample in samples])
    except UserError:
        return None


def run(model, sample, case):
    batch, media = harness.this_rank(sample, case.row)
    return model(
        input_ids=batch["ids"],
        position_ids=batch["positions"],
        attention_mask=batch.get("sight"),
        media=media,
    )


def theirs(directory, case, samples):
    """Logits of transformers, None if it fails."""
    try:
        kind = model_class(case.row.model)
        model = kind.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            return torch.cat([harness.hf_logits(model, sample, case.row) for sample in samples])
    except Exception:  # whatever it is
        return None


def verdict(directory, case, samples):
    """What is wrong with how a changed config is read; nothing if it is refused or computed as it should be."""
    try:
        found = ours(directory, case, samples)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    if found is None:
        return ""
    expected = theirs(directory, case, samples)
    if expected is None:
        return "computed, and transformers fails"
    error = text_harness.distance(expected, found[..., : expected.shape[-1]], expected.std())
    return "" if error <= 1e-4 else f"logits differ by {error:.1e}"


def problems(case, directory, only):
    samples = case.samples(AutoBridge.from_hf_pretrained(case.checkpoint).hf_config)[:2]
    config, found = json.loads((case.checkpoint / "config.json").read_text()), []
    for index, (part, key, value) in enumerate(changes(config)):
        if not only(index):
            continue
        shutil.copytree(case.checkpoint, directory, copy_function=os.link)
        (directory / "config.json").unlink()
        (directory / "config.json").write_text(json.dumps(changed(config, part, key, value)))
        if wrong := verdict(directory, case, samples):
            found.append(f"{part}.{key}={value!r}: {wrong}")
        shutil.rmtree(directory)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_no_change_passes(vision_case, tmp_path, name):
    assert problems(vision_case(name), tmp_path / "copy", lambda _: True) == []


def test_some_changes(vision_case, tmp_path):
    assert (
        problems(vision_case("qwen2_5_vl"), tmp_path / "copy", lambda index: index % 9 == 0) == []
    )
