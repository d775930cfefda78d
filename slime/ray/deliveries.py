"""`Deliveries`: the trainer gives its weights to engines, and engines that are lost are replaced with them.

Invariant: an engine joins its pool only with the version that the trainer has. Runs in the driver's process;
decides nothing of when.
"""

from __future__ import annotations

from slime.errors import EngineError
from slime.ray.delivery import Delivery
from slime.ray.engine_pool import EnginePool
from slime.ray.serving import ROLLOUT, ServingPlan
from slime.ray.supervision import Supervisor
from slime.ray.train_group import TrainGroup
from slime.serving.endpoint import EngineEndpoint
from slime.serving.weights.sync import UpdatePause, UpdateReport

CAUSE_SECONDS = 5.0
"""What the death of an engine gets to show after a call to it failed."""
REPORT_SECONDS = 30.0
"""What a weight update gets beyond its deadline to tell which engines failed."""


class Deliveries:
    """Weights on their way.

    Attributes:
        version: of the policy that the trainer has.
    """

    def __init__(
        self,
        serving: ServingPlan,
        pool: EnginePool | None,
        trainer: TrainGroup | None,
        supervisor: Supervisor,
    ) -> None:
        """`pool`: of the engines that rollouts ask; None without any. `trainer`: None where none trains."""
        self._serving, self._pool, self._trainer, self._supervisor = serving, pool, trainer, supervisor
        self.version = 0

    def deliver(
        self,
        pool: str,
        endpoints: tuple[EngineEndpoint, ...],
        version: int,
        pause: UpdatePause,
        *,
        released: bool = False,
    ) -> UpdateReport:
        """Let the trainer give its weights to engines.

        Args:
            pool: name of their pool.
            released: they gave up memory before.

        Raises:
            DeadlineError: the trainer did not report in time.
        """
        assert self._trainer is not None
        delivery = Delivery(
            way=self._serving.way(pool),
            endpoints=endpoints,
            version=version,
            pause=pause,
            released=released,
        )
        seconds = self._serving.config.run.update_timeout + REPORT_SECONDS
        calls = self._trainer.call("deliver", delivery)
        reports = self._supervisor.wait_all("weight update", calls, seconds, flag="--update-timeout")
        first: UpdateReport = reports[0]
        return first

    def mend(self) -> None:
        """Replace the engines that are lost, with the weights that the trainer has; it does nothing else
        meanwhile.

        Raises:
            EngineError: one was replaced as often as it may be.
        """
        pool = self._pool
        while pool is not None and pool.lost:
            fresh = pool.replace()
            self._supervisor.raise_if_dead(0.0)
            report = UpdateReport(metrics={})
            if self._trainer is not None:
                report = self.deliver(ROLLOUT, fresh, self.version, "abort")
            for endpoint in fresh:
                if endpoint.name not in report.failed:
                    pool.join(endpoint)
            self.leave_out(report)

    def leave_out(self, report: UpdateReport) -> None:
        """Engines that did not take the weights are lost, where engines are replaced; else the run ends.

        Raises:
            EngineError, ActorDiedError: see `raise_failures`.
        """
        assert self._pool is not None
        if not self._serving.config.serving.use_fault_tolerance:
            self.raise_failures(report)
        for name, reason in report.failed.items():
            self._pool.lose(name, f"weight update: {reason}")

    def raise_failures(self, report: UpdateReport) -> None:
        """Raise what kept engines from taking weights.

        Raises:
            ActorDiedError: an engine died.
            EngineError: one failed otherwise.
        """
        if report.failed:
            self._supervisor.raise_if_dead(CAUSE_SECONDS)
            name, reason = next(iter(report.failed.items()))
            raise EngineError(f"weight update: {reason}", place=f"engine {name}")
