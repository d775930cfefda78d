"""`slime eval`: the evaluations of a run, offline: any engine, any number of interruptions, the same numbers.

Data sets come from --eval-config or --eval-prompt-data. Results go to OUTPUT/results.jsonl, one line a
finished prompt; metrics, under the names that a run gives them, to OUTPUT/metrics.json.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from slime.cli.offline import (
    INTERRUPTED,
    Options,
    Plan,
    parse,
    perform,
    print_table,
    refuse_other_functions,
    tell_failures,
    write_metrics,
)
from slime.config.args_view import ArgsView
from slime.errors import ConfigError
from slime.rollout.eval import check_eval_hooks, eval_call, eval_dataset, eval_groups, eval_reward
from slime.rollout.offline import Work
from slime.rollout.scores import score_metrics
from slime.rollout.sglang_rollout import runner_for
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs


def main(argv: list[str]) -> int:
    """Entry of the verb; returns the exit code (130 after an interrupt).

    Raises:
        ConfigError: nothing to evaluate, or results of something else.
        RolloutFailedError: too many rollouts failed; results so far are kept.
    """
    options, config = parse("eval", __doc__, argv)
    refuse_other_functions(
        config, config.evaluation.eval_function_path or config.rollout.rollout_function_path
    )
    sets = {item.name: item for item in build_eval_dataset_configs(config.args())}
    if not sets:
        raise ConfigError(
            "there is nothing to evaluate",
            place="slime eval",
            remedy="give --eval-config or --eval-prompt-data",
        )
    check_eval_hooks(sets.values())
    outcome = perform(options, config, partial(_plan, options, list(sets.values())), keeps_tokens=False)
    if outcome is None:
        return INTERRUPTED
    metrics: dict[str, float] = {}
    for name, summary in outcome.summaries.items():
        metrics |= score_metrics(f"eval/{name}", summary.scores, sets[name].pass_threshold)
        metrics[f"eval/{name}/failed"] = float(summary.failed.total())
    print_table(outcome, metrics, "eval")
    tell_failures(outcome)
    print(f"metrics: {write_metrics(options, outcome, metrics)}")
    return 0


def _plan(options: Options, sets: list[EvalDatasetConfig], args: ArgsView) -> Plan:
    works: list[Work] = []
    for item in sets:
        runner, call = runner_for(args, item.max_context_len), eval_call(args, None, item)
        works += [
            Work(
                data_set=item.name,
                group=group,
                runner=runner,
                call=call,
                reward=lambda rollout: eval_reward(rollout, args),
            )
            for group in eval_groups(eval_dataset(args, item), item, options.limit)
        ]
    return Plan(works=works, data_sets={item.name: dataclasses.asdict(item) for item in sets})
