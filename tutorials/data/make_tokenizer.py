# SPDX-License-Identifier: Apache-2.0
"""How ``tutorials/data/tokenizer`` was made: a byte-level BPE of 512 tokens, of the text beside it.

python tutorials/data/make_tokenizer.py NEW_FOLDER

A published model has a tokenizer already. This one exists because a vocabulary of 128,256 tokens, as Llama 3 has
it, would be nearly all of a model that trains on a laptop in a minute.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).parent
START, END = "<|im_start|>", "<|im_end|>"

# ChatML. It has no {% generation %} marks: what the assistant says is found by rendering each turn twice.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts() -> list[str]:
    """Everything that the tutorials learn from."""
    articles = [json.loads(line)["text"] for line in (DATA / "lighthouses.jsonl").read_text().splitlines()]
    chats = [json.loads(line)["messages"] for line in (DATA / "chats/training.jsonl").read_text().splitlines()]
    turns = [f"{turn['role']}\n{turn['content']}\n" for chat in chats for turn in chat]
    return [*articles, *(DATA / "logbook.txt").read_text().splitlines(keepends=True), *turns]


def main() -> None:
    """Train it and write the folder."""
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any text can be written, with these 256 alone
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    # The end of a turn is also the end of a document: one token that says "stop here", whatever is written.
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
