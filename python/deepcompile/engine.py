"""The engine: a model, its optimizer and the loop's three calls, ``engine(batch)``, ``engine.backward(loss)``,
``engine.step()``.
"""

from __future__ import annotations

import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepcompile._shard_aware_torch import refuse_whole_parameter_optimizer
from deepcompile.clipping import Clipping
from deepcompile.config import Config, OptimizerConfig, load_config
from deepcompile.deferred import InitFunction
from deepcompile.engine_replay import ReplayProfile
from deepcompile.loss_scale import LossScale
from deepcompile.profile import Profile
from deepcompile.report import Explanation, StepTimes, explain, trace_events
from deepcompile.sharding import Sharding, is_sharded, shard, sharding_of

_log = logging.getLogger("deepcompile")

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    lr_scheduler: Any | None = None,
    process_group: dist.ProcessGroup | None = None,
    init_fn: InitFunction | None = None,
) -> Engine:
    """Shards ``model`` (unless :func:`deepcompile.shard` has) and returns its engine. ``optimizer`` is one over the
    parameters of ``model``, a function that makes one from them, or left to ``config["optimizer"]``.
    """
    checked = load_config(config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(model, optimizer)
    if not is_sharded(model):
        if isinstance(optimizer, torch.optim.Optimizer) and any(param.is_meta for param in model.parameters()):
            raise ValueError(
                "the model's parameters have no data yet and are about to be made: pass a function that makes the optimizer"
            )
        shard(model, checked, process_group=process_group, init_fn=init_fn)
    elif config is None:
        checked = sharding_of(model).config
    elif checked.stage != sharding_of(model).config.stage:
        raise ValueError(
            f"the model was sharded for stage {sharding_of(model).config.stage} and config asks for {checked.stage}"
        )
    return Engine(model, _make_optimizer(model, optimizer, checked.optimizer), checked, lr_scheduler)


def _make_optimizer(
    model: nn.Module, optimizer: OptimizerLike | None, config: OptimizerConfig | None
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        if config is not None:
            raise ValueError("an optimizer was passed and config key 'optimizer' asks for another; give one of them")
        return optimizer
    if callable(optimizer):
        made = optimizer(param for param in model.parameters() if param.requires_grad)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"the function that was to make the optimizer returned a {type(made).__name__}")
    elif optimizer is not None:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a function that makes one, not {type(optimizer).__name__}"
        )
    elif config is not None:
        made = getattr(torch.optim, config.type)(
            [param for param in model.parameters() if param.requires_grad], **config.params
        )
    else:
        return None
    _check_optimizer(model, made)
    return made


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    refuse_whole_parameter_optimizer(optimizer)
    members = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param in members:
                continue
            if hasattr(param, "full_shape"):
                raise ValueError(
                    f"the optimizer's group {index} holds a parameter of shape {list(param.full_shape)} that belongs to "
                    "another, already sharded model"
                )
            raise ValueError(
                f"the optimizer's group {index} holds a parameter of shape {list(param.shape)} that is not one of the "
                f"model's: make the optimizer from the parameters of the {type(model).__name__} that is passed"
            )
    if optimizer.state and not is_sharded(model):
        raise ValueError("the optimizer has state already: shard the model before its first step")


