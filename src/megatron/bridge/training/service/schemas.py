# SPDX-License-Identifier: Apache-2.0
"""Bodies of the requests of Tinker's client."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.bridge.utils.errors import UserError, did_you_mean

_LARGEST_ID = 1 << 53


class Body(BaseModel):
    """A body; a field that is not known is refused, unless its value asks for nothing."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name != "type" and value:
                hint = did_you_mean(name, list(type(self).model_fields))
                raise ValueError(f"{name}={value!r:.60} is not supported here{hint}: leave it out")
        return self


def read_body[B: Body](kind: type[B], values: Any) -> B:
    """Return a body of a kind.

    Raises:
        UserError: The values have another form.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{place}: {message}" if place else message) from error


class CreateSession(Body):
    """``create_session``."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class LoraConfig(Body):
    """Which layers an adapter changes, and its size."""

    rank: int = Field(ge=1, le=1 << 16)
    seed: int | None = Field(default=None, ge=0, lt=1 << 32)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """Which optimizer a model has."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """``create_model``."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class AdamParams(Body):
    """Settings of a step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """``optim_step``."""

    adam_params: AdamParams


class TensorData(Body):
    """Numbers of the tokens of a datum."""

    data: list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Chunk(BaseModel):
    """A part of a prompt; ``ModelInput`` refuses what is not text."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    """A prompt."""

    chunks: list[Chunk]

    def read_tokens(self) -> list[int]:
        """Return the tokens; raise ``UserError`` if there is something other than text."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise UserError(
                    f"a chunk has type={chunk.type!r}: this server takes text only, so send encoded_text"
                )
        return [token for chunk in self.chunks for token in chunk.tokens]


class Datum(Body):
    """A sequence to learn from."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class ForwardBackwardInput(Body):
    """Data and loss of ``forward_backward``."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackward(Body):
    """``forward_backward`` and ``forward``."""

    forward_backward_input: ForwardBackwardInput
    forward_only: bool = False


class SaveWeights(Body):
    """``save_weights``."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Body):
    """``save_weights_for_sampler``."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class LoadWeights(Body):
    """``load_weights``, into a model or as a new one."""

    model_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None


class CreateSamplingSession(Body):
    """``create_sampling_session``."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Body):
    """How to continue a prompt."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-_LARGEST_ID, le=_LARGEST_ID)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, ge=0, le=1)


class SampleRequest(Body):
    """``asample``."""

    num_samples: int = Field(default=1, ge=1)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)


class OfSession(Body):
    """``session_heartbeat`` and what else names a session."""

    session_id: str


class OfModel(Body):
    """``get_info``, ``unload_model`` and what else names a model."""

    model_id: str
    seq_id: int | None = None


class OfRequest(Body):
    """``retrieve_future`` and ``cancel_future``."""

    request_id: str
    allow_metadata_only: bool = False


class OfPath(Body):
    """``weights_info``."""

    tinker_path: str


def settings_of(body: OptimStep) -> Mapping[str, float]:
    """Return the settings of a step by name."""
    return {name: getattr(body.adam_params, name) for name in AdamParams.model_fields}
