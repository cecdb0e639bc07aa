# SPDX-License-Identifier: Apache-2.0
"""Save, resume and retain the checkpoints of a run.

A checkpoint holds weights, optimizer, schedule, progress (including the position in the data), random states and
the states of callbacks. With the same parallel sizes a resumed run is bitwise equal to an uninterrupted one. With
other parallel sizes it continues with the same samples; dropout differs, because random states belong to ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.nn import Module

from megatron.bridge.checkpoint import (
    bucket,
    loading,
    lock,
    model_io,
    paths,
    rank_local,
    saving,
    verification,
)
from megatron.bridge.checkpoint.async_writer import AsyncSaver
from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.models.chunk_info import chunk_info
from megatron.bridge.models.conversion import pretrained
from megatron.bridge.models.hf_pretrained.hub import is_hf_model
from megatron.bridge.training.checkpointing import megatron_lm, model_check, non_persistent
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, SchedulerConfig
from megatron.bridge.training.config.blocks.optimizer import STATE_NAMES
from megatron.bridge.training.initialize import peft, rank_state
from megatron.bridge.training.optim import optimizer_state
from megatron.bridge.training.optim.optimizer import (
    gathered_params,
    megatron_optimizers,
    set_update_count,
    update_count,
)
from megatron.bridge.training.state import Run
from megatron.bridge.utils import distributed, unpickling
from megatron.bridge.utils.config.serialize import to_plain
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

RUN = "run"
RANK = f"{model_io.RUN_STATE}.rank"

SCHEDULE_KEYS = {
    "max_lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_steps": "scheduler.lr_warmup_iters",
    "lr_decay_steps": "scheduler.lr_decay_iters",
    "lr_decay_style": "scheduler.lr_decay_style",
    "start_wd": "scheduler.start_weight_decay",
    "end_wd": "scheduler.end_weight_decay",
    "wd_incr_steps": "train.train_iters",
    "wd_incr_style": "scheduler.weight_decay_incr_style",
    "init_lr": "scheduler.lr_warmup_init",
    "wsd_decay_steps": "scheduler.lr_wsd_decay_iters",
    "lr_wsd_decay_style": "scheduler.lr_wsd_decay_style",
}
"""Values of the schedule that must match the checkpoint -> the keys that set them."""


def save_run(run: Run, background: AsyncSaver | None = None) -> Path:
    """Save ``run`` under its step as the newest checkpoint, and delete old ones beyond ``most_recent_k``.

    ``background`` writes the files while training continues, after waiting for an unfinished save; the
    checkpoint is published when ``background.poll`` finds that all ranks have finished. Returns its directory.

    Raises:
        UserError: The folder cannot be written, or the disk is full; the previous checkpoint stays the newest.
    """
    config = run.config.checkpoint
    assert config.save is not None, "checkpoint.save is not set"
    root = Path(config.save)
    step = run.progress.step
    is_best = config.keep_best and run.best_step == step
    for (
        companion
    ) in run.companions:  # first, so that the newest checkpoint of a run has all of them
        companion.best_step = run.best_step
        save_run(companion)
    directory = paths.iteration_dir(root, step)
    if background is not None:
        background.poll(wait=True)
    on_first_rank(lambda: _recover_folder(root))
    with gathered_params(run.model):
        saving.save(
            run_state(run),
            directory,
            model_io.extra_files(to_plain(run.config), chat_template=run.chat_template),
            overwrite=True,
            published=lambda: _make_newest(root, step, config.most_recent_k, is_best),
            background=background,
        )
    return directory


def save_non_persistent(run: Run, name: str, started: int | None) -> None:
    """Save a non-persistent checkpoint of ``run``; only the newest is kept.

    ``name`` is from ``non_persistent.run_name``; ``started`` is the last persistent checkpoint whose save began.
    """
    config = run.config.checkpoint
    step = run.progress.step
    origin = on_first_rank(lambda: non_persistent.origin(Path(str(config.save)), started))
    with gathered_params(run.model):
        state = run_state(run)
        if config.non_persistent_ckpt_type != "global":
            store = non_persistent.store(config, name)
            non_persistent.save_local(store, step, state, {**origin, "rank": distributed.rank()})
            return
        folder = non_persistent.global_root(config, name)
        config_files = model_io.extra_files(to_plain(run.config), chat_template=run.chat_template)

        def write_extra(staging: Path) -> None:
            config_files(staging)
            rank_local.write_origin(staging, origin)

        saving.save(
            state,
            paths.iteration_dir(folder, step),
            write_extra,
            overwrite=True,
            published=lambda: non_persistent.remove_global(folder, but=(step,)),
        )


def remove_non_persistent(run: Run, name: str) -> None:
    """Remove the non-persistent checkpoints of ``run``, which has ended and is saved."""
    config = run.config.checkpoint
    if config.non_persistent_ckpt_type != "global":
        non_persistent.store(config, name).keep_only(None)
    else:
        folder = non_persistent.global_root(config, name)
        on_first_rank(lambda: non_persistent.remove_global(folder))


def _recover_folder(root: Path) -> None:
    lock.check(root)
    paths.recover(root)


def run_state(run: Run) -> dict[str, Any]:
    """The sharded state dict of everything that a checkpoint of a run holds."""
    config = run.config.checkpoint
    state = peft.saved_weights(run, model_io.MODEL_METADATA)
    if config.save_optim:
        state["optimizer"] = optimizer_state.sharded_optimizer_state(run.optimizer, state)
    state[model_io.CONTENT_METADATA] = dict(model_io.MODEL_METADATA)
    state[RUN] = {
        "layout": rank_state.current_sizes(),
        "progress": run.progress.state_dict(),
        "scheduler": run.scheduler.state_dict() if run.scheduler else None,
        "optimizer": _optimizer_scalars(run) if config.save_optim else None,
        "random": config.save_rng,
        "base": chunk_info(run.model[0]).base,
        model_check.MODEL: model_check.function_of(run.config.model),
    }
    rank_state_dict = {
        "callbacks": _callback_states(run),
        "random": rank_state.random_states() if config.save_rng else None,
    }
    state[RANK] = ShardedObject(
        RANK, rank_state_dict, (distributed.world_size(),), (distributed.rank(),)
    )
    return state


def check_save(run: Run) -> None:
    """Fail before the first step if ``run`` could not be saved; all ranks call this.

    A run that could not be exported is refused with ``also_save_hf_checkpoint``, else a note says so.
    """
    run_state(run)
    problem = export_problem(run.config, run.model)
    if problem is None:
        return
    if run.config.checkpoint.also_save_hf_checkpoint:
        raise UserError(problem)
    print_rank_0(f"note: {problem}")


def export_problem(config: ConfigContainer, chunks: Sequence[Module]) -> str | None:
    """Return why the weights of a run cannot be exported to Hugging Face, or None.

    The run may go on without ``checkpoint.also_save_hf_checkpoint``: its checkpoints can still be
    trained and served. Adapters have a separate export.
    """
    checkpoint = config.checkpoint
    declares_nothing = (
        config.model.declared.hf_config is None and not checkpoint.also_save_hf_checkpoint
    )
    if config.peft is not None or declares_nothing:
        return None
    try:
        pretrained.check_export(chunks, checkpoint.pretrained_checkpoint)
    except UserError as error:
        setting = (
            "checkpoint.also_save_hf_checkpoint=True is impossible: "
            if checkpoint.also_save_hf_checkpoint
            else ""
        )
        return f"{setting}the checkpoints of this run cannot be exported to Hugging Face: {error}"
    return None


def _callback_states(run: Run) -> dict[str, Any]:
    """The states of the callbacks; one that a resumed run would refuse to read is refused now."""
    states = run.callbacks.state_dict()
    if not run.config.checkpoint.trust_checkpoint:
        for name, state in states.items():
            unpickling.check_readable(state, f"the state of callback {name}")
    return states


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint from which a run starts."""

    directories: tuple[
        Path, ...
    ]  # the checkpoint to load, then those to fall back to if it is damaged, newest first
    resumed: bool  # whether the run continues an earlier one, instead of starting from its weights
    # this rank's part of a newer, non-persistent checkpoint, which is loaded instead
    local: non_persistent.LocalCheckpoint | None = None


