# SPDX-License-Identifier: Apache-2.0
"""What a run saves, what it resumes from, and what it keeps.

A checkpoint is one unit: weights, optimizer, schedule, progress (and with it the position in the data), random
states and the callbacks' states. Under the same layout a resumed run is bitwise the undisturbed one. Under another
layout it goes on with the same next samples; random states belong to ranks, so dropout then draws otherwise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.bridge.checkpoint import distributed, layout, local, lock, model_io, saving, verification
from megatron.bridge.checkpoint.background import Background
from megatron.bridge.checkpoint.collective import on_every_rank, on_first_rank
from megatron.bridge.checkpoint.manifest import DamagedError
from megatron.bridge.training import adapters, megatron_lm, non_persistent
from megatron.bridge.training.config import CheckpointConfig, SchedulerConfig
from megatron.bridge.training.optimizer import follow_weights, parts, set_step, step_of
from megatron.bridge.training.optimizer_state import PREFIX, sharded_optimizer_state
from megatron.bridge.training.parallel_layout import Layout
from megatron.bridge.training.param_gather import gathered_params
from megatron.bridge.training.random_states import random_states, seed_everything, set_random_states
from megatron.bridge.training.state import Run
from megatron.bridge.utils import dist
from megatron.bridge.utils.config.serialize import to_plain
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

RUN = "run"
RANK = f"{model_io.RUN_STATE}.rank"

# What of the schedule a checkpoint fixes, and the key that sets it.
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


def save_run(run: Run, background: Background | None = None) -> Path:
    """Save ``run`` under its step, make that the newest checkpoint, and drop old ones beyond ``most_recent_k``.

    Args:
        run: The run.
        background: Where to write while the run goes on; a save that still goes on there is waited for. The
            checkpoint appears when ``background.poll`` finds that all ranks have written.

    Returns:
        The directory that was published, or will be.

    Raises:
        UserError: the folder cannot be written, or the disk is full; the checkpoint before stays the newest.
    """
    config = run.config.checkpoint
    assert config.save is not None, "checkpoint.save is not set"
    root, step = Path(config.save), run.progress.step
    directory = layout.iteration_dir(root, step)
    if background is not None:
        background.poll(wait=True)
    on_first_rank(lambda: _clear_folder(root))
    with gathered_params(run.model):
        saving.save(
            run_state(run),
            directory,
            model_io.extra_files(to_plain(run.config)),
            overwrite=True,
            published=lambda: _make_newest(root, step, config.most_recent_k),
            background=background,
        )
    return directory


def save_between(run: Run, name: str, started: int | None) -> None:
    """Save a non-persistent checkpoint of ``run``; only the newest is kept.

    Args:
        run: The run.
        name: Of the run, as ``non_persistent.run_name`` gives it.
        started: The persistent checkpoint that was last begun to be written.

    Raises:
        UserError: it cannot be written.
    """
    config, step = run.config.checkpoint, run.progress.step
    origin = on_first_rank(lambda: non_persistent.origin(Path(str(config.save)), started))
    with gathered_params(run.model):
        state = run_state(run)
        if config.non_persistent_ckpt_type != "global":
            kept = non_persistent.store(config, name)
            non_persistent.save_part(kept, step, state, {**origin, "rank": dist.rank()})
            return
        folder = non_persistent.global_root(config, name)
        config_files = model_io.extra_files(to_plain(run.config))

        def write_extra(staging: Path) -> None:
            config_files(staging)
            local.write_origin(staging, origin)

        saving.save(
            state,
            layout.iteration_dir(folder, step),
            write_extra,
            overwrite=True,
            published=lambda: non_persistent.remove_global(folder, but=(step,)),
        )


def forget_between(run: Run, name: str) -> None:
    """Remove the non-persistent checkpoints of ``run``: it has ended, and its end is saved."""
    config = run.config.checkpoint
    if config.non_persistent_ckpt_type != "global":
        non_persistent.store(config, name).keep_only(None)
    else:
        folder = non_persistent.global_root(config, name)
        on_first_rank(lambda: non_persistent.remove_global(folder))


def _clear_folder(root: Path) -> None:
    lock.check(root)
    layout.recover(root)


def run_state(run: Run) -> dict[str, Any]:
    """Everything of a run that a checkpoint holds, described for saving."""
    config = run.config.checkpoint
    state = adapters.saved_weights(run, model_io.MODEL_METADATA)
    if config.save_optim:
        state["optimizer"] = sharded_optimizer_state(run.optimizer, state)
    state[model_io.CONTENT_METADATA] = dict(model_io.MODEL_METADATA)
    state[RUN] = {
        "layout": asdict(Layout.current()),
        "progress": run.progress.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "optimizer": _optimizer_scalars(run) if config.save_optim else None,
        "random": config.save_rng,
        "base": adapters.base_of(run),
    }
    own = {"callbacks": run.callbacks.state_dict(), "random": random_states() if config.save_rng else None}
    state[RANK] = ShardedObject(RANK, own, (dist.world_size(),), (dist.rank(),))
    return state


@dataclass(frozen=True)
class Source:
    """Where a run starts.

    Attributes:
        directories: The checkpoint to load, then those to go back to if it is damaged, newest first.
        resumed: Whether the run goes on from a step of an earlier one.
        part: What this rank keeps of a newer, non-persistent checkpoint, which is loaded instead.
    """

    directories: tuple[Path, ...]
    resumed: bool
    part: non_persistent.Kept | None = None


def find_source(config: CheckpointConfig) -> Source | None:
    """Where a run starts: the first of these that there is.

    1. The newest checkpoint in ``checkpoint.save``, or a newer non-persistent one: the run was interrupted and
       goes on.
    2. ``checkpoint.load``: it goes on from there, or with ``finetune`` takes the weights only.
    3. ``checkpoint.pretrained_checkpoint``: weights from a Megatron checkpoint or a Hugging Face directory.

    To be called on all ranks, before anything is built: a folder that is not there, and a checkpoint that is not
    what was saved, are found at once. A damaged one in ``checkpoint.save`` is left for the one before, as
    ``checkpoint.when_damaged`` says; one that the config names is refused.

    Returns:
        None for a fresh start.

    Raises:
        UserError: nothing is where the config says, or it is damaged.
    """
    own = on_first_rank(lambda: _own_checkpoints(config))
    newer = non_persistent.newest(config, own)
    if isinstance(newer, non_persistent.Kept):
        return Source(own, resumed=True, part=newer)
    own = own if newer is None else (newer, *own)
    source = Source(own, resumed=True) if own else on_first_rank(lambda: _named_source(config))
    if source is None or on_first_rank((source.directories[0] / "config.json").is_file):
        return source
    return _first_whole(source, config, lambda directory: verification.verify(directory, config.verify))


def load_run(run: Run, source: Source | None) -> bool:
    """Bring ``run`` to where it shall start.

    Args:
        run: A run at step 0.
        source: As ``find_source`` tells.

    Returns:
        Whether the run goes on from a step that an earlier one reached.

    Raises:
        UserError: the checkpoint is damaged, or of another model or schedule.
    """
    if source is None:
        return False
    if source.part is not None:
        resume_part(run, source.part)
        console().print(f"resumed from {source.part.place} at step {run.progress.step}", markup=False)
    elif source.resumed:
        source = _first_whole(source, run.config.checkpoint, lambda directory: resume(run, directory))
        console().print(f"resumed from {source.directories[0]} at step {run.progress.step}", markup=False)
    else:
        load_weights(run, source.directories[0])
        console().print(f"weights from {source.directories[0]}", markup=False)
    return source.resumed


def load_weights(run: Run, path: Path) -> None:
    """Fill the model, and the optimizer's master copies of it, from a Megatron or a Hugging Face directory.

    Adapters are on their base already, and only ``checkpoint.load`` can hold other values for them.
    """
    if run.config.peft is not None:
        if path != _resolved(str(run.config.checkpoint.pretrained_checkpoint)):
            adapters.load_adapters(run, path)
        return
    filled = adapters.filled_from(run)
    if filled is not None and path == _resolved(filled):
        return
    if on_first_rank((path / "config.json").is_file):
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge

        AutoBridge.from_hf_pretrained(str(path)).load_hf_weights(run.model)
    else:
        model_io.load_model(run.model, path)
    follow_weights(run.optimizer)


def resume(run: Run, directory: Path) -> None:
    """Make ``run`` what was saved in ``directory``.

    Raises:
        UserError: the checkpoint is damaged, lacks what is asked for, or is of another model or schedule.
    """
    common = distributed.load_common(directory)
    foreign = RUN not in common and megatron_lm.is_one(common)
    if foreign:
        common = {**common, RUN: megatron_lm.run_state(common)}
    saved = _saved_run(run, common, directory)
    model_io.check_vocabulary(run.model, directory)
    state = _wanted(run, model_io.stored_metadata(common))
    load = _load_foreign if foreign else _load_own
    loaded = load(run, state, saved, directory)
    _go_on(run, saved, loaded, same=saved["layout"] == asdict(Layout.current()))


def _load_own(run: Run, state: dict[str, Any], saved: dict[str, Any], directory: Path) -> dict[str, Any]:
    same = saved["layout"] == asdict(Layout.current())
    # Under another layout no rank's own state fits; what callbacks kept is taken from the first rank.
    part = (dist.world_size(), dist.rank()) if same else (saved["layout"]["world"], 0)
    state[RANK] = ShardedObject(RANK, None, (part[0],), (part[1],), replica_id=0 if same else dist.rank())
    known = () if run.config.checkpoint.load_optim else (f"{PREFIX}.",)
    return distributed.load(state, directory, known=known)


def _load_foreign(run: Run, state: dict[str, Any], saved: dict[str, Any], directory: Path) -> dict[str, Any]:
    known = (*megatron_lm.BESIDE, "optimizer", "chained_")
    if "optimizer" in state:
        names = on_first_rank(lambda: list(distributed.stored_keys(distributed.check_files(directory))))
        megatron_lm.refuse_buffers(names, directory)
        state["optimizer"] = megatron_lm.under_their_names(state["optimizer"], names)
    return distributed.load(state, directory, known=known) | {RANK: {"callbacks": {}, "random": None}}


def resume_part(run: Run, kept: non_persistent.Kept) -> None:
    """Make ``run`` what its ranks kept, each for itself, under the same layout.

    Raises:
        UserError: they kept another model or schedule.
    """
    content = on_every_rank(lambda: kept.store.load(kept.iteration))
    saved = on_every_rank(lambda: _saved_run(run, content, kept.place))
    state = _wanted(run, dict(model_io.MODEL_METADATA)) | {RANK: None}
    loaded = on_every_rank(lambda: local.fill(state, content, kept.place))
    _go_on(run, saved, loaded, same=True)


def _wanted(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    """The tensors that a run takes from a checkpoint, described."""
    state = adapters.saved_weights(run, metadata)
    if run.config.checkpoint.load_optim:
        state["optimizer"] = sharded_optimizer_state(run.optimizer, state)
    return state


def _go_on(run: Run, saved: dict[str, Any], loaded: dict[str, Any], same: bool) -> None:
    """Take over what was loaded; ``same`` says whether the layout is that of the checkpoint."""
    adapters.set_saved_weights(run, loaded)
    _set_optimizer(run, saved["optimizer"])
    _set_schedule(run, saved["scheduler"])
    run.progress.load_state_dict(saved["progress"])
    run.callbacks.load_state_dict(loaded[RANK]["callbacks"])
    if run.config.checkpoint.load_rng:
        _set_random(run, loaded[RANK]["random"] if same else None, saved["layout"])


def check_schedule(run: Run, saved: dict[str, Any], directory: Path) -> None:
    """Refuse a schedule that differs from the checkpoint's, unless the config says which one counts.

    Raises:
        UserError: naming each value that differs.
    """
    config: SchedulerConfig = run.config.scheduler
    if config.override_opt_param_scheduler or config.use_checkpoint_opt_param_scheduler:
        return
    current = run.scheduler.state_dict()
    constant = saved["wd_incr_style"] == current["wd_incr_style"] == "constant"
    differing = [
        f"{key} gives {_in_steps(name, current, run)}, the checkpoint has {_in_steps(name, saved, run)}"
        for name, key in SCHEDULE_KEYS.items()
        if current[name] != saved.get(name, current[name]) and not (name == "wd_incr_steps" and constant)
    ]
    if differing:
        raise UserError(
            f"the schedule differs from that of checkpoint {directory}: {'; '.join(differing)}; "
            "set scheduler.use_checkpoint_opt_param_scheduler or scheduler.override_opt_param_scheduler"
        )


def _in_steps(name: str, schedule: dict[str, Any], run: Run) -> Any:
    """A value of the schedule as the config spells it: Megatron-Core counts lengths in samples."""
    if not name.endswith("_steps"):
        return schedule[name]
    train = run.config.train
    return f"{schedule[name]} samples" if train.rampup_batch_size else schedule[name] / train.global_batch_size


def prune(root: Path, newest: int, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints up to ``newest``, which is never deleted.

    Later iterations belong to a run that went back; it will replace them when it gets there.
    """
    if keep < 1:
        return
    older = [number for number in layout.published_iterations(root) if number < newest]
    for number in older[: max(0, len(older) - (keep - 1))]:
        layout.remove(root, number)


