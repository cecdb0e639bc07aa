# SPDX-License-Identifier: Apache-2.0
"""Records in a form of your own: a function makes prompts and completions of them.

python tutorials/data/02_own_records.py
"""

from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent


def question(record):
    """{"place": "Gull Rock", "choices": ["red", "white", "green"], "right": 1, "checked": true} as a question.

    The result may have any form that docs/finetuning.md lists: messages, prompt and completion, or text.
    """
    if not record["checked"]:
        return None  # leaves the record out; the run tells how many there were
    choices = " ".join(f"{letter}) {choice}" for letter, choice in zip("abc", record["choices"], strict=True))
    prompt = f"The light of {record['place']}: {choices}\n"
    return {"prompt": prompt, "completion": record["choices"][record["right"]]}


dataset = FinetuningDatasetConfig(
    dataset_root=str(DATA / "quiz"),
    seq_length=64,
    process_example_fn=question,
    truncation="drop",  # of a sample that is too long; by default the run would refuse it, by file and line
)
tokenizer = HuggingFaceTokenizer(str(DATA / "tokenizer"))
train, valid, _ = dataset.build(DatasetRequest(sizes=(20, 4, 0), tokenizer=tokenizer))
for name, split in (("training", train), ("validation", valid)):
    print(f"{name}: {'; '.join(split.report.lines())}")

row = train[0]
learnt = row["loss_mask"].bool()
print(f"prompt and completion: {tokenizer.detokenize(row['tokens'].tolist())[:60]!r}")
print(f"learnt of it: {tokenizer.detokenize(row['labels'][learnt].tolist())!r}")
