# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a vision-language model on pictures, and ask it about pictures that it has not seen.

python scripts/demo/prepare_shapes.py runs/tutorials/vision/pictures runs/tutorials/vision/untrained
python tutorials/vision/00_finetune_on_pictures.py

The first line draws pictures of colored shapes and makes a tiny Qwen2.5-VL with random weights. For a model of your
own, set MODEL and PICTURES, a folder with training.jsonl, validation.jsonl and the pictures that they name.
"""

import json
import os
import shutil
from pathlib import Path

from megatron.bridge import AutoBridge
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.recipes.qwen import qwen25_vl_3b_finetune_config
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.vlm_step import forward_step

OUT = Path("runs/tutorials/vision")
MODEL = os.environ.get(
    "MODEL", str(OUT / "untrained")
)  # a folder in Hugging Face format, or a hub id
PICTURES = Path(os.environ.get("PICTURES", OUT / "pictures"))

config = qwen25_vl_3b_finetune_config(
    pretrained_checkpoint=MODEL,
    tokenizer=MODEL,
    dataset_root=str(PICTURES),
    seq_length=80,  # one picture is 16 tokens here; a run says how many yours are
    train_iters=240,
    global_batch_size=32,
    micro_batch_size=32,
    lr=2e-3,  # of a model that has learned nothing; a pretrained one needs about 1e-5
    eval_interval=240,
    eval_iters=1,
    precision="fp32",
    dir=str(OUT / "run"),
)
# The recipe describes Qwen2.5-VL 3B. MODEL is smaller, so these two lines use its own config.
config.model = AutoBridge.from_hf_pretrained(MODEL).to_megatron_provider(load_weights=False)
config.model.seq_length = config.dataset.seq_length

config.dataset.do_test = False  # there is no test.jsonl; without this line, that is an error
config.logger.log_interval = 40
# config.model.freeze_vision_model = True leaves a pretrained tower as it is. This one has learned nothing.

# Before the first step, the run reports the images, their tokens, and how many tokens are in the loss.
run = finetune(config, forward_step)

# A complete Hugging Face checkpoint, tower, image processor and tokenizer included; an export never overwrites.
shutil.rmtree(OUT / "exported", ignore_errors=True)
AutoBridge.from_hf_pretrained(MODEL).save_hf_pretrained(run.model, OUT / "exported")

# Paths of pictures start from media_root, as in training.
records = [
    json.loads(line) for line in (PICTURES / "validation.jsonl").read_text().splitlines()[:6]
]
questions = [record["messages"][:1] for record in records]
with LLM(str(OUT / "exported"), media_root=str(PICTURES)) as llm:
    for record, (completion,) in zip(
        records, llm.generate_each(questions, Sampling(max_new_tokens=16)), strict=True
    ):
        picture, answer = (
            record["messages"][0]["content"][0]["image"],
            record["messages"][1]["content"],
        )
        print(f"{picture}: {completion.text.strip()!r}, and is a {answer}")
