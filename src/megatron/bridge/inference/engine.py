# SPDX-License-Identifier: Apache-2.0
"""The inference engine: it takes requests and generates tokens step by step, identically on every rank.

All ranks call the same methods with the same arguments. Each data-parallel rank computes its own lane of requests, and
every rank tracks the state of all lanes.
"""

import logging
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron.bridge.backends.moe.router_replay import check_routers
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference import decoding_state
from megatron.bridge.inference.adapter_bank import AdapterNames
from megatron.bridge.inference.decoding_graphs import DecodingGraphs, find_obstacle
from megatron.bridge.inference.decoding_state import DecodingState
from megatron.bridge.inference.grammars import GrammarMatcher, Grammars
from megatron.bridge.inference.mtp_drafts import MtpDrafter
from megatron.bridge.inference.prompts import PromptSight
from megatron.bridge.inference.requests import Completion, Sampling
from megatron.bridge.inference.runner import Pixels, RoutedExperts, Runner, share
from megatron.bridge.inference.sampling import RowOutput, read_logprob, width_of
from megatron.bridge.inference.scheduler import Limits, ScheduledText, Scheduler, StepPlan
from megatron.bridge.inference.speculation import Drafter, NgramDrafter, Speculation
from megatron.bridge.utils.distributed import broadcast_object
from megatron.bridge.utils.errors import UserError

_log = logging.getLogger(__name__)
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Convert tokens to pieces of text that concatenate to the full text.

    A piece is withheld while its last character may be incomplete, or while it may be the start of a stop text.

    Args:
        hf: The transformers tokenizer.
        stop: Texts that end the text.
        shown_ids: Special tokens whose text is included.
        min_tokens: Tokens in whose text stop texts are not looked for.
    """

    def __init__(
        self,
        hf: Any,
        stop: Sequence[str] = (),
        shown_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._hf = hf
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._hidden_ids: frozenset[int] | None = None
        if shown_ids:
            self._hidden_ids = frozenset(hf.all_special_ids) | special_ids(hf)
            self._hidden_ids -= frozenset(shown_ids)
        self._ids: list[int] = []
        self._first = (
            0  # tokens from here on are decoded together, so that spaces between words are correct
        )
        self._read = 0  # number of tokens whose text is known
        self._held = ""
        self.offsets: list[int] = []
        """Where the text of each token begins."""
        self.text = ""
        """The text returned so far."""
        self.stopped = False
        """Whether the text has reached a stop text."""

    def add(self, token: int) -> str:
        """Add a token and return the text that can no longer change."""
        self._ids.append(token)
        self.offsets.append(len(self.text) + len(self._held))
        return self._give_out(self._decode_new(final=False), final=False)

    def visible_tokens(self, is_over: bool) -> int:
        """Return the number of tokens whose text has been returned; those behind a stop text never are."""
        if self.stopped:
            return bisect_left(self.offsets, len(self.text))
        if is_over:
            return len(self._ids)
        ends = [*self.offsets[1 : self._read], len(self.text) + len(self._held)]
        return bisect_right(ends[: self._read], len(self.text))

    def finish(self) -> str:
        return self._give_out(self._decode_new(final=True), final=True)

    def _decode_new(self, final: bool) -> str:
        known = self._decode(self._ids[self._first : self._read])
        text = self._decode(self._ids[self._first :])
        if not text.startswith(known) or (text.endswith(_REPLACEMENT) and not final):
            return "" if not final else text[len(known) :]
        if text != known:  # else the next token still follows the last token that has a text
            self._first = self._read
        self._read = len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        skips_all = self._hidden_ids is None
        if self._hidden_ids is not None:
            ids = [token for token in ids if token not in self._hidden_ids]
        return self._hf.decode(
            ids, skip_special_tokens=skips_all, clean_up_tokenization_spaces=False
        )

    def _give_out(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        if len(self._ids) <= self._min_tokens:
            piece = self._held
            self._held = ""
            self.text += piece
            return piece
        ends = [position for text in self._stop if (position := self._held.find(text)) >= 0]
        if ends:
            self.stopped = True
            piece = self._held[: min(ends)]
            self._held = ""
        else:
            keep = 0 if final else self._possible_stop()
            cut = len(self._held) - keep
            piece = self._held[:cut]
            self._held = self._held[cut:]
        self.text += piece
        return piece

    def _possible_stop(self) -> int:
        """Return the number of characters at the end that may be the start of a stop text."""
        longest = 0
        for text in self._stop:
            for length in range(min(len(text) - 1, len(self._held)), longest, -1):
                if text.startswith(self._held[-length:]):
                    longest = length
                    break
        return longest


def special_ids(hf: Any) -> frozenset[int]:
    """Return the special tokens of a tokenizer, whose text completions leave out."""
    added_tokens = hf.added_tokens_decoder
    return frozenset(token for token, added in added_tokens.items() if added.special)


Running = Literal["abort", "finish", "keep"]
"""What to do with running texts when the weights change: end them immediately, finish them first, or continue them
with the new weights and the caches that the old weights filled."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits of the engine, and properties of the model."""

    max_context: int  # tokens of a prompt and its completion
    vocabulary: int  # size of the vocabulary without padding
    ends: frozenset[int] = frozenset()  # tokens that end a text
    kv_memory: int = 4 << 30  # bytes for keys, values and states on each rank
    max_requests: int = 32  # texts that are computed at the same time
    chunk: int = 256  # tokens of a prompt that one step computes together
    rows: int = 1024  # maximum new tokens in a step
    prefix_reuse: bool = True  # texts reuse the caches of others that begin with the same tokens
    window_rings: bool = (
        False  # layers with a window cache only the window; texts then do not share caches
    )
    graphs: bool = False  # replay single-token steps if the model's kernels allow it
    speculation: Speculation | None = None  # drafts several tokens of a text for each step
    pack: bool = False  # on CPUs, store weights in oneDNN's packed format: about twice as fast


