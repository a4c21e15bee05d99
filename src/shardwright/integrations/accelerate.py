"""Accelerate's `Accelerator`, with models spread by Shardwright.

``num_processes`` counts replicas, so that data loaders, schedulers and gathered metrics count each sample
once; all ranks of a replica see the same batch, and have the same outputs.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.integrations.step_model import StepModel
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.startup import script_run

__all__ = ["Accelerator"]

_ON_CPUS = "ACCELERATE_USE_CPU"


def count_ranks_on_cpus() -> None:
    """Sets the variable of ``accelerate launch --cpu``; without it Accelerate sees one process on CPUs."""
    on_cpus = not torch.cuda.is_available() or os.environ.get("SHARDWRIGHT_DEVICE") == "cpu"
    if "RANK" in os.environ and on_cpus:
        os.environ.setdefault(_ON_CPUS, "true")


def refuse_other_ranks() -> None:
    """Refuses a run in which Accelerate counts other ranks: each would write files, and print."""
    counted = PartialState().num_processes
    if counted != sw.size():
        raise UsageError(
            f"Accelerate counts {counted} processes, but the run has {sw.size()} ranks. Import the Trainer "
            "or Accelerator of shardwright.integrations before TrainingArguments are made; on CPUs, "
            f"{_ON_CPUS}=true in the environment does the same."
        )


count_ranks_on_cpus()

_PLAIN_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in a state of accelerate.Accelerator


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` over stages, shards, parts of layers and replicas.

    A prepared model that is called in training runs forward and backward of the loss that it returns, as
    Accelerate's plugin for Megatron-LM does. ``accelerator.backward(loss)`` then checks that the loss is that
    one.

    Args:
        *args: as for `accelerate.Accelerator`.
        config: settings, a plan, or the path of a plan file, as for `shardwright.torch.init`.
        training_outputs: a call of the model in training returns all outputs, such as logits, on every rank;
            else its loss and other single numbers alone.
        loss_reduction: what the loss of a model without ``labels`` is, as for `shardwright.torch.step`.
        **kwargs: as for `accelerate.Accelerator`.

    Raises:
        UsageError: ``fp16``, ``fp8``, or a plugin for another library.

    Example:
        ``from shardwright.integrations.accelerate import Accelerator``
    """

    flag_tensor: Tensor | None

    def __init__(
        self,
        *args: Any,
        config: Any = None,
        training_outputs: bool = False,
        loss_reduction: Any = None,
        **kwargs: Any,
    ):
        if not sw.is_initialized():
            sw.init(config)
        super().__init__(*args, **kwargs)
        refuse_other_ranks()
        self._training_outputs, self._loss_reduction = training_outputs, loss_reduction
        if self.mixed_precision not in ("no", "bf16"):
            raise UsageError(
                f'mixed_precision="{self.mixed_precision}" does not go with this Accelerator: its scaler '
                'would see one rank alone. Use "bf16", or the setting "fp16" of Shardwright: '
                'Accelerator(config={"fp16": True}).'
            )
        if self.distributed_type not in (
            DistributedType.NO,
            DistributedType.MULTI_CPU,
            DistributedType.MULTI_GPU,
        ):
            raise UsageError(
                f"this Accelerator was set up for {self.distributed_type}, which spreads the model in its "
                "own way. Take the plugin out (accelerate config, or the arguments of Accelerator)."
            )

    # ---- replicas in place of processes ----

    @property
    def num_processes(self) -> int:
        """Number of replicas."""
        return sw.rdp_size()

    @property
    def process_index(self) -> int:
        """The replica of this rank."""
        return sw.rdp_rank()

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank: true for one process only."""
        return sw.rank() == sw.size() - 1

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """The part of this replica: all of its ranks have the same."""
        counts_replicas: Any = self
        part: AbstractContextManager[Any] = PartialState.split_between_processes(
            counts_replicas, inputs, apply_padding
        )
        return part

    # ---- preparing ----

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not isinstance(model, sw.DistributedModel):
            model = StepModel(
                model,
                accumulation=self.gradient_accumulation_steps,
                autocast=self.autocast,
                training_outputs=self._training_outputs,
                loss_reduction=self._loss_reduction,
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wraps an optimizer; each rank updates its own parameters."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = _Optimizer(sw.DistributedOptimizer(optimizer), self._models)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Has the scheduler count replicas, as data loaders do."""
        if not isinstance(scheduler, AcceleratedScheduler):
            scheduler = _Scheduler(
                scheduler,
                self._optimizers,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                split_batches=self.split_batches,
            )
        if scheduler not in self._schedulers:
            self._schedulers.append(scheduler)
        return scheduler

    # ---- training ----

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Changes nothing: gradients of several calls add up, each as the mean over the replicas."""
        return nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Takes note that gradients are wanted; the call of the model has computed them.

        Raises:
            UsageError: it is not the loss that the model has returned.
        """
        if not loss.requires_grad:
            raise UsageError(
                f"{user_line()}: accelerator.backward(loss) was given a loss that leads back to no "
                "parameter. One that was computed from outputs of the model does not: the backward has run "
                "inside the call of the model. Give the loss that the model returns, or compute yours in a "
                "function decorated with @sw.step that calls model.backward(loss)."
            )
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clips by the norm over all stages, at the last batch of an accumulation; returns the norm."""
        if not self.sync_gradients:
            return None
        return sw.clip_grad_norm_(list(parameters), max_norm, norm_type)

    # ---- numbers of all replicas ----

    def gather(self, tensor: Any) -> Any:
        """The tensors of all replicas, one after the other along dimension 0."""
        return recursively_apply(_gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What `gather` returns, without the samples that fill up the last batch; of objects, one list."""
        if not use_gather_object and _are_tensors(input_data):
            return super().gather_for_metrics(input_data)
        found = _objects_gathered(input_data)
        state = self.gradient_state
        cut = state.end_of_dataloader and state.remainder > 0 and isinstance(found, Sequence | Tensor)
        return found[: state.remainder] if cut else found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over the replicas."""
        return recursively_apply(_reduced, tensor, reduction, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last check: all ranks have to know."""
        found = torch.tensor(int(self.flag_tensor or 0), device=self.device)
        if sw.size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.flag_tensor = None
        return bool(found)

    def wait_for_everyone(self) -> None:
        sw.barrier()

    # ---- files ----

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module inside. Its weights are complete in `get_state_dict` alone."""
        inner = model.get_module() if isinstance(model, sw.DistributedModel) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model's state, under the names of the module inside; call it on all ranks."""
        return model.state_dict()

    def save_model(self, model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the whole model, with arguments as for `accelerate.Accelerator`; call it on all ranks."""
        super().save_model(_Whole(self.get_state_dict(model)), save_directory, *args, **kwargs)

    def save_state(self, output_dir: str | None = None, *_: Any, **__: Any) -> str:
        """Saves model, optimizers, schedulers and generators; call it on all ranks, between two steps.

        Args:
            output_dir: of its own for each state.

        Returns:
            The folder.
        """
        folder = self._folder(output_dir, "save_state")
        reporter = script_run().reporter
        with closing(self._checkpoints(folder)) as checkpoints:
            checkpoints.save(0 if reporter is None else reporter.num_steps)
        return folder

    def load_state(self, input_dir: str | None = None, *_: Any, **__: Any) -> None:
        """Loads what `save_state` has saved, before the first step; on any number of ranks."""
        folder = Path(self._folder(input_dir, "load_state"))
        if not CheckpointFolder(folder).commits():
            raise UsageError(_no_state(folder))
        with closing(self._checkpoints(str(folder))) as checkpoints:
            checkpoints.resume()

    def _checkpoints(self, folder: str) -> sw.Checkpoints:
        kinds = (("scheduler", self._schedulers), ("registered", self._custom_objects))
        state = {f"{kind}_{number}": each for kind, found in kinds for number, each in enumerate(found)}
        return sw.Checkpoints(Path(folder), state=state, asynchronous=False, signals=())

    def _folder(self, given: str | None, call: str) -> str:
        if given is None:
            raise UsageError(f'accelerator.{call}() needs a folder: accelerator.{call}("checkpoints/first").')
        return given


class _Whole(nn.Module):
    """Has the state of a whole model, where the model itself has no data of other ranks' layers."""

    def __init__(self, state: dict[str, Any]):
        super().__init__()
        self._state = state

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._state


class _Optimizer(AcceleratedOptimizer):
    """Steps at the last batch of an accumulation, once the loop has asked for the backward."""

    def __init__(self, optimizer: sw.DistributedOptimizer, models: list[nn.Module]):
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._models = models

    def step(self, closure: Any = None) -> None:
        self._refuse_waiting("optimizer.step() is called")
        super().step(closure)

    def zero_grad(self, set_to_none: bool | None = True) -> None:
        self._refuse_waiting("optimizer.zero_grad() is called")
        super().zero_grad(set_to_none)

    def _refuse_waiting(self, event: str) -> None:
        for model in self._models:
            if isinstance(model, StepModel):
                model.refuse_waiting(event)


class _Scheduler(AcceleratedScheduler):
    """A scheduler that steps once for each replica, as its script counts batches of one process."""

    def __init__(self, scheduler: Any, optimizers: Any, *, step_with_optimizer: bool, split_batches: bool):
        self._times = 1 if split_batches or not step_with_optimizer else sw.rdp_size()
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self._times):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises behind its last step
            if self._times == 1 or total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)


