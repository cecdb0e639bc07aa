# SPDX-License-Identifier: Apache-2.0
"""Drafts by the model's first layer of multi-token prediction (MTP).

From the decoder's output for the token at position p and the embedding of the token at p + 1, the layer predicts the
token at p + 2. After each step it runs over the step's tokens whose successor is known, so that its caches have the
keys of all of them; the prediction of the last one is the first draft. Further drafts come from the layer's own output,
as in vLLM. Drafts are sampled with the random numbers of the tokens that they propose.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron.bridge.backends.decoding.step import DecodingStep, TokenSpan
from megatron.bridge.backends.kernels import c_kernels
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference.decoding_state import DecodingState
from megatron.bridge.inference.runner import is_sampling_rank, share
from megatron.bridge.inference.sampling import FIXED, RowOutput, choose_outputs
from megatron.bridge.inference.scheduler import ScheduledText, StepPlan
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class _Row:
    """A position of a text whose token and its successor are known."""

    text: ScheduledText
    hidden_row: int  # row of the decoder's output, or of the layer's output in the pass before
    position: int


class MtpDrafter:
    """Propose the tokens that the model's own layer of multi-token prediction predicts.

    Args:
        chunks: this rank's chunks with their MTP layers.
        state: the caches of this rank.
        vocabulary: size of the vocabulary without padding.
        tokens: maximum number of drafts of a text.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], state: DecodingState, vocabulary: int, tokens: int
    ) -> None:
        bare: Any = unwrap(chunks[-1])
        _check_model(bare)
        self._state = state
        self._vocabulary = vocabulary
        self._most = tokens
        self._chunk = bare
        self._layer: Any = bare.mtp.layers[0] if bare.post_process else None
        self._hidden: Tensor | None = None  # the decoder's output in the last step

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Keep the decoder's output of each step inside the context."""
        handle = self._chunk.decoder.register_forward_hook(self._keep_output)
        try:
            yield
        finally:
            handle.remove()

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._hidden = hidden

    def propose(self, text: ScheduledText, most: int) -> list[int]:
        """Return the drafts that ``draft`` has made."""
        return text.drafts[:most]

    def forget(self, text: ScheduledText) -> None:
        pass

    @torch.inference_mode()
    @c_kernels.in_use()
    def draft(
        self,
        plans: Sequence[StepPlan],
        lane: int,
        drafting: Sequence[Sequence[tuple[ScheduledText, int]]],
        output_of: Callable[[ScheduledText, int], RowOutput],
    ) -> None:
        """Make the drafts of texts after a step, on all ranks together.

        Args:
            plans: the step of each lane.
            lane: the lane that this rank computes.
            drafting: texts of each lane whose next step may have drafts, with their maximum number.
            output_of: describes how to sample the token of a text after its drafts from a row of logits.
        """
        rows = [row for work in plans[lane].work for row in _known_rows(work)]
        hidden = self._hidden
        self._hidden = None
        for index in range(self._most):
            drafted_texts = [[text for text, most in texts if most > index] for texts in drafting]
            if index and not any(drafted_texts):
                return
            hidden = self._run_layer(rows, hidden, index)
            last_rows = {id(known.text): row for row, known in enumerate(rows)}
            sampled = [last_rows[id(text)] for text in drafted_texts[lane]]
            tokens = self._sample(hidden, sampled, drafted_texts, lane, output_of)
            for text, token in zip(
                (text for texts in drafted_texts for text in texts), tokens, strict=True
            ):
                text.drafts.append(token)
            rows = [
                _Row(text, row, len(text.tokens) - 1 + index)
                for text, row in zip(drafted_texts[lane], sampled, strict=True)
            ]

    def _run_layer(self, rows: Sequence[_Row], hidden: Tensor | None, drafts: int) -> Tensor | None:
        """Return the layer's output [rows, 1, hidden] on the last stage; a lane without rows computes padding."""
        if self._layer is None:
            return None
        assert hidden is not None
        step = DecodingStep(
            _spans(rows) or [TokenSpan(0, 1, 0, self._state.spare, 0)], self._state.device
        )
        next_tokens = [
            row.text.drafts[drafts - 1] if drafts else row.text.tokens[row.position + 1]
            for row in rows
        ]
        padding = [0] * (step.rows - len(rows))
        selected = torch.tensor([row.hidden_row for row in rows] + padding, device=hidden.device)
        ids = torch.tensor([next_tokens + padding], device=hidden.device)
        self._state.begin(step, None)
        return self._layer.forward_single_position(
            hidden_states=hidden[selected],
            next_token_ids=ids,
            position_ids=step.positions[None],
            embedding=self._chunk.embedding,
            rotary_pos_emb=_angles(self._chunk),
        )

    def _sample(
        self,
        hidden: Tensor | None,
        rows: Sequence[int],
        drafted_texts: Sequence[Sequence[ScheduledText]],
        lane: int,
        output_of: Callable[[ScheduledText, int], RowOutput],
    ) -> list[int]:
        """Return one token for each of the texts of all lanes in ``drafted_texts``; ``rows`` are those of this lane."""
        table = None
        if hidden is not None:
            # expert-parallel ranks need no collectives here, so a lane without texts computes nothing
            logits = self._logits(hidden, rows) if rows else None
            if logits is not None and is_sampling_rank():
                outputs = [output_of(text, row) for row, text in enumerate(drafted_texts[lane])]
                table = choose_outputs(logits, outputs, FIXED)
        counts = [len(texts) for texts in drafted_texts]
        results = share(table, sum(counts), FIXED, sum(counts[:lane]), self._state.device)
        tokens = results[:, 0].nan_to_num(posinf=0.0).long().clamp(0, self._vocabulary - 1)
        return tokens.tolist()

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        chunk = self._chunk
        weight = (
            chunk.shared_embedding_or_output_weight()
            if chunk.share_embeddings_and_output_weights
            else None
        )
        self._state.select_logits(rows)
        logits, _ = chunk.output_layer(hidden, weight=weight, runtime_gather_output=True)
        return chunk._scale_logits(logits)[: len(rows), 0, : self._vocabulary]