@dataclass(eq=False)
class InferenceJob:
    completion: Completion
    sampling: Sampling
    text: ScheduledText
    lane: int
    detokenizer: Detokenizer | None = None
    matcher: GrammarMatcher | None = None  # of ``sampling.grammar``; used where tokens are sampled
    piece: str = field(default="")  # text that the last step added

    @property
    def is_over(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def visible_tokens(self) -> int:
        """Number of tokens whose text has been returned; none of a stop text or behind it."""
        if self.detokenizer is None or (self.is_over and not self.detokenizer.stopped):
            return len(self.completion.tokens)
        return self.detokenizer.visible_tokens(self.is_over)


class Engine(AbstractContextManager["Engine"]):
    """Generate with caches; the caches exist only inside the context.

    ``chunks`` are this rank's chunks in evaluation mode. ``hf`` is a transformers tokenizer; without it, completions
    have no text and stop texts are refused. Without ``pixels``, images are refused.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: EngineConfig,
        hf: Any = None,
        adapters: AdapterNames | None = None,
        pixels: Pixels | None = None,
    ) -> None:
        self.config = config
        self.hf = hf
        self.adapters = adapters or AdapterNames()
        bare: list[Any] = [unwrap(chunk) for chunk in chunks]
        decoding_state.check_layers(bare)
        self._switch = decoding_state.switch_length(bare)
        reuses = config.prefix_reuse and self._switch is None
        limits = _find_limits(chunks, config, reuses)
        self._state = DecodingState(
            chunks, limits.tokens, limits.requests, config.pack, config.window_rings
        )
        graphs = None
        self._drafter = self._make_drafter(chunks)
        self.replay_obstacle = self._find_replay_obstacle(chunks)
        """Why single-token steps are not replayed; None if they are."""
        if self.replay_obstacle is None:
            graphs = DecodingGraphs(chunks[0], self._state, self.adapters, config.max_context)
        else:
            _log.info("decoding steps are not replayed: %s", self.replay_obstacle)
        self._runner = Runner(chunks, self._state, config.vocabulary, self.adapters, pixels, graphs)
        self._sight = PromptSight(bare[0].config, pixels is not None)
        self.lanes = [
            Scheduler(limits) for _ in range(parallel_state.get_data_parallel_world_size())
        ]
        self._lane = parallel_state.get_data_parallel_rank()
        self._jobs: dict[int, InferenceJob] = {}
        self.drafted_tokens = 0
        """Number of drafts that were computed so far."""
        self.accepted_tokens = 0
        """Number of these that are tokens of their texts."""
        self._grammars = Grammars(hf, config.vocabulary, config.ends)
        self._attached = self._state.attached()
        self._drafter_attached: AbstractContextManager[None] | None = None
        self.weight_version = 0
        self._routed_experts = RoutedExperts(self._state)
        self._has_failed = False  # a step failed, so the other ranks may be anywhere

    def _find_replay_obstacle(self, chunks: Sequence[nn.Module]) -> str | None:
        if not self.config.graphs:
            return "graphs=False"
        if isinstance(self._drafter, MtpDrafter):
            return "drafts of MTP layers, which need the hidden states of each step"
        return find_obstacle(chunks, self._state)

    def _make_drafter(self, chunks: Sequence[nn.Module]) -> Drafter | None:
        settings = self.config.speculation
        if settings is None:
            return None
        if settings.method == "ngram":
            return NgramDrafter(settings)
        if self.adapters.names:
            raise UserError(
                "speculative method='mtp' does not work with several adapters: use ngram, or serve each on its own"
            )
        count = settings.num_speculative_tokens
        return MtpDrafter(chunks, self._state, self.config.vocabulary, count)

    def __enter__(self) -> Self:
        self._attached.__enter__()
        if isinstance(self._drafter, MtpDrafter):
            self._drafter_attached = self._drafter.attached()
            self._drafter_attached.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._drafter_attached is not None:
            self._drafter_attached.__exit__(*error)
        self._attached.__exit__(*error)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> list[InferenceJob]:
        """Check a prompt and queue it as ``sampling.n`` jobs."""
        self.check(prompt, sampling)
        return self.enqueue(prompt, sampling)

    def enqueue(self, prompt: Sequence[int], sampling: Sampling) -> list[InferenceJob]:
        """Queue a prompt that ``check`` has accepted."""
        seed = sampling.seed
        if seed is None:
            seed = 0 if sampling.is_greedy else broadcast_object(secrets.randbits(63))
        lane = min(
            range(len(self.lanes)),
            key=lambda index: len(self.lanes[index].waiting) + len(self.lanes[index].running),
        )
        image_facts = self._sight.facts(prompt)
        return [
            self._submit(prompt, sampling, seed, choice, lane, image_facts)
            for choice in range(sampling.n)
        ]

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse a prompt that cannot be computed."""
        if not prompt:
            raise UserError(
                "the prompt has no tokens: give at least one, such as the tokenizer's bos_token"
            )
        self._sight.check(prompt, sampling)
        for token in (
            *set(prompt) - self._sight.placeholders,
            *sampling.stop_ids,
            *sampling.logit_bias,
        ):
            if not 0 <= token < self.config.vocabulary:
                raise UserError(
                    f"token {token} is not in the vocabulary of {self.config.vocabulary}: use its own tokenizer"
                )
        longest = len(prompt) + (sampling.max_new_tokens or -1)
        if longest > self.config.max_context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens={sampling.max_new_tokens} exceed the "
                f"context of {self.config.max_context}: shorten the prompt, or generate fewer tokens"
            )
        if sampling.grammar is not None:
            self._grammars.check(sampling.grammar)
        if sampling.routed_experts:
            self._check_routers()
        if (sampling.stop or sampling.shown_ids) and self.hf is None:
            raise UserError(
                f"stop={sampling.stop!r} and shown_ids={sampling.shown_ids!r} need a tokenizer: give stop_ids, or a "
                "tokenizer"
            )
        self.adapters.check(sampling.adapter_name)
        self._check_memory(longest)

    def _check_routers(self) -> None:
        if not self._routed_experts.layers:
            raise UserError(
                "routed_experts=True: the model has no layers with experts; leave it out"
            )
        check_routers(self._state.bare[0].config, "routed_experts=True")

    def _check_memory(self, longest: int) -> None:
        if longest > self.lanes[0].arena.size:
            raise UserError(
                f"a text of {longest} tokens does not fit into the {self.lanes[0].arena.size} tokens that "
                f"kv_memory={self.config.kv_memory} holds: shorten it, lower max_new_tokens, or increase kv_memory"
            )

    def _submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        choice: int,
        lane: int,
        image_facts: Mapping[str, Any],
    ) -> InferenceJob:
        wants_prompt = sampling.prompt_logprobs is not None and choice == 0
        limit = len(prompt) + sampling.max_new_tokens
        scored = sampling.score_from - 1 if wants_prompt else 0
        text_options = {
            "scored": scored,
            "adapter": sampling.adapter_name,
            "priority": sampling.priority,
            "records_experts": sampling.routed_experts,
            **image_facts,
        }
        text = ScheduledText(
            list(prompt), len(prompt), limit, wants_prompt, self._switch, **text_options
        )
        completion = Completion(list(prompt), seed=seed, choice=choice)
        job = InferenceJob(completion, sampling, text, lane)
        if self.hf is not None:
            job.detokenizer = Detokenizer(
                self.hf, sampling.stop, sampling.shown_ids, sampling.min_new_tokens
            )
        if sampling.grammar is not None:
            job.matcher = GrammarMatcher(self._grammars, sampling.grammar)
        self._jobs[id(text)] = job
        self.lanes[lane].add(text)
        return job

    def cancel(self, job: InferenceJob) -> None:
        """End a job; its completion keeps the tokens generated so far."""
        if not job.is_over:
            self._finish(job, "cancelled")

    def uses_adapter(self, name: str) -> bool:
        """Return whether a text that waits or runs has this adapter."""
        return any(job.text.adapter == name for job in self._jobs.values())

    def plain_weights(self) -> AbstractContextManager[None]:
        """Restore the values of the parameters inside the context; see ``EngineConfig.pack``."""
        return self._state.plain_weights()

    @contextmanager
    def new_weights(self, running: Running = "abort") -> Iterator[None]:
        """Change the parameters inside the context, on all ranks; call nothing else meanwhile.

        Waiting texts stay in the queue. Caches from before the change are not reused. ``running`` says what to do with
        running texts.
        """
        if running not in get_args(Running):
            raise UserError(f"running={running!r} must be one of {', '.join(get_args(Running))}")
        if running == "finish":
            while any(lane.running for lane in self.lanes):
                self.step()
        if running == "abort":
            for job in [
                job for job in self._jobs.values() if job.completion.tokens or job.text.computed
            ]:
                self.cancel(job)
        for lane in self.lanes:
            lane.forget_caches()
        with self._state.plain_weights():
            yield
        self.weight_version += 1

    @property
    def is_idle(self) -> bool:
        return all(lane.is_idle for lane in self.lanes)

    def step(self) -> list[InferenceJob]:
        """Compute one step of every lane; return the jobs that got a token or ended."""
        self._propose_drafts()
        plans = [lane.plan() for lane in self.lanes]
        outputs_and_jobs = [self._outputs(plan) for plan in plans]
        width = width_of([output for outputs, _ in outputs_and_jobs for output in outputs])
        counts = [len(outputs) for outputs, _ in outputs_and_jobs]
        own_lane = self._lane
        try:
            table = self._runner.run(plans[own_lane], outputs_and_jobs[own_lane][0], width)
            rows = share(
                table, sum(counts), width, sum(counts[:own_lane]), self._state.device
            ).tolist()
        except BaseException:  # some layers may have advanced their states
            self._has_failed = True
            for lane in self.lanes:
                lane.restart()
            raise
        self._has_failed = False
        for lane, plan in zip(self.lanes, plans, strict=True):
            lane.commit(plan)
        jobs = [job for _, jobs in outputs_and_jobs for job in jobs]
        outputs = [output for lane_outputs, _ in outputs_and_jobs for output in lane_outputs]
        for job in dict.fromkeys(jobs):
            job.piece = ""
        for job, output, row in zip(jobs, outputs, rows, strict=True):
            self._take(job, output, row, width)
        for text in (work.text for plan in plans for work in plan.work if work.drafts):
            text.drafts = []
        self._finish_prompts(plans)
        if isinstance(self._drafter, MtpDrafter):
            self._draft_with_model(self._drafter, plans)
        return list(dict.fromkeys(jobs))

    def _propose_drafts(self) -> None:
        if self._drafter is None:
            return
        assert self.config.speculation is not None
        limit = self.config.speculation.num_speculative_tokens
        for text in (text for lane in self.lanes for text in lane.running if text.is_decoding):
            most_drafts = min(limit, text.most_drafts)
            text.drafts = self._drafter.propose(text, most_drafts) if most_drafts else []

    def _draft_with_model(self, drafter: MtpDrafter, plans: Sequence[StepPlan]) -> None:
        """Make the drafts of the texts that got a token in this step and go on."""
        assert self.config.speculation is not None
        limit = self.config.speculation.num_speculative_tokens
        drafting: list[list[tuple[ScheduledText, int]]] = []
        for lane, plan in zip(self.lanes, plans, strict=True):
            texts = {id(work.text): work.text for work in plan.work if work.text.is_decoding}
            reserved: list[tuple[ScheduledText, int]] = []
            for text in texts.values():
                most_drafts = min(limit, text.most_drafts)
                if most_drafts:
                    reserved.append((text, lane.reserve_drafts(text, most_drafts)))
            drafting.append(reserved)

        def output_of(text: ScheduledText, row: int) -> RowOutput:
            job = self._jobs[id(text)]
            output = self._output_of_job(job, row, None, len(text.drafts))
            # drafts are not checked against a grammar, and their log-probabilities are not returned
            return replace(output, matcher=None, draft=None, top=None)

        drafter.draft(plans, self._lane, drafting, output_of)

    def run(self) -> Iterator[InferenceJob]:
        """Run steps until no job is left, and yield each job when it ends."""
        while not self.is_idle:
            yield from (job for job in self.step() if job.is_over)

    def _outputs(self, plan: StepPlan) -> tuple[list[RowOutput], list[InferenceJob]]:
        outputs: list[RowOutput] = []
        jobs: list[InferenceJob] = []
        for work in plan.work:
            job = self._jobs[id(work.text)]
            targets = [(position, work.text.tokens[position + 1]) for position in work.scored]
            sampled = [(work.start + work.count - 1, None)] if work.samples else []
            for position, target in (*targets, *sampled):
                row = work.row + position - work.start
                outputs.append(self._output_of_job(job, row, target, work.drafts))
                jobs.append(job)
        return outputs, jobs

    def _output_of_job(
        self, job: InferenceJob, row: int, target: int | None, drafts: int
    ) -> RowOutput:
        """Return what to compute from a row, after the first ``drafts`` drafts of the text."""
        sampling = job.sampling
        completion = job.completion
        tokens = job.text.tokens
        draft = None
        if drafts:
            tokens = tokens + job.text.drafts[:drafts]
            draft = tokens[-1]
        excluded_ids: tuple[int, ...] = ()
        if len(completion.tokens) + drafts < sampling.min_new_tokens:
            ends = () if sampling.ignore_eos else self.config.ends
            excluded_ids = (*ends, *sampling.stop_ids)
        return RowOutput(
            row=row,
            sampling=sampling,
            tokens=tokens,
            prompt_length=job.text.prompt_length,
            seed=completion.seed,
            choice=completion.choice,
            target=target,
            top=sampling.logprobs if target is None else sampling.prompt_logprobs,
            matcher=job.matcher,
            excluded_ids=excluded_ids,
            draft=draft,
        )

    def _take(self, job: InferenceJob, output: RowOutput, row: Sequence[float], width: int) -> None:
        if output.target is not None:
            job.completion.prompt_logprobs.append(read_logprob(row, output.top or 0, width))
            return
        if output.draft is not None and not self._accept_draft(job, output):
            return
        if not math.isfinite(row[0]):
            self._finish(job, "error" if math.isnan(row[0]) else "grammar")
            return
        token = int(row[0])
        job.text.tokens.append(token)
        job.completion.tokens.append(token)
        job.completion.weight_versions.append(self.weight_version)
        if output.top is not None:
            job.completion.logprobs.append(read_logprob(row, output.top, width))
        self._end_or_go_on(job, token)

    def _accept_draft(self, job: InferenceJob, output: RowOutput) -> bool:
        """Return whether the text has got exactly the drafts that a row follows; its caches then have them, too."""
        self.drafted_tokens += 1
        text = job.text
        if job.is_over or len(text.tokens) != len(output.tokens) or text.tokens[-1] != output.draft:
            return False
        self.accepted_tokens += 1
        text.computed += 1
        return True

    def _end_or_go_on(self, job: InferenceJob, token: int) -> None:
        sampling = job.sampling
        text = job.text
        if token in sampling.stop_ids or (token in self.config.ends and not sampling.ignore_eos):
            self._finish(job, "stop")
            return
        if job.detokenizer is not None:
            job.piece += job.detokenizer.add(token)
            if job.detokenizer.stopped:
                self._finish(job, "stop")
                return
        if not text.needs_sample:
            self._finish(job, "length")

    def _finish_prompts(self, plans: Sequence[StepPlan]) -> None:
        """End the jobs that only compute log-probabilities of their prompt."""
        for plan in plans:
            for text in {id(work.text): work.text for work in plan.work}.values():
                if text.limit == text.prompt_length and text.computed == text.chunked:
                    self._finish(self._jobs[id(text)], "length")

    def _finish(self, job: InferenceJob, reason: Any) -> None:
        if job.detokenizer is not None:
            job.piece += job.detokenizer.finish()
            job.completion.text = job.detokenizer.text
            job.completion.text_offsets = job.detokenizer.offsets
        job.completion.finish_reason = reason
        job.completion.visible_tokens = job.visible_tokens
        job.completion.cached_tokens = job.text.cached
        if job.sampling.routed_experts and not self._has_failed:
            # the last token is not computed, and a text without memory has no experts
            count = min(job.text.computed, len(job.text.tokens) - 1)
            job.completion.routed_experts = self._routed_experts.read(
                job.text.extent or 0, count, job.lane == self._lane
            )
        self.lanes[job.lane].remove(job.text)
        if self._drafter is not None:
            self._drafter.forget(job.text)
        del self._jobs[id(job.text)]