def find_starting_point(config: ConfigContainer) -> StartingPoint | None:
    """Find the checkpoint from which a run starts: the first of these that exists.

    1. The newest checkpoint in ``checkpoint.save``, or a newer non-persistent one: the run was interrupted and
       resumes.
    2. ``checkpoint.load``: the run resumes from it, or with ``finetune`` loads the weights only.
    3. ``checkpoint.pretrained_checkpoint``: weights from a Megatron checkpoint or a Hugging Face directory.

    To be called on all ranks before anything is built, so that a missing folder or a damaged checkpoint is found
    at once. Every Megatron checkpoint that the run reads is verified here, once. If a checkpoint in
    ``checkpoint.save`` is damaged, ``checkpoint.when_damaged`` decides whether the previous one is used; a
    damaged checkpoint that the config names is refused.

    Returns:
        None if the run starts from random weights.
    """
    start = _verified_start(config.checkpoint)
    base = on_first_rank(lambda: _unverified_base(config, start))
    if base is not None:
        verification.verify(base, config.checkpoint.verify)
    return start


def _verified_start(config: CheckpointConfig) -> StartingPoint | None:
    own_checkpoints = on_first_rank(lambda: _own_checkpoints(config))
    newer = non_persistent.newest_usable(config, own_checkpoints)
    if isinstance(newer, non_persistent.LocalCheckpoint):
        return StartingPoint(own_checkpoints, resumed=True, local=newer)
    own_checkpoints = own_checkpoints if newer is None else (newer, *own_checkpoints)
    start = (
        StartingPoint(own_checkpoints, resumed=True)
        if own_checkpoints
        else on_first_rank(lambda: _configured_start(config))
    )
    if start is None or on_first_rank(lambda: is_hf_model(start.directories[0])):
        return start
    return _first_undamaged(
        start, config, lambda directory: verification.verify(directory, config.verify)
    )


