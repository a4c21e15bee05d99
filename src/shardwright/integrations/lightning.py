"""A strategy for Lightning: ``Trainer(strategy=ShardwrightStrategy())``, or ``strategy="shardwright"``.

The whole ``training_step`` of a LightningModule is the step function. What it logs goes the way of its
outputs: each microbatch tells its values, and Lightning is told their mean::

    training_step(batch) ──► sw.step ──► each microbatch: training_step, backward of its loss
                                └──────► self.log(name, mean over the microbatches)
"""

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.integrations.step_model import backward_of, is_factor, own_loss
from shardwright.run.context import context
from shardwright.torch.batch.step_output import StepOutput
from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.startup import script_run

__all__ = ["ShardwrightStrategy"]

_logged: ContextVar[dict[str, Tensor]] = ContextVar("logged")
"""What the microbatch that is running has logged: each is a coroutine, with a context of its own."""


@contextmanager
def log_of_microbatch() -> Iterator[dict[str, Tensor]]:
    """Yields what the microbatch that runs inside logs, by name."""
    logged: dict[str, Tensor] = {}
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        with suppress(ValueError):  # a microbatch that is ended from outside is closed in another context
            _logged.reset(token)


@contextmanager
def options_of_logs(module: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """Has ``self.log`` of a module note what microbatches tell it."""
    options: dict[str, dict[str, Any]] = {}

    def log(name: str, value: Any, **given: Any) -> None:
        if not isinstance(value, Tensor | int | float):
            raise UsageError(
                f'self.log("{name}", ...) was given a {type(value).__name__}, which would see one '
                "microbatch after the other, on one rank. Log a tensor with one number, or update "
                "metrics in on_train_batch_end or on_validation_batch_end, from what the step returns."
            )
        options[name] = given
        _logged.get()[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))

    module.log = log
    try:
        yield options
    finally:
        del module.log


