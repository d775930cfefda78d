"""Contracts of a generate hook on an engine that works: what it gives back, and which tokens train.

Each is a function of a `GenerateCase`. They share one watched call of the hook, so that all of them together
take as long as a few rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from slime.contracts.attempt import Attempt, attempt, attempts
from slime.contracts.finding import NotApplicableError, broken
from slime.contracts.generate_case import GenerateCase
from slime.contracts.stage import WORDS
from slime.contracts.trace import Origin
from slime.errors import CheckpointError, HookError
from slime.rollout.boundary import check_trainable, checked_siblings
from slime.rollout.hooks import names_argument
from slime.rollout.rm_hub.validity import checked_reward
from slime.rollout.sample_json import from_json, to_json
from slime.serving.scripted import ScriptedAnswer, ScriptedCall
from slime.utils.types import Sample

TOLERANCE = 1e-4
_TAKE_IDS = (
    "take ids and log-probs from the engine's answer (output_ids, meta_info.output_token_logprobs), e.g. by "
    "sample.append_response_tokens, never by encoding text; tokens of tools and prompts get trainable=False"
)


def takes_the_call(case: GenerateCase) -> None:
    """The path loads, and the function takes (args, sample, sampling_params[, evaluation])."""
    _ = case.hook


def gives_a_rollout(case: GenerateCase) -> str:
    """It is async, and on an engine that works it returns in time with a rollout: no exception, no
    give-up."""
    _needs_hook(case)
    first = case.first
    if first.error is not None:
        found = f"that it raised {type(first.error).__name__}: {first.error}"
        raise broken("a rollout", found, "give it what it needs: --prompt-data, --script, --hf-checkpoint")
    if first.gave_up:
        said = [s.metadata.get("abort_reason") or s.metadata.get("failure") for s in first.samples]
        raise broken(
            "a rollout that is COMPLETED or TRUNCATED on an engine that works",
            f"status {_names(first.statuses)} ({said[0] or 'no reason in metadata'})",
            "mend what made it give up; metadata['abort_reason'] may say what",
        )
    return f"{len(first.samples)} sample(s), {len(first.served)} engine call(s)"


def returns_samples(case: GenerateCase) -> str:
    """It returns a Sample, or a non-empty list of Samples: the siblings of one rollout."""
    _needs_hook(case)
    first = case.first
    if isinstance(first.error, HookError) and first.error.__cause__ is None:
        raise first.error
    if not first.returned:
        raise NotApplicableError("it returned nothing")
    return "a list" if isinstance(first.result, list) else "a Sample"


def asks_the_engine(case: GenerateCase) -> str:
    """Its tokens come from the run's engine, whose address is on args."""
    if not case.rollout.served:
        raise broken(
            "a request at the engine",
            "none",
            "ask the engine of args: get_model_url(args), or slime.rollout.sglang_rollout.generate",
        )
    return f"{len(case.rollout.served)} request(s)"


def keeps_the_ids(case: GenerateCase) -> None:
    """group_index, index and rollout_id of the sample that it was given stay as they are, or are unset."""
    given, base = case.rollout.given, case.rollout.base
    alone = not isinstance(case.rollout.result, list)
    rows: list[Sample] = [base, *case.rollout.samples]
    for name in ("group_index", "index", "rollout_id"):
        rows_of_name = rows if name == "group_index" or alone else [base]
        wanted = getattr(given, name)
        for sample in rows_of_name:
            value = getattr(sample, name)
            if value not in (None, wanted) or (sample is base and value is None):
                raise broken(
                    f"{name} {wanted}", f"{name} {value}", f"leave sample.{name} alone: slime counts by it"
                )


def siblings_are_one_rollout(case: GenerateCase) -> str:
    """The samples of a list are different objects, and have one rollout_id, or none: slime fills it in."""
    if not isinstance(case.rollout.result, list):
        raise NotApplicableError("it returns a single Sample")
    samples = case.rollout.samples
    ids = sorted({sample.rollout_id for sample in samples if sample.rollout_id is not None})
    if len(ids) > 1:
        raise broken("one rollout_id", f"siblings with different rollout_id {ids}", "leave rollout_id unset")
    if len({id(sample) for sample in samples}) < len(samples):
        raise broken("a Sample for each row", "the same Sample twice in the list", "make copies")
    return f"{len(samples)} siblings"


def lengths_agree(case: GenerateCase) -> None:
    """There is a prompt, ids are of the vocabulary, the mask is 0 or 1, and mask and log-probs are as long as
    the response."""
    for sample in case.rollout.samples:
        check_trainable(sample, case.path, vocab_size=len(case.stage.tokenizer))