def _unverified_base(config: ConfigContainer, start: StartingPoint | None) -> Path | None:
    """The Megatron checkpoint that the new model is loaded from although the run starts from another one."""
    name = config.checkpoint.pretrained_checkpoint
    projected = (
        config.distill is not None and config.distill.hidden_layers and Path(name or "").exists()
    )
    if name is None or not (config.peft or projected):
        return None
    base = pretrained.local_weights(name)
    verified = start.directories[:1] if start else ()
    return None if base in verified or is_hf_model(base) else base


def load_run(run: Run, start: StartingPoint | None) -> bool:
    """Load the checkpoint from which ``run``, at step 0, starts; return whether the run continues an earlier one."""
    if start is None:
        if chunk_info(run.model[0]).filled_from is None:
            print_rank_0(
                "random weights; checkpoint.pretrained_checkpoint=DIR starts from those of a model"
            )
        return False
    if start.local is not None:
        resume_local(run, start.local)
        print_rank_0(f"resumed from {start.local.place} at step {run.progress.step}")
    elif start.resumed:
        start = _first_undamaged(
            start, run.config.checkpoint, lambda directory: resume(run, directory)
        )
        print_rank_0(f"resumed from {start.directories[0]} at step {run.progress.step}")
    else:
        load_weights(run, start.directories[0])
        print_rank_0(f"loaded weights from {start.directories[0]}")
    return start.resumed


def load_weights(run: Run, path: Path) -> None:
    """Load the model and the optimizer's main parameters from a Megatron or a Hugging Face directory.

    With PEFT the base weights are loaded already, and only ``checkpoint.load`` can hold values of the adapters.
    """
    if run.config.peft is not None:
        if path != pretrained.local_weights(str(run.config.checkpoint.pretrained_checkpoint)):
            peft.load_adapters(run, path)
        return
    filled = chunk_info(run.model[0]).filled_from
    if filled is not None and path == pretrained.local_weights(filled):
        return
    pretrained.load_weights(run.model, path, run.config.checkpoint.ignore_adapter)
    optimizer_state.reload_main_weights(run.optimizer)
    model_check.note_other_function(run, path)