def _no_state(folder: Path) -> str:
    """The error for a folder without a state of ours."""
    message = f"accelerator.load_state({str(folder)!r}): no state of this Accelerator is there. "
    weights = next((path for path in _PLAIN_WEIGHTS if (folder / path).is_file()), None)
    if weights is None:
        return f"{message}accelerator.save_state({str(folder)!r}) makes one."
    load = "safetensors.torch.load_file" if weights.endswith(".safetensors") else "torch.load"
    return (
        f"{message}It was saved by plain Accelerate, in one process. Take its weights before prepare(): "
        f"model.load_state_dict({load}({str(folder / weights)!r})). Optimizers and schedulers begin anew."
    )


def _gathered(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor.contiguous() if tensor.dim() else tensor[None]
    if sw.rdp_size() == 1:
        return tensor
    found = [torch.empty_like(tensor) for _ in range(sw.rdp_size())]
    dist.all_gather(found, tensor, group=sw.get_dp_process_group())
    return torch.cat(found)


def _are_tensors(data: Any) -> bool:
    """Whether Accelerate gathers the data as tensors."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _objects_gathered(data: Any) -> Any:
    """The items of all replicas in one list; of one replica, as they are."""
    if sw.rdp_size() == 1:
        return data
    found = tell_all(data, group=sw.get_dp_process_group(), objects=True)
    return [item for items in found for item in items]


def _reduced(tensor: Tensor, reduction: str) -> Tensor:
    if reduction not in ("sum", "mean"):
        raise UsageError(f'accelerator.reduce(reduction="{reduction}"): only "sum" and "mean" are there.')
    total = tensor.detach().clone()
    if sw.rdp_size() > 1:
        dist.all_reduce(total, group=sw.get_dp_process_group())
    return total / sw.rdp_size() if reduction == "mean" else total