def trains_only_sampled_tokens(case: GenerateCase) -> str:
    """Tokens with mask 1 are ids that the engine sent (law 1): no prompt, template or tool token, no text
    that was encoded again."""
    for sample, origin in case.trained("prompt", "foreign"):
        where = "read in a prompt" if origin.kind == "prompt" else "never sent"
        raise broken(
            "sampled tokens only under mask 1", f"{_named(case, sample, origin)}, {where}", _TAKE_IDS
        )
    trained = sum(map(len, case.origins))
    return f"{trained} of {sum(len(call.token_ids) for call in case.rollout.served)} sampled tokens train"


def trains_tokens_in_their_context(case: GenerateCase) -> None:
    """In front of a trained token stands exactly what the engine saw when it sampled it."""
    for sample, origin in case.trained("displaced"):
        raise broken(
            "the engine's own prompt in front of a sampled token",
            f"other tokens in front of {_named(case, sample, origin)}",
            "append to the tokens that were sent and sampled; if the context is cut or rewritten, return the "
            "rows before and after as siblings",
        )


def trains_each_token_once(case: GenerateCase) -> None:
    """A sampled token trains in one row (law 1): where siblings share it, all but one give it mask 0."""
    for sample, origin in case.trained("twice"):
        raise broken(
            "mask 1 in one row only",
            f"{_named(case, sample, origin)}, which trains in an earlier row too",
            "set loss_mask 0 for what another sibling trains already",
        )


def keeps_the_engines_log_probs(case: GenerateCase) -> None:
    """rollout_log_probs of trained tokens are those of the engine's answer (law 7)."""
    for sample, origin in case.trained("sampled"):
        assert origin.served is not None
        values = sample.rollout_log_probs
        found = None if values is None or origin.position >= len(values) else values[origin.position]
        wanted = origin.served.logprobs[origin.place]
        if found is None or not abs(found - wanted) <= TOLERANCE:
            raise broken(f"log-prob {wanted:g} for {_named(case, sample, origin)}", f"{found}", _TAKE_IDS)


def keeps_sampling_params(case: GenerateCase) -> None:
    """It leaves sampling_params as they are, and trained tokens are sampled with their temperature, top_p and
    top_k (law 7)."""
    attempt = case.rollout
    if attempt.params != attempt.params_before:
        changed = sorted(
            key
            for key in {*attempt.params, *attempt.params_before}
            if attempt.params.get(key) != attempt.params_before.get(key)
        )
        raise broken(
            "sampling_params unchanged", f"changes of {changed}", "work on a copy: dict(sampling_params)"
        )
    calls = {id(o.served): o.served for _, o in case.trained("sampled", "twice") if o.served is not None}
    for call in calls.values():
        for name, used in call.params.items():
            wanted = attempt.params_before.get(name, used)
            if used != wanted:
                raise broken(
                    f"{name} {wanted} in every request whose tokens train",
                    f"{name} {used}",
                    "pass sampling_params on; only lengths and stops may differ",
                )


def reward_is_a_number_or_unset(case: GenerateCase) -> str:
    """A reward that the hook sets itself is a finite number, a list, or a dict with --reward-key (law 4)."""
    rewards = [sample for sample in case.rollout.samples if sample.reward is not None]
    if not rewards:
        raise NotApplicableError("it sets no reward")
    for sample in rewards:
        checked_reward(sample.reward, source=case.path, sample=sample, args=case.stage.args)
    if len(rewards) < len(case.rollout.samples):
        found = f"{len(rewards)} of {len(case.rollout.samples)} siblings with one"
        raise broken("a reward on all siblings or on none", found, "set it on all: they are one rollout")
    return f"{rewards[0].reward}"


def can_be_stored(case: GenerateCase) -> None:
    """Its samples can go to disk and back, as requeued rollouts and dumps do: plain values only."""
    for sample in case.rollout.samples:
        restored = from_json(to_json(sample))
        if restored.tokens != sample.tokens:
            raise CheckpointError("tokens are not whole numbers", place=f"sample {sample.index}")


def repeats_itself(case: GenerateCase) -> None:
    """The same prompt and the same answers give the same trained ids."""
    first, second = (_trained_ids(one.samples) for one in (case.rollout, case.second))
    if first != second:
        lengths = f"{sum(map(len, first))} and {sum(map(len, second))} trained tokens"
        raise broken(
            "the same trained ids in two runs",
            f"{lengths} that differ",
            "draw nothing from clocks or unseeded generators, and keep nothing between rollouts",
        )


