# SPDX-License-Identifier: Apache-2.0
"""The limits of images that a run had, in the files of the image processor that goes with its model."""

import json

import pytest
from transformers import AutoImageProcessor

from megatron.bridge.models.conversion.engine.side_files import _write_frames, _write_limits

SIZE = {"shortest_edge": 3136, "longest_edge": 1_000_000}
OLDER = {"min_pixels": 3136, "max_pixels": 1_000_000}
FORMS = {"sizes": {"size": SIZE}, "pixels": OLDER, "both": {"size": SIZE, **OLDER}, "defaults": {}}


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Glm4vImageProcessor"])
@pytest.mark.parametrize("form", FORMS)
def test_every_spelling_has_the_limits(tmp_path, kind, form):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_processor_type": kind, **FORMS[form]}))
    before = AutoImageProcessor.from_pretrained(tmp_path).size
    _write_limits(tmp_path, {"max_pixels": 640})
    after = AutoImageProcessor.from_pretrained(tmp_path).size
    assert (after["shortest_edge"], after["longest_edge"]) == (before["shortest_edge"], 640)


def test_a_processor_within_a_composite_one(tmp_path):
    path = tmp_path / "processor_config.json"
    path.write_text(
        json.dumps(
            {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": SIZE}}
        )
    )
    _write_limits(tmp_path, {"min_pixels": 100})
    assert json.loads(path.read_text())["image_processor"]["size"] == {**SIZE, "shortest_edge": 100}


def test_frames_of_videos_are_in_the_file_that_says_which_are_used(tmp_path):
    def written(name, content, limits, model_type="qwen2_5_vl"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / name).write_text(json.dumps(content))
        _write_frames(tmp_path, limits)
        found = json.loads((tmp_path / name).read_text())
        (tmp_path / name).unlink()
        return found

    sampled = {"do_sample_frames": True}
    own = written("video_preprocessor_config.json", {"size": SIZE}, {"fps": 2.0})
    assert own == {"size": SIZE, "fps": 2.0, "num_frames": None, **sampled}
    inside = written("processor_config.json", {"video_processor": {}}, {"max_frames": 8})
    assert inside == {"video_processor": {"max_frames": 8, **sampled}}
    renamed = written("preprocessor_config.json", {}, {"fps": 1.0, "max_frames": 8}, "smolvlm")
    assert renamed == {"fps": 1.0, "num_frames": 8, **sampled}
