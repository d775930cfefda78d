"""verl's arithmetic beside slime's: its functions as they are, on the same tensors."""

from functools import partial

import torch
from arithmetic_batch import (
    CLIPS,
    ROLLOUTS,
    TOKENS,
    Row,
    advantages,
    corrections,
    loss_and_gradient,
    make_batch,
    returns,
)
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as helper
from verl.workers.config import FSDPActorConfig

from slime.train.corrections import CorrectionRule, Rejection, Weighting
from slime.train.kl import kl_estimate
from slime.train.value_loss import value_losses

BATCH = make_batch()
GIVEN = advantages(BATCH)
GAMMA, LAMBDA = 0.9, 0.8
GRPO, RLOO = verl.compute_grpo_outcome_advantage, verl.compute_rloo_outcome_advantage
VANILLA, KL = verl.compute_policy_loss_vanilla, verl.kl_penalty
WEIGHTS, REJECTION = helper.compute_rollout_correction_weights, helper.compute_rollout_rejection_mask
GAE, VALUE = verl.compute_gae_advantage_return, verl.compute_value_loss
PLUS, BASELINE = (
    verl.compute_reinforce_plus_plus_outcome_advantage,
    verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
)


def outcome(what, function, why=None, *, of=BATCH, theirs=None, **estimator):
    """Advantages from one reward a rollout."""

    def peer():
        options = {"index": of.groups.numpy()} | (theirs or {})
        return function(of.token_rewards(), of.mask, **options)[0]

    name = estimator.get("name", "grpo")
    return Row(what, name, function, partial(advantages, of, **estimator), peer, why)


def generalised(what, part, why=None, **estimator):
    """GAE: its advantages or its returns."""
    settings = {"name": "ppo", "gamma": GAMMA, "lambd": LAMBDA} | estimator

    def peer():
        found = GAE(BATCH.token_rewards(), BATCH.values, BATCH.mask, GAMMA, LAMBDA)
        return found[part] * BATCH.mask

    return Row(what, "ppo", GAE, partial((advantages, returns)[part], BATCH, **settings), peer, why)


def policy(what, function, aggregation, mode, *, bound=1e9, correction=None, **loss):
    """A policy loss and its gradient; `bound` is the dual clip's."""
    constant = TOKENS if aggregation == "constant" else None
    ours = partial(loss_and_gradient, BATCH, GIVEN, aggregation, constant, correction, **(CLIPS | loss))

    def peer():
        actor = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": ROLLOUTS}
        clips = {"clip_ratio_low": CLIPS["clip_low"], "clip_ratio_high": CLIPS["clip_high"]}
        config = FSDPActorConfig(**actor, **clips, clip_ratio_c=bound)
        log_probs = BATCH.log_probs.clone().requires_grad_()
        value, _ = function(BATCH.old, log_probs, GIVEN, BATCH.mask, mode, config, correction)
        value.backward()
        return torch.cat([value.detach()[None], log_probs.grad.flatten()])

    return Row(what, f"{loss.get('surrogate', 'ppo')}, {aggregation}", function, ours, peer)


def kl(what, kind, why=None, *, of=BATCH):
    """A KL estimator."""
    ours, peer = (partial(f, of.log_probs, of.ref, kind) for f in (kl_estimate, KL))
    return Row(what, kind, KL, ours, peer, why)


def weights(what, level, threshold, *, normalise=False, **weighting):
    """Importance weights of the gap between engine and trainer."""
    rule = CorrectionRule(weighting=Weighting(level=level, normalise=normalise, **weighting))

    def peer():
        return WEIGHTS(BATCH.old - BATCH.engine, BATCH.mask, level, threshold, normalise)[0]

    return Row(what, f"Weighting, {level}", WEIGHTS, partial(corrections, BATCH, rule), peer)


def rejection(what, option, low, high, why=None, *, level="token"):
    """What is left out for being too far from the engine."""
    rule = CorrectionRule(rejection=Rejection(level=level, low=low, high=high))

    def peer():
        kept, _ = REJECTION(BATCH.old - BATCH.engine, BATCH.mask, option, f"{low}_{high}")
        return kept * BATCH.mask

    return Row(what, f"Rejection, {level}", REJECTION, partial(corrections, BATCH, rule), peer, why)