def _known_rows(work: Any) -> list[_Row]:
    """Return the positions of a text's work that have a successor, as far as drafts were accepted."""
    text = work.text
    if text.extent is None:
        return []
    stop = min(work.start + work.count, len(text.tokens) - 1)
    return [
        _Row(text, work.row + position - work.start, position)
        for position in range(work.start, stop)
    ]


def _spans(rows: Sequence[_Row]) -> list[TokenSpan]:
    """Return spans of consecutive positions."""
    spans: list[TokenSpan] = []
    for number, row in enumerate(rows):
        text = row.text
        previous = rows[number - 1] if number else None
        if previous is not None and previous.text is text and previous.position + 1 == row.position:
            last = spans[-1]
            spans[-1] = TokenSpan(
                last.row, last.count + 1, last.start, last.extent, last.slot, last.long
            )
            continue
        assert text.extent is not None
        spans.append(TokenSpan(number, 1, row.position, text.extent, text.slot or 0, text.long))
    return spans


def _angles(chunk: Any) -> Any:
    """Return the rotary angles of the step; layers of latent attention have their own."""
    config = chunk.config
    if config.multi_latent_attention or chunk.position_embedding_type not in ("rope", "yarn"):
        return None
    angles = chunk.rotary_pos_emb(1)
    return angles[0] if isinstance(angles, tuple) else angles


def _check_model(chunk: Any) -> None:
    config = chunk.config
    problems = {
        "sequence_parallel": config.sequence_parallel,
        "context_parallel_size": config.context_parallel_size > 1,
        "vision": getattr(config, "vision", None) is not None,
    }
    for name, is_set in problems.items():
        if is_set:
            raise UserError(
                f"speculative method='mtp' does not work with {name}={getattr(config, name)}: use ngram"
            )
    if not config.mtp_num_layers:
        raise UserError(
            "speculative method='mtp': the model has no layers of multi-token prediction; use ngram"
        )
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if is_last and not getattr(chunk, "mtp_process", False):
        raise UserError(
            "speculative method='mtp' needs the layers of multi-token prediction on the last pipeline stage: change "
            "model.pipeline_model_parallel_layout, or use ngram"
        )
