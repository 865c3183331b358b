"""The summed loss of a batch, for the in-tree transformer and for any causal language model of Hugging Face.

The in-tree head computes its loss itself. For other models, the forward of the output projection is replaced while the
loss is computed. It returns the chunked cross-entropy, and the model returns that as its `logits`; the real logits
never exist as a whole. This is correct only if the model does not change logits after the projection (soft capping,
scale, bias). A trial on the meta device tests it: the body is replaced, the projection returns a marker tensor, and the
model must return the same object. All other models take the plain path, through their logits.

Position ids that start at 0 again isolate the documents of a row: most architectures make their attention mask from
them. A similar trial tests whether a model does; otherwise isolation is refused.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import ConfigurationError, StateError
from ..data.samples import Batch
from ..loss import USUAL_CHUNKS, Chunks, Reduction, chunked_cross_entropy

_KEY = "_shardwise_loss_path"


@dataclass(frozen=True, slots=True)
class LossPath:
    how: Literal["in-tree", "chunked", "plain"]  # the three ways at the top of this file
    isolates: bool  # documents of a row can be isolated
    chunks: Chunks = USUAL_CHUNKS


def loss_sum(model: Any, batch: Batch) -> Tensor:
    """Return the cross-entropy, summed over the targets of the batch, in fp32. The model is called once."""
    return losses(model, batch, "sum")


def losses(model: Any, batch: Batch, reduction: Reduction) -> Tensor:
    """Return the cross-entropy in fp32: summed, or of each target, with 0 elsewhere (`reduction` "none")."""
    path = path_of(model)
    if path.how == "in-tree":
        return model(batch.tokens, batch.targets, batch.positions, reduction, path.chunks)
    inputs = {"input_ids": batch.tokens}
    if batch.positions is not None:
        if not path.isolates:
            raise ConfigurationError(
                f"isolate_documents: the attention of {model.config.model_type} cannot isolate documents: use "
                "packing 'padded', or isolate_documents false"
            )
        inputs["position_ids"] = batch.positions
    if path.how == "chunked":
        head = _head_of(model)

        def loss_of(hidden: Tensor) -> Tensor:
            return chunked_cross_entropy(hidden, head.weight, batch.targets, reduction=reduction, chunks=path.chunks)

        with _forward_replaced(head, loss_of), _documents_known(batch, path):
            return model(**inputs).logits
    with _documents_known(batch, path):
        logits = model(**inputs).logits
    found = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction=reduction)
    return found.view_as(batch.targets) if reduction == "none" else found


def path_of(model: nn.Module) -> LossPath:
    path = model.__dict__.get(_KEY)
    if path is None:
        raise StateError(f"this {type(model).__name__} was not made by build(): its loss path is unknown")
    return path


def set_path(model: nn.Module, path: LossPath) -> None:
    model.__dict__[_KEY] = path


def find_path(model: Any) -> LossPath:
    """Find the path for a Hugging Face model on the meta device, by trials."""
    return LossPath("chunked" if _returns_head_output_unchanged(model) else "plain", _isolates_documents(model))


def _head_of(model: Any) -> Any:
    """Return the module that computes the logits. If adapters train a copy of the head, it is that copy."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if copies is None:
        return head
    return head.original_module if head.disable_adapters else copies[head.active_adapters[0]]


def has_plain_head(model: Any) -> bool:
    head = _head_of(model)
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head.bias is None


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a forward for a time. Hooks still run, so the engine still gathers. It may have set a forward, too."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before


@contextmanager
def _documents_known(batch: Batch, path: LossPath) -> Iterator[None]:
    """Keep transformers from searching the position ids for documents if there are none: on a GPU, the host would wait
    for the result, and so for the backward before it."""
    if batch.positions is not None or not path.isolates:
        yield
        return
    with _document_search(lambda _: None):
        yield


@contextmanager
def _document_search(search: Any) -> Iterator[None]:
    """Replace the function of transformers that finds the documents of a row in its position ids."""
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = search
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


class _Body(tuple[Tensor, ...]):
    """Stands for the output of any model's body. It has hidden states; every other attribute is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _returns_head_output_unchanged(model: Any) -> bool:
    body = model.base_model
    if body is model or not has_plain_head(model):
        return False
    head = _head_of(model)
    hidden = torch.empty(2, 3, head.in_features, dtype=head.weight.dtype, device="meta")
    mark = torch.empty((), dtype=torch.float32, device="meta")
    shapes = []

    def projection(states: Tensor) -> Tensor:
        shapes.append(states.shape)
        return mark

    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with _forward_replaced(body, lambda *_, **__: _Body((hidden,))), _forward_replaced(head, projection):
        try:
            output = model(input_ids=tokens)
        except Exception:  # noqa: BLE001  an architecture that fails here cannot use this path
            return False
    return output.logits is mark and shapes == [hidden.shape]


class _MaskIsMade(BaseException):
    """Ends the trial when the model makes its mask. Not an error."""


def _isolates_documents(model: Any) -> bool:
    """Return True if position ids reach the function that finds documents, and the model has no recurrent state."""
    if getattr(model, "_is_stateful", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return False

    def stop(*_: Any, **__: Any) -> None:
        raise _MaskIsMade

    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with _document_search(stop):
            model(input_ids=tokens, position_ids=tokens)
    except _MaskIsMade:
        return True
    except Exception:  # noqa: BLE001  it cannot run on the meta device up to its mask
        return False
    return False
