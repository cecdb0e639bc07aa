# SPDX-License-Identifier: Apache-2.0
"""Records in a format of your own: a function converts them to prompts and completions.

python tutorials/data/02_own_records.py
"""

from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent


def question(record):
    """{"place": "Gull Rock", "choices": ["red", "white", "green"], "right": 1, "checked": true} as a question.

    The result may have any format that docs/finetuning.md lists: messages, prompt and completion, or text.
    """
    if not record["checked"]:
        return None  # leaves the record out; the run reports how many there were
    choices = " ".join(
        f"{letter}) {choice}" for letter, choice in zip("abc", record["choices"], strict=True)
    )
    prompt = f"The light of {record['place']}: {choices}\n"
    return {"prompt": prompt, "completion": record["choices"][record["right"]]}


dataset = FinetuningDatasetConfig(
    dataset_root=str(DATA / "quiz"),
    seq_length=64,
    process_example_fn=question,
    truncation="drop",  # drops samples that are too long; by default, the run stops and names the file and line
)
tokenizer = HuggingFaceTokenizer(str(DATA / "tokenizer"))
train, valid, _ = dataset.build(DatasetRequest(sizes=(20, 4, 0), tokenizer=tokenizer))
for name, split in (("training", train), ("validation", valid)):
    print(f"{name}: {'; '.join(split.report.lines())}")

row = train[0]
trained = row["loss_mask"].bool()
print(f"prompt and completion: {tokenizer.detokenize(row['tokens'].tolist())[:60]!r}")
print(f"in the loss: {tokenizer.detokenize(row['labels'][trained].tolist())!r}")
