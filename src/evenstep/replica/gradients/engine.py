"""The replica engine: follows backward passes and accumulation windows, and averages gradients while autograd runs.

[Note: the life of a synchronised backward pass]

    forward        the engine puts an autograd hook on the outputs
    backward       the hook on the outputs begins a *pass*, or `model.backward` has begun it. `Readiness` reports when a
                   bucket is complete. The exchange packs it (one batched copy, none for gradients that are views of it
                   already) and launches it, in order. The first pass only counts, and launches at its end
    its end        a parameter without a gradient was not used: its bucket is sent with zeros. A header with weights and
                   used flags follows, then rank 0's module buffers; all are awaited. Gradients that the transport has
                   not divided are divided now: see [Note: one division] in `division`

A pass inside `no_sync` or `accumulate`, and all but the last pass of `microbatches`, only add to `p.grad`: within a
window `p.grad` is this rank's undivided sum. The state at backward decides, not the state at forward. `window` defines
how a pass counts, `strategies` how a window ends, `observer` the interface of checks.

[Note: passes of the wrapper's own]

A backward pass that bypasses the wrapper (`model.module(x).sum().backward()`, for a saliency map or an attack) belongs
to this rank alone: its gradients are added to `p.grad`, and no other rank takes part. A pass is the wrapper's own in
two cases.

    it reaches an output of the wrapper's forward       whatever the state was at forward, and however often
    a forward of the wrapper has *prepared* it          it is the first pass since that began in a synchronised state:
                                                        also where it goes past the outputs, as a loss that the module
                                                        keeps in an attribute does, or one in an object of a class that
                                                        no pytree knows. This is all that torch's class goes by

The engine doesn't follow a pass that bypasses the wrapper: it treats the gradients like any tensor that the program has
stored in `p.grad`. So a PLAIN window averages them with its own gradients, as torch's class does. `window.State` lists
a model's states, and `window.TRANSITIONS` the transitions between them.

[Note: a loss that goes through several models]

The gradient that reaches an encoder in `decoder.backward(loss, weight=w)` has been multiplied by w, although the
encoder's `backward` wasn't called: divided by the number of ranks it would be about w times too large. So the program
names both, `evenstep.backward([encoder, decoder], loss, weight=w)`, and each has a pass of the same weight. A gradient
that reaches a model that wasn't named raises an error. `loss.backward()` means the same for every model, so it needs no
names.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from evenstep.errors import DriftError, EvenstepError, MismatchError, NonFiniteError, UsageError
from evenstep.ground.compat.torch_autograd import at_end_of_backward, enclosing_node, graph_task_id
from evenstep.replica.gradients.autograd_hooks import OutputHooks, Readiness
from evenstep.replica.gradients.buckets.bucket import Bucket, late_gradient, moved_parameter
from evenstep.replica.gradients.division import divide_alone
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.observer import overriding
from evenstep.replica.gradients.strategies import WindowEnd
from evenstep.replica.gradients.window import (
    TRANSITIONS,
    Effect,
    Event,
    Kind,
    Pass,
    SavedGradients,
    State,
    Turn,
    Window,
    all_zero,
    as_multiplied,
    drop_grads,
    effect_of,
)
from evenstep.transport.core.validation import refuse_after_end

_FAILED = "the last backward pass raised an exception, so its gradients were not averaged"


class Engine:
    """Follows the backward passes and accumulation windows of one wrapped module.

    Args:
        trained: The module's trained parameters, and the observers of their steps.
        exchange: Averages the parameters' gradients over ranks.
        ending: How the windows end.
        label: The module's class, for messages.

    Attributes:
        ending: How windows end; a `LocalSGD` replaces this while it is in use.
        state: The model's state between two optimizer steps.
    """

    def __init__(self, trained: Trained, exchange: Exchange, ending: WindowEnd, *, label: str) -> None:
        self.names, self.parameters, self.num_dense = trained.names, trained.parameters, trained.num_dense
        self.parameter_ids = frozenset(map(id, trained.parameters))
        self.world, self.transport, self.control = trained.world, trained.transport, trained.control
        self.recorder = trained.recorder
        self.trained, self.observers = trained, trained.observers
        events = ("begin_pass", "end_window", "forget_forwards", "act", "step")
        self._at_begin, self._at_end, self._at_forgotten, self._acting, self._at_step = (
            overriding(trained.observers, event) for event in events
        )
        self.exchange, self.ending = exchange, ending
        self.readiness = Readiness(self.parameters, exchange.layout, self)
        self.shares_statistics = False  # whether other ranks' outputs depend on this rank's rows
        self.synchronise = True  # whether the next backward pass ends the window
        self.state = State.IDLE
        self.is_apart = False  # local SGD: parameters differ between ranks
        self.was_scaled = False  # whether a GradScaler has scaled the gradients that the last window left in `p.grad`
        self.num_reductions, self.has_learned_order = 0, False
        self._hooks = OutputHooks(self._real_outputs_reached)
        self._dummy_hooks = OutputHooks(self._dummy_outputs_reached, is_tracked=True)
        self._window: Window | None = None
        self._pass: Pass | None = None
        # Numbers of training forward passes, and of outputs that backward passes have reached, since the last window.
        self._num_forwards = self._num_reached = 0
        self._single_pass_task = -1  # autograd's task id of the last pass that was a whole window
        self._muted: list[RemovableHandle] = []  # hooks on parameters, if a dummy batch's outputs can't be muted
        self._left_early: str | None = None
        self._label = label
        _engines.add(weakref.ref(self, _engines.discard))
        self._may_be_single = not (
            exchange.travels or ending.sums_first or any(each.inspects_buckets for each in self.observers)
        )

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in which gradients are sent."""
        return self.exchange.buckets

    # ------------------------------------------------------------------ called by the wrapper

    def begin_forward(self) -> None:
        """Called before a forward pass: raise if the replicas would drift apart from here on.

        Raises:
            UsageError: An earlier backward pass failed half-way, or a loop over micro-batches was left early.
        """
        if self._pass is not None and graph_task_id() == -1:
            self._give_up_pass()
        if self._window is not None or self._left_early is not None:
            self._drop_zeroed_window()
        problem = _FAILED if self.state is State.FAILED else self._left_early
        if problem is not None and self.world.world_size > 1:
            raise UsageError(f"rank {self.world.rank}: {problem}. The replicas are no longer in step; start again.")
        if self.state is State.FAILED:
            self._reset_after_error()

    def end_forward(self, outputs: object, began_ns: int, *, over_dummy: bool, is_training: bool) -> None:
        """Put hooks on the module's outputs, which begin a pass when a backward pass reaches them.

        Args:
            outputs: The module's outputs, any pytree of tensors.
            began_ns: When the forward pass began, on the clock of `time.perf_counter_ns`.
            over_dummy: The module ran on a dummy batch in place of an empty share.
            is_training: The module is in training mode.
        """
        if self.synchronise:
            self.prepare()
        if not over_dummy:
            self._unmute()  # no pass has followed the forward pass over a dummy batch, or none that this engine saw
        can_be_reached = (self._dummy_hooks if over_dummy else self._hooks).put_on(outputs)
        self._num_forwards += is_training and can_be_reached
        if not can_be_reached and graph_task_id() == -1:
            self.readiness.count()
            if over_dummy and not self._muted:
                trained = [each for each in self.parameters if each.requires_grad]
                self._muted = [each.register_hook(torch.zeros_like) for each in trained]  # type: ignore[no-untyped-call]
        self.recorder.forward(began_ns)

    def prepare(self) -> None:
        """Make the next pass count as the wrapper's own: see [Note: passes of the wrapper's own]."""
        self._enter(Event.FORWARD)

    def is_over_dummies(self, loss: Tensor) -> bool:
        """Whether a loss goes through outputs over dummy batches, and through no outputs over samples."""
        return self._dummy_hooks.are_alone_in(loss, other=self._hooks)

    def contribution(self) -> float | Tensor:
        """`Pass.contribution` of the running pass; 1.0 if none runs."""
        return 1.0 if self._pass is None else self._pass.contribution

    def announce(self) -> None:
        """Make ranks that have left their loop take part in the window that has begun.

        Collective, including those ranks.
        """
        self.exchange.announce()

    def begin_weighted_pass(
        self,
        weight: float | Tensor,
        scale: float | None,
        *,
        is_scaled: bool,
        turn: Turn,
        only_dummies: bool,
        dtype: torch.dtype,
    ) -> float:
        """Begin a pass of `model.backward`; see `weighted_passes`.

        Args:
            weight: The pass's weight.
            scale: The scale of the pass's first model; None: this model is the first, and determines the scale.
            is_scaled: The loss was scaled by a GradScaler.
            turn: This model's turn in the pass.
            only_dummies: See `is_over_dummies`.
            dtype: The loss's dtype.

        Returns:
            The scale by which the weight is divided.
        """
        self.begin_forward()  # a pass may have failed since the forward pass
        may_be_single = isinstance(weight, float) and weight > 0 and turn is Turn.ALONE and not only_dummies
        is_alone = may_be_single and self._begin_single_pass()
        opens_window = not self.is_in_window
        if scale is None:
            is_urgent = self.ends_together or (is_scaled and self.ending.exchanges)
            scale = self.exchange.scale.agree(weight, opens_window=opens_window, is_urgent=is_urgent)
        else:
            self.exchange.scale.adopt(scale, opens_window=opens_window)
        if is_alone:
            self._enter(Event.SINGLE)
            self.was_scaled = is_scaled
        else:
            self.exchange.turn = turn
            takes_part = self.exchange.takes_every_pass
            counted = as_multiplied(weight, scale, dtype)
            effect = effect_of(
                counted,
                only_dummies=only_dummies and not takes_part,
                shares_statistics=self.shares_statistics or takes_part,
            )
            self._open_pass(Pass(Kind.WEIGHTED, counted, effect, is_scaled))
            self._count()
        return scale

    def end_weighted_pass(self) -> None:
        """End the pass of `begin_weighted_pass`. Collective if the engine synchronises."""
        if self.state is State.SINGLE:
            self._pass_ended()
            self.recorder.end()
        else:
            self._close_pass()

    def reduce_without_backward(self) -> None:
        """Collective: end the window on a rank that has nothing to add to it (an empty share).

        Raises:
            UsageError: As in `begin_forward`, which a rank with an empty share may not have called.
        """
        self.begin_forward()
        window = self.window
        weight = window.weight if window is not None and window.kind is Kind.WEIGHTED else None
        self.exchange.scale.agree(weight, opens_window=not self.is_in_window, is_urgent=self.ending.exchanges)
        if self._window is None:
            self._window = window = self._new_window(is_running=False)
            window.has_leftovers = not all_zero(self.parameters)
            if window.has_leftovers and self.exchange.was_weighted():
                self._save_reduced(window)
        self._end_window()

    def open_window(self) -> None:
        """Open a window before its first pass, and save earlier reduced gradients. Does nothing if a window is open."""
        if self.window is None:
            self._window = self._new_window(is_running=False)
            self._save_reduced(self._window)

    def cancel_window(self) -> None:
        """Close a window without passes, and restore `p.grad`."""
        if self._window is not None and self._window.kind is None:
            self._window.saved.add_back()
            self._window = None

    @property
    def is_in_window(self) -> bool:
        """Whether gradients have been added on this rank since they were last averaged."""
        window = self.window
        return window is not None and window.kind is not None

    @property
    def window(self) -> Window | None:
        """The open accumulation window, or None. `zero_grad` closes a window whose gradients it drops."""
        if self._window is not None:
            self._drop_zeroed_window()
        return self._window

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass is running."""
        return self._pass is not None

    @property
    def stays_local(self) -> bool:
        """Whether windows end on this rank alone, without an exchange of gradients."""
        return not self.ending.exchanges

    @property
    def ends_together(self) -> bool:
        """Whether the next pass ends a window whose gradients are averaged over ranks."""
        return self.synchronise and self.ending.exchanges

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients or parameters may differ between ranks: accumulation, local steps."""
        return self.is_in_window or not self.synchronise or self.is_apart

    def replace_exchange(self, made: Exchange) -> None:
        """Use another exchange from now on. Call this between two windows."""
        self.exchange = made
        self._may_be_single = False
        self.readiness = Readiness(self.parameters, made.layout, self)
        self.has_learned_order = False

    def adopt_order(self, order: Sequence[int]) -> None:
        """Collective: lay buckets out as in the run that is resumed, before there is optimizer state to move.

        Args:
            order: `Exchange.order` of the resumed run. Ignored if it doesn't fit this model.
        """
        if not self.has_learned_order and sorted(order) == list(range(self.num_dense)):
            self.has_learned_order = True
            self.exchange.learn_order(order)

    def unused_parameters(self) -> list[str]:
        """Names of the parameters that had no gradient on any rank when the last window ended."""
        return [self.names[index] for index in self.exchange.unused()]

    def leave_early(self, what: str) -> None:
        """Record that a window was abandoned before its gradients were averaged."""
        self._left_early = what

    # ------------------------------------------------------------------ called by autograd

    def _real_outputs_reached(self, grad: Tensor) -> Tensor | None:
        with self.readiness.lock:
            return self._outputs_reached(grad, over_dummy=False)

    def _dummy_outputs_reached(self, grad: Tensor) -> Tensor:
        with self.readiness.lock:
            self._outputs_reached(grad, over_dummy=True)
        return torch.zeros_like(grad)  # the loss may also go through outputs over samples

    def _outputs_reached(self, grad: Tensor, *, over_dummy: bool) -> Tensor | None:
        self._num_reached += 1
        self._notice_failure()
        if self._pass is None:
            task = graph_task_id()
            if self.state is State.SINGLE or task == self._single_pass_task:
                return None  # another output, or another call of the module, was reached before
            if not (over_dummy or _weighted) and self._begin_single_pass():
                self._single_pass_task = task
                return None
            is_dropped = over_dummy and not self.exchange.takes_every_pass
            self._open_plain_pass(Effect.DROPPED if is_dropped else Effect.ADDED)
        assert self._pass is not None
        if self._pass.kind is Kind.PLAIN and self._pass.place == math.inf:
            self._take_turn(self._pass)
        if self._pass.kind is Kind.PLAIN and not over_dummy:
            self._pass.effect = Effect.ADDED  # outputs over a dummy batch were reached first
        if self._pass.fills_buckets:
            self.readiness.outputs_reached()
        return self._pass.at_outputs(grad)

    def _begin_single_pass(self) -> bool:
        """Begin a pass that needs only autograd, if this is one: see `State.SINGLE`. Returns whether it is."""
        if not self._may_be_single or self.is_in_window or not self.synchronise or self.world.ended_at:
            return False
        if self.recorder.is_profiled or self._muted:
            return False  # a profile also needs the end of the pass, at which muting ends
        self.was_scaled = False
        self.num_reductions += 1
        self.recorder.begin_backward(is_whole=True)
        return True

    def gradient_came(self, parameter: int | None = None) -> bool:
        """See `Listener`."""
        self._notice_failure()
        if self._pass is None:  # the loss uses the parameter directly, perhaps in addition to the module's outputs
            # In a weighted window a gradient without a weight is a mistake; `_count` raises the error.
            is_weighted = self._window is not None and self._window.kind is Kind.WEIGHTED
            if not (self.state is State.FORWARD or is_weighted or _weighted):
                if parameter is not None and not self.stays_local:
                    for observer in self.observers:
                        observer.passed_by(self.parameters[parameter])
                return False  # see [Note: passes of the wrapper's own]
            self._open_plain_pass(Effect.ADDED, is_found_late=True)
        current = self._pass
        assert current is not None
        if self.state is State.STARTED:
            self._count()
        return current.fills_buckets

    def bucket_complete(self, bucket: int) -> None:
        """See `Listener`."""
        assert self._window is not None
        self.exchange.complete(bucket, self._window)

    def gradient_late(self, parameter: int) -> None:
        """See `Listener`."""
        raise (moved_parameter if self.readiness.is_another(parameter) else late_gradient)([self.names[parameter]])

    def autograd_ended(self) -> None:
        """Called when autograd has ended the run in which a pass of `loss.backward()` began.

        All passes of the run end now, in one order on all ranks: see `_take_turn`.
        """
        if self._pass is None:
            return
        known = [engine for each in tuple(_engines) if (engine := each()) is not None]
        running = [(each._pass, each) for each in known if each._pass is not None]
        ending = [(current.place, each) for current, each in running if current.task == self._pass.task]
        for _, each in sorted(ending, key=itemgetter(0)):
            each.exchange.when_added(each._plain_pass_ended)

    def _plain_pass_ended(self) -> None:
        if self._pass is None:
            return
        if self.state is State.STARTED:
            if not self.readiness.any_has_come():  # it was torch.autograd.grad, which leaves nothing to average
                self._cancel_pass()
                return
            self._count()
        self._close_pass()

    # ------------------------------------------------------------------ passes and windows

    def _enter(self, event: Event) -> None:
        """Change the state.

        Raises:
            UsageError: The event isn't possible in this state.
        """
        if event not in TRANSITIONS[self.state]:
            raise UsageError(
                f"backward on rank {self.world.rank}: a pass of a wrapped {self._label} begins within another one "
                f"({event.name} in {self.state.name}). Run them one after the other."
            )
        self.state = TRANSITIONS[self.state][event]

    def _notice_failure(self) -> None:
        """Check for a failed pass, as `begin_forward` does, if a pass has failed since the last forward pass."""
        if self._pass is not None and self._pass.has_raised:
            self._give_up_pass()
        if self.state is State.FAILED:
            self.begin_forward()

    def _give_up_pass(self) -> None:
        """End a pass in which autograd has raised."""
        if self.state is State.COUNTED or self.readiness.any_has_come():
            self.fail()
        else:
            self._cancel_pass()  # it was torch.autograd.grad, or it raised before any gradient came

    def _cancel_pass(self) -> None:
        """End a pass in which no parameter has received a gradient."""
        assert self._pass is not None
        self._pass.end_apart()
        if self._pass.opens_window:
            self.cancel_window()
        self.readiness.end()
        self.state, self._pass = self._pass.before, None

    def _open_plain_pass(self, effect: Effect, *, is_found_late: bool = False) -> None:
        """Begin a pass of `loss.backward()`. If autograd is running, the pass ends with autograd.

        Args:
            effect: See `Pass`.
            is_found_late: Whether a gradient has come before any output was reached.
        """
        # Until an output is reached: another model may be first.
        self.exchange.turn = Turn.BEHIND if len(_engines) > 1 else Turn.ALONE
        opened = Pass(Kind.PLAIN, 0.0, effect, task=graph_task_id())
        self._open_pass(opened)
        if self.exchange.takes_every_pass:
            self._count()
        if opened.task == -1:
            return
        end, node = _AutogradEnd(self, opened), enclosing_node() if is_found_late else None
        if node is None:
            at_end_of_backward(end)
            return

        def end_with_outer(*_: object) -> None:
            opened.task = graph_task_id()
            at_end_of_backward(end)

        node.register_hook(end_with_outer)  # a reentrant checkpoint's pass ends before the pass around it

    def _take_turn(self, current: Pass) -> None:
        """Give a pass of `loss.backward()` its place among those of other models. The first output was reached.

        Autograd reaches the models' outputs in the same order on all ranks. It doesn't find a parameter that the loss
        uses directly in the same order: a rank has hooks on other parameters than another rank.
        """
        global _last_reached
        before, _last_reached = None if _last_reached is None else _last_reached(), weakref.ref(self)
        is_alone = before is None or before is self or not before.is_in_pass
        self.exchange.turn = Turn.ALONE if is_alone else Turn.BEHIND
        current.place = next(_places)

    def _open_pass(self, opened: Pass) -> None:
        if self.world.ended_at:
            refuse_after_end(self.world.rank, self.world.ended_at)
        self.ending.validate_pass("a backward pass")
        self.recorder.begin_backward()
        opened.before, opened.opens_window = self.state, self.window is None
        self._enter(Event.START)
        self._pass = opened
        opened.ends_window = self.synchronise
        travels = self.ends_together
        self.exchange.begin_pass(opened.kind, travels=travels)
        for observer in self._at_begin:
            observer.begin_pass()
        if opened.opens_window:
            self._window = self._new_window(is_running=graph_task_id() != -1)
            if opened.kind is Kind.WEIGHTED:
                self._save_reduced(self._window)
        if opened.effect is Effect.DROPPED:
            opened.saved = SavedGradients()
            opened.saved.save(self.parameters, is_copied=False)
        opened.fills_buckets = travels and opened.saved is None
        self.readiness.begin()

    def _new_window(self, *, is_running: bool) -> Window:
        window = Window()
        self.exchange.open_window(window.saved, is_running=is_running)
        return window

    def _save_reduced(self, window: Window) -> None:
        """Save the gradients that an earlier reduction left in `p.grad`: see [Note: saved gradients]."""
        if all(parameter.grad is None for parameter in self.parameters):
            return
        # After zero_grad(set_to_none=False) there is nothing to save, and the views stay in `p.grad`.
        clear = {p for each in self.buckets if each.hides or each.is_clear for p in each.parameters}
        window.saved.save([p for p in self.parameters if p.grad is not None and p not in clear], is_copied=True)

    def _count(self) -> None:
        """Count the pass in the window, because a parameter has received a gradient, or will."""
        assert self._pass is not None
        assert self._window is not None
        if self._pass.kind is Kind.PLAIN and _weighted:
            raise UsageError(
                f"backward on rank {self.world.rank}: the loss also goes through a wrapped {self._label}, but the "
                f"backward call doesn't name that model. Name all wrapped models that the loss goes through: "
                f"evenstep.backward([encoder, decoder], loss, weight=...). If instead another thread is in "
                f"model.backward, call model.backward in this thread, too."
            )
        self._enter(Event.COUNT)
        self._window.add(self._pass.kind, self._pass.weight, is_scaled=self._pass.is_scaled)
        if self._pass.ends_window and self.ending.exchanges:
            self.exchange.last_pass_begins(self._window)

    def _close_pass(self) -> None:
        current = self._pass
        assert current is not None
        self._unmute()
        current.end_apart()
        self.readiness.end()
        if current.ends_window:
            self._end_window()
        else:
            assert self._window is not None
            self._window.note_gradients(self.parameters)
            for observer in self.observers if not self.stays_local else ():
                observer.end_local_pass()
            self._pass_ended()

    def _pass_ended(self) -> None:
        self._enter(Event.END)
        self._pass = None

    def _unmute(self) -> None:
        while self._muted:
            self._muted.pop().remove()

    def _drop_zeroed_window(self) -> None:
        """Drop the open window, with its weights and saved gradients, if `zero_grad` has dropped its gradients.

        Also drop the incomplete sum of a loop over micro-batches that was left early.
        """
        if self._pass is not None:
            return  # the running pass may have changed the gradients
        if self._window is None:
            is_dropped = all(parameter.grad is None for parameter in self.parameters)
        else:
            is_dropped = (self._left_early or self._window.has_changed()) and all_zero(self.parameters)
        if is_dropped:
            self._left_early = self._window = None

    def _end_window(self) -> None:
        """Collective: afterwards `p.grad` is the global mean on every rank, or in local SGD this rank's own mean."""
        assert self._window is not None
        if not self.ending.exchanges:
            self.end_local_window()
            self._pass_ended()
            return
        self.ending.close(self._window, self.buckets)
        first = self.num_dense if self.exchange.buckets else 0
        for observer in self._at_end:
            observer.end_window(self.names[first:], self.parameters[first:])
        for observer in self._at_forgotten:
            # A forward pass with several outputs may be counted several times. Then some forward passes without a
            # backward pass go unnoticed.
            observer.forget_forwards(max(0, self._num_forwards - self._num_reached))
        self._num_forwards = self._num_reached = 0
        self.exchange.finish(self._window)
        self._window.saved.add_back(to_shards=True)
        window, self._window = self._window, None
        self.was_scaled = window.is_scaled
        self.recorder.end()
        self.num_reductions += 1
        if not self.has_learned_order:
            self.has_learned_order = True  # on all ranks in the same window, also on those without gradients
            self.exchange.learn_order(self.readiness.order)
        if self.readiness.is_counting:
            self.readiness.watch(self.exchange.layout)
        self._pass_ended()  # before the observers act, because they may raise: the state must be the same on all ranks
        skips = [each.act(window) for each in self.observers if each.found is not None or each in self._acting]
        if any(skips):
            drop_grads(self.parameters)
        for observer in self._at_step:
            observer.step()

    def end_local_window(self) -> None:
        """End a window without the other ranks: `p.grad` is this rank's mean, or its sum of PLAIN passes."""
        window = self.window
        if window is None:
            return
        divide_alone(self.parameters, window, plain=self.ending.num_shares, scale=self.exchange.scale.of_window)
        window.saved.add_back()
        self.was_scaled, self._window = window.is_scaled, None
        self.num_reductions += 1

    # ------------------------------------------------------------------ errors

    def fail(self) -> None:
        """Record that a backward pass has raised an exception: replicas may differ now."""
        self.state, self._pass = State.FAILED, None
        self._unmute()

    def _reset_after_error(self) -> None:
        """Drop the gradients of a failed pass, in a world of one. The model is as before the pass."""
        self._enter(Event.RESET)
        self._window = None
        self.exchange.reset()
        self.readiness.end()
        drop_grads(self.parameters)

    def __repr__(self) -> str:
        return f"<Engine {len(self.parameters)} parameters in {len(self.buckets)} buckets, {self.exchange!r}>"