def resume(run: Run, directory: Path) -> None:
    common = loading.load_common(directory)
    from_megatron_lm = RUN not in common and megatron_lm.is_megatron_lm(common)
    if from_megatron_lm:
        common = {**common, RUN: megatron_lm.run_state(common)}
    saved = _checked_run_state(run, common, directory)
    model_io.check_vocabulary(run.model, directory)
    if run.config.checkpoint.load_optim and not from_megatron_lm:
        _check_optimizer(run.config.optimizer.optimizer, directory)
    state = _state_to_load(run, model_io.stored_metadata(common))
    load = _load_megatron_lm if from_megatron_lm else _load_run_state
    loaded = load(run, state, saved, directory)
    _restore(run, saved, loaded, same=saved["layout"] == rank_state.current_sizes())


def _check_optimizer(optimizer: str, directory: Path) -> None:
    """Refuse the state of another optimizer than that of the run."""
    keys = on_first_rank(lambda: list(loading.stored_keys(loading.check_files(directory))))
    saved = optimizer_state.saved_state_names(keys)
    if not saved or optimizer_state.fits_optimizer(optimizer, saved):
        return
    of_checkpoint = [name for name in STATE_NAMES if optimizer_state.fits_optimizer(name, saved)]
    saved_optimizer = " or ".join(of_checkpoint) or "another optimizer"
    remedy = f"set optimizer.optimizer={of_checkpoint[0]}, or " if of_checkpoint else "set "
    raise UserError(
        f"checkpoint {directory} has the state of {saved_optimizer} ({', '.join(sorted(saved))}), and "
        f"optimizer.optimizer={optimizer} has {', '.join(STATE_NAMES[optimizer])}: {remedy}"
        "checkpoint.load_optim=false to start with a new state"
    )


def _load_run_state(
    run: Run, state: dict[str, Any], saved: dict[str, Any], directory: Path
) -> dict[str, Any]:
    same = saved["layout"] == rank_state.current_sizes()
    # with other parallel sizes no rank's own state matches; the states of callbacks are those of the first rank
    part = (distributed.world_size(), distributed.rank()) if same else (saved["layout"]["world"], 0)
    state[RANK] = ShardedObject(
        RANK, None, (part[0],), (part[1],), replica_id=0 if same else distributed.rank()
    )
    known = () if run.config.checkpoint.load_optim else (f"{optimizer_state.PREFIX}.",)
    return loading.load(state, directory, known=known)


def _load_megatron_lm(
    run: Run, state: dict[str, Any], saved: dict[str, Any], directory: Path
) -> dict[str, Any]:
    known = (*megatron_lm.IGNORED, "optimizer", "chained_")
    if "optimizer" in state:
        names = on_first_rank(lambda: list(loading.stored_keys(loading.check_files(directory))))
        megatron_lm.check_optimizer_format(names, directory)
        state["optimizer"] = megatron_lm.with_megatron_lm_keys(state["optimizer"], names)
    return loading.load(state, directory, known=known) | {RANK: {"callbacks": {}, "random": None}}


def resume_local(run: Run, checkpoint: non_persistent.LocalCheckpoint) -> None:
    """Restore ``run`` from a non-persistent checkpoint, where each rank has its own part."""
    content = on_every_rank(lambda: checkpoint.store.load(checkpoint.iteration))
    saved = on_every_rank(lambda: _checked_run_state(run, content, checkpoint.place))
    state = _state_to_load(run, dict(model_io.MODEL_METADATA)) | {RANK: None}
    loaded = on_every_rank(lambda: rank_local.copy_into(state, content, checkpoint.place))
    _restore(run, saved, loaded, same=True)