def _make_newest(root: Path, step: int, keep: int) -> None:
    layout.write_tracker(root, step)
    prune(root, step, keep)


def _first_whole(source: Source, config: CheckpointConfig, use: Callable[[Path], None]) -> Source:
    """``source`` from the first directory on that ``use`` does not find damaged."""
    directory, *older = source.directories
    try:
        use(directory)
    except DamagedError as error:
        _go_back(config, error, older)
        return _first_whole(Source(tuple(older), source.resumed), config, use)
    return source


def _go_back(config: CheckpointConfig, error: DamagedError, older: list[Path]) -> None:
    """Say that an older checkpoint is used instead.

    Raises:
        DamagedError: there is none, or the config forbids it.
    """
    if not older:
        raise error
    if config.when_damaged == "refuse":
        raise DamagedError(
            f"{error} (to go back to {older[0].name}, set checkpoint.when_damaged=use_previous)"
        ) from error
    console().print(f"{error}; going on from {older[0]}", markup=False)


def _named_source(config: CheckpointConfig) -> Source | None:
    if config.load is not None and config.load != config.save:
        return Source((_resolved(config.load),), not config.finetune)
    if config.finetune and config.pretrained_checkpoint is None:
        raise UserError(
            "checkpoint.finetune=True needs weights: set checkpoint.load to the folder that holds them"
        )
    if config.pretrained_checkpoint is not None:
        return Source((_resolved(config.pretrained_checkpoint),), resumed=False)
    return None