class _AutogradEnd:
    """An object that autograd calls when it has ended. If autograd raises, it drops the object without a call."""

    def __init__(self, engine: Engine, current: Pass) -> None:
        self._engine = engine
        self._pass: Pass | None = current

    def __call__(self) -> None:
        self._pass = None
        self._engine.autograd_ended()

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.has_raised = True


# The running `weighted_passes` of all threads. On a GPU one autograd thread runs the passes of all threads, so the
# current thread doesn't identify the pass. It is a set, because two threads may change it at once.
_weighted: set[object] = set()
# All engines of this process. Threads may add some meanwhile, so iterate over a copy.
_engines: set[weakref.ref[Engine]] = set()
# The engine whose outputs a pass of `loss.backward()` has reached last, and the numbers of such passes.
_last_reached: weakref.ref[Engine] | None = None
_places = itertools.count()


@contextlib.contextmanager
def weighted_passes(
    engines: Sequence[Engine],
    weight: float | Tensor,
    *,
    only_dummies: Sequence[bool],
    dtype: torch.dtype,
    is_scaled: bool = False,
) -> Iterator[float]:
    """Context for one backward pass through one or several models; yields the scale that divides the weight.

    Collective if the engines synchronise. Passes begin and end in the order of `engines`.

    Args:
        engines: Engines of all wrapped models through which the loss goes, in the same order on all ranks.
        weight: The pass's weight.
        only_dummies: For each engine, the result of `is_over_dummies` for the loss.
        dtype: The loss's dtype.
        is_scaled: The loss was scaled by a GradScaler.
    """
    if len(engines) > 1:
        _validate_disjoint(engines)
    this, scale = object(), None
    _weighted.add(this)
    try:
        if (largest := max(engines, key=lambda engine: engine.world.world_size)) is not engines[0]:
            # A model over fewer ranks is named before the model over the most ranks. Gradients of the larger model are
            # added over several groups, so the groups need one scale: the larger model's. No collective is possible
            # here: a rank without samples ends the first model's window before it takes part in the second's.
            opens_window = not largest.is_in_window
            scale = largest.exchange.scale.agree(None, opens_window=opens_window, is_urgent=False)
        turns = [Turn.FIRST if len(engines) > 1 else Turn.ALONE, *[Turn.BEHIND] * (len(engines) - 1)]
        for engine, turn, is_dummy in zip(engines, turns, only_dummies, strict=True):
            scale = engine.begin_weighted_pass(
                weight, scale, is_scaled=is_scaled, turn=turn, only_dummies=is_dummy, dtype=dtype
            )
        assert scale is not None
        yield scale
    except BaseException:
        for engine in engines:
            engine.fail()
        raise
    finally:
        _weighted.discard(this)
    found: EvenstepError | None = None
    for number, engine in enumerate(engines):
        try:
            engine.end_weighted_pass()
        except (NonFiniteError, DriftError, MismatchError) as error:  # on all ranks; the other engines end their pass
            found = found or error
        except BaseException:
            for behind in engines[number + 1 :]:
                behind.fail()
            raise
    if found is not None:
        raise found


def _validate_disjoint(engines: Sequence[Engine]) -> None:
    """Raise if a parameter is in two of the models: each model would divide its gradient by the sum of weights.

    Local.
    """
    seen: set[int] = set()
    for engine in engines:
        if not seen.isdisjoint(engine.parameter_ids):
            name = next(name for name, p in zip(engine.names, engine.parameters, strict=True) if id(p) in seen)
            raise UsageError(
                f"backward on rank {engine.world.rank}: parameter {name!r} is in two of the wrapped models, whose "
                f"gradients are averaged separately. Put the modules that share it into one module, and wrap that."
            )
        seen |= engine.parameter_ids