class Engine:
    """Trains one sharded model. Made by :func:`initialize`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, lr_scheduler: Any | None
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.sharding: Sharding = sharding_of(model)
        self.loss_scale = LossScale(config.fp16)
        #: Optimizer steps taken, and steps skipped because gradients were not finite.
        self.steps = 0
        self.skipped_steps = 0
        self._clipping = Clipping(self.sharding, config.gradient_clipping)
        self._micro_steps = 0  # backwards since the last optimizer step
        self._awaits_step = False
        self._said_skip = False
        self._trace_to: str | None = None
        self.times = StepTimes()
        self._forward: Callable[..., Any] = model
        self.profile: Profile | ReplayProfile = Profile(self.sharding, 0)
        if config.compile.mode == "compile":
            self._compile()
        elif config.compile.mode == "replay":
            self.sharding.planner  # noqa: B018 - made here, by all ranks together
            self.profile = ReplayProfile(self.sharding, config.compile.profile_steps)

    def _compile(self) -> None:
        options = self.config.compile
        self._forward = torch.compile(
            self.module, backend="deepcompile", dynamic=options.dynamic, fullgraph=options.fullgraph
        )
        self.sharding.planner  # noqa: B018 - made here, by all ranks together
        self.profile = Profile(self.sharding, options.profile_steps)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.config.compute_dtype
        if dtype is not None:
            args, kwargs = _cast(args, dtype), _cast(kwargs, dtype)
        runtime = self.sharding.runtime
        training = torch.is_grad_enabled()
        if training:
            self._begin_step()
        if self.config.compile.mode == "compile":
            runtime.start_compiled_forward()
        else:
            runtime.start_forward()
        if training:
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

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        """True when an optimizer step follows the next (or the last) backward."""
        done = self._micro_steps - int(self._awaits_step)
        return (done + 1) % self.config.gradient_accumulation_steps == 0

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradients of ``loss``, divided by the accumulation steps, averaged over the ranks."""
        if self._awaits_step:
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
        update = self.is_gradient_accumulation_boundary
        self.sharding.runtime.start_backward(update)
        factor = self.loss_scale.value / self.config.gradient_accumulation_steps
        self.profile.start_backward()
        try:
            (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            torch.ops.dc.end_backward(self.sharding.graph_id)
            self.profile.end_backward()
        except Exception as error:
            self.profile.failed(error)
            raise
        self.sharding.end_backward()
        self._micro_steps += 1
        self._awaits_step = True
        return loss

    def step(self) -> bool:
        """At the accumulation boundary: clips, updates, clears the gradients. True when parameters were updated."""
        if not self._awaits_step:
            raise RuntimeError("engine.step was called without engine.backward(loss) before it")
        boundary = self.is_gradient_accumulation_boundary
        self._awaits_step = False
        if not boundary:
            return False
        self._micro_steps = 0
        if self.optimizer is None:
            raise RuntimeError("engine.step: there is no optimizer; pass one to initialize, or config key 'optimizer'")
        started = time.monotonic_ns()
        if self._clipping.heard():
            self._skip("the step before the last")
        taken = self._clipping.apply(self.optimizer, self.loss_scale.value, must_know=self.loss_scale.dynamic)
        self.loss_scale.update(overflow=not taken)
        if taken:
            self.optimizer.step()
            self._clipping.done(self.optimizer)
            self.steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self._skip()
        self.zero_grad()
        self.profile.end_update(started)
        self._end_step()
        return taken

    def _begin_step(self) -> None:
        if not self._micro_steps and not self._awaits_step:
            self.times.begin(self.stats()["wait_seconds"])
            self.profile.begin_step(self._trace_to is not None)
            if self._trace_to is not None:
                self.sharding.runtime.take_timeline()
                self.sharding.runtime.record_timeline(True)

    def _end_step(self) -> None:
        self.times.end(self.stats()["wait_seconds"])
        self.profile.end_step()
        if self.profile.ready():
            changed = self.profile.plan()
            self.times.forget()
            if self.sharding.rank == 0:
                _log.info("%s", self.profile.line(changed))
        elif self._trace_to is not None and self.profile.done:
            self.sharding.runtime.record_timeline(False)
            pathlib.Path(self._trace_to).write_text(trace_events(self.sharding, self.sharding.runtime.take_timeline()))
            self._trace_to = None

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the gradients at the last step, before clipping; None before the first."""
        return self._clipping.norm

    def _skip(self, late: str = "") -> None:
        self.skipped_steps += 1
        if late:
            self.steps -= 1  # it was counted before its gradients were known
        if self._said_skip:
            return
        self._said_skip = True
        names = [s.name for s in self.sharding.params if s.param.grad is not None and not s.param.grad.isfinite().all()]
        where = f"; on this rank in {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
        _log.warning(
            "rank %d: the gradients of step %d are not finite%s. The step is skipped%s. Said once; engine.skipped_steps "
            "counts them",
            self.sharding.rank,
            self.steps + self.skipped_steps,
            where if not late else f" ({late})",
            f" and the loss scale is now {self.loss_scale.value:g}" if self.loss_scale.dynamic else "",
        )

    def zero_grad(self) -> None:
        for param in self.module.parameters():
            param.grad = None

    # -- the model ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.module.parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The shards of this rank. ``deepcompile.full_state_dict(engine.module)`` gives whole parameters."""
        return self.module.state_dict()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, folder: str | os.PathLike[str], client_state: Any = None, *, keep: int | None = None
    ) -> str:
        """Saves model, optimizer, loss scale, schedule, random state and ``client_state`` (anything that can be pickled)
        under ``folder`` and returns where. Every rank calls it. A job that is killed meanwhile leaves the last as it was.
        ``keep``: how many checkpoints stay; None: all.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; at least the checkpoint that is being saved stays")
        from deepcompile import checkpoint  # it brings much with it

        return checkpoint.save_checkpoint(self, folder, client_state, keep)

    def load_checkpoint(self, folder: str | os.PathLike[str], name: str | None = None) -> Any:
        """Loads the latest checkpoint of ``folder`` (or the one called ``name``), saved by any number of ranks under any
        stage, and returns its ``client_state``. Random states are restored when the number of ranks is the same.
        """
        from deepcompile import checkpoint

        return checkpoint.load_checkpoint(self, folder, name)

    @property
    def gradients_pending(self) -> bool:
        """True between the first backward of an accumulation and its step."""
        return self._micro_steps > 0

    def progress(self) -> dict[str, Any]:
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.loss_scale.state_dict(),
            "schedule": schedule,
        }

    def load_progress(self, state: dict[str, Any]) -> None:
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
        self._trace_to = os.fspath(path)

    def stats(self) -> dict[str, Any]:
        return self.sharding.runtime.stats()

    def close(self) -> None:
        """Waits for what is in flight and lets go of channels and buffers. The model cannot be run afterwards."""
        self.sharding.close()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point inputs in the dtype in which the model computes."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


__all__ = ["Engine", "initialize"]
