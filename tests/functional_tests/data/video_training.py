# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on videos against transformers' loss, and in two layouts; prints what differs, one line each.

Videos need torchvision and PyAV, which the other tests do not have: this runs in a process of its own.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests import toy_vision, vision_run
from tests.functional_tests.data.processors_oracle import composite_sample
from tests.workers import Processes, WorkerPool

LAYOUTS = {
    "qwen2_5_vl": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "qwen3_vl": {"pipeline_model_parallel_size": 2},
    "qwen3_5_vl": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "glm4v": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "internvl": {},  # DP2
    "smolvlm": {"tensor_model_parallel_size": 2},
}
LONG = 1024


def write(name: str, folder: Path) -> Path:
    toy_vision.save(name, folder, weights=True)
    data = folder / "data"
    data.mkdir()
    first = {"type": "video", "video": toy_vision.film(data, "first.mp4", 44, 30, frames=6, fps=3)}
    stills = [toy_vision.picture(data, f"{place}.png", 16, 24, place) for place in range(4)]
    listed, image = (
        {"type": "video", "video": stills, "fps": 2},
        {"type": "image", "image": stills[0]},
    )
    media = [[first], [listed], [image], [first, image] if name.startswith("qwen") else []]
    lines = [json.dumps(_record(parts)) + "\n" for parts in media]
    for stem in ("training", "validation"):
        (data / f"{stem}.jsonl").write_text("".join(lines))
    return folder


def _record(parts: list[dict[str, Any]]) -> dict[str, Any]:
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "What moves?"}]}
    return {"messages": [question, {"role": "assistant", "content": f"I see {len(parts)}."}]}


def run(folder: Path, model: dict[str, Any]) -> Any:
    """One step over all records, which share rows."""
    dataset = {"seq_length": LONG, "padding_free": True}
    train = {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 4}
    return vision_run.run(
        folder,
        model={"seq_length": LONG, **model},
        train=train,
        dataset=dataset,
        kind="padding-free",
    )


def hf_loss(folder: Path) -> float:
    """The mean over all trained tokens, by transformers' own model and processor."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    rules = MediaRules(str(folder), str(folder / "data"))
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(LONG, media=rules))
    losses = []
    for line in (folder / "data/training.jsonl").open():
        record = json.loads(line)
        given = composite_sample(encoder, processor, record, {})
        with torch.no_grad():
            logits = model(**given).logits[0, :-1]
        trained = torch.from_numpy(encoder([("here", record)]).samples[0].trained[1:])
        labels = given["input_ids"][0, 1:]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[trained])
    return float(torch.cat(losses).mean())


def differences(name: str, folder: Path, processes: Processes) -> Iterator[str]:
    write(name, folder)
    expected, single = hf_loss(folder), run(folder, {})
    if abs(single.losses[0] / expected - 1) > 1e-5:
        yield f"{name}: loss {single.losses[0]}, not {expected}"
    for record in WorkerPool(2, processes).run(run, folder, LAYOUTS[name]):
        for what in ("losses", "grad_norms"):
            found, wanted = getattr(record, what)[0], getattr(single, what)[0]
            if abs(found / wanted - 1) > 1e-4:
                yield f"{name} with {LAYOUTS[name]}: {what} {found}, not {wanted}"


def main() -> None:
    processes = Processes()
    for name in sys.argv[1:] or LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            for line in differences(name, Path(folder), processes):
                print(line)  # noqa: T201
        print(f"{name} done")  # noqa: T201
    processes.close()


if __name__ == "__main__":
    main()
