"""`slime rollout`: rollouts of --prompt-data by any engine, rewarded, written down, resumably.

Results go to OUTPUT/results.jsonl as they finish; at the end OUTPUT/rollouts/<step>.jsonl holds them
as `slime view` and --load-debug-rollout-data read them, --rollout-batch-size groups a step (default: all).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from slime.cli.offline import (
    INTERRUPTED,
    Options,
    Outcome,
    Plan,
    parse,
    perform,
    print_table,
    refuse_other_functions,
    tell_failures,
    write_metrics,
)
from slime.config.args_view import ArgsView
from slime.config.problem import listed
from slime.errors import ConfigError
from slime.rollout import dump
from slime.rollout.group_run import leaves
from slime.rollout.offline import Work
from slime.rollout.outcome import MemberGroup
from slime.rollout.prompt_stream import DATASET
from slime.rollout.result_file import GroupRecord
from slime.rollout.rm_hub import check_reward_source
from slime.rollout.runner import Call
from slime.rollout.sample_json import from_json
from slime.rollout.scores import score_metrics
from slime.rollout.sglang_rollout import runner_for
from slime.rollout.state import base_sampling_params
from slime.utils.misc import load_function

DEFAULT_SET = "rollouts"
"""Name where there is only one data set."""


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code (130 after an interrupt).

    Raises:
        ConfigError: no prompts, no reward, or results of something else.
        RolloutFailedError: too many rollouts failed; results so far are kept.
    """
    options, config = parse("rollout", __doc__, argv)
    refuse_other_functions(config, config.rollout.rollout_function_path)
    outcome = perform(options, config, partial(_plan, options), keeps_tokens=True)
    if outcome is None:
        return INTERRUPTED
    metrics: dict[str, float] = {}
    for name, summary in outcome.summaries.items():
        metrics |= score_metrics(f"rollout/{name}", summary.scores, config.reward.pass_threshold)
        metrics[f"rollout/{name}/failed"] = float(summary.failed.total())
    steps = _dump(options, outcome, config.data.rollout_batch_size or len(outcome.records))
    print_table(outcome, metrics, "rollout")
    tell_failures(outcome)
    print(f"rollouts: {options.output / 'rollouts'} ({steps} {'file' if steps == 1 else 'files'})")
    print(f"metrics: {write_metrics(options, outcome, metrics)}")
    return 0


def _plan(options: Options, args: ArgsView) -> Plan:
    source = load_function(args.data_source_path)(args)
    dataset = getattr(source, "dataset", None)
    check_reward_source(args, dataset.samples if dataset is not None else None)
    wanted = options.limit or len(source)
    if not wanted:
        raise ConfigError(
            "there is no end to the prompts of a data source without a data set",
            place="slime rollout",
            remedy="give --limit, or --prompt-data",
        )
    runner = runner_for(args)
    call = Call(step=0, sampling_params=base_sampling_params(args), seed=args.rollout_seed)
    works = [
        Work(data_set=_name(group), group=group, runner=runner, call=call, reward=lambda r: r.reward(args))
        for group in map(list, source.get_samples(wanted))
    ]
    return Plan(works=works, data_sets=_data_sets(args))


def _data_sets(args: ArgsView) -> dict[str, dict[str, Any]]:
    """The prompt files, and what shapes rollouts of all of them."""
    flags = (
        "input_key",
        "label_key",
        "tool_key",
        "metadata_key",
        "apply_chat_template",
        "apply_chat_template_kwargs",
        "rollout_max_prompt_len",
        "rollout_max_context_len",
        "n_samples_per_prompt",
        "rollout_shuffle",
        "prompt_data_weights",
        "data_source_path",
    )
    common = {name: getattr(args, name) for name in flags} | {"sampling": base_sampling_params(args)}
    paths = listed(args.prompt_data) if args.rollout_global_dataset else []
    return {path: {"path": path} for path in paths} | {"all": common}


def _name(group: MemberGroup) -> str:
    return str(leaves(group[0])[0].metadata.get(DATASET, DEFAULT_SET))


def _dump(options: Options, outcome: Outcome, size: int) -> int:
    """Write the rollouts, `size` groups a file, with the tokens that training needs; returns the files."""
    batches = [outcome.records[start : start + size] for start in range(0, len(outcome.records), size)]
    folder = options.output / "rollouts"
    written = [
        dump.save(str(folder / "{rollout_id}.jsonl"), step, _samples(batch))
        for step, batch in enumerate(batches)
    ]
    for path in set(folder.glob("*.jsonl")) - set(written):
        path.unlink()  # of an earlier call with other sizes
    return len(written)


def _samples(records: Sequence[GroupRecord]) -> list[Any]:
    rollouts = [rollout for group in records for rollout in group.rollouts]
    return [from_json(sample) for rollout in rollouts for sample in rollout.samples]
