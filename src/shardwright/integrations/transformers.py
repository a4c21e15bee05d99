"""The Trainer of transformers 5, with the model spread by Shardwright.

The whole of ``compute_loss`` is the step function, so losses of your own, label smoothing and
``compute_loss_func`` run over stages as they are::

    training_step(inputs) ──► sw.step ──► each microbatch: compute_loss, backward of its share
    prediction_step(inputs) ► sw.step ──► each microbatch: compute_loss, logits
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import nested_detach

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.integrations.accelerate import Accelerator
from shardwright.integrations.step_model import backward_of, counted_labels
from shardwright.torch.batch.step_output import StepOutput
from shardwright.torch.pytorch.tree import map_tree

__all__ = ["Trainer"]

_STATE = "shardwright"
"""A folder in each checkpoint of the Trainer: optimizer, scheduler, and the generators of all ranks."""


class Trainer(transformers.Trainer):
    """`transformers.Trainer` over stages, shards, parts of layers and replicas.

    Takes the same arguments. Settings come from ``shardwright run --set``, or from a call of
    `shardwright.torch.init` before this. A batch of ``per_device_train_batch_size`` samples is that of one
    replica, however many ranks it has.

    Raises:
        UsageError: an argument asks for something that this trainer does not do.

    Example:
        ``from shardwright.integrations.transformers import Trainer`` in place of ``from transformers import
        Trainer``.
    """

    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any):
        self._accelerator_arguments: dict[str, Any] = {}
        self._train: Any = sw.step(self._train_microbatch)
        weighed = sw.step(non_split_inputs=["num_items"], loss_reduction="sum")
        self._train_weighed: Any = weighed(self._train_weighed_microbatch)
        self._predict: Any = sw.step(non_split_inputs=["num_items"])(self._predict_microbatch)
        super().__init__(*args, **kwargs)
        self._refuse_settings()

    # ---- what the Trainer asks before it trains ----

    def create_accelerator_and_postprocess(self) -> None:
        """Takes an `Accelerator` of ours in the place of that of accelerate."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self._accelerator_arguments)
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_arguments = arguments
        return arguments

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """The samples of one update: those of all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * sw.rdp_size())

    def store_flos(self) -> None:
        """Counts the work of each replica: all of its ranks share one."""
        before = self.state.total_flos
        super().store_flos()
        self.state.total_flos = before + (self.state.total_flos - before) * sw.rdp_size() / sw.size()

    # ---- a batch ----

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Runs a step: forward and backward of all microbatches, over all stages.

        Args:
            num_items_in_batch: labels that count in the batches of one update, of all replicas.

        Returns:
            The loss, as the Trainer logs it; one number.
        """
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self._is_weighed(num_items_in_batch):
            loss = self._train_weighed(model, inputs, num_items=num_items_in_batch).reduce_sum()
        else:
            has_items, is_scaled = num_items_in_batch is not None, self.loss_is_scaled_for_ga
            if is_scaled is None:
                is_scaled = self.compute_loss_func is not None
            batches = 1 if is_scaled else self.current_gradient_accumulation_steps
            loss = self._train(model, inputs, has_items=has_items, batches=batches).reduce_mean() / batches
        told: Tensor = loss.to(self.args.device)
        return told

    def _train_microbatch(self, model: Any, inputs: dict[str, Any], has_items: bool, batches: int) -> Tensor:
        return backward_of(model, self._loss(model, inputs, has_items), 1 / batches)

    def _train_weighed_microbatch(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        loss = self._loss(model, inputs, has_items=True)
        # Replicas add up, as a sum does; the Trainer wants the mean over them.
        return backward_of(model, loss * (self._num_items(inputs) / num_items), 1 / sw.rdp_size())

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates a batch over all stages; arguments and results as those of `transformers.Trainer`."""
        inputs = self._prepare_inputs(inputs)
        names = self.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        has_loss = has_labels or (not names and bool(inputs.get("return_loss", self.can_return_loss)))
        labels = nested_detach(tuple(inputs.get(name) for name in names)) if has_loss else None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        num_items = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        with torch.no_grad():
            loss, logits = self._predict(
                self._spread_model(),
                inputs,
                num_items=num_items,
                keys=(has_loss, prediction_loss_only, *ignore_keys),
            )
        if loss is not None:
            loss = loss.reduce_sum() if self._is_weighed(num_items) else loss.reduce_mean()
        if prediction_loss_only:
            return loss, None, None
        return loss, _alone(map_tree(_joined, logits)), _alone(labels)

    def _predict_microbatch(
        self, model: Any, inputs: dict[str, Any], num_items: Any, keys: Sequence[Any]
    ) -> tuple[Tensor | None, Any]:
        has_loss, loss_only, *ignored = keys
        loss = None
        if has_loss:
            loss, outputs = self._loss(model, inputs, num_items is not None, return_outputs=True)
            loss = loss.mean()
            if self._is_weighed(num_items):
                loss = loss * (self._num_items(inputs) / num_items)
        else:
            outputs = model(**inputs)
        if loss_only:
            return loss, None
        if isinstance(outputs, Mapping):
            left_out = (*ignored, "loss") if has_loss else ignored
            return loss, tuple(value for key, value in outputs.items() if key not in left_out)
        return loss, tuple(outputs[1:] if has_loss else outputs)

    def _loss(self, model: Any, inputs: dict[str, Any], has_items: bool, **options: Any) -> Any:
        """The mean loss of a microbatch: computed as that of a batch with its own items alone."""
        own = self._num_items(inputs) if has_items else None
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            return self.compute_loss(model, dict(inputs), num_items_in_batch=own, **options)

    def _is_weighed(self, num_items: Any) -> bool:
        """Whether microbatches are weighed by their labels here; else as the graph of their loss says."""
        return num_items is not None and self.loss_is_scaled_for_ga is not False

    def _num_items(self, inputs: Mapping[str, Any]) -> Tensor:
        """The labels of a microbatch that count; 1 where none does, since the loss is divided by it."""
        if "shift_labels" in inputs:
            return counted_labels(inputs["shift_labels"], shifted=False).clamp(min=1)
        return counted_labels(inputs["labels"], shifted=self._loss_shifts_labels).clamp(min=1)

    def _spread_model(self) -> sw.DistributedModel:
        if not isinstance(self.model_wrapped, sw.DistributedModel):
            self.model_wrapped = self.accelerator.prepare_model(self.model)
        model: sw.DistributedModel = self.model_wrapped
        return model

    # ---- files ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model for ``from_pretrained``; call it on all ranks."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self._save(folder, state_dict=_saved_state(self._spread_model()))
        sw.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with closing(self._checkpoints(output_dir)) as checkpoints:
            checkpoints.save(self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leaves the weights to `_load_optimizer_and_scheduler`, which has all of the run."""
        if not (Path(resume_from_checkpoint) / _STATE).is_dir():
            raise UsageError(
                f"{resume_from_checkpoint} has no folder {_STATE}: a plain Trainer has saved it, or it was "
                "saved with save_only_model. To begin with its weights alone, make the model by "
                f'from_pretrained("{resume_from_checkpoint}") and train without resume_from_checkpoint.'
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with closing(self._checkpoints(checkpoint)) as checkpoints:
                checkpoints.resume()

    def _load_best_model(self) -> None:
        from safetensors.torch import load_file

        folder, model = Path(str(self.state.best_model_checkpoint)), self._spread_model()
        files = sorted(folder.glob("model*.safetensors"))
        adapter = folder / "adapter_model.safetensors"
        if adapter.is_file():
            from shardwright.integrations.peft import load_adapter

            load_adapter(model, folder)
            return
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if not state:
            raise UsageError(
                f"load_best_model_at_end: {folder} has neither model*.safetensors nor {adapter.name}. Save "
                "checkpoints in these formats, or load the best one yourself."
            )
        model.load_state_dict(state, strict=False)  # tied weights are there once

    def _checkpoints(self, folder: str) -> sw.Checkpoints:
        """Of one checkpoint of the Trainer, which keeps and removes them itself."""
        return sw.Checkpoints(
            Path(folder) / _STATE,
            state={"scheduler": self.lr_scheduler},
            asynchronous=False,
            signals=(),
        )

    def _refuse_settings(self) -> None:
        args = self.args
        for asked, what, remedy in (
            (args.fp16, "fp16", 'bf16, or the setting "fp16" of sw.init'),
            (args.torch_compile, "torch_compile", "model.compile() before the Trainer is made"),
            (args.auto_find_batch_size, "auto_find_batch_size", "a batch size that fits"),
            (args.deepspeed, "deepspeed", "the settings of sw.init"),
            (args.fsdp, "fsdp", 'the setting "sharded_data_parallel_degree" of sw.init'),
        ):
            if asked:
                raise UsageError(
                    f"TrainingArguments({what}=...) does not go with this Trainer. Use {remedy}."
                )


def _saved_state(model: sw.DistributedModel) -> dict[str, Any]:
    """The whole model's state, with one tensor for the names of one parameter; of adapters, theirs alone."""
    if hasattr(model.get_module(), "peft_config"):
        from shardwright.integrations.peft import adapter_state

        return adapter_state(model)
    state = model.state_dict()
    first: dict[int, str] = {}
    for name, parameter in model.get_module().named_parameters(remove_duplicate=False):
        state[name] = state[first.setdefault(id(parameter), name)]
    return state


def _joined(item: Any) -> Any:
    """One tensor for the batch from those of its microbatches."""
    if isinstance(item, StepOutput):
        return item.concat() if item[0].dim() else item.reduce_mean()
    return item


def _alone(values: Any) -> Any:
    """The Trainer takes a tuple of one value for the value."""
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values
