"""The engine: a model, its optimizer and the loop's three calls, ``engine(batch)``, ``engine.backward(loss)``,
``engine.step()``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepcompile.compiler.backend import load_compiler
from deepcompile.compiler.operators import keep_guards
from deepcompile.config.config import Config
from deepcompile.engine.clipping import Clipping
from deepcompile.engine.drift import Drift
from deepcompile.engine.engine_replay import ReplayProfile
from deepcompile.engine.engine_surface import EngineSurface
from deepcompile.engine.joint_profile import JointProfile
from deepcompile.engine.loss_scale import LossScale
from deepcompile.engine.report import StepTimes, explain
from deepcompile.engine.schedule_state import ScheduleState
from deepcompile.engine.zero_grad import watch_zero_grad
from deepcompile.planning.profile import Profile
from deepcompile.planning.report import Explanation
from deepcompile.runtime.step_trace import TraceFile
from deepcompile.sharding import fused_adam
from deepcompile.sharding.sharded_modules import force_guard_check
from deepcompile.sharding.sharding import ShardedParam, Sharding, sharding_of
from deepcompile.sharding.state_offload import StateOffload

_log = logging.getLogger("deepcompile")


@dataclasses.dataclass
class _Loop:
    """Where the training loop is, and what it was warned of."""

    micro_steps: int = 0  # backwards since the last optimizer step
    awaits_step: bool = False  # a backward has ended, and step() was not called since
    in_step: bool = False  # from the first forward to the update
    trains: bool | None = None  # whether any parameter required a gradient at the last forward
    #: The learning-rate schedule before the last update, while the device may still skip that update.
    schedule_before: ScheduleState | None = None
    warned_of_skip: bool = False
    warned_of_discard: bool = False


class Engine(EngineSurface):
    """Trains one sharded model. Made by :func:`initialize`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, lr_scheduler: Any | None
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.sharding: Sharding = sharding_of(model)
        watch_zero_grad(self)
        self.loss_scale = LossScale(config.fp16)
        #: Optimizer steps taken, and steps skipped because gradients were not finite.
        self.steps = 0
        self.skipped_steps = 0
        self._clipping = Clipping(self.sharding, config.gradient_clipping)
        self.micro_steps = 0  # backwards so far
        self._loop = _Loop()
        # Freeing gradient buffers at each update costs page faults on a CPU, so there only if the budget is "least". A
        # device's caching allocator returns memory at once.
        on_cpu = self.sharding.runtime.device.type == "cpu"
        self.sharding.frees_gradients = not self.sharding.single_rank and (
            not on_cpu or config.memory_budget == "least"
        )
        if self.sharding.frees_gradients:
            self.sharding.runtime.let_gradients_go()
        #: Moves the optimizer's states to the host and back; None if they stay on the device.
        self.offload: StateOffload | None = None
        if optimizer is not None and config.offloads_states and self.sharding.runtime.host_is_apart:
            self.offload = self.sharding.offload = StateOffload(self.sharding, optimizer, config)
        self._trace_file: TraceFile | None = None
        self.times = StepTimes()
        self._forward: Callable[..., Any] = model
        self.profile: Profile | ReplayProfile = Profile(self.sharding, 0)
        self.drift = Drift(self.sharding, 0, 1)
        if config.compile.mode == "compile":
            self._compile()
        elif config.compile.mode == "replay":
            self._make_planner()
            self.profile = ReplayProfile(self.sharding, config.compile.profile_steps)

    def _make_planner(self) -> None:
        with self.sharding.runtime.outside_step():
            self.sharding.planner  # noqa: B018 - constructs the planner, a collective

    def _compile(self) -> None:
        options = self.config.compile
        load_compiler(options.backend)
        self._forward = torch.compile(
            self.module,
            backend="deepcompile",
            dynamic=options.dynamic,
            fullgraph=options.fullgraph,
            options={"guard_filter_fn": keep_guards},
        )
        if self.sharding.single_rank:  # nothing to plan
            return
        self._make_planner()
        self.profile = Profile(self.sharding, options.profile_steps)
        self.drift = Drift(self.sharding, options.replan_factor, options.replan_steps)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.config.compute_dtype
        if dtype is not None:
            args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        runtime = self.sharding.runtime
        # A forward of a completely frozen model (a GAN's other half) only passes gradients on: not a step of this engine.
        trains = any(sharded.param.requires_grad for sharded in self.sharding.params)
        if trains != self._loop.trains:  # (changes of single parameters are handled by update_trainable)
            for sharded in self.sharding.params if self._loop.trains is not None else ():
                force_guard_check(sharded)
            self._loop.trains = trains
        training = torch.is_grad_enabled() and trains
        if training:
            self._begin_step()
            if self.offload is not None:
                self.offload.start_forward(self.is_gradient_accumulation_boundary())
        if self.config.compile.mode == "compile":
            runtime.start_compiled_forward()
            if training:
                runtime.hold_shards(True)
        else:
            runtime.start_forward()
        if training:
            self.drift.start()
            self.profile.start_forward()
        try:
            return self._forward(*args, **kwargs)
        except Exception as error:
            self.profile.failed(error)
            raise
        finally:
            if training:
                self.profile.end_forward()
            runtime.end_forward()
            if training:
                self.drift.stop()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when an optimizer step follows the next (or the last) backward."""
        done = self._loop.micro_steps - int(self._loop.awaits_step)
        return (done + 1) % self.gradient_accumulation_steps() == 0

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """The gradients of ``loss``, divided by the accumulation steps, averaged over the ranks."""
        if self._loop.awaits_step:
            raise RuntimeError(
                "engine.backward was called twice without engine.step() between; call step() after every backward, it "
                "updates at the accumulation boundary only"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"engine.backward takes a scalar loss, not {what}")
        if not loss.requires_grad:
            raise RuntimeError(
                "engine.backward: the loss does not depend on any trainable parameter (made under no_grad, or detached?)"
            )
        update = self.is_gradient_accumulation_boundary()
        self.drift.start()
        # Without a memory budget the reductions of all but the last micro-batch may overlap the next forward; until they
        # end they hold their gradients.
        self.sharding.runtime.start_backward(update, settle_later=self.config.memory_budget is None)
        factor = self.loss_scale.value / self.gradient_accumulation_steps()
        self.profile.start_backward()
        try:
            (loss if factor == 1.0 else loss * factor).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            torch.ops.dc.end_backward(self.sharding.graph_id)
            self.profile.end_backward()
        except Exception as error:
            self.profile.failed(error)
            raise
        self.sharding.end_backward()
        self.drift.stop()
        self._loop.micro_steps += 1
        self.micro_steps += 1
        self._loop.awaits_step = True
        return loss

    def step(self) -> bool:
        """At the accumulation boundary: clips, updates, clears the gradients. True when parameters were updated."""
        if not self._loop.awaits_step:
            raise RuntimeError("engine.step was called without engine.backward(loss) before it, or after zero_grad()")
        boundary = self.is_gradient_accumulation_boundary()
        self._loop.awaits_step = False
        if not boundary:
            return False
        self._loop.micro_steps = 0
        if self.optimizer is None:
            raise RuntimeError("engine.step: there is no optimizer; pass one to initialize, or config key 'optimizer'")
        self.drift.start()
        started = time.monotonic_ns()
        self._settle_late_skip()
        taken = self._clipping.apply(self.optimizer, self.loss_scale.value, must_know=self.loss_scale.dynamic)
        self.loss_scale.update(overflow=not taken)
        if taken:
            if self.offload is not None:
                self.offload.update(self.optimizer)
            else:
                fused_adam.step(self.optimizer)
            self._clipping.done(self.optimizer)
            self.steps += 1
            if self.lr_scheduler is not None:
                if self._clipping.decides_late:
                    self._loop.schedule_before = ScheduleState(self.lr_scheduler, self.optimizer)
                self.lr_scheduler.step()
        else:
            if self.offload is not None:
                self.offload.skip()
            self._skip()
        self._clear_gradients()
        self.drift.stop()
        self.profile.end_update(started)
        self._end_step()
        return taken

    def _settle_late_skip(self) -> None:
        """If the device skipped the last update, uncounts the step and restores the learning-rate schedule."""
        if self._clipping.pop_late_skip():
            if self._loop.schedule_before is not None:
                self._loop.schedule_before.restore()
            self._skip(late=True)
        self._loop.schedule_before = None

    def _begin_step(self) -> None:
        if self._loop.micro_steps == 0:  # also if the last forward had no backward
            self._update_trainable()
        else:
            self._refuse_changed_trainable()
        if not self._loop.in_step:  # the first forward of the step
            self._loop.in_step = True
            self.sharding.steps_begun += 1
            self.times.begin(self.sharding.runtime.wait_seconds())
            if self.offload is not None and self.optimizer is not None:
                self.offload.begin_step(self.optimizer)
            self.profile.begin_step()
            if self._trace_file is not None:
                self._trace_file.begin(self.sharding.runtime)

    def _refuse_changed_trainable(self) -> None:
        names = self.sharding.changed_trainable()
        if names:
            raise RuntimeError(
                f"rank {self.sharding.rank}: requires_grad of '{names[0]}'{' and others' if names[1:] else ''} was changed "
                f"after {self._loop.micro_steps} of {self.gradient_accumulation_steps()} micro-batches of an accumulation; "
                "change it after engine.step() has updated, or throw the accumulation away first (engine.zero_grad())"
            )

    def _update_trainable(self) -> None:
        changed = self.sharding.update_trainable()
        if changed and self.sharding.rank == 0:
            _log.info("other parameters are trained from now on: %s changed", ", ".join(changed[:5]))
        if changed and isinstance(self.profile, ReplayProfile):  # the recorded steps trained other parameters
            self.profile.stop()
            self._loop.in_step = False  # so that begin_step is called on the new profile
            replays = self.config.compile.mode == "replay"
            self.profile = (ReplayProfile if replays else Profile)(self.sharding, self.profile.iterations)

    def _end_step(self) -> None:
        self._loop.in_step = False
        self.times.end(self.sharding.runtime.wait_seconds())
        self.profile.end_step()
        if isinstance(self.profile, Profile) and self.profile.several_graphs:
            self.profile = JointProfile(self.sharding, self.profile.iterations)
        if self.profile.ready():
            changed = self.profile.plan()
            self.times.forget()
            self.drift.forget()
            if self.sharding.rank == 0:
                _log.info("%s", self.profile.line(changed))
        elif self._trace_file is not None and self._trace_file.begun and self.profile.done:
            self._trace_file.write(self.sharding.names, self.sharding.rank)
            self._trace_file = None
        if not isinstance(self.profile, Profile) or not self.profile.done or self.profile.why_not:
            self.drift.leave_out()
        elif self.drift.noticed():
            self.profile.again()

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients at the last step, before clipping; None before the first."""
        return self._clipping.norm

    def _skip(self, late: bool = False) -> None:
        self.skipped_steps += 1
        if late:
            self.steps -= 1  # counted when the host did not know yet that the device would skip it
        if self._loop.warned_of_skip:
            return
        self._loop.warned_of_skip = True
        names = [s.name for s in self.sharding.params if s.param.grad is not None and not s.param.grad.isfinite().all()]
        where = f"; on this rank in {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
        _log.warning(
            "rank %d: the gradients of step %d are not finite%s. The step is skipped%s. Said once; engine.skipped_steps "
            "counts them",
            self.sharding.rank,
            self.steps + self.skipped_steps,
            where if not late else " (found by the device)",
            f" and the loss scale is now {self.loss_scale.value:g}" if self.loss_scale.dynamic else "",
        )

    def zero_grad(self) -> None:
        """Discards the accumulated gradients. Within an accumulation this restarts it: the next micro-batch is its first.
        Every rank calls it.
        """
        if self._loop.micro_steps > 0:
            self._discard(self.sharding.params)
        self._clear_gradients()

    def note_zero_grad(self, params: list[torch.Tensor]) -> None:
        """Called when ``zero_grad`` of an optimizer or a module has cleared the gradients of ``params``. If these are all
        trained parameters, the accumulation restarts.
        """
        if not self.sharding.is_open:
            return
        cleared = set(params)
        found = [sharded for sharded in self.sharding.params if sharded.param in cleared]
        if not found:
            return
        if not self._loop.warned_of_discard and self.sharding.rank == 0:
            self._loop.warned_of_discard = True
            _log.warning(
                "zero_grad() was called after %d of %d micro-batches of an accumulation and throws their gradients away. "
                "Said once. engine.step() clears gradients by itself: leave zero_grad() out where this is not meant",
                self._loop.micro_steps,
                self.gradient_accumulation_steps(),
            )
        self._discard(found)
        for sharded in found:  # a pending reduction may have published a gradient since
            sharded.param.grad = None

    def _discard(self, params: list[ShardedParam]) -> None:
        """Discards the accumulated gradients of these parameters."""
        self.sharding.runtime.discard_gradients([sharded.id for sharded in params])
        if {s.id for s in self.sharding.params if s.param.requires_grad} <= {sharded.id for sharded in params}:
            self._loop.micro_steps, self._loop.awaits_step = 0, False
            self.drift.leave_out()
            if isinstance(self.profile, ReplayProfile):
                self.profile.stop()
            self._loop.in_step = False  # the next forward begins a new step, also for recording and measuring

    def _clear_gradients(self) -> None:
        # Walking through the modules, as module.zero_grad() does, would take longer than many a kernel.
        for sharded in self.sharding.params:
            sharded.param.grad = None
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for param in group["params"]:
                param.grad = None
        if self.sharding.frees_gradients:
            self.sharding.runtime.let_gradients_go()

    @property
    def gradients_pending(self) -> bool:
        """True between the first backward of an accumulation and its step."""
        return self._loop.micro_steps > 0

    def progress(self) -> dict[str, Any]:
        """What a checkpoint saves of the engine."""
        self._settle_late_skip()
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": schedule,
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        self._clipping.pop_late_skip()  # discards the decision on an update from before the checkpoint was loaded
        self._loop.schedule_before = None
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        self.loss_scale.load_state_dict(state["loss_scale"])
        if self.lr_scheduler is not None and state["schedule"] is not None:
            self.lr_scheduler.load_state_dict(state["schedule"])

    # -- what it did -------------------------------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """What is active and why: sharding, plan, predicted and measured times, memory. ``print`` it."""
        return explain(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Records the next step (after the profile is done) and writes it to ``path`` for Perfetto or chrome://tracing."""
        self._trace_file = TraceFile(path)

    def stats(self) -> dict[str, Any]:
        return self.sharding.runtime.stats()

    def close(self) -> None:
        """Waits for work in flight and frees channels and buffers. The model cannot be run afterwards."""
        self.sharding.close()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point inputs to the dtype in which the model computes."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )
