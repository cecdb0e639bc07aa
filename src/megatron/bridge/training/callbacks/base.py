# SPDX-License-Identifier: Apache-2.0
"""The callback interface and the manager that calls callbacks in order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError, did_you_mean


class Callback:
    """Reacts to events of a run. Override the hooks that you need; all ranks call them in the same order.

    A hook may use collectives, except ``on_error`` and ``close``: other ranks may be gone by then. A callback with
    state that must survive a restart returns it from ``state_dict``; the state is saved under ``name``.

    A public method whose name begins with ``on_`` must be a hook, because a misspelled one would never be called. Other
    methods may have any name.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = [name for name in dir(cls) if callable(getattr(cls, name, None))]
        refuse_unknown_hooks(cls.__name__, methods)

    @property
    def name(self) -> str:
        """Key of the state in a checkpoint. Two stateful callbacks of the same class need different names."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """State that must survive a restart. It is read when a checkpoint is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def on_train_start(self, context: Run) -> None:
        """Called before the first step, after the checkpoint is loaded."""

    def on_train_step_start(self, context: Run) -> None:
        """Called before the batch of a step is read."""

    def on_grads_ready(self, context: Run) -> None:
        """Called when gradients are reduced and normalized, before the optimizer step."""

    def on_train_step_end(self, context: Run) -> None:
        """Called after a step; ``context.loss_dict``, ``grad_norm`` and ``skipped_iter`` belong to this step."""

    def on_train_end(self, context: Run) -> None:
        """Called after the last step, unless an error ended the run."""

    def on_eval_start(self, context: Run) -> None:
        """Called before an evaluation on the validation data."""

    def on_eval_step_start(self, context: Run) -> None:
        """Called before each global batch of the validation data."""

    def on_eval_step_end(self, context: Run) -> None:
        """Called after each global batch of the validation data."""

    def on_eval_end(self, context: Run) -> None:
        """Called after an evaluation; ``context.total_loss_dict`` holds the mean losses."""

    def on_test_start(self, context: Run) -> None:
        """Called before the evaluation on the test data, once, after training."""

    def on_test_step_start(self, context: Run) -> None:
        """Called before each global batch of the test data."""

    def on_test_step_end(self, context: Run) -> None:
        """Called after each global batch of the test data."""

    def on_test_end(self, context: Run) -> None:
        """Called after the evaluation on the test data; ``context.total_loss_dict`` holds the mean losses."""

    def on_error(self, context: Run, error: BaseException) -> None:
        """Called when this rank raised an error. Do not use collectives here."""

    def close(self, context: Run) -> None:
        """Release resources. Always called, in reverse order, also after an error."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def refuse_unknown_hooks(owner: str, methods: Iterable[str]) -> None:
    """Refuse methods that look like hooks and are none.

    Args:
        owner: Name of the class, for the message.
        methods: Names of its methods.

    Raises:
        UserError: A name begins with ``on_`` and is not an event.
    """
    for method in methods:
        if method.startswith("on_") and method not in EVENTS:
            hint = did_you_mean(method, EVENTS) or f"; hooks are {', '.join(EVENTS)}"
            raise UserError(
                f"{owner}.{method} is not a hook, so nothing would call it{hint} (a method of another kind needs a "
                "name that does not begin with on_)"
            )


def refuse_other_objects(callback: Any) -> None:
    """Refuse what is no object of a subclass of ``Callback``, such as the class itself, or a function."""
    if isinstance(callback, type) and issubclass(callback, Callback):
        name = callback.__name__
        raise UserError(f"the callback {name} is a class: give an object of it, {name}()")
    if not isinstance(callback, Callback):
        raise UserError(
            f"{callback!r:.100} is no callback: give an object of a subclass of "
            "megatron.bridge.training.callbacks.Callback, or register functions with CallbackManager.register"
        )


class CallbackManager:
    """Holds callbacks and calls them in order.

    Example:
        >>> manager = CallbackManager()
        >>> manager.register("on_train_end", lambda context: None)
        >>> len(list(manager))
        1
    """

    def __init__(self, callbacks: "Iterable[Callback] | CallbackManager" = ()) -> None:
        self._callbacks: list[Callback] = []
        self.add(*callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, *callbacks: Callback | list[Callback]) -> None:
        for entry in callbacks:
            for callback in entry if isinstance(entry, list) else [entry]:
                refuse_other_objects(callback)
                refuse_unknown_hooks(type(callback).__name__, vars(callback))
                self._callbacks.append(callback)

    def register(self, event_name: str, fn: Callable[..., None]) -> None:
        """Call ``fn(context)`` on an event, for example ``on_train_step_end``.

        Raises:
            UserError: The event does not exist.
        """
        if event_name not in EVENTS:
            raise UserError(
                f"callback event {event_name} does not exist{did_you_mean(event_name, EVENTS)}"
            )
        callback = Callback()
        setattr(callback, event_name, fn)
        self._callbacks.append(callback)

    def emit(self, event: str, context: Run, *values: Any) -> None:
        """Call ``on_<event>(context, *values)`` of every callback."""
        method = f"on_{event}"
        for callback in self._callbacks:
            getattr(callback, method)(context, *values)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {}
        for callback in self._callbacks:
            if state := callback.state_dict():
                if callback.name in states:
                    raise UserError(
                        f"two callbacks with state have the name {callback.name}: override `name` in one of them"
                    )
                states[callback.name] = state
        return states

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore the state of each callback.

        A new callback keeps its initial state. The state of a callback that no longer exists is dropped with a note.
        """
        for callback in self._callbacks:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])
        for name in sorted(states.keys() - {callback.name for callback in self._callbacks}):
            print_rank_0(
                f"the state of callback {name} is dropped: this run has no callback of that name"
            )
