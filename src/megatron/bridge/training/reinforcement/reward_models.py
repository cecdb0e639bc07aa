# SPDX-License-Identifier: Apache-2.0
"""A reward model of transformers as a reward function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.bridge.utils.errors import UserError, one_line

KEY = "grpo.reward_funcs"
BATCH_SIZE = 8


class RewardModel:
    """Scores completions with a sequence classifier that has one output, on the first rank.

    The texts are those of TRL: a conversation is rendered with the chat template of the reward model, any other prompt
    is followed by its completion.

    Args:
        name: A Hugging Face directory or hub id.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = Path(name).name
        self._model: Any = None
        self._tokenizer: Any = None

    def check(self) -> None:
        """Read the config, so that a model of another kind is refused before the run.

        Raises:
            UserError: There is no such model, or it has not one score.
        """
        from transformers import AutoConfig

        try:
            config: Any = AutoConfig.from_pretrained(self._name)
        except Exception as error:
            raise UserError(
                f"{KEY}: {self._name!r} names no function (package.module:function or "
                f"path/to/file.py:function) and no reward model ({one_line(error)})"
            ) from error
        if config.num_labels != 1:
            raise UserError(
                f"{KEY}={self._name}: a reward model has one score, and this has {config.num_labels} classes: name "
                "a model with num_labels=1"
            )

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        self._load()
        texts = [
            self._text(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        # equal lengths together, so that batches have little padding
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            for index, score in zip(chosen, self._score([texts[i] for i in chosen]), strict=True):
                scores[index] = score
        return scores

    def _load(self) -> None:
        if self._model is not None:
            return
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model: Any = AutoModelForSequenceClassification.from_pretrained(self._name, num_labels=1)
        self._model = model.eval().to(torch.cuda.current_device())
        self._tokenizer = AutoTokenizer.from_pretrained(self._name)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            # a decoder scores the last token that is no padding
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)

    @torch.no_grad()
    def _score(self, texts: list[str]) -> list[float]:
        inputs = self._tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        tensors = {name: value.to(torch.cuda.current_device()) for name, value in inputs.items()}
        return self._model(**tensors).logits[:, 0].float().tolist()
