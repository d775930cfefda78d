"""`Parking`: tensors whose bytes are on the host while others need the device.

Invariant: a tensor that comes back has the bits that it had, in the storage object that it had, so views and
shards of it are what they were. (Only memory that was a file's is first replaced by a copy.) Meanwhile the
storage is empty: nothing may compute with it. Knows storages; knows no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from slime.backends.torch.sharding import own


class Parking:
    """Storages that were emptied, each with its bytes."""

    def __init__(self) -> None:
        self._parked: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of these tensors from their device; those on the host stay where they are."""
        for tensor in map(own, tensors):
            if on_host(tensor) or tensor.untyped_storage()._cdata in self._parked or not tensor.numel():
                continue
            storage = _own_storage(tensor)
            source = _bytes(storage)
            content = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
            content.copy_(source)
            storage.resize_(0)
            self._parked[storage._cdata] = storage, content

    def restore(self) -> None:
        """Bring all storages back."""
        for key in list(self._parked):
            self._restore(key)

    @contextmanager
    def lent(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Bring the storages of these tensors back for a while, if they are away."""
        keys = ((tensor, own(tensor).untyped_storage()._cdata) for tensor in tensors)
        away = {key: tensor for tensor, key in keys if key in self._parked}
        for key in away:
            self._restore(key)
        try:
            yield
        finally:
            self.park(away.values())

    def _restore(self, key: int) -> None:
        storage, content = self._parked[key]
        storage.resize_(content.numel())
        _bytes(storage).copy_(content)
        del self._parked[key]


def on_host(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to take from a device."""
    return tensor.device.type == "cpu"


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A storage that can be emptied; memory of a file, which cannot, is left for a copy."""
    if not tensor.untyped_storage().resizable():
        with torch.no_grad():
            tensor.set_(tensor.clone())  # type: ignore[call-overload]
    return tensor.untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
