"""Law 8: configuration is closed; what cannot run or cannot learn is refused before a model loads."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import FULLY_ASYNC, load_config
from slime.config.parse import all_flags
from slime.config.plan import old_log_probs
from slime.errors import ConfigError


@pytest.fixture
def base(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(tmp_path / "model")),
        *("--prompt-data", str(tmp_path / "data.jsonl")),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--num-rollout", "10", "--rollout-max-response-len", "16"),
    ]


def refused(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return str(caught.value)


def test_values_arrive_typed_in_their_section(base):
    config = load_config([*base, "--lr", "1e-5", "--rollout-stop", "a", "b", "--no-use-tensorboard"])
    assert (config.train.lr, config.rollout.rollout_stop) == (1e-5, ["a", "b"])
    assert config.run.use_tensorboard is False


def test_an_unknown_flag_names_the_nearest(base):
    text = refused([*base, "--rollout-bach-size", "3"])
    assert "rollout-bach-size" in text and "'rollout-batch-size'" in text


def test_flags_are_never_abbreviated(base):
    assert "unknown flag 'rollout-temp'" in refused([*base, "--rollout-temp", "1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "fast"], "--lr: expects a number, got 'fast'"),
        (["--lr", "-1"], "--lr: must be at least 0, got -1"),
        (["--lr", "nan"], "--lr: expects a number"),
        (["--n-samples-per-prompt", "2.5"], "--n-samples-per-prompt: expects a whole number"),
        (["--rollout-top-p", "0"], "--rollout-top-p: must be above 0"),
        (["--advantage-estimator", "grop"], "--advantage-estimator: must be one of grpo"),
        (["--apply-chat-template-kwargs", "[1]"], "expects a JSON object"),
        (["--n-samples-per-prompt", "1"], "cannot learn"),
        (["--rollout-temperature", "0"], "cannot learn"),
        (["--rollout-top-k", "1"], "cannot learn"),
        (["--lr", "0"], "cannot learn"),
        (["--num-epoch", "1"], "contradicts --num-epoch"),
        (["--global-batch-size", "64"], "is never full"),
        (["--over-sampling-batch-size", "4"], "is below --rollout-batch-size 8"),
        (["--kl-loss-coef", "0.1"], "has no effect without --use-kl-loss"),
        (["--use-kl-loss"], "--kl-loss-coef is 0"),
        (["--max-tokens-per-gpu", "100"], "has no effect without --use-dynamic-batch-size"),
        (["--use-dynamic-batch-size"], "needs --max-tokens-per-gpu"),
        (["--save-interval", "2"], "has no effect without --save"),
        (["--eval-interval", "2"], "has no effect without --eval-prompt-data"),
        (["--eval-temperature", "0.5"], "--eval-temperature: has no effect without --eval-prompt-data"),
        (["--rollout-top-k", "0"], "must be -1 (all) or at least 1"),
        (["--lr", "inf"], "--lr: expects a number"),
        (["--use-tis", "--tis-clip-low", "3"], "is above --tis-clip"),
        (["--save-hf", "out/{step}"], "no other braces"),
        (["--debug-rollout-only", "--save", "x"], "--save: has no effect without a trainer"),
        (["--rm-type", "f1", "--custom-rm-path", "a.b"], "--rm-type: has no effect"),
        (["--disable-rollout-global-dataset"], "--prompt-data: has no effect"),
        (["--eval-prompt-data", "x"], "pairs of name and path"),
        (["--rm-type", "remote_rm"], "needs --rm-url"),
        (["--rm-type", "dapo"], "set --reward-key score"),
        (["--rm-type", "boxed_dapo"], "set --reward-key score"),
        (["--rm-type", "judge", "--judge-model", "m"], "judge needs --judge-url"),
        (["--rm-type", "judge", "--judge-url", "http://x/v1"], "judge needs --judge-model"),
        (["--judge-scale", "5", "--rm-type", "f1"], "--judge-scale: has no effect without --rm-type judge"),
        (["--judge-scale", "0"], "--judge-scale: must be above 0"),
        (["--rollout-max-context-len", "16"], "leaves no room for a prompt"),
        (["--debug-train-only"], "has nothing to train on"),
        (["--hf-checkpoint", "nowhere"], "model folder 'nowhere' is not there"),
        (["--prompt-data", "nowhere.jsonl"], "file 'nowhere.jsonl' is not there"),
        (["stray"], "unexpected argument 'stray'"),
        (["--offload-train", "false"], "--offload-train takes no value, leave 'false' out (--no-"),
        (["--run-dir", "no", "--debug-rollout-only", "no"], "remedy: --debug-rollout-only takes no value"),
        (["--lr", "1e-6", "1e-6"], "unexpected argument '1e-6'\n  remedy: `slime"),
        (["--keep-checkpoints", "2"], "--keep-checkpoints: has no effect without --save"),
        (["--load", "nowhere"], "checkpoint folder 'nowhere' is not there"),
        (["--load", "nowhere", "--save", "elsewhere"], "checkpoint folder 'nowhere' is not there"),
        (["--deterministic-mode", "--engine-max-running-requests", "4"], "no --deterministic-mode"),
        (["--gamma", "0.9"], "--gamma: has no effect without --advantage-estimator reinforce_plus_plus"),
        (["--lambd", "0.9"], "--lambd: has no effect without --advantage-estimator ppo"),
        (["--value-clip", "0.1"], "--value-clip: has no effect without --advantage-estimator ppo"),
        (["--critic-lr", "1e-5"], "--critic-lr: has no effect without --advantage-estimator ppo"),
        (["--num-critic-only-steps", "1"], "has no effect without --advantage-estimator ppo"),
        (["--advantage-estimator", "ppo", "--critic-lr", "0"], "--critic-lr: must be above 0"),
        (["--advantage-estimator", "ppo", "--critic-load", "nowhere"], "model folder 'nowhere' is not there"),
        (["--advantage-estimator", "ppo", "--critic-save", "out/{step}"], "no other braces"),
        (["--advantage-estimator", "ppo", "--critic-min-lr", "1e-7"], "--lr-decay-style cosine"),
        (["--advantage-estimator", "ppo", "--disable-rewards-normalization"], "has no effect"),
        (["--advantage-estimator", "rloo", "--disable-rewards-normalization"], "has no effect"),
        (["--advantage-estimator", "rloo", "--n-samples-per-prompt", "1"], "cannot learn"),
        (["--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1"], "contradicts"),
        (["--calculate-per-token-loss", "--loss-aggregation", "prompt"], "contradicts"),
        (["--loss-aggregation", "constant"], "constant needs its divisor"),
        (["--loss-aggregation-tokens", "16"], "has no effect without --loss-aggregation constant"),
        (["--opsm-delta", "0.1"], "has no effect without --use-opsm"),
        (["--tis-mode", "mask"], "has no effect without --use-tis"),
        (["--advantage-estimator", "rloo", "--custom-reward-post-process-path", "a.b"], "has no effect"),
        (
            ["--disable-rewards-normalization", "--custom-reward-post-process-path", "a.b"],
            "--disable-rewards-normalization: has no effect",
        ),
        (
            ["--sibling-reward", "sum", "--custom-reward-post-process-path", "a.b"],
            "contradicts --sibling-reward",
        ),
        (["--loss-type", "custom_loss"], "needs --custom-loss-function-path"),
        (["--custom-loss-function-path", "a.b"], "has no effect without --loss-type custom_loss"),
        (["--disable-compute-advantages-and-returns"], "--loss-type sft_loss or custom_loss"),
        (
            ["--loss-type", "custom_loss", "--custom-loss-function-path", "a.b", "--use-tis"],
            "--use-tis: has no effect without slime's own policy loss",
        ),
        (["--opd-kl-coef", "0.5"], "has no effect without --use-opd"),
        (["--use-opd", "--rm-url", "http://x"], "nothing asks the teacher"),
        (["--use-opd", "--rm-type", "remote_rm", "--rm-url", "http://x"], "both read --rm-url"),
        (["--incomplete-step", "carry", "--advantage-estimator", "ppo"], "carry and a critic exclude"),
        (["--tis-level", "sequence"], "has no effect without --use-tis"),
        (["--rs-level", "sequence"], "has no effect without --use-rs"),
        (["--use-rs", "--rs-lower-bound", "3"], "is above --rs-upper-bound"),
        (["--use-rs", "--use-rollout-logprobs"], "contradicts --use-rollout-logprobs"),
        (["--custom-tis-function-path", "a.b"], "has no effect without --use-tis"),
        (["--use-tis", "--custom-tis-function-path", "a.b", "--tis-level", "sequence"], "has no effect"),
        (
            ["--custom-pg-loss-reducer-function-path", "a.b", "--loss-aggregation", "token"],
            "contradicts --loss-aggregation",
        ),
        (["--loss-mask-type", "qwen3"], "has no effect without --loss-type sft_loss"),
        (["--loss-type", "sft_loss", "--apply-chat-template"], "no --loss-type sft_loss"),
        (["--loss-type", "sft_loss", "--eps-clip", "0.1"], "--eps-clip: has no effect without a policy loss"),
        (["--loss-type", "sft_loss", "--lr", "0"], "cannot learn"),
        (["--loss-type", "sft_loss"], "give --rollout-function-path slime.rollout.sft_rollout"),
        (
            ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"],
            "give --loss-type sft_loss",
        ),
        (
            ["--debug-train-only", "--loss-type", "sft_loss", "--disable-rollout-global-dataset"],
            "has no effect",
        ),
        (["--no-balance-data"], "--balance-data: has no effect without --actor-num-gpus-per-node 2 or more"),
        (["--actor-num-nodes", "2"], "--actor-num-nodes: the torch trainer runs on one machine"),
        (["--tensor-model-parallel-size", "2"], "but not the products of one row"),
        (["--lora-alpha", "8"], "--lora-alpha: has no effect without --lora-rank"),
        (["--lora-rank", "8", "--lora-dropout", "0.1"], "--lora-dropout: must be 0, got 0.1"),
    ],
)
def test_what_cannot_run_is_refused_with_its_flag(base, words, message):
    assert message in refused([*base, *words])


def test_fine_tuning_has_an_engine_only_where_it_evaluates(base, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"input": "a"}\n')
    rollout = ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
    tuning = [*base, "--loss-type", "sft_loss", *rollout]
    evaluation = ["--eval-prompt-data", "held_out", str(tmp_path / "held_out.jsonl")]
    function = ["--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    assert load_config(tuning).train_only
    assert not load_config([*tuning, *evaluation, *function]).train_only
    assert "--eval-function-path: is required" in refused([*tuning, *evaluation])


def test_an_estimator_without_a_baseline_needs_no_group(base):
    words = ["--advantage-estimator", "reinforce_plus_plus", "--n-samples-per-prompt", "1"]
    assert load_config([*base, *words, "--gamma", "0.9"]).algorithm.gamma == 0.9


def test_a_critic_is_a_baseline_and_the_plan_tells_of_it(base):
    words = ["--advantage-estimator", "ppo", "--n-samples-per-prompt", "1", "--num-steps-per-rollout", "2"]
    config = load_config([*base, *words, "--num-critic-only-steps", "3", "--critic-num-epochs", "4"])
    plan = config.plan(None, 2)
    assert config.has_critic
    assert "8 optimizer steps per rollout step; alone in the first 3 rollout steps" in "\n".join(plan.lines())
    assert (plan.optimizer_steps, plan.actor_steps(10), plan.critic_steps(10)) == (14, 14, 80)
    assert (plan.actor_steps(2), plan.critic_steps(2)) == (0, 16)
    without = load_config(base)
    assert not without.has_critic
    assert "critic" not in "\n".join(without.plan(None).lines())


def test_a_critic_takes_the_actors_values_where_it_has_none_of_its_own(base):
    words = ["--advantage-estimator", "ppo", "--lr", "1e-5", "--critic-lr", "1e-4", "--weight-decay", "0.1"]
    config = load_config([*base, *words])
    own = config.critic.train_config(config.train)
    assert (own.lr, own.weight_decay, config.train.lr) == (1e-4, 0.1, 1e-5)


def test_a_run_that_never_trains_the_actor_says_so(base):
    config = load_config([*base, "--advantage-estimator", "ppo", "--num-critic-only-steps", "10"])
    assert any("the actor is never trained" in problem.message for problem in config.warnings)


CONVERT = "--custom-convert-samples-to-train-data-path"
POSTPROCESS = "--rollout-data-postprocess-path"


@pytest.mark.parametrize(
    "hook",
    ["--custom-advantage-function-path", "--custom-reward-post-process-path", CONVERT, POSTPROCESS],
)
def test_advantages_of_the_users_own_need_no_group(base, hook):
    assert load_config([*base, hook, "a.b", "--n-samples-per-prompt", "1"]).data.n_samples_per_prompt == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([CONVERT, "a.b", "--disable-rewards-normalization"], "without slime's own normalisation of rewards"),
        ([CONVERT, "a.b", "--advantage-estimator", "rloo"], "an estimator that takes rewards as they are"),
        ([CONVERT, "a.b", "--custom-reward-post-process-path", "a.c"], f"contradicts {CONVERT}"),
        ([CONVERT, "a.b", "--sibling-reward", "sum"], "contradicts --sibling-reward"),
        ([POSTPROCESS, "a.b", "--loss-type", "sft_loss"], f"{POSTPROCESS}: has no effect without a policy"),
    ],
)
def test_a_conversion_gives_the_rewards_and_a_post_processing_needs_advantages(base, words, message):
    assert message in refused([*base, *words])


def test_a_teacher_needs_no_group_and_is_compared_at_temperature_1(base):
    hook = "slime.rollout.on_policy_distillation.ask_teacher"
    words = ["--use-opd", "--rm-url", "http://x/generate", "--n-samples-per-prompt", "1"]
    words += ["--rollout-sample-hook-path", hook]
    config = load_config([*base, *words, "--rollout-temperature", "0.7"])
    assert any("teacher" in problem.message for problem in config.warnings)


def test_a_step_larger_than_a_rollout_step_is_filled_by_several_where_rollouts_wait(base):
    config = load_config([*base, "--global-batch-size", "64", "--incomplete-step", "carry"])
    assert config.plan(1).optimizer_steps == 5


def test_all_problems_are_reported_together(base):
    text = refused([*base, "--lr", "0", "--kl-loss-coef", "0.1"])
    assert "2 problems" in text and "--lr" in text and "--kl-loss-coef" in text


def test_yaml_gives_flags_and_the_command_line_wins(base, tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("lr: 1e-5\nn_samples_per_prompt: 2\ndisable-rewards-normalization: true\n")
    config = load_config([*base, "--config", str(file)])
    assert (config.train.lr, config.data.n_samples_per_prompt) == (1e-5, 4)
    assert config.algorithm.rewards_normalization is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlearning-rate: 2\n", "flags.yaml:2: unknown flag 'learning-rate'"),
        ("lr: [1]\n", "flags.yaml:1: lr: expects a number"),
        ("- lr\n", "must be a mapping"),
        ("lr: {\n", "is not YAML"),
    ],
)
def test_a_bad_config_file_is_named_with_its_line(base, tmp_path, text, message):
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    assert message in refused([*base, "--config", str(file)])


def test_written_flags_read_back_to_the_same_configuration(base, tmp_path):
    import yaml

    config = load_config([*base, "--disable-grpo-std-normalization", "--rollout-stop", "x"])
    file = tmp_path / "flags.yaml"
    file.write_text(yaml.safe_dump(config.flags()))
    assert load_config(["--config", str(file)]).flags() == config.flags()


def test_args_are_read_only_apart_from_user_keys(base, tmp_path):
    (tmp_path / "mine.yaml").write_text("my_key: 3\n")
    args = load_config([*base, "--custom-config-path", str(tmp_path / "mine.yaml")]).args()
    assert (args.my_key, args.n_samples_per_prompt) == (3, 4)
    args.my_key = 4
    args.another = 5
    assert (args.my_key, args.another) == (4, 5)
    with pytest.raises(ConfigError, match="read-only"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="did you mean 'num_rollout'"):
        _ = args.num_rolout
    assert getattr(args, "absent", None) is None
    assert pickle.loads(pickle.dumps(args)).my_key == 4


def test_user_keys_cannot_set_flags(base, tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 3\n")
    assert "sets flags: lr" in refused([*base, "--custom-config-path", str(tmp_path / "mine.yaml")])


def test_every_flag_has_a_meaning_and_a_unique_name():
    flags = all_flags()
    assert all(flag.help for flag in flags)
    assert len({flag.name for flag in flags}) == len({flag.dest for flag in flags}) == len(flags)


@settings(deadline=None)
@given(
    prompts=st.integers(1, 50), rollouts=st.integers(2, 16), steps=st.integers(1, 8), count=st.integers(1, 20)
)
def test_the_plan_covers_every_rollout(tmp_path_factory, prompts, rollouts, steps, count):
    folder = tmp_path_factory.getbasetemp() / "plan"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    config = load_config(
        [
            *("--hf-checkpoint", str(folder), "--disable-rollout-global-dataset"),
            *("--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(rollouts)),
            *("--num-steps-per-rollout", str(steps), "--num-rollout", str(count)),
            *("--rollout-max-response-len", "8"),
        ]
    )
    plan = config.plan(None)
    assert plan.rollouts_per_rollout_step == prompts * rollouts
    covered = plan.rollouts_per_optimizer_step * plan.optimizer_steps_per_rollout_step
    assert 0 <= covered - plan.rollouts_per_rollout_step < plan.rollouts_per_optimizer_step
    assert plan.optimizer_steps == count * plan.optimizer_steps_per_rollout_step


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the step's own"),
        (["--num-steps-per-rollout", "2"], "computed anew before it for the later ones"),
        (["--use-rollout-logprobs"], "the engine's"),
        (["--loss-type", "custom_loss", "--custom-loss-function-path", "a.b"], "for your loss"),
    ],
)
def test_the_source_of_the_old_log_probs_is_derived_and_told(base, words, told):
    config = load_config([*base, *words])
    assert told in old_log_probs(config.algorithm, config.plan(1).optimizer_steps_per_rollout_step)


def test_a_run_may_resume_from_the_folder_that_it_is_about_to_make(base):
    words = ["--save", "runs/new/checkpoint", "--load", "runs/new/checkpoint/", "--keep-checkpoints", "1"]
    assert load_config([*base, *words]).model.keep_checkpoints == 1


def test_several_prompt_files_are_a_list_and_one_is_a_text(base, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"input": "2+2"}\n')
    files = [str(tmp_path / "data.jsonl"), str(tmp_path / "more.jsonl")]
    config = load_config([*base, "--prompt-data", *files, "--prompt-data-weights", "0.7", "0.3"])
    assert (config.data.prompt_data, config.data.prompt_data_weights) == (files, [0.7, 0.3])
    assert load_config(base).args().prompt_data == files[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-data-weights", "1"], "--prompt-data-weights: has no effect without several files"),
        (["--prompt-data", "{0}", "{1}", "--prompt-data-weights", "1"], "has 1 weights for 2 prompt files"),
        (["--prompt-data", "{0}", "{1}", "--prompt-data-weights", "1", "0"], "must be above 0"),
        (["--prompt-data", "{0}", "{0}"], "names a file twice"),
        (["--prompt-data", "{0}", "gone.jsonl"], "file 'gone.jsonl' is not there"),
        (["--pass-rate-low", "0.3"], "--pass-rate-low: has no effect"),
        (["--curriculum-floor", "0.3"], "--curriculum-floor: has no effect"),
        (["--pass-threshold", "0.5"], "--pass-threshold: has no effect"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(base, tmp_path, words, message):
    (tmp_path / "more.jsonl").write_text('{"input": "2+2"}\n')
    files = [str(tmp_path / "data.jsonl"), str(tmp_path / "more.jsonl")]
    assert message in refused([*base, *(word.format(*files) for word in words)])


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--async-training", "--max-staleness", "0"], "--max-staleness"),
        (["--rollout-function-path", FULLY_ASYNC, "--max-staleness", "0"], "--max-staleness"),
        (["--rollout-function-path", FULLY_ASYNC, "--debug-rollout-only"], "--rollout-function-path"),
        (["--async-training", "--deterministic-mode"], "--deterministic-mode"),
        (["--update-in-flight", "wait"], "--update-in-flight"),
        (["--mask-offpolicy-in-partial-rollout"], "--mask-offpolicy-in-partial-rollout"),
    ],
)
def test_asynchrony_that_cannot_work_is_refused(base, words, flag):
    assert f"{flag}: " in refused([*base, "--rm-type", "math", *words])


def test_routes_are_replayed_only_where_there_are_experts(base, tmp_path):
    flag = "--use-rollout-routing-replay"
    assert f"{flag}: needs a mixture of experts" in refused([*base, flag])
    (tmp_path / "experts").mkdir()
    sizes = '{"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}'
    (tmp_path / "experts" / "config.json").write_text(sizes)
    base[1] = str(tmp_path / "experts")
    assert load_config([*base, flag]).algorithm.use_rollout_routing_replay
    hook = ["--custom-convert-samples-to-train-data-path", "tests.rollout.converters.plain"]
    assert f"{flag}: contradicts" in refused([*base, flag, *hook])
