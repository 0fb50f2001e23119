"""The replica engine: averages gradients in buckets while the backward pass still runs.

[Note: the life of a synchronised backward pass]

    forward        an autograd hook is put on the outputs
    backward       the hook on the outputs begins a *pass* (or `model.backward` has begun it)
                   `readiness` says when a bucket is complete; it is packed (one batched copy, none for gradients that
                   are views of it already) and launched, in order. The first pass only counts, and launches at its end
    its end        what has no gradient now was not used: its bucket goes out with zeros. A header with weights and
                   used flags follows, then rank 0's module buffers; all are awaited. The gradients are divided by
                   the weights' sum, or have been by the number of ranks as they were packed

A pass inside `no_sync`, `accumulate` or all but the last of `microbatches` only adds to `p.grad`: within a window
`p.grad` is this rank's undivided sum. What decides is the state at backward, not at forward. What a pass contributes
is told in `passes`; a loss that goes through several models in `multiplied`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.health import page
from evenstep.health.telemetry import BACKWARD
from evenstep.replica import multiplied
from evenstep.replica.bucket import Bucket, late_gradient, moved_parameter
from evenstep.replica.bucket_exchange import BucketExchange
from evenstep.replica.carried import Carried
from evenstep.replica.drift import build_watch
from evenstep.replica.exchange import Exchange, build_exchange
from evenstep.replica.in_backward import InBackward
from evenstep.replica.lane_sums import LaneSums
from evenstep.replica.no_exchange import NoExchange
from evenstep.replica.nonfinite import OwnWatch, build_guard, build_sum_watch
from evenstep.replica.options import OptionsWatch
from evenstep.replica.output_hooks import OutputHooks
from evenstep.replica.passes import WHOLE_WINDOW, Pass
from evenstep.replica.readiness import Readiness, at_end_of_backward
from evenstep.replica.settings import Settings
from evenstep.replica.trained import Trained
from evenstep.replica.weighting import Kind, Window, divide_by_weight, drop_grads
from evenstep.transport.base import Transport
from evenstep.world import World


class Engine:
    """Follows the passes and windows of one wrapped module, and tells its exchange.

    Args:
        module: The wrapped module; its trained parameters are laid out now.
        world: Who takes part.
        settings: Sizes of buckets, what is ignored, what is sparse.
        transport: Carries what belongs to its passes: see `channels`.
    """

    def __init__(self, module: nn.Module, world: World, settings: Settings, transport: Transport) -> None:
        self.trained = trained = Trained.of(module, world, settings, transport)
        self.names, self.parameters, self.num_dense = trained.names, trained.parameters, trained.num_dense
        self.world, self.transport, self.recorder = world, transport, trained.recorder
        self.exchange: Exchange = build_exchange(trained)
        self.guard = build_guard(settings.on_nonfinite, world, transport)
        self.sums = build_sum_watch(settings.on_nonfinite, world, transport)
        self.drift = build_watch(settings, self.names, self.parameters, world, transport)
        self.options = OptionsWatch(world, transport, self.parameters[0].device)
        self.lanes = None if world.lanes is None else LaneSums(world.lanes, self.parameters)
        self._equip_exchange()
        self._travels = not isinstance(self.exchange, NoExchange) or self.lanes is not None
        self.readiness = Readiness(self.parameters, self.exchange.layout, self)
        self.shares_statistics = False  # whether outputs of other ranks depend on this rank's rows
        self.synchronise = True  # whether the next backward pass ends the window
        self.local_by: object = None  # local SGD: what lets windows end on this rank
        self.is_apart = False  # local SGD: parameters differ between ranks
        self.was_scaled = False  # whether a GradScaler has scaled what is in `p.grad` of a window that ended here alone
        self.num_reductions, self.has_learned_order = 0, False
        self.in_backward = InBackward(self.parameters if self._travels else ())
        self._hooks = OutputHooks(self._outputs_reached)
        self._window: Window | None = None
        self._pass: Pass | None = None
        self.carried = Carried(self.parameters)
        self._ran = self._ran_stand_in = False  # since the last pass, over samples and over a stand-in
        self._whole_task = -1  # of autograd: the last pass that was a whole window
        self._left_early: str | None = None
        self._broken: str | None = None
        self._thread, self._is_expecting = threading.get_ident(), False  # in which it last ran forward
        multiplied.enter(self)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What travels."""
        return self.exchange.buckets

    # ------------------------------------------------------------------ called by the wrapper

    def begin_forward(self) -> None:
        """Refuse to go on where replicas would drift apart.

        Raises:
            UsageError: An earlier backward pass failed half-way, or a loop over micro-batches was left early.
        """
        if self._pass is not None and torch._C._current_graph_task_id() == -1:
            self._fail()
        self._thread = threading.get_ident()
        problem = self._broken or self._left_early
        if self._left_early is not None and all(parameter.grad is None for parameter in self.parameters):
            # zero_grad has thrown away the half-made sum, and with it what was kept out of that.
            self._left_early = self._window = None
            self.carried.forget()
        elif problem is not None and self.world.world_size > 1:
            raise UsageError(f"rank {self.world.rank}: {problem}. The replicas are no longer in step; start again.")
        elif self._broken is not None:
            self._reset_after_error()

    def end_forward(self, outputs: object, began_ns: int, *, over_stand_in: bool) -> None:
        """Begin a pass when a backward pass reaches the module's outputs.

        Args:
            outputs: What the module returned, any nest of tensors.
            began_ns: When the forward pass began, on the clock of `time.perf_counter_ns`.
            over_stand_in: The module ran on a stand-in for an empty share.
        """
        if over_stand_in:
            self._ran_stand_in = True
        else:
            self._ran = True
        self._hooks.put_on(outputs)
        self.recorder.forward(began_ns)

    @property
    def only_stand_ins(self) -> bool:
        """Whether all forward passes since the last backward pass ran on stand-ins."""
        return self._ran_stand_in and not self._ran

    def contribution(self) -> float | Tensor:
        """What the pass that is running counts for: 0.0 where what it produces is dropped, else not 0.0.

        A 0-dim tensor where the weight is one: it may be 0, and isn't read.
        """
        if self._pass is None:
            return 1.0
        if self._pass.discards:
            return 0.0
        return self._pass.weight if isinstance(self._pass.weight, Tensor) else 1.0

    def announce(self) -> None:
        """Collective with ranks that have left their loop: a window has begun in which they are needed."""
        self.exchange.announce()

    @contextlib.contextmanager
    def weighted_pass(self, weight: float | Tensor, *, is_scaled: bool = False) -> Iterator[float]:
        """Around one `loss.backward` of `model.backward`. Yields the scale by which the weight is to be divided.

        Collective if the engine synchronises, and in the first windows of a model with 16-bit parameters.
        """
        is_whole = isinstance(weight, float) and weight > 0 and self._begin_whole_window()
        scale = self.exchange.weight_scale(weight, opens_window=self._window is None)
        try:
            multiplied.begin(weight, scale, is_scaled=is_scaled, by=self)
            if is_whole:
                self._pass, self.was_scaled = WHOLE_WINDOW, is_scaled
            else:
                self._open_weighted_pass(weight, is_scaled=is_scaled)
                self._confirm()
            yield scale
        except BaseException:
            self._fail()
            raise
        finally:
            multiplied.end(by=self, has_failed=self._pass is None)
        if is_whole:
            self._pass = None
            self.recorder.end()
            page.mark(page.Phase.BETWEEN_STEPS)
        else:
            self._close_pass()

    def end_lane(self) -> None:
        """A lane of this rank is complete, and another will follow."""
        assert self.lanes is not None
        self.lanes.add_lane(self._window, self.buckets)

    def reduce_without_backward(self) -> None:
        """Collective: end the window of a rank that had nothing to add to it (an empty share)."""
        self.exchange.weight_scale(None, opens_window=self._window is None)
        if self._window is None:
            self._window = Window()
            self.exchange.open_window(is_running=False)
            self._window.has_leftovers = any(parameter.grad is not None for parameter in self.parameters)
            if self._window.has_leftovers and (self.lanes is not None or self.exchange.was_weighted()):
                self.carried.set_aside(self.exchange)
        self._end_window()

    @property
    def is_in_window(self) -> bool:
        """Whether gradients have been added on this rank since they were last averaged."""
        return self._window is not None

    @property
    def is_in_pass(self) -> bool:
        """Whether a backward pass is running."""
        return self._pass is not None

    @property
    def stays_local(self) -> bool:
        """Whether windows end on this rank, and gradients aren't exchanged."""
        return self.local_by is not None

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are being accumulated, or ranks step on their own: nothing that ranks have alike."""
        return self._window is not None or not self.synchronise or self.is_apart

    def replace_exchange(self, made: Exchange) -> None:
        """Between two windows: gradients take another way from now on."""
        self.exchange = made
        self._travels = True
        self._equip_exchange()
        self.readiness = Readiness(self.parameters, made.layout, self)
        self.has_learned_order = False

    def unused_parameters(self) -> list[str]:
        """Names of the parameters that had no gradient on any rank when the last window ended."""
        return [self.names[index] for index in self.exchange.unused()]

    def leave_early(self, what: str) -> None:
        """Note that a window was abandoned before its gradients were averaged."""
        self._left_early = what

    # ------------------------------------------------------------------ called by autograd

    def _outputs_reached(self, grad: Tensor) -> Tensor | None:
        if self._pass is None:
            task = torch._C._current_graph_task_id()
            if task == self._whole_task:
                return None  # a module has several outputs, or was called more than once
            if multiplied.by_what() is None and self._begin_whole_window():
                self._whole_task = task
                return None
            self._open_unasked(discards=self.only_stand_ins)
        assert self._pass is not None
        if self._pass.fills_buckets:
            self.readiness.outputs_reached()
        mutes = self._pass.mutes
        if isinstance(mutes, Tensor):
            return torch.where(mutes.to(grad.device), 0.0, grad)
        return torch.zeros_like(grad) if mutes else None

    def _begin_whole_window(self) -> bool:
        """Begin a pass that leaves its mean in `p.grad` by itself, if it is one: see `WHOLE_WINDOW`."""
        if self._travels or self._window is not None or not self.synchronise or self.guard is not None:
            return False
        if self._ran_stand_in and not self._ran:
            return False
        self._ran = self._ran_stand_in = self.was_scaled = False
        self.num_reductions += 1
        self.recorder.whole_backward()
        if page.current is not None:
            page.mark(page.Phase.BACKWARD)
        return True

    def gradient_came(self) -> bool:
        """See `readiness.Listener`."""
        if self._pass is None:  # the loss uses the parameter directly; perhaps the module's outputs too
            self._open_unasked(discards=False)
        current = self._pass
        assert current is not None
        if not current.confirmed:
            self._confirm()
        return current.fills_buckets

    def bucket_complete(self, bucket: int) -> None:
        """See `readiness.Listener`."""
        assert self._window is not None
        self.exchange.complete(bucket, self._window)

    def gradient_late(self, parameter: int) -> None:
        """See `readiness.Listener`."""
        raise (moved_parameter if self.readiness.is_another(parameter) else late_gradient)([self.names[parameter]])

    def _plain_pass_ended(self) -> None:
        current = self._pass
        if current is None:
            return
        if not current.confirmed:
            if not self.readiness.any_has_come():  # torch.autograd.grad: nothing to average
                self._put_back(current)
                if self._window is None and self.lanes is None:
                    self.exchange.cancel_window()
                    self.carried.add_back()
                self.readiness.end()
                self._pass = None
                return
            self._confirm()
        self._close_pass()

    # ------------------------------------------------------------------ passes and windows

    def expect_pass(self, weight: multiplied.Weight) -> None:
        """See `multiplied.Reached`."""
        if self._pass is None and self.lanes is None and self._thread == threading.get_ident():
            if self._window is None:
                self.carried.make_way(self.exchange)
            elif self._window.kind is Kind.WEIGHTED:
                self.exchange.weight_from(*weight[:2], opens_window=False)
            self._is_expecting = True
            self.readiness.begin()

    def expect_no_more(self, *, has_failed: bool) -> None:
        """See `multiplied.Reached`. Collective if gradients have come, but none by way of the outputs."""
        if self._is_expecting and self._thread == threading.get_ident():
            if not has_failed and self.readiness.any_has_come():
                self._open_unasked(discards=False)
                self._confirm()
                self._close_pass()
            self._is_expecting = False
            self.readiness.end()
            self.carried.give_way_back()

    def _open_unasked(self, *, discards: bool) -> None:
        """Begin a pass, which isn't one of this model's `backward`. Within autograd it ends when that does."""
        multiplied_by = multiplied.by_what()
        if multiplied_by is None:
            self._open_pass(Pass(Kind.PLAIN, 0.0, discards))
        else:
            by, scale, is_scaled = multiplied_by
            weight = self.exchange.weight_from(by, scale, opens_window=self._window is None)
            self._open_weighted_pass(weight, is_scaled=is_scaled)
        if torch._C._current_graph_task_id() != -1:
            at_end_of_backward(self._plain_pass_ended)

    def _open_pass(self, opened: Pass) -> None:
        if self.lanes is not None:
            self.lanes.validate_open("a backward pass")
        self.recorder.mark(BACKWARD)
        page.mark(page.Phase.BACKWARD)
        self._pass = opened
        opened.synchronised = self.synchronise and not self.stays_local
        self.in_backward.take_over()
        was_expected, self._is_expecting = self._is_expecting, False
        if was_expected and opened.discards and self._window is None:
            self.readiness.drop_what_came()
        if self._window is None:
            self.exchange.open_window(is_running=was_expected or torch._C._current_graph_task_id() != -1)
        if opened.kind is Kind.WEIGHTED and self._window is None:
            self.carried.keep() if was_expected else self.carried.set_aside(self.exchange)
        if opened.discards:
            opened.set_aside = [parameter.grad for parameter in self.parameters]
            drop_grads(self.parameters)
        if not was_expected:  # else it has seen the pass from the beginning
            self.readiness.begin()

    def _open_weighted_pass(self, weight: float | Tensor, *, is_scaled: bool) -> None:
        is_zero: bool | Tensor = weight == 0.0
        mutes = is_zero if self.shares_statistics and not self.only_stand_ins else False
        discards = self.only_stand_ins or (is_zero is True and mutes is False)
        self._open_pass(Pass(Kind.WEIGHTED, weight, discards, mutes, is_scaled))

    def _confirm(self) -> None:
        """The pass is a real one: count it in the window."""
        assert self._pass is not None
        self._pass.confirmed = True
        self._ran = self._ran_stand_in = False
        if self._window is None:
            self._window = Window()
        self._window.add(self._pass.kind, self._pass.weight, is_scaled=self._pass.is_scaled)
        if self._pass.synchronised:
            self.exchange.weigh(self._window)

    def _close_pass(self) -> None:
        current = self._pass
        assert current is not None
        self._put_back(current)
        self.readiness.end()
        if current.synchronised or (self.stays_local and self.synchronise):
            self._end_window()
        elif self.drift is not None:
            self.drift.kept_back()
        self._pass = None

    def _put_back(self, current: Pass) -> None:
        if current.set_aside is not None:
            for parameter, grad in zip(self.parameters, current.set_aside, strict=True):
                parameter.grad = grad

    def _end_window(self) -> None:
        """Collective: afterwards `p.grad` is the global mean on every rank; this rank's own where it stays local."""
        assert self._window is not None
        if self.stays_local:
            self.end_local_window()
            return
        if self.lanes is not None:
            self.lanes.close_window(self._window, self.buckets)
        if self.guard is not None:
            first = self.num_dense if self.exchange.buckets else 0
            self.guard.look_at_gradients(self.names[first:], self.parameters[first:])
        self.exchange.finish(self._window)
        self.carried.add_back()
        window, self._window = self._window, None
        self.recorder.end()
        page.mark(page.Phase.BETWEEN_STEPS)
        self.num_reductions += 1
        if not self.has_learned_order:
            self.has_learned_order = True  # on all ranks in the same window, whatever each of them has seen
            self.exchange.learn_order(self.readiness.order)
        if self.readiness.is_counting:
            self.readiness.watch(self.exchange.layout)
        if self.guard is not None and self.guard.is_fault(is_scaled=window.is_scaled):
            drop_grads(self.parameters)
        self.exchange.conclude()
        self.in_backward.step()

    def _equip_exchange(self) -> None:
        self.exchange.lanes = self.lanes
        if isinstance(self.exchange, BucketExchange):
            self.exchange.looker = self.guard or (self.sums if isinstance(self.sums, OwnWatch) else None)
            self.exchange.drift, self.exchange.options = self.drift, self.options
            if self.sums is not None:
                self.exchange.watch_sums(self.sums)

    def end_local_window(self) -> None:
        """End a window without the other ranks: gradients are this rank's mean, or its sum of PLAIN passes."""
        if self._window is None:
            return
        divide_by_weight(self.parameters, self._window, self.exchange.weight_scale(0.0, opens_window=False))
        self.carried.add_back()
        self.was_scaled, self._window = self._window.is_scaled, None

    # ------------------------------------------------------------------ errors

    def _fail(self) -> None:
        self._broken = "the last backward pass raised an exception, so its gradients were not averaged"
        self._pass = None

    def _reset_after_error(self) -> None:
        """In a world of one a failed pass concerns nobody else: its gradients are lost, the model is as before it."""
        self._broken = self._window = None
        self.carried.forget()
        self.exchange.reset()
        self.readiness.end()
        drop_grads(self.parameters)

    def __repr__(self) -> str:
        return f"<Engine {len(self.parameters)} parameters in {len(self.buckets)} buckets, {self.exchange!r}>"
