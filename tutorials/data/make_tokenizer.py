# SPDX-License-Identifier: Apache-2.0
"""Make ``tutorials/data/tokenizer``: a byte-level BPE of 512 tokens, trained on the texts of this folder.

python tutorials/data/make_tokenizer.py NEW_FOLDER

A published model has its own tokenizer. This one exists because the 128,256 tokens of Llama 3 would be nearly all
of a model that trains on a laptop in a minute.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).parent
START, END = "<|im_start|>", "<|im_end|>"

# ChatML without {% generation %} markers: rendering each turn twice finds the answers of the assistant.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts() -> list[str]:
    """All texts that the tutorials train on."""
    articles = [
        json.loads(line)["text"] for line in (DATA / "lighthouses.jsonl").read_text().splitlines()
    ]
    chats = [
        json.loads(line)["messages"]
        for line in (DATA / "chats/training.jsonl").read_text().splitlines()
    ]
    turns = [f"{turn['role']}\n{turn['content']}\n" for chat in chats for turn in chat]
    return [*articles, *(DATA / "logbook.txt").read_text().splitlines(keepends=True), *turns]


def main() -> None:
    """Train the tokenizer and write the folder."""
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # these 256 bytes can represent any text
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    # One token ends a turn and a document.
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=512,
    )
    wrapped.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()