def value_loss(what, factor, why=None):
    """The critic's loss, mean over tokens, times `factor`."""

    def ours():
        losses, _ = value_losses(BATCH.values, BATCH.old_values, BATCH.ref, clip=0.2)
        return factor * (losses * BATCH.mask).sum() / BATCH.mask.sum()

    def peer():
        return VALUE(BATCH.values, BATCH.ref, BATCH.old_values, BATCH.mask, 0.2)[0]

    return Row(what, "value_losses", VALUE, ours, peer, why)


def equal():
    """Where the definitions agree."""
    clipped = corrections(BATCH, CorrectionRule(weighting=Weighting(high=1.2)))
    plus = {"config": AlgoConfig(gamma=GAMMA)}
    return [
        outcome("advantages, GRPO", GRPO),
        outcome("advantages, Dr.GRPO", GRPO, theirs={"norm_adv_by_std_in_grpo": False}, scale_by_std=False),
        outcome("advantages, RLOO", RLOO, name="rloo"),
        outcome("advantages, REINFORCE++", PLUS, theirs=plus, name="reinforce_plus_plus", gamma=GAMMA),
        outcome("advantages, REINFORCE++ baseline", BASELINE, name="reinforce_plus_plus_baseline"),
        generalised("advantages, GAE, whitened", 0, whiten=True),
        generalised("returns, GAE", 1),
        *(kl(f"KL, {kind}", kind) for kind in ("k1", "k2", "low_var_kl")),
        policy("PPO clip, mean over tokens", VANILLA, "token", "token-mean"),
        policy("PPO clip, mean over rollouts", VANILLA, "rollout", "seq-mean-token-mean"),
        policy("PPO clip, sums over a constant", VANILLA, "constant", "seq-mean-token-sum-norm"),
        policy("dual clip", VANILLA, "token", "token-mean", bound=1.3, dual_clip=1.3),
        policy("GSPO", verl.compute_policy_loss_gspo, "rollout", "seq-mean-token-mean", surrogate="gspo"),
        policy("CISPO", verl.compute_policy_loss_cispo, "token", "token-mean", surrogate="cispo"),
        policy("PPO clip with TIS", VANILLA, "token", "token-mean", correction=clipped),
        weights("TIS of tokens", "token", 1.2, high=1.2),
        weights("TIS of sequences", "sequence", 1.5, high=1.5),
        weights("IcePop", "token", "0.7_1.3", mode="mask", low=0.7, high=1.3),
        weights("weights normalised over tokens", "token", 1.2, high=1.2, normalise=True),
        weights("weights normalised over sequences", "sequence", 1.5, high=1.5, normalise=True),
        rejection("rejection of tokens, bounds 1/c and c", "token_k1", 1 / 1.3, 1.3),
        rejection("rejection of sequences, 1/c and c", "seq_mean_k1", 1 / 1.1, 1.1, level="geometric"),
        value_loss("value loss, halved", 0.5),
    ]


def different():
    """Where they do not, and why."""
    alone = make_batch(groups=(0,) * 7 + (1,))
    siblings = make_batch(rollouts=(0, 0, 0, 1, 2, 3, 4, 5))
    rounded = make_batch(groups=(0,) * ROLLOUTS, reward=0.7)
    baseline = "alone in its group a rollout has no baseline: 0 here, its raw reward in verl"
    votes = "a rollout has one vote in its group's mean and deviation; in verl every row has one"
    exact = "means are exact here, so equal rewards give exactly 0; in verl rounding becomes a signal"
    whitens = "verl always whitens; here that is `--normalize-advantages`"
    clamps = "k3 is the estimator itself here, clamped at 10 it is low_var_kl; in verl both are clamped"
    inverse = "verl bounds the engine's probability over the trainer's; here it is the inverse, as in weights"
    half = "verl has a factor 1/2, which is the critic's learning rate's to make up for"
    return [
        outcome("advantages, GRPO, a rollout of three rows", GRPO, votes, of=siblings),
        outcome("advantages, GRPO, all rewards 0.7 in float32", GRPO, exact, of=rounded),
        outcome("advantages, GRPO, group of one", GRPO, baseline, of=alone),
        outcome("advantages, RLOO, group of one", RLOO, baseline, of=alone, name="rloo"),
        generalised("advantages, GAE", 0, whitens),
        kl("KL, k3, policies far apart", "k3", clamps, of=make_batch(spread=9.0)),
        rejection("rejection of tokens, other bounds", "token_k1", 0.9, 1.5, inverse),
        value_loss("value loss", 1.0, half),
    ]