class ShardwrightStrategy(ParallelStrategy):
    """Trains a LightningModule over stages, shards, parts of layers and replicas.

    The ranks are those of the launcher: ``shardwright run -n 4 train.py``, torchrun, Slurm or MPI. A batch of
    the data loader is that of one replica, however many ranks it has.

    Args:
        config: settings, a plan, or the path of a plan file, as for `shardwright.torch.init`.
        loss_reduction: what the loss of a training step is, as for `shardwright.torch.step`.
        **kwargs: as for `lightning.pytorch.strategies.ParallelStrategy`.

    Example:
        ``lightning.Trainer(strategy=ShardwrightStrategy({"pipeline_parallel_degree": 2}))``
    """

    strategy_name = "shardwright"
    optimizers: Any

    def __init__(self, config: Any = None, *, loss_reduction: Any = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._config = config
        self._loss_reduction = loss_reduction
        self._steps: dict[str, Callable[..., Any]] = {}
        self._gradients_are_new = False

    # ---- ranks ----

    def _configure_launcher(self) -> None:
        """Starts no processes: the launcher has."""

    def setup_environment(self) -> None:
        """Joins the ranks."""
        if not sw.is_initialized():
            sw.init(self._config)
        rank_zero_only.rank = sw.rank()
        super().setup_environment()

    @property
    def root_device(self) -> torch.device:
        return context().device if sw.is_initialized() else torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """Whether replicas need data of their own."""
        return sw.is_initialized() and sw.rdp_size() > 1

    @property
    def global_rank(self) -> int:
        return sw.rank() if sw.is_initialized() else super().global_rank

    @property
    def local_rank(self) -> int:
        return sw.local_rank() if sw.is_initialized() else super().local_rank

    @property
    def world_size(self) -> int:
        return sw.size() if sw.is_initialized() else super().world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The part of the data that this replica reads."""
        return {"num_replicas": sw.rdp_size(), "rank": sw.rdp_rank()}

    # ---- model and optimizers ----

    def setup(self, trainer: lightning.Trainer) -> None:
        """Wraps the module and its optimizers."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        _refuse(trainer, module)
        self.accelerator.setup(trainer)
        self.model = _spread(module)
        names = ("training_step", "validation_step", "test_step", "predict_step")
        self._steps = {name: self._step_of(getattr(module, name)) for name in names}
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.optimizers = [_Optimizer(optimizer, self) for optimizer in self.optimizers]
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Leaves that to `DistributedModel`."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step: forward and backward of all microbatches, over all stages."""
        trainer = self._trainer()
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        output, loss = self._run("training_step", args, kwargs)
        if loss is None:
            return None
        self._gradients_are_new = True
        value = own_loss(loss.reduce_mean(), self._backward_asked)
        if isinstance(output, Mapping):
            return {**output, "loss": value}
        return value

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a batch over all stages."""
        return self._run("validation_step", args, kwargs)[0]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test_step", args, kwargs)[0]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict_step", args, kwargs)[0]

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Notes that Lightning is where gradients are wanted; the step has computed them."""
        torch.autograd.backward(closure_loss)
        return closure_loss

    # ---- numbers of all ranks ----

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum, maximum or minimum of a number over the replicas."""
        if not isinstance(tensor, Tensor) or sw.rdp_size() == 1:
            return tensor
        total, name = tensor.detach().clone(), str(reduce_op).upper().rpartition(".")[2]
        is_mean = name in ("MEAN", "AVG")
        op = dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, name)
        dist.all_reduce(total, op=op, group=sw.get_dp_process_group())
        return total / sw.rdp_size() if is_mean else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or some rank, decide so."""
        if sw.size() == 1:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all replicas, along a new first dimension."""
        found = [torch.empty_like(tensor) for _ in range(sw.rdp_size())]
        if len(found) == 1:
            return tensor[None]
        dist.all_gather(found, tensor.detach().contiguous(), group=sw.get_dp_process_group())
        return torch.stack(found)

    def barrier(self, name: str | None = None) -> None:
        if sw.is_initialized():
            sw.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives all ranks what the first has: text, numbers, lists and dictionaries of them.

        Raises:
            UsageError: it is to come from another rank.
        """
        if src:
            raise UsageError(
                f"strategy.broadcast(src={src}): only the first rank's values can be sent. Use src=0."
            )
        return context().from_first_rank(lambda: obj)

    # ---- files ----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: states are loaded into the wrapped model."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model, under the names of the LightningModule; collective."""
        assert isinstance(self.model, sw.DistributedModel)
        return self.model.state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the whole model; each rank takes its share."""
        assert isinstance(self.model, sw.DistributedModel)
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Says where the state is: no rank has all of it, and `save_checkpoint` writes it elsewhere."""
        return {"in": "the folder beside this file"}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes Lightning's file, and the optimizers beside it, in a folder of the same name."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if "optimizer_states" in checkpoint:
            with closing(_checkpoints(filepath)) as checkpoints:
                checkpoints.save(self._trainer().global_step)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers from the folder beside Lightning's file."""
        path = self._trainer().ckpt_path
        folder = _beside(path)
        if not folder.is_dir():
            raise UsageError(
                f"{path} was not saved by this strategy: there is no folder {folder.name} beside it, so the "
                "state of the optimizers is not there. Load the weights alone: "
                "LightningModule.load_from_checkpoint(path)."
            )
        with closing(_checkpoints(path)) as checkpoints:
            checkpoints.resume()

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def teardown(self) -> None:
        """Leaves the model where it is."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- inside ----

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one of the module's steps on a batch, and logs what it has logged."""
        plugin = self.precision_plugin
        with (
            plugin.train_step_context() if name == "training_step" else plugin.val_step_context(),
            options_of_logs(self.lightning_module) as options,
        ):
            result, loss, logged = self._steps[name](*args, **kwargs)
        for key, values in logged.items():
            self.lightning_module.log(key, values.reduce_mean(), **options[key])
        return map_tree(_joined, result), loss

    def _step_of(self, method: Callable[..., Any]) -> Any:
        """One of the module's steps as a step function, which returns its result, loss, and what it logs."""

        @functools.wraps(method)
        def microbatch(*args: Any, **kwargs: Any) -> tuple[Any, Tensor | None, dict[str, Tensor]]:
            with log_of_microbatch() as logged:
                output = method(*args, **kwargs)
            if method.__name__ != "training_step":
                return output, None, logged
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:
                return None, None, logged
            rest = (
                {key: item for key, item in output.items() if key != "loss"} if output is not loss else None
            )
            return rest, backward_of(self.model, loss, 1 / self._trainer().accumulate_grad_batches), logged

        return sw.step(loss_reduction=self._loss_reduction)(microbatch)

    def _backward_asked(self, factor: Tensor) -> None:
        wanted = 1 / self._trainer().accumulate_grad_batches
        if not is_factor(factor, wanted):
            raise UsageError(
                f"the loss was multiplied by {float(factor):g} between training_step and its backward, and "
                f"not by {wanted:g}. The gradients are there already: multiply the loss in training_step."
            )

    def gradients_are_new(self) -> bool:
        """Whether a step has left gradients that no update has used, so that `zero_grad` must leave them."""
        return self._gradients_are_new

    def updated(self) -> None:
        """An optimizer has used the gradients."""
        self._gradients_are_new = False

    def _trainer(self) -> lightning.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class _Optimizer(sw.DistributedOptimizer):
    """An optimizer as Lightning calls it: a closure runs the step, then clears gradients and asks for them.

    The step has left its gradients by then, and has cleared older ones itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: ShardwrightStrategy):
        super().__init__(optimizer)
        self._strategy = strategy

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the closure, and updates."""
        loss = None if closure is None else closure()
        super().step()
        self._strategy.updated()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, unless they are those of the step that Lightning has just run."""
        if not self._strategy.gradients_are_new():
            super().zero_grad(set_to_none)


def _spread(module: lightning.LightningModule) -> sw.DistributedModel:
    """The wrapped module: that of an earlier `fit` or `test`, if there was one."""
    model = script_run().model
    if model is not None and model.get_module() is module:
        return model
    return sw.DistributedModel(module)


def _refuse(trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
    plugin = trainer.strategy.precision_plugin
    if not module.automatic_optimization:
        raise UsageError(
            "automatic_optimization is False: a training_step that calls its optimizers cannot be cut into "
            "microbatches. Let Lightning call them, or write the loop with @sw.step."
        )
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise UsageError(
            'precision="16-mixed" does not go with this strategy. Use "bf16-mixed", or the setting "fp16" of '
            "ShardwrightStrategy, whose loss scale knows all ranks."
        )


def _beside(path: Any) -> Path:
    return Path(f"{path}.shardwright")


def _checkpoints(path: Any) -> sw.Checkpoints:
    return sw.Checkpoints(_beside(path), keep=1, asynchronous=False, signals=())


def _joined(item: Any) -> Any:
    """One tensor for the batch from those of its microbatches."""
    if isinstance(item, StepOutput):
        return item.concat() if item[0].dim() else item.reduce_mean()
    return item


StrategyRegistry.register(
    "shardwright", ShardwrightStrategy, description="Shardwright's stages, shards and replicas"
)
