"""From gradients of micro batches to the gradients of the step: pending sums, tied copies, the norm over all ranks.

The loss is normalised by the number of tokens of the whole step before the backward, so every reduction here is a plain sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.collectives.counter import record
from shardwise.parallel.build import ParallelModel


def local(x: Tensor) -> Tensor:
    """The rows of this rank, of a parameter or gradient that FSDP shards."""
    return x.to_local() if isinstance(x, DTensor) else x


def gradient(parameter: nn.Parameter) -> Tensor:
    """The local gradient; zeros where nothing reached the parameter (an expert without tokens)."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return local(parameter.grad)


def sum_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum over ranks in place, as one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            by_dtype[tensor.dtype].append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        record("all_reduce", group, 2 * (group.size() - 1) * flat.numel() * flat.element_size() // group.size())
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))


def finish(model: ParallelModel) -> None:
    """All sums but the data parallel one. Communication: one all-reduce per tensor parallel or shared-head group, one for tied weights."""
    pending: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for parameter, held in model.parameters:
        for group in held.pending:
            pending[group].append(gradient(parameter))
    for group, grads in pending.items():
        sum_flat(grads, group)
    _tie(model)


def _tie(model: ParallelModel) -> None:
    """The embedding of the first stage and the output weight of the last are one weight: both copies get the sum of both gradients."""
    grads = [gradient(parameter) for parameter in tied_copies(model)]
    if len(grads) == 2:
        total = grads[0] + grads[1]
        for grad in grads:
            grad.copy_(total)
    elif grads:
        assert model.topology.ends.group is not None
        sum_flat(grads, model.topology.ends.group)


def tied_copies(model: ParallelModel) -> list[nn.Parameter]:
    """This rank's copies of a weight whose other copy is on another stage: two where both ends of a folded pipeline are here."""
    name = next((held.name for _, held in model.parameters if not held.counted), None)
    first = model.topology.ends.group is not None and model.config.get_text_config().tie_word_embeddings and not _folded(model)
    if name is None and first:
        name = _embedding(model)
    return [parameter for parameter, held in model.parameters if held.name == name]


def _folded(model: ParallelModel) -> bool:
    return model.topology.layout.schedule in ("zbv", "dualpipev")


def _embedding(model: ParallelModel) -> str:
    stage = next(iter(model.stages.values()))
    weight = stage.model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in stage.model.named_modules() if module is weight)


def squared_norm(model: ParallelModel, grads: Iterable[tuple[Tensor, int, bool]]) -> Tensor:
    """Sum of squares over the whole model. grads: local gradient, ranks of the world that hold the same elements, whether it counts.

    Communication: one all-reduce of a number over the world.
    """
    total = torch.zeros((), dtype=torch.float32, device=next(iter(model.parameters))[0].device)
    for grad, copies, counted in grads:
        if counted and grad.numel():
            total += grad.float().square().sum() / copies
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total
