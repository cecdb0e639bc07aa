# SPDX-License-Identifier: Apache-2.0
"""Training rows of data in Tinker's form, and samplings of its sampling parameters."""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.bridge.inference.requests import MOST_CHOICES, Completion, Sampling, TokenLogprob
from megatron.bridge.training.service.schemas import (
    Datum,
    ForwardBackwardInput,
    SampleRequest,
    TensorData,
)
from megatron.bridge.training.step.row_losses import TrainingRow
from megatron.bridge.utils.errors import UserError, did_you_mean

_POLICY_INPUTS = {
    "target_tokens": "targets",
    "logprobs": "sampled_logprobs",
    "advantages": "advantages",
}
_CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}

INPUTS: dict[str, Mapping[str, str]] = {
    "cross_entropy": {"target_tokens": "targets", "weights": "weights"},
    "importance_sampling": _POLICY_INPUTS,
    "ppo": _POLICY_INPUTS,
    "cispo": _POLICY_INPUTS,
    "dro": _POLICY_INPUTS,
}
"""For each loss, the inputs of a datum and the fields of a row that take them."""

SETTINGS: dict[str, Mapping[str, str]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "dro": {"beta": "beta"},
}
"""For each loss, the keys of its configuration and the fields of a row that take them."""

_OPTIONAL_INPUTS = ("weights",)


def read_rows(model: str, request: ForwardBackwardInput) -> list[TrainingRow]:
    """Return the rows of a request.

    Raises:
        UserError: The loss, a key or an entry cannot be used.
    """
    loss = request.loss_fn
    if loss not in INPUTS:
        raise UserError(
            f"loss_fn={loss!r}: use one of {', '.join(INPUTS)}, or "
            "forward_backward_custom, which computes a loss in the client"
        )
    settings = _read_settings(loss, request.loss_fn_config or {})
    rows = []
    for index, datum in enumerate(request.data):
        try:
            rows.append(_read_row(model, loss, datum, settings))
        except UserError as error:
            raise UserError(f"data[{index}]: {error}") from error
    return rows


def _read_settings(loss: str, config: Mapping[str, Any]) -> dict[str, float]:
    settings: dict[str, float] = {}
    for key, value in config.items():
        field = SETTINGS[loss].get(key)
        if field is None:
            known = ", ".join(SETTINGS[loss]) or "nothing"
            raise UserError(f"loss_fn_config.{key}={value}: {loss} has {known}; leave it out")
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config.{key}={value!r}: give a finite number")
        settings[field] = value
    return settings


def _read_row(model: str, loss: str, datum: Datum, settings: Mapping[str, float]) -> TrainingRow:
    tokens = datum.model_input.read_tokens()
    fields = INPUTS[loss]
    for key in datum.loss_fn_inputs:
        if key not in fields:
            raise UserError(
                f"loss_fn_inputs.{key}: {loss} uses {', '.join(fields)}, so leave it out"
                f"{did_you_mean(key, list(fields))}"
            )
    values: dict[str, Any] = {}
    for key, field in fields.items():
        tensor = datum.loss_fn_inputs.get(key)
        if tensor is not None:
            values[field] = _read_numbers(key, tensor, len(tokens))
        elif key not in _OPTIONAL_INPUTS:
            raise UserError(
                f"loss_fn_inputs.{key} is missing: {loss} needs one entry for each token"
            )
    values.update(settings)
    return TrainingRow(model, tokens, loss=loss, **values)


def _read_numbers(key: str, tensor: TensorData, length: int) -> list[Any]:
    if tensor.sparse_crow_indices is not None or len(tensor.shape or ()) > 1:
        raise UserError(
            f"loss_fn_inputs.{key} has shape {tensor.shape}: several targets of a token are not supported, so give "
            "one entry for each token"
        )
    if len(tensor.data) != length:
        raise UserError(
            f"loss_fn_inputs.{key} has {len(tensor.data)} entries: give one for each of {length} tokens"
        )
    if not all(math.isfinite(number) for number in tensor.data):
        raise UserError(
            f"loss_fn_inputs.{key} has a number that is not finite: leave the datum out"
        )
    if key == "target_tokens":
        return [int(number) for number in tensor.data]
    return list(tensor.data)


def make_sampling(
    request: SampleRequest, prompt: Sequence[int], adapter: str | None, max_context: int
) -> Sampling:
    """Return the sampling of a request.

    Args:
        request: The request.
        prompt: Its tokens.
        adapter: Name of the adapter; None is the base.
        max_context: Tokens of a prompt and its completion.

    Raises:
        UserError: A value cannot be used.
    """
    params = request.sampling_params
    room = max_context - len(prompt)
    if room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens and the context {max_context}: shorten the prompt"
        )
    if request.num_samples > MOST_CHOICES:
        raise UserError(
            f"num_samples={request.num_samples}: at most {MOST_CHOICES}, so send several requests"
        )
    stop = [params.stop] if isinstance(params.stop, str) else (params.stop or [])
    wants_prompt = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    return Sampling(
        max_new_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        adapter_name=adapter,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        n=request.num_samples,
        stop=[text for text in stop if isinstance(text, str)],
        stop_ids=[token for token in stop if isinstance(token, int)],
        # what ends a text is either the model's own end tokens or what the request names
        ignore_eos=params.stop is not None,
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.topk_prompt_logprobs if wants_prompt else None,
        score_from=_first_scored(request, len(prompt)),
    )


def _first_scored(request: SampleRequest, length: int) -> int:
    """Return the index of the first token of the prompt whose log-probability is wanted."""
    count = request.prompt_logprobs_last_n
    if count is None:
        return 1
    if not request.prompt_logprobs:
        raise UserError(f"prompt_logprobs_last_n={count} needs prompt_logprobs=true: give both")
    if count >= length:
        raise UserError(
            f"prompt_logprobs_last_n={count}: at most {length - 1}, one less than the prompt has tokens"
        )
    return length - count


def describe_samples(request: SampleRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer to a request for samples, as JSON."""
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [_describe_sequence(request, completion) for completion in completions],
        "prompt_cache_hit_tokens": completions[0].cached_tokens,
    }
    scored = completions[0].prompt_logprobs
    missing: list[None] = [None] * (len(completions[0].prompt_tokens) - len(scored))
    if request.prompt_logprobs:
        answer["prompt_logprobs"] = [*missing, *(entry.logprob for entry in scored)]
    if request.topk_prompt_logprobs:
        answer["topk_prompt_logprobs"] = [*missing, *_describe_top(scored)]
    return answer


def _describe_sequence(request: SampleRequest, completion: Completion) -> dict[str, Any]:
    sequence: dict[str, Any] = {
        "stop_reason": "stop" if completion.finish_reason == "stop" else "length",
        "tokens": completion.tokens,
        "logprobs": [entry.logprob for entry in completion.logprobs],
    }
    if request.topk_sample_logprobs:
        sequence["topk_logprobs"] = _describe_top(completion.logprobs)
    return sequence


def _describe_top(entries: Sequence[TokenLogprob]) -> list[list[tuple[int, float]]]:
    return [list(entry.top.items()) for entry in entries]
