# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Run ``LLM`` as a model of lm-evaluation-harness."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.bridge.data.records.template_rendering import render_conversation
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError, did_you_mean, one_line

_LONGEST_ANSWER = 256  # the harness's own default


class HarnessModel(TemplateLM):
    """The model interface of the harness; texts are encoded like those of the harness's ``hf`` model."""

    backend = "causal"

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        if llm.hf is None:
            raise UserError(
                "an evaluation needs a tokenizer, but the model has none: give --tokenizer"
            )
        self.llm = llm
        self.tokenizer = llm.hf
        self.max_length = llm.max_context

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return token ids, with the tokenizer's special tokens unless the text already begins with them."""
        prefix = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is None and not (prefix and string.startswith(prefix)):
            return self.tokenizer.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render_conversation(
            self.tokenizer.get_chat_template(),
            chat_history,
            None,
            {
                **self.tokenizer.special_tokens_map,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            },
        ).text

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would generate it."""
        prompts: list[list[int]] = []
        sampling: list[Sampling] = []
        for _, context, continuation in requests:
            prompt = [*context, *continuation][-self.max_length - 1 :]
            first = max(1, len(prompt) - len(continuation))
            prompts.append(prompt)
            sampling.append(Sampling(max_new_tokens=0, prompt_logprobs=0, score_from=first))
        results: list[tuple[float, bool]] = []
        for completions in self.llm.generate_each(prompts, sampling):
            scored = completions[0].prompt_logprobs
            results.append(
                (
                    sum(token.logprob for token in scored),
                    all(token.is_most_likely for token in scored),
                )
            )
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of full texts, computed in windows of the context length."""
        windows: list[Any] = []
        bounds = [0]
        for request in requests:
            pieces = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                self.prefix_token_id,
                self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            bounds.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return [sum(scores[start:stop]) for start, stop in pairwise(bounds)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers up to the task's stop texts."""
        end = self.tokenizer.decode([self.eot_token_id])
        prompts: list[list[int]] = []
        sampling: list[Sampling] = []
        stops: list[list[str]] = []
        for request in requests:
            values = normalize_gen_kwargs(request.args[1], _LONGEST_ANSWER)
            stops.append(handle_stop_sequences(values.pop("until", None), eos=end))
            count = values.pop("max_gen_toks")
            if count >= self.max_length:
                raise UserError(
                    f"max_gen_toks={count} leaves no room in a context of {self.max_length}: lower it"
                )
            prompts.append(self.tok_encode(request.args[0])[-(self.max_length - count) :])
            # like the harness's own model, in which the end of a turn does not end a text
            ends = {"ignore_eos": True, "stop_ids": sorted(self.llm.declared_ends)}
            sampling.append(_make_sampling(values, count, stops[-1], ends))
        texts = [completions[0].text for completions in self.llm.generate_each(prompts, sampling)]
        return [
            postprocess_generated_text(text, stop, None)
            for text, stop in zip(texts, stops, strict=True)
        ]


def _make_sampling(
    values: dict[str, Any], count: int, stop: list[str], ends: dict[str, Any]
) -> Sampling:
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    warm = values.get("temperature", 0.0) if values.get("do_sample") else 0.0
    chosen = {name: values[name] for name in names if warm and name in values}
    texts = [text for text in stop if text]
    return Sampling(max_new_tokens=count, temperature=warm, seed=0, stop=texts, **ends, **chosen)


def evaluate(
    llm: LLM,
    tasks: Sequence[str],
    include_path: Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """Run tasks of the harness; all ranks must call this.

    ``tasks`` are names of tasks or groups, including those in ``include_path``, or YAML files. Each task runs on at
    most ``limit`` examples, with ``few_shot`` examples in the prompt (None means the task's default), and with ``chat``
    in the chat template. Rank 0 returns the results, with a record of each example under ``samples``; other ranks
    return an empty dict.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    known = manager.all_tasks
    for task in tasks:
        if task not in known and not Path(task).is_file():
            raise UserError(f"--tasks {task} is not a task{did_you_mean(task, known)}")
    try:
        results = lm_eval.simple_evaluate(
            HarnessModel(llm),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=few_shot,
            apply_chat_template=chat,
            bootstrap_iters=100 if distributed.rank() == 0 else 0,
        )
    except (OSError, ConnectionError) as error:
        raise UserError(
            f"--tasks {','.join(tasks)}: the data cannot be read ({one_line(error)})"
        ) from error
    return dict(results or {})
