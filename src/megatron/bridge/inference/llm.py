# SPDX-License-Identifier: Apache-2.0
"""``LLM``: generate text, chat, and compute log-probabilities.

In a plain script, a model that needs one rank is loaded in the script's process; for more ranks, ``LLM`` starts
processes. Under torchrun, every rank creates the same ``LLM`` and calls the same methods.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from megatron.bridge.inference.conversations.tool_parsers import find_tool_format
from megatron.bridge.inference.requests import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    Completion,
    Sampling,
    TokenLogprob,
)
from megatron.bridge.utils import distributed
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.inference.conversations.answer_reader import AnswerFormat
    from megatron.bridge.inference.prompts import Messages, Prompt, PromptReader
    from megatron.bridge.inference.refit.replacement import WeightStep


_ENGINE = (
    "max_requests",
    "kv_memory",
    "prefix_reuse",
    "window_rings",
    "graphs",
    "chunk",
    "rows",
)
"""Options of ``LLM`` that are also fields of ``EngineConfig``."""


_LOADING = ("dtype", "adapter", "adapters", "tokenizer", "trust_remote_code", "media_root")
"""Options of ``LLM`` that are also arguments of ``loading.load``."""


class LLM:
    """A model for inference.

    Args:
        path: Hugging Face directory or hub id, or Megatron checkpoint.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, which compute different requests.
        etp: expert-tensor-parallel ranks.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None uses the dtype of the checkpoint.
        adapter: run with adapters, one of its checkpoints, or a directory in ``peft`` format. ``none`` leaves out an
            adapter that is in the folder of the model.
        adapters: several adapters by name; ``Sampling.adapter_name`` chooses one for each prompt.
        max_adapters: maximum number of adapters that ``load_adapter`` may make of them; 0 for no changes.
        tokenizer: directory or hub id of another tokenizer.
        template: chat template to use instead of the tokenizer's.
        tool_parser: format of calls of tools in answers; None uses the one of the chat template.
        media_root: folder that must contain the images of prompts; None allows any path.
        max_context: tokens of a prompt and its completion; None uses the model's maximum.
        max_requests: texts that are computed at the same time.
        kv_memory: bytes for keys, values and states on each rank.
        prefix_reuse: texts reuse the caches of others that begin with the same tokens, in full chunks.
        window_rings: layers with a sliding window cache only the window, so more texts fit, but texts do not share
            prefixes.
        speculative: draft tokens with ``{"method": "ngram", "num_speculative_tokens": 4}`` or ``mtp``; further settings
            are fields of ``speculation.Speculation``. None computes one token of a text in each step.
        graphs: replay decoding steps if the model always launches the same kernels.
        chunk: tokens of a prompt that one step computes together.
        rows: maximum new tokens in a step, but one chunk fits with any number of single tokens; None is 1,024 on a
            CPU and 8,192 on a GPU.
        trust_remote_code: run Python code of the model's repository.
        trust_checkpoint: unpickle all classes in a Megatron checkpoint, which can run code.
    """

    def __init__(
        self,
        path: str,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        dtype: str | None = None,
        adapter: str | None = None,
        adapters: Mapping[str, str] | None = None,
        max_adapters: int = 0,
        tokenizer: str | None = None,
        template: str | None = None,
        tool_parser: str | None = None,
        media_root: str | None = None,
        max_context: int | None = None,
        max_requests: int = 32,
        kv_memory: int = 4 << 30,
        prefix_reuse: bool = True,
        window_rings: bool = False,
        speculative: Mapping[str, Any] | None = None,
        graphs: bool = True,
        chunk: int = 256,
        rows: int | None = None,
        trust_remote_code: bool = False,
        trust_checkpoint: bool = False,
    ) -> None:
        options = {key: value for key, value in locals().items() if key not in ("self", "path")}
        if tool_parser is not None:
            find_tool_format("", tool_parser)  # refuses unknown names
        self._cleanup = ExitStack()
        self._workers: Any = None
        self._replacement: Any = None
        if max_adapters < 0:
            raise UserError(f"max_adapters={max_adapters} must be at least 0")
        process_count = check_sizes(
            tp, pp, ep, etp, max_requests, chunk, 1 if rows is None else rows
        )
        if process_count > 1 and "RANK" not in os.environ:
            from megatron.bridge.inference.workers import Workers

            self._workers = self._cleanup.enter_context(
                Workers(process_count, LLM, str(path), options)
            )
            ((self.reader, self.max_context, self.declared_ends),) = self._workers.iterate(
                "yield_facts", ()
            )
            return
        self._load(path, options)

    def _load(self, path: str, options: dict[str, Any]) -> None:
        import megatron.bridge  # noqa: F401 - makes megatron.core usable without a GPU
        from megatron.bridge.backends.cpu import allocator
        from megatron.bridge.backends.cpu.device import has_cuda
        from megatron.bridge.checkpoint.model_io import unwrap
        from megatron.bridge.inference.engine import Engine, EngineConfig
        from megatron.bridge.inference.loading import load
        from megatron.bridge.inference.prompts import PromptReader, declared_ends, end_tokens
        from megatron.bridge.inference.speculation import Speculation, uses_mtp
        from megatron.bridge.models.vision.sharing import rank_share
        from megatron.bridge.utils import unpickling

        distributed.initialize()
        speculation = Speculation.of(options["speculative"])
        more = {name: options[name] for name in _LOADING}
        with unpickling.trusting(options["trust_checkpoint"]):
            with_mtp = uses_mtp(speculation)
            model = load(path, parallel_sizes(options), with_mtp=with_mtp, **more)
        context = _checked_context(options["max_context"], model.max_context)
        share = rank_share(unwrap(model.chunks[0]).config)
        template = options["template"] or model.template
        if model.hf is not None and template is not None:
            model.hf.chat_template = template  # for what asks the tokenizer, such as evaluation
        reader = PromptReader(model.hf, template, model.media, share, context)
        ends = end_tokens(model.hf, model.folder)
        if model.hf is not None and reader.template is not None:
            ends |= reader.end_of_turn()
        engine_options = _engine_options(options, default_rows=8192 if has_cuda() else 1024)
        config = EngineConfig(
            context,
            model.vocabulary,
            frozenset(ends),
            pack=True,
            speculation=speculation,
            **engine_options,
        )
        self.reader = reader
        self._tool_parser = options["tool_parser"]
        self.max_context = context
        self.declared_ends = declared_ends(model.folder)
        pixels = reader.pixels if model.media else None
        engine = Engine(model.chunks, config, model.hf, model.adapters, pixels)
        self.engine = self._cleanup.enter_context(engine)
        allocator.trim()  # packing has freed the weights as they were read
        self._bridge = model.bridge
        self._chunks = model.chunks
        self._make_adapter_changes(options["max_adapters"])

    def _make_adapter_changes(self, most: int) -> None:
        from megatron.bridge.inference.adapter_bank import has_single_adapter
        from megatron.bridge.inference.adapter_changes import AdapterChanges

        self.adapter_changes: AdapterChanges | None = None
        if not most:
            return
        if has_single_adapter(self._chunks):
            raise UserError(
                f"the model has an adapter for all texts, so max_adapters={most} cannot add others: load the base "
                "model, and its adapter with adapters"
            )
        if len(self.engine.adapters.names) > most:
            raise UserError(
                f"max_adapters={most} is less than the {len(self.engine.adapters.names)} adapters: increase it"
            )
        self.adapter_changes = AdapterChanges(self.engine, self._bridge, self._chunks, most)

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter; ``Sampling.adapter_name`` then chooses it.

        Args:
            name: Name of the adapter.
            path: Directory in ``peft`` format, run with adapters, or one of its checkpoints.
        """
        self._change_adapters(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, whose name can then be that of another one."""
        self._change_adapters(name, None)

    def _change_adapters(self, name: str, path: str | None) -> None:
        steps = (
            self.adapter_step(name, path)
            if self._workers is None
            else self._workers.iterate("adapter_step", (name, path))
        )
        for _ in steps:
            pass

    def adapter_step(self, name: str, path: str | None) -> Iterator[None]:
        """Apply ``load_adapter``, or ``unload_adapter`` if ``path`` is None, on each rank."""
        if self.adapter_changes is None:
            raise UserError("adapters are fixed: create the LLM with max_adapters")
        if path is not None:
            self.adapter_changes.load(name, path)
        else:
            self.adapter_changes.close(name)
            self.adapter_changes.remove_unused()
        yield from ()

    @property
    def hf(self) -> Any:
        """Tokenizer of transformers; None without one."""
        return self.reader.hf

    def yield_facts(self) -> Iterator[tuple["PromptReader", int, set[int]]]:
        """Yield prompt reader, maximum context and end tokens, for a process that has not loaded the model."""
        yield self.reader, self.max_context, self.declared_ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Detach the caches and end the processes that this object started."""
        self._cleanup.close()

    def generate(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[list[Completion]]:
        """Return ``n`` completions for each text or list of token ids; ``sampling`` is shared or one per prompt."""
        from megatron.bridge.inference.prompts import as_list

        return list(self.generate_each(as_list(prompts), sampling))

    def generate_each(
        self,
        prompts: "Sequence[Prompt | Messages]",
        sampling: Sampling | Sequence[Sampling] | None = None,
        places: Sequence[str] | None = None,
    ) -> Iterator[list[Completion]]:
        """Complete texts and answer conversations.

        Yields the completions of each prompt, in order, as soon as they are complete. Invalid prompts raise a
        ``UserError`` before any computation; its message uses ``places`` as the names of the prompts.
        """
        if self._workers is not None:
            yield from self._workers.iterate("generate_each", (prompts, sampling, places))
            return
        samplings = (
            [sampling or Sampling()] * len(prompts)
            if not isinstance(sampling, Sequence)
            else list(sampling)
        )
        if len(samplings) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts and {len(samplings)} samplings: give one for each, or one for all"
            )
        planned = [
            self._plan(prompt, places[index] if places else f"prompt {index}", prompt_sampling)
            for index, (prompt, prompt_sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        for completions in self._complete(planned):
            assert not isinstance(completions, str), "refused prompts have raised an error"
            _refuse_failed(completions)
            yield completions

    def complete_each(
        self, prompts: Sequence[list[int]], samplings: Sequence[Sampling]
    ) -> Iterator[list[Completion] | str]:
        """Complete prompts of which some may be invalid.

        Yields the completions of each prompt, in order; for an invalid prompt, the message of its error. The
        ``finish_reason`` of a completion says whether it has failed.
        """
        if self._workers is not None:
            yield from self._workers.iterate("complete_each", (prompts, samplings))
            return
        planned: list[_PlannedPrompt | str] = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            try:
                self.engine.check(prompt, sampling)
            except UserError as error:
                planned.append(str(error))
            else:
                planned.append(_PlannedPrompt(prompt, sampling))
        yield from self._complete(planned)

    def chat(
        self,
        messages: "Messages",
        sampling: Sampling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a conversation.

        The answer's ``message`` has ``content``, ``reasoning_content`` and ``tool_calls``; append it to the messages
        to go on. All arguments have the form of OpenAI's API.

        Args:
            messages: Messages with ``role`` and ``content``, or a record with ``messages`` and images.
            sampling: How to generate the answer.
            tools: Functions that the model may call.
            tool_choice: ``none``, ``auto``, ``required``, or the function to call.
            parallel_tool_calls: False returns only the first call.
            response_format: Structure of the answer.
            reasoning_effort: For chat templates that read it.
            chat_template_kwargs: Variables of the chat template.
        """
        options = {
            "tools": None if tools is None else list(tools),
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "reasoning_effort": reasoning_effort,
            "chat_template_kwargs": chat_template_kwargs,
        }
        record = dict(messages) if isinstance(messages, Mapping) else {"messages": messages}
        record |= {name: value for name, value in options.items() if value is not None}
        return next(iter(self.generate_each([record], sampling)))[0]

    def stream(
        self,
        prompt: "Prompt | Messages",
        sampling: Sampling | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[str | Completion]:
        """Yield pieces of a completion, then the completion; rank 0 calls ``stopped`` at each step to end it early."""
        if self._workers is not None:
            yield from self._workers.iterate("stream", (prompt, sampling), stopped)
            return
        planned = self._plan(prompt, "the prompt", sampling or Sampling())
        job = self.engine.enqueue(planned.tokens, planned.sampling)[0]
        try:
            while not job.is_over:
                self.engine.step()
                if distributed.broadcast_object(stopped()):
                    self.engine.cancel(job)
                if job.piece:
                    yield job.piece
        finally:
            self.engine.cancel(job)
        _refuse_failed([job.completion])
        planned.add_message(job.completion)
        yield job.completion

    def logprobs(
        self, texts: "Prompt | Sequence[Prompt]", top: int = 0
    ) -> list[list[TokenLogprob]]:
        """Return the log-probability of each token after the first, with the ``top`` most likely tokens there."""
        scoring = Sampling(max_new_tokens=0, prompt_logprobs=top)
        return [completions[0].prompt_logprobs for completions in self.generate(texts, scoring)]

    def replace_weights(self, step: "WeightStep") -> None:
        """Apply one step of a weight update on all ranks; ``refit.sender.Refit`` sends all steps."""
        steps = (
            self.weight_step(step)
            if self._workers is None
            else self._workers.iterate("weight_step", (step,))
        )
        for _ in steps:
            pass

    def weight_step(self, step: "WeightStep") -> Iterator[None]:
        """Apply ``replace_weights`` on each rank."""
        from megatron.bridge.inference.refit.replacement import Replacement

        if self._bridge is None:
            raise UserError(
                "this engine was loaded from a Megatron checkpoint: load a Hugging Face model to refit it"
            )
        if self._replacement is None:
            self._replacement = Replacement(self.engine, self._bridge, self._chunks)
        self._replacement.take(step)
        yield from ()

    def _plan(
        self, prompt: "Prompt | Messages", location: str, sampling: Sampling
    ) -> "_PlannedPrompt":
        """Return what to compute for a prompt or a conversation after the engine has checked it."""
        from megatron.bridge.inference.prompts import is_conversation

        if is_conversation(prompt):
            planned = self._plan_conversation(prompt, location, sampling)  # pyright: ignore[reportArgumentType]
        else:
            planned = _PlannedPrompt(self.reader.tokens(prompt, location), sampling)
        try:
            self.engine.check(planned.tokens, planned.sampling)
        except UserError as error:
            raise UserError(f"{location}: {error}") from error
        return planned

    def _plan_conversation(
        self, conversation: "Messages", location: str, sampling: Sampling
    ) -> "_PlannedPrompt":
        from megatron.bridge.inference.conversations.planning import plan_conversation

        plan, sampling = plan_conversation(
            self.reader, conversation, sampling, self._tool_parser, location
        )
        return _PlannedPrompt(plan.prompt, sampling, True, plan.answer_format)

    def _complete(
        self, planned: "Sequence[_PlannedPrompt | str]"
    ) -> Iterator[list[Completion] | str]:
        """Yield the completions of each prompt, and the text of each refusal."""
        jobs = [
            [] if isinstance(prompt, str) else self.engine.enqueue(prompt.tokens, prompt.sampling)
            for prompt in planned
        ]
        try:
            for prompt, choices in zip(planned, jobs, strict=True):
                if isinstance(prompt, str):
                    yield prompt
                    continue
                while not all(job.is_over for job in choices):
                    self.engine.step()
                completions = [job.completion for job in choices]
                for completion in completions:
                    prompt.add_message(completion)
                yield completions
        finally:
            for job in (job for choices in jobs for job in choices):
                self.engine.cancel(job)


@dataclass(frozen=True)
class _PlannedPrompt:
    """What to compute for a prompt.

    Attributes:
        tokens: Token ids.
        sampling: Sampling of the completions.
        is_conversation: Whether the completions are answers to a conversation.
        answer_format: How to read such an answer; None if all of it is content.
    """

    tokens: list[int]
    sampling: Sampling
    is_conversation: bool = False
    answer_format: "AnswerFormat | None" = None

    def add_message(self, completion: Completion) -> None:
        """Set the message of a completion that answers a conversation."""
        if not self.is_conversation:
            return
        from megatron.bridge.inference.conversations.answer_messages import MessageWriter

        # equal on all ranks, because later prompts have the ids
        id_seed = f"{completion.prompt_tokens} {completion.tokens}"
        writer = MessageWriter(self.answer_format, id_seed)
        completion.message = writer.write_message(completion.text)


def _checked_context(max_context: int | None, longest: int) -> int:
    """Return the context length, which is at most that of the model."""
    context = max_context or longest
    if not 1 < context <= longest:
        raise UserError(f"max_context={context} must be from 2 to {longest}, the model's maximum")
    return context


def _engine_options(options: Mapping[str, Any], default_rows: int) -> dict[str, Any]:
    """Return the options of ``LLM`` that are fields of ``EngineConfig``."""
    engine_options = {name: options[name] for name in _ENGINE}
    engine_options["rows"] = engine_options["rows"] or default_rows
    return engine_options


def _refuse_failed(completions: Sequence[Completion]) -> None:
    reasons = {completion.finish_reason for completion in completions}
    if "error" in reasons:
        raise UserError(NOT_FINITE)
    if "grammar" in reasons:
        raise UserError(GRAMMAR_FAILED)


def ranks_of(options: dict[str, Any]) -> int:
    """Return the number of processes that an ``LLM`` with these options uses."""
    defaults = {"tp": 1, "pp": 1, "ep": 1, "etp": None, "max_requests": 32, "chunk": 256, "rows": 1}
    return check_sizes(*(options.get(name, value) for name, value in defaults.items()))


def check_sizes(tp: int, pp: int, ep: int, etp: int | None, *sizes: int) -> int:
    """Check the sizes and return the number of processes of the layout."""
    for name, size in (("tp", tp), ("pp", pp), ("ep", ep), ("etp", etp or 1)):
        if size < 1:
            raise UserError(f"{name}={size}: a parallel size must be at least 1")
    if sizes and min(sizes) < 1:
        raise UserError(f"max_requests, chunk and rows are {sizes}: each must be at least 1")
    return pp * math.lcm(tp, ep * (etp or tp))


def parallel_sizes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of the options ``tp``, ``pp``, ``ep`` and ``etp`` by the names of a provider's fields."""
    return {
        "tensor_model_parallel_size": options["tp"],
        "pipeline_model_parallel_size": options["pp"],
        "expert_model_parallel_size": options["ep"],
        "expert_tensor_parallel_size": options["etp"],
    }
