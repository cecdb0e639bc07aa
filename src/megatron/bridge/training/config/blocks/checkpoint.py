# SPDX-License-Identifier: Apache-2.0
"""What a run saves and loads."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron.bridge.utils.config.ranges import AT_LEAST_ONE


@dataclass
class CheckpointConfig:
    """What a run saves and loads, where and when."""

    save: str | None = None
    """Run folder for checkpoints, metrics and the resolved config. A run resumes from the newest checkpoint in it.
    None saves nothing.
    """
    load: str | None = None
    """Folder to resume from if ``save`` has no checkpoint yet."""
    save_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Steps between checkpoints. The last step is always saved."""
    pretrained_checkpoint: str | None = None
    """Weights to start from: a Megatron checkpoint or a Hugging Face directory."""
    ignore_adapter: bool = False
    """Leave out an adapter (``adapter_config.json``) in the folder of Hugging Face weights. transformers would apply
    it, so that such a folder is refused otherwise.
    """
    most_recent_k: int = -1
    """Number of newest checkpoints to keep; -1 keeps all."""
    keep_best: bool = False
    """Also save after each evaluation that is the best so far (``validation.metric``), and keep that checkpoint.
    ``best_checkpointed_iteration.txt`` names it.
    """
    save_optim: bool = True
    """Save the optimizer state."""
    save_rng: bool = True
    """Save the random number generator states."""
    load_optim: bool = True
    """Load the optimizer state."""
    load_rng: bool = True
    """Load the random number generator states."""
    load_main_params_from_ckpt: bool = False
    """Only False: main parameters come with ``load_optim``, or else from the loaded weights."""
    fully_parallel_save: bool = True
    """Only True: ranks that hold the same values share the writing."""
    fully_parallel_load: bool = True
    """Only True: all ranks read at the same time, each what it needs."""
    ckpt_assume_constant_structure: bool = False
    """Promise that all saves hold the same tensors. Nothing relies on it: each save is planned anew."""
    allow_model_change: list[str] = field(default_factory=list[str])
    """Settings of ``model``, such as ``rotary_base``, that may differ from those of the checkpoint to resume from.
    Others that change what the model computes are refused.
    """
    finetune: bool = False
    """Load only weights from ``load``, and start at step 0."""
    async_save: bool = False
    """Write in the background. Training stops only while the state is copied."""
    also_save_hf_checkpoint: bool = False
    """Make a Hugging Face copy of each checkpoint, ``hf_NNNNNNN`` next to ``iter_NNNNNNN``. A process of rank 0 on
    the CPU makes it while the training goes on. A copy is deleted with its checkpoint.
    """
    async_strategy: Literal["thread", "nvrx"] = "thread"
    """What writes in the background: a ``thread`` of each process, or a process of nvidia-resiliency-ext
    (``nvrx``).
    """
    verify: Literal["full", "fast"] = "full"
    """How to compare a checkpoint with its manifest before loading it: ``full`` reads every file, ``fast``
    compares file sizes and reads only small files.
    """
    trust_checkpoint: bool = False
    """Unpickle objects of any class from checkpoints, which can run code. Otherwise only tensors, plain values and
    Megatron-Core's own classes are read, and all others are refused by name.
    """
    when_damaged: Literal["use_previous", "refuse"] = "use_previous"
    """If the newest checkpoint in ``save`` is damaged: resume from the one before it, or refuse to start."""
    non_persistent_save_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Steps between non-persistent checkpoints. Only the newest is kept, and only until the run ends."""
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    """``global`` writes an ordinary checkpoint to a separate folder, ``local`` writes each rank's shard to a disk
    of its machine, ``in_memory`` keeps each rank's shard in memory for ``inprocess_restart``.
    """
    non_persistent_global_ckpt_dir: str | None = None
    """Folder of ``global`` checkpoints. None means ``non_persistent`` in ``save``."""
    non_persistent_local_ckpt_dir: str | None = None
    """Folder of ``local`` checkpoints, on every machine."""