def _resolved(path: str) -> Path:
    return Path(path) if (Path(path) / "config.json").is_file() else layout.resolve(path)


def _own_checkpoints(config: CheckpointConfig) -> tuple[Path, ...]:
    """What is published in ``checkpoint.save``, from the newest backwards."""
    if config.save is None or not Path(config.save).is_dir():
        return ()
    root = Path(config.save)
    with lock.held(root):  # what looks like left over may be a living run's
        layout.recover(root)
    published = layout.published_iterations(root)[::-1]
    if not published:
        return ()
    directories = [layout.iteration_dir(root, number) for number in published]
    try:
        newest = layout.latest_iteration(root)
        if newest is None:
            raise DamagedError(f"{root / layout.TRACKER} is missing, but {directories[0].name} is there")
    except DamagedError as error:
        _go_back(config, error, directories)
        return tuple(directories)
    later = published.index(newest)
    if later:
        names = ", ".join(path.name for path in directories[:later])
        console().print(
            f"{root / layout.TRACKER} names iteration {newest}: going on from there, {names} will be replaced",
            markup=False,
        )
    return tuple(directories[later:])


def _saved_run(run: Run, common: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What a checkpoint knows of its run, if that is all that ``run`` asks for, and fits it."""
    config = run.config.checkpoint
    if RUN not in common:
        raise UserError(
            f"checkpoint {directory} holds weights only, no run to go on with; "
            "set checkpoint.pretrained_checkpoint to it instead of checkpoint.load"
        )
    saved: dict[str, Any] = common[RUN]
    for wanted, found, key, what in (
        (config.load_optim, saved["optimizer"], "load_optim", "the optimizer's state"),
        (config.load_rng, saved["random"], "load_rng", "random states"),
    ):
        if wanted and not found:
            raise UserError(f"checkpoint {directory} was saved without {what}; set checkpoint.{key}=false")
    check_schedule(run, saved["scheduler"], directory)
    adapters.check_base(run, saved, directory)
    return saved


def _optimizer_scalars(run: Run) -> dict[str, Any]:
    scalers = [part.grad_scaler.state_dict() if _scaler(part) else {} for part in parts(run.optimizer)]
    return {"step": step_of(run.optimizer), "grad_scalers": scalers}


def _scaler(part: Any) -> Any:
    return getattr(part, "grad_scaler", None)


def _set_optimizer(run: Run, saved: dict[str, Any] | None) -> None:
    if not run.config.checkpoint.load_optim or saved is None:
        follow_weights(run.optimizer)
        return
    set_step(run.optimizer, saved["step"])
    for part, scaler in zip(parts(run.optimizer), saved["grad_scalers"], strict=False):
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
        set_random_states(states)
        return
    seed_everything(run.config.rng, run.progress.step)
    sizes = ", ".join(f"{name} {size}" for name, size in (saved or {}).items())
    why = f"the checkpoint's layout was {sizes}" if sizes else "those of Megatron-LM are not taken over"
    console().print(f"random states start afresh: {why}", markup=False)
