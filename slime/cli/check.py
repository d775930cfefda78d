"""`slime check my.module:generate`: whether hooks keep their contracts; `slime check --arithmetic`: whether a
configuration and its hooks obey law 3. Both before it costs a run.

Contracts are slime/contracts. For the arithmetic the rollouts are synthetic and the model is tiny and random;
estimator, loss, corrections and hooks are the user's. Owns: the choice of what is checked, the words, and the
exit status. The check of the arithmetic itself is backends/torch/conformance.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config import Config, load_config
from slime.config.training_sections import CriticConfig, TrainConfig
from slime.config.validate import CHECKS_OF_FLAGS
from slime.contracts import check
from slime.rollout.hooks import check_hooks, load_hook
from slime.rollout.reward_shaping import shaped_rewards
from slime.train.rewards import total_reward
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.backends.base import Critic, Trainer
    from slime.backends.torch.conformance import Finding
    from slime.train.batch import TrainSample

_ADVANTAGES = (
    "make the advantages of a token depend on its rollout (rollout_ids, trained tokens), never on the "
    "number, length or order of rows",
    (
        "custom_reward_post_process_path",
        "custom_advantage_function_path",
        "rollout_data_postprocess_path",
    ),
)
_REMEDIES = {
    "advantages": _ADVANTAGES,
    "returns": _ADVANTAGES,
    "correction": (
        "let it depend on the sequences that it is given, each a whole rollout, never on their order",
        ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"),
    ),
}
"""First value that differs -> what to change, and the hooks that make it."""
_LOSS = (
    "let the loss be a sum over tokens in which each depends on its own values alone",
    ("custom_loss_function_path",),
)
_STILL = TrainConfig(lr=0.0, clip_grad=0.0, train_precision="float32", train_num_threads=1)
_RANDOM = "the same rows gave two results: take the randomness, or what is kept between calls, out"


def main(argv: list[str]) -> int:
    """Entry of the verb; returns 1 where a check failed."""
    if "--arithmetic" in argv:
        return check_arithmetic([word for word in argv if word != "--arithmetic"])
    return check(argv)


def check_arithmetic(rest: list[str]) -> int:
    """Check the arithmetic of these flags; returns 1 where it depends on how rollouts are cut."""
    config = load_config(rest, prog="slime check", checks=CHECKS_OF_FLAGS)
    check_hooks(config.args())
    failed = False
    for finding in findings(config):
        failed |= finding.verdict == "fail"
        print("\n".join(lines(finding, config)), flush=True)
    print("the arithmetic depends on how rollouts are cut or packed" if failed else "the arithmetic holds")
    return int(failed)


def findings(config: Config) -> Iterator[Finding]:
    """Every check of the configuration's arithmetic, on a random model.

    Raises:
        ConfigError: no rollout has a gradient, so that nothing can be compared.
        SlimeError: what training itself would raise.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from slime.backends.critic_update import CriticTraining
    from slime.backends.hooks import load_hooks
    from slime.backends.torch.conformance import check_invariance
    from slime.backends.torch.critic import TorchCritic
    from slime.backends.torch.tiny import VOCABULARY, write_tiny_model
    from slime.backends.torch.trainer import TorchTrainer
    from slime.backends.update import RolloutUpdate, train_on_rollouts
    from slime.train.synthetic import synthetic_rollouts

    algorithm, hooks = config.algorithm, load_hooks(config.args(), load_hook)
    samples = synthetic_rollouts(vocabulary=VOCABULARY)

    def train(trainer: Trainer, critic: Critic | None, rows: Sequence[TrainSample]) -> RolloutUpdate:
        return train_on_rollouts(
            trainer,
            _shaped(rows, config),
            algorithm=algorithm,
            rollouts_per_step=len(samples) // 2,
            hooks=hooks,
            critic=None if critic is None else CriticTraining(critic=critic),
        )

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        model = replace(config.model, hf_checkpoint=folder, ref_load=None)
        trainer = TorchTrainer(model, algorithm, _STILL, temperature=1.0, total_steps=1, hooks=hooks)
        critic = None
        if config.has_critic:
            clip = algorithm.value_clip
            critic = TorchCritic(model, CriticConfig(), _STILL, value_clip=clip, total_steps=1)
        yield from check_invariance(
            trainer,
            train,
            samples,
            critic=critic,
            shares_reward=algorithm.sibling_reward == "sum",
            depends_on_cut=_depends_on_cut(config),
        )


def lines(finding: Finding, config: Config) -> list[str]:
    """The finding as a person reads it."""
    verdict = "FAIL" if finding.verdict == "fail" else "ok"
    head = f"{verdict:<5} {finding.variation.name:<52} {finding.gap:8.1e}"
    if finding.verdict == "by definition":
        return [f"{head}  --loss-aggregation sample depends on the cut by definition"]
    if finding.verdict == "pass":
        return [head]
    return [head, f"      first: {finding.offender}", f"      change: {remedy(finding, config)}"]


def remedy(finding: Finding, config: Config) -> str:
    """What to change, naming the hooks of the configuration that can be the reason."""
    if finding.variation.is_repetition:
        return _RANDOM
    text, dests = _REMEDIES.get(finding.field or "", _LOSS)
    args = config.args()
    hooks = [
        f"--{dest.replace('_', '-')} {getattr(args, dest)}"
        for dest in dests
        if dest in args and getattr(args, dest)
    ]
    return f"{', '.join(hooks)}: {text}" if hooks else "none of your hooks makes it: report this as a bug"


def _shaped(rows: Sequence[TrainSample], config: Config) -> list[TrainSample]:
    """The rows with what ``--custom-reward-post-process-path`` makes of their rewards, if it is set."""
    voting = [row for row in rows if row.votes]
    rewards = shaped_rewards([_sample(row, config.reward.reward_key) for row in voting], config.args())
    if rewards is None:
        return list(rows)
    by_index = {row.index: reward for row, reward in zip(voting, rewards, strict=True)}
    return [replace(row, reward=by_index.get(row.index, row.reward)) for row in rows]


def _sample(row: TrainSample, reward_key: str | None) -> Sample:
    reward = total_reward(row.reward)
    return Sample(
        index=row.index,
        group_index=row.group_index,
        rollout_id=row.rollout_id,
        tokens=list(row.tokens),
        response_length=row.response_length,
        loss_mask=list(row.loss_mask),
        rollout_log_probs=list(row.rollout_log_probs or ()),
        reward={reward_key: reward} if reward_key else reward,
        status=Sample.Status.COMPLETED,
    )


def _depends_on_cut(config: Config) -> bool:
    return config.algorithm.loss_aggregation == "sample" and not config.algorithm.calculate_per_token_loss