def leaves_nothing_running(case: GenerateCase) -> None:
    """When it has returned, no task and no engine request of it goes on (law 6)."""
    second = case.second
    if second.leaked:
        raise broken(
            "no task left", f"{', '.join(second.leaked)}", "await or cancel the tasks that it starts"
        )
    if second.still_running:
        raise broken("an idle engine", f"{second.still_running} request(s)", "await or abort its requests")


def leaves_the_event_loop_free(case: GenerateCase) -> str:
    """While the engine works, other rollouts go on: it awaits its answers."""
    held_up = {call.number for call in case.rollout.served} & set(case.stage.held_up)
    if held_up:
        raise broken(
            "an event loop that moves while the engine works",
            f"that it stood still in {len(held_up)} request(s)",
            "use an async client, or asyncio.to_thread",
        )
    return "probed at every request"


def keeps_rollouts_apart(case: GenerateCase) -> str:
    """Eight rollouts at once mix no tokens: each trains what was sampled for its own prompt, once."""
    _ = case.rollout
    stage = case.stage
    samples = stage.samples(len(WORDS))
    with stage.playing(stage.answers if stage.has_script else _numbered):
        tries = attempts(stage, case.hook, samples)
    for one in tries:
        if one.gave_up:
            found = one.error or f"status {_names(one.statuses)} of sample {one.given.index}"
            raise broken("eight rollouts", f"{found}", "keep no state of a rollout outside of it")
    for sample, origin in case.strangers(tries):
        found = f"{_named(case, sample, origin)} of another rollout or none"
        raise broken("its own tokens in each", found, "keep no state of a rollout outside of it")
    _check_words(case, tries)
    return f"{len(tries)} at once"


def takes_evaluation(case: GenerateCase) -> None:
    """If its signature names `evaluation`, it works with True, too."""
    _ = case.rollout
    if not names_argument(case.hook, "evaluation"):
        raise NotApplicableError("its signature does not name evaluation")
    one = attempt(case.stage, case.hook, case.stage.samples(1)[0], evaluation=True)
    if one.gave_up or not one.samples:
        found = one.error or f"status {_names(one.statuses)}"
        raise broken("a rollout with evaluation=True", f"{found}", "return samples as in training")
    checked_siblings(one.result, one.given, case.path)


CONTRACTS: tuple[Callable[[GenerateCase], str | None], ...] = (
    takes_the_call,
    gives_a_rollout,
    returns_samples,
    asks_the_engine,
    keeps_the_ids,
    siblings_are_one_rollout,
    lengths_agree,
    trains_only_sampled_tokens,
    trains_tokens_in_their_context,
    trains_each_token_once,
    keeps_the_engines_log_probs,
    keeps_sampling_params,
    reward_is_a_number_or_unset,
    can_be_stored,
    repeats_itself,
    leaves_nothing_running,
    leaves_the_event_loop_free,
    keeps_rollouts_apart,
    takes_evaluation,
)


def _needs_hook(case: GenerateCase) -> None:
    try:
        _ = case.hook
    except HookError as error:
        raise NotApplicableError("the hook cannot be called") from error


def _numbered(call: ScriptedCall) -> ScriptedAnswer:
    """Another answer to each request, so that tokens tell whose they are."""
    return ScriptedAnswer(text=f"Answer {call.number} is 42.")


def _check_words(case: GenerateCase, tries: list[Attempt]) -> None:
    """No rollout holds the prompt of another."""
    words = [next((word for word in WORDS if word in str(one.given.prompt)), None) for one in tries]
    for one, own in zip(tries, words, strict=True):
        for sample in one.samples:
            text = case.stage.tokenizer.decode(sample.tokens)
            strange = [word for word in words if word and word != own and f"Question {word}" in text]
            if own and strange:
                found = f"the prompt of {strange[0]!r} in the rollout of {own!r}"
                raise broken("its own prompt in each", found, "keep no state of a rollout outside of it")


def _trained_ids(samples: Iterable[Sample]) -> list[list[int]]:
    rows = []
    for sample in samples:
        response = sample.tokens[sample.prompt_length :]
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
        rows.append([token for token, trains in zip(response, mask, strict=False) if trains])
    return rows


def _named(case: GenerateCase, sample: Sample, origin: Origin) -> str:
    text = case.stage.tokenizer.decode([origin.token])
    return f"token {origin.token} ({text!r}) at response position {origin.position} of sample {sample.index}"


def _names(statuses: Iterable[Any]) -> str:
    return ", ".join(sorted(status.name for status in statuses)) or "none"
