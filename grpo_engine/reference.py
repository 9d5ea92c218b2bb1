"""A reference that follows the policy is refused before the first step, by what it computes with.

A figure can't tell: in bfloat16 the KL of a sound run is exactly 0 while updates are rounded away.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import UserError
from .resume import probe

IDS = (0, 1, 2, 3)  # any tokens: it counts which weights are read, not what comes out


def check_reference(
    trained: Iterable[tuple[str, Tensor]],
    reference: Callable[[], AbstractContextManager[nn.Module]],
) -> None:
    """Raises UserError, naming it, if the reference reads the memory of a tensor that is trained.

    trained: by name. reference: the context in which the yielded model computes the reference.
    """
    with reference() as model, _Read() as read:
        probe(model, IDS)
    found = [name for name, tensor in trained if read.any_of(tensor)]
    if found:
        more = f" and {len(found) - 1} others" if len(found) > 1 else ""
        raise UserError(
            f"the reference of the KL would follow the policy: it computes with {found[0]}{more}, "
            "which is trained; set model.reference to a model that stays as it is, or loss.beta 0"
        )


class _Read(TorchDispatchMode):
    """Notes where the tensors lie that operations take."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        self._addresses.update(leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **kwargs)

    def any_of(self, tensor: Tensor) -> bool:
        """Whether `tensor`, or a part of it, was among them."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= address < end for address in self._addresses)
