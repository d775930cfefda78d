"""Checks across flags: contradictory, unused, cannot learn, missing files.

Each check is one small function that yields problems; all problems of a configuration are reported together.
Runs before a model loads; knows nothing of torch, engines or hooks' contents.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.asynchrony import asynchrony
from slime.config.device_sharing import devices
from slime.config.engine_choice import engine_installed
from slime.config.experts import experts
from slime.config.plan import rollouts_per_optimizer_step
from slime.config.problem import Check, Problem, dashed, listed
from slime.config.unused import takes_groups, unused
from slime.config.weight_movement import weight_movement
from slime.errors import ConfigError

if TYPE_CHECKING:
    from slime.config import Config


_SCATTER_SESSIONS = ("random", "round_robin", "power_of_two")
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
_MAY_ASK_A_TEACHER = (
    "rollout_sample_hook_path",
    "custom_rm_path",
    "custom_generate_function_path",
    "rollout_function_path",
)


def validate(config: Config, given: frozenset[str], checks: Sequence[Check] | None = None) -> list[Problem]:
    """Run the checks, by default all; `given` holds the dests that the user set. Returns the warnings.

    Raises:
        ConfigError: with every problem found.
    """
    problems = [problem for check in checks or CHECKS for problem in check(config, given)]
    errors = [problem for problem in problems if not problem.warning]
    if errors:
        text = "\n".join(f"  {p.flag}: {p.message}\n    remedy: {p.remedy}" for p in errors)
        count = "one problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise ConfigError(f"this configuration cannot run ({count})\n{text}")
    return [problem for problem in problems if problem.warning]


def _required(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    data = config.data
    if config.model.hf_checkpoint is None:
        yield Problem("--hf-checkpoint", "is required", "name a Hugging Face model folder")
    if data.rollout_batch_size is None:
        yield Problem("--rollout-batch-size", "is required", "prompts per rollout step, e.g. 8")
    if data.num_rollout is None and data.num_epoch is None:
        yield Problem("--num-rollout", "is required", "rollout steps to run, or give --num-epoch")
    makes_rollouts = not config.train_only or (config.learns_from_data and not config.reads_dumps)
    if data.rollout_global_dataset and data.prompt_data is None and makes_rollouts:
        yield Problem(
            "--prompt-data", "is required", "a .jsonl or .parquet file, or --disable-rollout-global-dataset"
        )
    if config.rollout.rollout_max_response_len is None and not config.train_only:
        yield Problem("--rollout-max-response-len", "is required", "the most new tokens of a response")


def _files_exist(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    model, data = config.model, config.data
    folders = [("--hf-checkpoint", model.hf_checkpoint), ("--ref-load", model.ref_load)]
    for name, folder in [*folders, ("--critic-load", config.critic.load)]:
        if folder is not None and not (Path(folder) / "config.json").is_file():
            what = "has no config.json" if Path(folder).is_dir() else "is not there"
            yield Problem(
                name, f"model folder {folder!r} {what}", "`slime convert` makes one from a GGUF file"
            )
    files: list[tuple[str, str | None]] = [("--prompt-data", path) for path in listed(data.prompt_data)]
    files += [("--eval-config", config.evaluation.eval_config)]
    files += [("--sglang-config", config.serving.sglang_config)]
    files += [("--eval-prompt-data", path) for path in (config.evaluation.eval_prompt_data or [])[1::2]]
    for name, file in files:
        if file is not None and not Path(file.split("@[")[0]).is_file():
            yield Problem(
                name, f"file {file!r} is not there", "check the path; it is relative to where you are"
            )
    own = model.load is not None and model.save is not None and Path(model.load) == Path(model.save)
    if model.load is not None and not Path(model.load).is_dir() and not own:
        yield Problem(
            "--load",
            f"checkpoint folder {model.load!r} is not there",
            "leave it out to start anew, or give --save the same folder",
        )


def _contradictions(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    for first, second in (
        ("num_rollout", "num_epoch"),
        ("global_batch_size", "num_steps_per_rollout"),
        ("debug_rollout_only", "debug_train_only"),
        ("debug_rollout_only", "load_debug_rollout_data"),
        ("use_tis", "use_rollout_logprobs"),
        ("use_rs", "use_rollout_logprobs"),
        ("custom_tis_function_path", "use_rs"),
        ("custom_reward_post_process_path", "sibling_reward"),
        ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
        ("custom_convert_samples_to_train_data_path", "sibling_reward"),
        ("custom_pg_loss_reducer_function_path", "loss_aggregation"),
        ("use_kl_loss", "kl_coef"),
        ("use_rollout_routing_replay", "custom_convert_samples_to_train_data_path"),
        ("calculate_per_token_loss", "loss_aggregation"),
        ("eval_config", "eval_prompt_data"),
        ("sglang_config", "prefill_num_servers"),
    ):
        if first in given and second in given:
            yield Problem(dashed(first), f"contradicts {dashed(second)}", "give one of them")
    if config.run.debug_train_only and not config.reads_dumps and not config.learns_from_data:
        yield Problem("--debug-train-only", "has nothing to train on", "give --load-debug-rollout-data")


def _fine_tuning(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    makes_conversations = config.rollout.rollout_function_path == SFT_ROLLOUT
    if config.learns_from_data and not config.reads_dumps and "rollout_function_path" not in given:
        yield Problem(
            "--loss-type",
            "sft_loss learns from conversations, and the default rollout function asks an engine",
            f"give --rollout-function-path {SFT_ROLLOUT}, or your own",
        )
    if makes_conversations and config.evaluates and config.evaluation.eval_function_path is None:
        yield Problem(
            "--eval-function-path",
            "is required: the rollout function of supervised fine-tuning does not evaluate",
            "give slime.rollout.sglang_rollout.generate_rollout, or your own",
        )
    if makes_conversations and not config.learns_from_data:
        yield Problem(
            "--rollout-function-path",
            "cannot learn: conversations of the data have no rewards to learn a policy loss from",
            "give --loss-type sft_loss",
        )


def _sizes(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    data, rollout = config.data, config.rollout
    rollouts = (data.rollout_batch_size or 0) * data.n_samples_per_prompt
    per_step = rollouts_per_optimizer_step(data)
    carries = data.incomplete_step == "carry"
    if carries and config.has_critic:
        yield Problem(
            "--incomplete-step",
            "carry and a critic exclude each other: returns of an older critic would be learned anew",
            "train",
        )
    if rollouts and per_step > rollouts and not carries:
        yield Problem(
            "--global-batch-size",
            f"a step of {per_step} rollouts is never full: a rollout step makes {rollouts}",
            "lower it, or raise --rollout-batch-size or --n-samples-per-prompt",
        )
    over = rollout.over_sampling_batch_size
    if over is not None and data.rollout_batch_size is not None and over < data.rollout_batch_size:
        yield Problem(
            "--over-sampling-batch-size",
            f"{over} is below --rollout-batch-size {data.rollout_batch_size}",
            "it counts the prompts in flight and must be at least as many",
        )
    context, response = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    if context is not None and response is not None and response >= context:
        yield Problem(
            "--rollout-max-response-len",
            f"{response} leaves no room for a prompt in --rollout-max-context-len {context}",
            "lower it or raise the context",
        )


def _incomplete(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    train, reward, pairs = config.train, config.reward, config.evaluation.eval_prompt_data
    if config.data.num_epoch is not None and config.data.prompt_data is None:
        yield Problem("--num-epoch", "needs --prompt-data", "without a data set, give --num-rollout")
    for name, value in (
        ("--rollout-top-k", config.rollout.rollout_top_k),
        ("--eval-top-k", config.evaluation.eval_top_k),
    ):
        if value == 0:
            yield Problem(name, "must be -1 (all) or at least 1, got 0", "-1 samples among all tokens")
    for name, template in (("--save-hf", config.model.save_hf), ("--critic-save", config.critic.save)):
        if "{" in (template or "").replace("{rollout_id}", ""):
            yield Problem(name, "knows {rollout_id} and no other braces", "write it so")
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu is None:
        yield Problem(
            "--use-dynamic-batch-size", "needs --max-tokens-per-gpu", "tokens of a micro-batch, e.g. 4096"
        )
    if reward.rm_type is not None and "remote_rm" in reward.rm_type and reward.rm_url is None:
        yield Problem("--rm-type", "remote_rm needs --rm-url", "the URL that scores a response")
    if config.serving.sglang_router_ip is not None and config.serving.sglang_router_port is None:
        yield Problem("--sglang-router-ip", "needs --sglang-router-port", "the port of the router that runs")
    yield from _incomplete_reward(config)
    if config.algorithm.use_opd and "remote_rm" in (reward.rm_type or ""):
        yield Problem(
            "--rm-type",
            "remote_rm and the teacher of --use-opd both read --rm-url",
            "ask the remote reward in a hook of your own (--custom-rm-path)",
        )
    yield from _mixture(config)
    if pairs is not None and len(pairs) % 2:
        yield Problem(
            "--eval-prompt-data",
            f"takes pairs of name and path, got {len(pairs)} words",
            "name path name path",
        )


def _incomplete_reward(config: Config) -> Iterator[Problem]:
    """What the built-in reward of the run lacks."""
    reward = config.reward
    kind = (reward.rm_type or "").removeprefix("boxed_")
    if kind == "dapo" and reward.reward_key is None and reward.custom_rm_path is None:
        yield Problem("--rm-type", "dapo gives a dict of score, acc and pred", "set --reward-key score")
    if kind == "judge":
        for name, value in (("--judge-url", reward.judge_url), ("--judge-model", reward.judge_model)):
            if value is None:
                yield Problem("--rm-type", f"judge needs {name}", "see docs/en/rewards.md")


def _mixture(config: Config) -> Iterator[Problem]:
    files, weights = listed(config.data.prompt_data), config.data.prompt_data_weights
    if weights is not None and len(weights) != len(files):
        yield Problem(
            "--prompt-data-weights",
            f"has {len(weights)} weights for {len(files)} prompt files",
            "give one weight a file, in the same order",
        )
    if len(set(files)) < len(files):
        yield Problem("--prompt-data", "names a file twice", "give it once, with a larger weight")
    if config.data.pass_rate_low > config.data.pass_rate_high:
        yield Problem("--pass-rate-low", "is above --pass-rate-high", "lower it")


def _incomplete_loss(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.loss_aggregation == "constant" and algorithm.loss_aggregation_tokens is None:
        yield Problem(
            "--loss-aggregation",
            "constant needs its divisor",
            "give --loss-aggregation-tokens, e.g. the longest response",
        )
    if algorithm.loss_type == "custom_loss" and not algorithm.custom_loss_function_path:
        yield Problem(
            "--loss-type", "custom_loss needs --custom-loss-function-path", "the dotted path of your loss"
        )
    if algorithm.tis_clip_low > algorithm.tis_clip:
        yield Problem("--tis-clip-low", "is above --tis-clip", "lower it")
    if algorithm.rs_lower_bound > algorithm.rs_upper_bound:
        yield Problem("--rs-lower-bound", "is above --rs-upper-bound", "lower it")


def _parallel(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    train = config.train
    if train.actor_num_nodes > 1:
        yield Problem(
            "--actor-num-nodes",
            "the torch trainer runs on one machine",
            "use --actor-num-gpus-per-node",
        )
    if train.tensor_model_parallel_size > 1:
        yield Problem(
            "--tensor-model-parallel-size",
            "the torch trainer spreads rows and parameters over processes, but not the products of one row",
            "--actor-num-gpus-per-node spreads the parameters",
        )
    rollouts = rollouts_per_optimizer_step(config.data)
    if 0 < rollouts < train.actor_num_gpus_per_node:
        yield Problem(
            "--actor-num-gpus-per-node",
            f"a step has {rollouts} rollouts, so some of the {train.actor_num_gpus_per_node} train processes "
            "have none",
            "fewer processes, or a larger --global-batch-size",
            warning=True,
        )


def _adapters(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    if config.train.lora_dropout:
        yield Problem(
            "--lora-dropout",
            f"must be 0, got {config.train.lora_dropout:g}: the policy that is trained must be the one that "
            "sampled, and dropout makes its log-probs random",
            "leave it out",
        )
    if config.train.lora_rank and importlib.util.find_spec("peft") is None:
        yield Problem("--lora-rank", "needs the package peft", "pip install 'slime[lora]'")


def _cannot_learn(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    if config.run.debug_rollout_only or (config.data.num_rollout == 0):
        return
    if config.train.lr == 0:
        yield Problem("--lr", "cannot learn: the learning rate is 0", "e.g. 1e-6")
    if config.learns_from_data:
        return
    data, rollout, algorithm = config.data, config.rollout, config.algorithm
    if rollout.rollout_temperature == 0 or rollout.rollout_top_k == 1:
        yield Problem(
            "--rollout-temperature" if rollout.rollout_temperature == 0 else "--rollout-top-k",
            "cannot learn: greedy rollouts of a group are all alike, so every advantage is 0",
            "sample, e.g. --rollout-temperature 1.0",
        )
    asks = (
        "rollout_sample_hook_path",
        "custom_rm_path",
        "custom_generate_function_path",
        "rollout_function_path",
    )
    if algorithm.use_opd and not config.reads_dumps and not given.intersection(asks):
        yield Problem(
            "--use-opd",
            "cannot learn: nothing asks the teacher for its log-probs",
            "--rollout-sample-hook-path slime.rollout.on_policy_distillation.ask_teacher, with --rm-url",
        )
    compares = algorithm.advantage_estimator == "rloo" or (
        algorithm.rewards_normalization and takes_groups(algorithm)
    )
    has_other_signal = bool(
        algorithm.use_opd
        or algorithm.custom_advantage_function_path
        or algorithm.gives_final_rewards
        or algorithm.rollout_data_postprocess_path
    )
    if data.n_samples_per_prompt == 1 and compares and not has_other_signal:
        yield Problem(
            "--n-samples-per-prompt",
            "cannot learn: with one rollout a group its own reward is the baseline, so every advantage is 0",
            "at least 2, better 8; or --disable-rewards-normalization",
        )
    if algorithm.use_kl_loss and algorithm.kl_loss_coef == 0:
        yield Problem("--use-kl-loss", "has no effect: --kl-loss-coef is 0", "e.g. --kl-loss-coef 0.001")
    if config.reward.rm_type == "random":
        yield Problem("--rm-type", "random rewards teach nothing", "for trying out only", warning=True)


def _doubtful(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    data, rollout = config.data, config.rollout
    alone = config.algorithm.num_critic_only_steps
    if config.has_critic and data.num_rollout is not None and alone >= data.num_rollout > 0:
        yield Problem(
            "--num-critic-only-steps",
            f"the actor is never trained: the critic has all {data.num_rollout} rollout steps",
            "lower it; to only prepare a critic, --critic-save keeps it",
            warning=True,
        )
    rollouts = (data.rollout_batch_size or 0) * data.n_samples_per_prompt
    per_step = rollouts_per_optimizer_step(data)
    if per_step and rollouts % per_step and data.incomplete_step == "train":
        yield Problem(
            "--global-batch-size",
            f"{rollouts} rollouts do not divide by {per_step}: the steps of a rollout step differ in size",
            "nothing is dropped: each weighs its own rollouts; --incomplete-step carry makes full ones",
            warning=True,
        )
    if (rollout.rollout_top_p < 1 or rollout.rollout_top_k > 1) and not config.run.debug_rollout_only:
        yield Problem(
            "--rollout-top-p",
            "log-probs are those of the untruncated distribution, so training is slightly off-policy",
            "1.0 trains exactly what was sampled",
            warning=True,
        )
    if config.algorithm.use_opd and rollout.rollout_temperature != 1:
        yield Problem(
            "--rollout-temperature",
            "the teacher's log-probs are those of temperature 1, the student's of this one",
            "1.0 compares like with like",
            warning=True,
        )
    policy = config.router.get("policy")
    if config.rollout.custom_generate_function_path and policy in _SCATTER_SESSIONS:
        yield Problem(
            "--router-policy",
            f"{policy} sends each turn of a session to any engine, which computes the earlier turns again",
            "consistent_hashing keeps a session on its engine; see docs/en/serving.md",
            warning=True,
        )
    corrects = config.algorithm.use_tis or config.algorithm.use_rs
    if config.engine.dtype == "bfloat16" and not corrects:
        yield Problem(
            "--engine-dtype",
            "bfloat16 log-probs differ from the trainer's by 0.03-0.05 on average",
            "--use-tis corrects for it, or use float32",
            warning=True,
        )


CHECKS_OF_FLAGS: tuple[Check, ...] = (
    _contradictions,
    _fine_tuning,
    _sizes,
    asynchrony,
    devices,
    unused,
    weight_movement,
    _incomplete,
    _incomplete_loss,
)
"""Those that hold without data, files or a run to learn from."""
CHECKS_OFFLINE: tuple[Check, ...] = (_files_exist, _contradictions, _incomplete)
"""Those that hold where rollouts are made without training."""
CHECKS: tuple[Check, ...] = (
    _required,
    _files_exist,
    *CHECKS_OF_FLAGS,
    engine_installed,
    _adapters,
    experts,
    _parallel,
    _cannot_learn,
    _doubtful,
)
