# SPDX-License-Identifier: Apache-2.0
"""GPT-2's two files of a tokenizer in Hugging Face's format."""

from pathlib import Path

from megatron.bridge.utils.atomic import refuse_unwritable
from megatron.bridge.utils.errors import UserError, one_line

END_OF_TEXT = "<|endoftext|>"


def write_gpt2_tokenizer(vocab_file: Path, merge_file: Path, folder: Path) -> Path:
    """Write byte-level BPE to ``folder``, and return it.

    Args:
        vocab_file: JSON with the id of each token.
        merge_file: Text with a merge in each line.
        folder: Directory to create.

    Raises:
        UserError: a file is missing or has another format.
    """
    from transformers import GPT2Tokenizer

    for path in (vocab_file, merge_file):
        if not path.is_file():
            raise UserError(f"{path} is not a file: check --vocab-file and --merge-file")
    try:
        tokenizer = GPT2Tokenizer(
            vocab=str(vocab_file), merges=str(merge_file), eos_token=END_OF_TEXT
        )
    except Exception as error:  # of the Rust library, which has no classes of errors
        raise UserError(
            f"{vocab_file} and {merge_file} are no tokenizer of GPT-2 ({one_line(error)}): give vocab.json and "
            "merges.txt"
        ) from error
    with refuse_unwritable(str(folder), "choose another --output-prefix"):
        tokenizer.save_pretrained(folder)
    return folder
