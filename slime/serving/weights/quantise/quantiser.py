"""`quantiser_of`: outgoing weights in the form in which the engine's checkpoint holds them.

Invariant: what comes out has the names, dtypes and layouts of that checkpoint, so an engine that loaded it
takes them. Where the names of its tensors are known, they decide what is quantised; else what its config
lists. Knows neither trainers nor transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from torch import Tensor

from slime.errors import ModelError
from slime.serving.weights.quantise.names import WEIGHT, parts_of, quantise_weight
from slime.serving.weights.quantise.scheme import Quantisation, Scheme, is_linear, quantisation_of

Quantiser: TypeAlias = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Name and tensor of a weight -> names and tensors as they are stored."""


def quantiser_of(hf_config: Mapping[str, Any], names: AbstractSet[str] | None = None) -> Quantiser:
    """The function that turns a weight into what is stored of it; the identity without quantization_config.

    It raises ModelError, naming the weight, for one that is not finite, or that its scheme cannot hold.
    Tensors on the meta device come out on it, with the stored names, shapes and dtypes.

    Args:
        hf_config: what the checkpoint's config.json holds.
        names: the names of its tensors, if they are known (`WeightFolder.names`); a set.

    Raises:
        ModelError: a method or an option that is not supported, naming those that are.
    """
    quantisation = quantisation_of(hf_config)
    if quantisation is None:
        return _unchanged

    def quantised(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        scheme = scheme_of(name, tensor.shape, quantisation, names)
        if scheme is None:
            yield name, tensor
        else:
            yield from quantise_weight(name, tensor.detach(), scheme)

    return quantised


def scheme_of(
    name: str, shape: Sequence[int], quantisation: Quantisation, names: AbstractSet[str] | None
) -> Scheme | None:
    """How the weight of this name is stored; None is as it is.

    Raises:
        ModelError: experts in one tensor, which checkpoints store apart.
    """
    if not name.endswith(WEIGHT):
        if len(shape) == 3 and ".experts." in name:
            raise ModelError(
                "holds all experts of a layer, which quantised checkpoints store one by one",
                place=name,
                remedy="send the weights under the checkpoint's names",
            )
        return None
    module, sizes = name.removesuffix(WEIGHT), tuple(shape)
    linear = is_linear(module, sizes)
    listed = quantisation.scheme_of(module, linear=linear)
    if names is None:
        return listed if linear else None
    schemes = [listed] if listed else [rule.scheme for rule in quantisation.rules]
    return next((s for s in schemes if all(part in names for part in parts_of(name, s))), None)


def _unchanged(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor
