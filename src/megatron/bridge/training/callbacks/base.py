# SPDX-License-Identifier: Apache-2.0
"""What a callback can do, and the ordered collection of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.bridge.training.state import Run
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError, did_you_mean


class Callback:
    """Reacts to events of a run; override what you need. All ranks call the same hooks in the same order.

    A hook may communicate, except ``on_error`` and ``close``: other ranks may be gone by then. A callback that
    must continue where it stopped returns its state from ``state_dict``; it is saved under ``name``.
    """

    @property
    def name(self) -> str:
        """Key of the state in a checkpoint; two stateful callbacks of one class need different names."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; read after all hooks of a step that come before saving."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""

    def on_train_start(self, context: Run) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_train_step_start(self, context: Run) -> None:
        """Before the batch of a step is drawn."""

    def on_grads_ready(self, context: Run) -> None:
        """Gradients are reduced and normalised; the optimizer has not run."""

    def on_train_step_end(self, context: Run) -> None:
        """After a step; ``context.loss_dict``, ``grad_norm`` and ``skipped_iter`` are those of this step."""

    def on_train_end(self, context: Run) -> None:
        """After the last step, if nothing failed."""

    def on_eval_start(self, context: Run) -> None:
        """Before an evaluation on the validation data."""

    def on_eval_step_start(self, context: Run) -> None:
        """Before a global batch of it."""

    def on_eval_step_end(self, context: Run) -> None:
        """After a global batch of it."""

    def on_eval_end(self, context: Run) -> None:
        """After it; ``context.total_loss_dict`` holds the mean losses."""

    def on_test_start(self, context: Run) -> None:
        """Before the evaluation on the test data, once, after training."""

    def on_test_step_start(self, context: Run) -> None:
        """Before a global batch of it."""

    def on_test_step_end(self, context: Run) -> None:
        """After a global batch of it."""

    def on_test_end(self, context: Run) -> None:
        """After it; ``context.total_loss_dict`` holds the mean losses."""

    def on_error(self, context: Run, error: BaseException) -> None:
        """Something failed on this rank: no communication from here on."""

    def close(self, context: Run) -> None:
        """Release what is held; always called, in reverse order, also after an error."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackManager:
    """Callbacks in the order in which they are called.

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
        """Append callbacks, given one by one or as a list."""
        for entry in callbacks:
            self._callbacks.extend(entry if isinstance(entry, list) else [entry])

    def register(self, event_name: str, fn: Callable[..., None]) -> None:
        """Call ``fn(context)`` on an event, for example ``on_train_step_end``.

        Raises:
            UserError: no such event.
        """
        if event_name not in EVENTS:
            raise UserError(f"callback event {event_name} does not exist{did_you_mean(event_name, EVENTS)}")
        callback = Callback()
        setattr(callback, event_name, fn)
        self._callbacks.append(callback)

    def emit(self, event: str, context: Run, *values: Any) -> None:
        """Call ``on_<event>`` of every callback."""
        method = f"on_{event}"
        for callback in self._callbacks:
            getattr(callback, method)(context, *values)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """States of the callbacks that have one, by name."""
        states: dict[str, dict[str, Any]] = {}
        for callback in self._callbacks:
            if state := callback.state_dict():
                if callback.name in states:
                    raise UserError(
                        f"two callbacks with state are called {callback.name}: override `name` in one of them"
                    )
                states[callback.name] = state
        return states

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Give callbacks their states back: one that is new keeps its own, one that is gone is named."""
        for callback in self._callbacks:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])
        for name in sorted(states.keys() - {callback.name for callback in self._callbacks}):
            console().print(f"the state of callback {name} is dropped: this run has no such one", markup=False)