def _find_limits(chunks: Sequence[nn.Module], config: EngineConfig, reuses: bool) -> Limits:
    """Return the limits that fit into the memory of every rank."""
    cache_specs = decoding_state.Kept.of(chunks, config.window_rings)
    bytes_per_token = sum(spec.per_token for spec in cache_specs)
    states = sum(spec.per_request for spec in cache_specs)
    largest_tokens = config.max_requests * -(-config.max_context // 16) * 16
    free_memory = config.kv_memory - config.max_requests * states
    tokens = (
        min(largest_tokens, free_memory // bytes_per_token - 1)
        if bytes_per_token
        else largest_tokens * (free_memory >= 0)
    )  # one token is reserved for idle ranks
    if dist.is_initialized() and dist.get_world_size() > 1:  # all ranks must make the same plans
        smallest = torch.tensor([tokens, -states], device=torch.cuda.current_device())
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        tokens = int(smallest[0])
        states = -int(smallest[1])
    if states and config.speculation is not None:
        raise UserError(
            "speculative decoding does not work with states that cannot be undone: those of recurrent layers, and "
            "windows as rings (window_rings=True); leave out speculative"
        )
    if tokens < 32:
        raise UserError(
            f"kv_memory={config.kv_memory} holds {max(tokens, 0)} tokens in addition to the states of "
            f"max_requests={config.max_requests} requests: increase kv_memory, or lower max_requests"
        )
    chunk = min(config.chunk, config.rows)
    return Limits(tokens, config.max_requests, chunk, config.rows, reuses=reuses and not states)
