"""The train actors of a run: one process or several that hold one model together.

Invariant: a call reaches all of them, in the same order. Knows their names and how they meet; knows no flags
but the number of processes, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config import Config
from slime.config.plan import Plan

Calls = dict[str, Any]
"""References to the results of one call, by the name of the process."""


class TrainGroup:
    """All ranks of the trainer."""

    def __init__(self, config: Config, plan: Plan, make: Callable[..., Any]) -> None:
        """Make the actors.

        Args:
            make: makes and watches an actor: name, class path, threads, arguments of the class.
        """
        size = config.train.actor_num_gpus_per_node
        names = ["trainer"] if size == 1 else [f"trainer rank {rank} of {size}" for rank in range(size)]
        path = "slime.ray.train_actor.TrainActor"
        self._actors = {name: make(name, path, 2, config, plan, rank) for rank, name in enumerate(names)}

    @property
    def actors(self) -> list[Any]:
        """By rank."""
        return [*self._actors.values()]

    @property
    def first(self) -> Any:
        """The actor that speaks for all, and holds the weights for the engine."""
        return self.actors[0]

    def call(self, method: str, *arguments: Any) -> Calls:
        """Call a method of every rank."""
        import ray

        shared = [ray.put(argument) for argument in arguments]
        return {name: getattr(actor, method).remote(*shared) for name, actor in self._actors.items()}