def _state_to_load(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """The sharded state dict of the tensors that a run loads from a checkpoint."""
    state = peft.saved_weights(run, metadata)
    if run.config.checkpoint.load_optim:
        state["optimizer"] = optimizer_state.sharded_optimizer_state(run.optimizer, state)
    return state


def _restore(run: Run, saved: dict[str, Any], loaded: dict[str, Any], same: bool) -> None:
    """Restore the loaded state; ``same`` tells whether the parallel sizes are those of the checkpoint."""
    peft.set_saved_weights(run, loaded)
    _set_optimizer(run, saved["optimizer"])
    if (
        run.scheduler and saved["scheduler"]
    ):  # another program's loop may save and load weights alone
        _set_schedule(run, saved["scheduler"])
    run.progress.load_state_dict(saved["progress"])
    run.callbacks.load_state_dict(loaded[RANK]["callbacks"])
    if run.config.checkpoint.load_rng:
        _set_random(run, loaded[RANK]["random"] if same else None, saved["layout"])


def check_schedule(run: Run, saved: dict[str, Any], directory: Path) -> None:
    """Refuse a schedule with other values than the checkpoint's, unless the config says which one to use."""
    config: SchedulerConfig = run.config.scheduler
    if config.override_opt_param_scheduler or config.use_checkpoint_opt_param_scheduler:
        return
    current = run.scheduler.state_dict()
    if config.lr_warmup_init is None:  # open: the run goes on with the checkpoint's
        current["init_lr"] = saved.get("init_lr", 0.0)
    constant = saved["wd_incr_style"] == current["wd_incr_style"] == "constant"
    differing = [
        f"{key} is {_config_value(name, current, run)}, in the checkpoint {_config_value(name, saved, run)}"
        for name, key in SCHEDULE_KEYS.items()
        if current[name] != saved.get(name, current[name])
        and not (name == "wd_incr_steps" and constant)
    ]
    if differing:
        raise UserError(
            f"the schedule differs from that of checkpoint {directory}: {'; '.join(differing)}; "
            "set scheduler.use_checkpoint_opt_param_scheduler or scheduler.override_opt_param_scheduler"
        )


def _config_value(name: str, schedule: dict[str, Any], run: Run) -> Any:
    """A value of the schedule in the units of the config: Megatron-Core counts lengths in samples."""
    if not name.endswith("_steps"):
        return schedule[name]
    train = run.config.train
    return (
        f"{schedule[name]} samples"
        if train.rampup_batch_size
        else schedule[name] / train.global_batch_size
    )


def prune(root: Path, newest: int, keep: int) -> None:
    """Delete all but the best and the ``keep`` newest checkpoints up to ``newest``, which is never deleted.

    Later iterations exist if the run went back to an older checkpoint; the run will replace them.
    """
    if keep < 1:
        return
    older = [iteration for iteration in paths.published_iterations(root) if iteration < newest]
    best = paths.best_iteration(root)
    for iteration in older[: max(0, len(older) - (keep - 1))]:
        if iteration != best:
            paths.remove(root, iteration)


def _make_newest(root: Path, step: int, keep: int, is_best: bool) -> None:
    if is_best:
        paths.write_best(root, step)
    paths.write_tracker(root, step)
    prune(root, step, keep)


def _first_undamaged(
    start: StartingPoint, config: CheckpointConfig, use: Callable[[Path], None]
) -> StartingPoint:
    """Try ``use`` on each directory, newest first, and drop those that are damaged."""
    directory, *older = start.directories
    try:
        use(directory)
    except DamagedError as error:
        _fall_back(config, error, older)
        return _first_undamaged(StartingPoint(tuple(older), start.resumed), config, use)
    return start


def _fall_back(config: CheckpointConfig, error: DamagedError, older: list[Path]) -> None:
    """Print that an older checkpoint is used instead of a damaged one, if there is one and the config allows it."""
    if not older:
        raise error
    if config.when_damaged == "refuse":
        raise DamagedError(
            f"{error} (to resume from {older[0].name}, set checkpoint.when_damaged=use_previous)"
        ) from error
    print_rank_0(f"{error}; resuming from {older[0]}")


def _configured_start(config: CheckpointConfig) -> StartingPoint | None:
    if config.load is not None and config.load != config.save:
        return StartingPoint((pretrained.local_weights(config.load),), not config.finetune)
    if config.finetune and config.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.finetune=True needs weights: set checkpoint.load to their folder"
        )
    if config.pretrained_checkpoint is not None:
        return StartingPoint(
            (pretrained.local_weights(config.pretrained_checkpoint),), resumed=False
        )
    return None


def _own_checkpoints(config: CheckpointConfig) -> tuple[Path, ...]:
    """The published checkpoints in ``checkpoint.save``, newest first."""
    root = Path(config.save or "")
    bucket.refresh(root)
    if config.save is None or not root.is_dir():
        return ()
    with lock.held(root):  # files that look like leftovers may belong to a running job
        paths.recover(root)
    published = paths.published_iterations(root)[::-1]
    if not published:
        return ()
    directories = [paths.iteration_dir(root, iteration) for iteration in published]
    try:
        newest = paths.latest_iteration(root)
        if newest is None:
            raise DamagedError(
                f"{root / paths.TRACKER} is missing, but {directories[0].name} exists"
            )
    except DamagedError as error:
        _fall_back(config, error, directories)
        return tuple(directories)
    later = published.index(newest)
    if later:
        names = ", ".join(path.name for path in directories[:later])
        print_rank_0(
            f"{root / paths.TRACKER} names iteration {newest}: resuming from it; {names} will be replaced"
        )
    return tuple(directories[later:])


def _checked_run_state(run: Run, common: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The run state of a checkpoint, after checking that it holds everything ``run`` needs and matches it."""
    config = run.config.checkpoint
    if RUN not in common:
        raise UserError(
            f"checkpoint {directory} holds only weights, no run state to resume; "
            "set checkpoint.pretrained_checkpoint to it instead of checkpoint.load"
        )
    saved: dict[str, Any] = common[RUN]
    for is_needed, is_saved, key, description in (
        (config.load_optim, saved["optimizer"], "load_optim", "the optimizer state"),
        (config.load_rng, saved["random"], "load_rng", "random states"),
    ):
        if is_needed and not is_saved:
            raise UserError(
                f"checkpoint {directory} was saved without {description}; set checkpoint.{key}=false"
            )
    model_check.check_same_function(run.config.model, saved, directory, config.allow_model_change)
    if run.scheduler and saved["scheduler"] and not run.config.train.skip_train:
        check_schedule(run, saved["scheduler"], directory)
    peft.check_base(run, saved, directory)
    return saved


def _optimizer_scalars(run: Run) -> dict[str, Any]:
    scalers = [
        part.grad_scaler.state_dict() if _scaler(part) else {}
        for part in megatron_optimizers(run.optimizer)
    ]
    return {"step": update_count(run.optimizer), "grad_scalers": scalers}


def _scaler(part: Any) -> Any:
    return getattr(part, "grad_scaler", None)


def _set_optimizer(run: Run, saved: dict[str, Any] | None) -> None:
    if not run.config.checkpoint.load_optim or saved is None:
        optimizer_state.reload_main_weights(run.optimizer)
        return
    optimizer_state.copy_loaded_masters(run.optimizer)
    set_update_count(run.optimizer, saved["step"])
    for part, scaler in zip(
        megatron_optimizers(run.optimizer), saved["grad_scalers"], strict=False
    ):
        if scaler and _scaler(part):
            part.grad_scaler.load_state_dict(scaler)


def _set_schedule(run: Run, saved: dict[str, Any]) -> None:
    scheduler = run.scheduler
    if saved["wd_incr_style"] == scheduler.wd_incr_style == "constant":
        saved = {**saved, "wd_incr_steps": scheduler.wd_incr_steps}
    scheduler.num_steps = 0
    scheduler.load_state_dict(saved)


def _set_random(run: Run, states: dict[str, Any] | None, saved: dict[str, int] | None) -> None:
    if states is not None:
        rank_state.set_random_states(states)
        return
    rank_state.seed_everything(run.config.rng, run.progress.step)
    sizes = ", ".join(f"{name} {size}" for name, size in (saved or {}).items())
    why = (
        f"the checkpoint was saved with parallel sizes {sizes}"
        if sizes
        else "those of Megatron-LM are not loaded"
    )
    print_rank_0(f"random states are reseeded: {why}")
