"""What the engine does with requests: reuse, seeds, stops, aborts, pauses, weights, failures."""

import contextlib
import random
import sys
import threading

import pytest
import torch

from slime.config.sections import EngineConfig
from slime.errors import EngineError, EngineRequestError, EngineUnavailableError
from slime.serving.embedded.engine import Engine
from tests.serving.embedded.harness import generate, one, request, running, send
from tests.tiny import tiny_model, tiny_model_dir

PROMPT = list(range(20, 60))
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), initializer_range=0.2)


@pytest.fixture(scope="module")
def shared_engine(folder):
    with running(folder) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    assert shared_engine.flush_cache()
    return shared_engine


def same(left, right):
    """Same tokens, and log-probs equal but for the rounding of other batch shapes."""
    close = pytest.approx(right.output_logprobs, abs=1e-4)
    return left.output_ids == right.output_ids and left.output_logprobs == close


# --- seeds


def test_tokens_do_not_depend_on_the_batch(engine):
    rng = random.Random(1)
    requests = [
        request(
            [rng.randrange(3, 259) for _ in range(n)],
            greedy=False,
            sampling_seed=n,
            max_new_tokens=20,
            top_p=p,
        )
        for n, p in ((5, 1.0), (70, 0.7), (31, 1.0), (12, 0.9))
    ]
    together = generate(engine, requests)
    engine.flush_cache()
    alone = [generate(engine, [r])[0] for r in requests]
    assert all(map(same, together, alone))


def test_same_seed_same_tokens_and_no_seed_fresh_ones(engine):
    seeded = [
        one(engine, PROMPT, greedy=False, sampling_seed=5, max_new_tokens=12).output_ids for _ in range(2)
    ]
    fresh = [one(engine, PROMPT, greedy=False, max_new_tokens=12).output_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert fresh[0] != fresh[1]


# --- prefix reuse


def test_repeated_prompt_computes_only_its_last_token(engine):
    first, again = one(engine, PROMPT), one(engine, PROMPT)
    assert (first.cached_tokens, again.cached_tokens) == (0, len(PROMPT) - 1)
    assert same(first, again)


def test_group_prefills_its_prompt_once(engine):
    before = engine.stats.prefill_tokens
    group = generate(engine, [request(PROMPT, greedy=False, sampling_seed=i) for i in range(8)])
    assert engine.stats.prefill_tokens - before == len(PROMPT)
    assert sorted(update.cached_tokens for update in group) == [0] + [len(PROMPT) - 1] * 7


def test_next_turn_computes_only_new_tokens(engine):
    history = list(PROMPT)
    for turn in range(4):
        update = one(engine, history)
        # All of the last turn but its final sampled token, which never went through the model.
        assert update.cached_tokens == (0 if turn == 0 else len(history) - 6)
        history += [*update.output_ids, 7, 8, 9, 10, 11]


def test_reuse_changes_no_result(engine):
    longer = PROMPT + list(range(100, 120))
    fresh = one(engine, longer)
    engine.flush_cache()
    one(engine, PROMPT)
    reused = one(engine, longer)
    assert reused.cached_tokens == len(PROMPT)
    assert same(reused, fresh)


def test_scored_prompt_tokens_are_computed_again(engine):
    fresh = one(engine, PROMPT, score=10)
    again = one(engine, PROMPT, score=10)
    assert again.cached_tokens == 10
    assert [token for _, token in again.input_logprobs] == PROMPT[10:]
    assert again.input_logprobs[0] == (None, PROMPT[10])
    for (a, _), (b, _) in zip(fresh.input_logprobs[1:], again.input_logprobs[1:], strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_no_new_tokens_scores_the_prompt(engine):
    update = one(engine, PROMPT, score=0, top=2, max_new_tokens=0)
    assert update.finish_reason == {"type": "length", "length": 0}
    assert update.output_ids == []
    assert len(update.input_logprobs) == len(update.input_top_logprobs) == len(PROMPT)
    assert update.input_top_logprobs[0] is None
    assert update.input_top_logprobs[1][0][0] >= update.input_logprobs[1][0]


# --- stops


def test_stop_token_is_kept_in_ids_and_left_out_of_text(engine):
    free = one(engine, PROMPT, max_new_tokens=6)
    stop = free.output_ids[3]
    cut = one(engine, PROMPT, max_new_tokens=6, ignore_eos=False, stop_token_ids=frozenset([stop]))
    end = free.output_ids.index(stop) + 1
    assert cut.output_ids == free.output_ids[:end]
    assert cut.finish_reason == {"type": "stop", "matched": stop}
    assert cut.text == engine.tokenizer.decode(cut.output_ids[:-1])


def test_stop_string_across_tokens_ends_and_trims(engine):
    prompt = engine.tokenizer.encode("once upon a time")
    bias = dict.fromkeys(engine.tokenizer.encode("abcd"), 100.0)
    options = {"greedy": False, "sampling_seed": 1, "logit_bias": bias, "max_new_tokens": 60}
    free = one(engine, prompt, **options)
    stop = free.text[20:23]
    cut = one(engine, prompt, stop=(stop,), **options)
    kept = one(engine, prompt, stop=(stop,), no_stop_trim=True, **options)
    assert cut.finish_reason == {"type": "stop", "matched": stop}
    assert cut.text == free.text[: free.text.index(stop)]
    assert kept.text == cut.text + stop
    assert cut.output_ids == free.output_ids[: len(cut.text) + len(stop)]


def test_min_new_tokens_holds_the_end_back(engine):
    end = {next(iter(engine.eos_ids)): 100.0}
    short = one(engine, PROMPT, ignore_eos=False, logit_bias=end)
    longer = one(engine, PROMPT, ignore_eos=False, logit_bias=end, min_new_tokens=4)
    assert (len(short.output_ids), len(longer.output_ids)) == (1, 5)
    assert longer.finish_reason == {"type": "stop", "matched": 2}


def test_repetition_penalties_make_tokens_differ(engine):
    plain = one(engine, [5, 5, 5, 5], max_new_tokens=30).output_ids
    for penalty in ({"frequency_penalty": 50.0}, {"presence_penalty": 50.0}, {"repetition_penalty": 1e6}):
        assert len(set(one(engine, [5, 5, 5, 5], max_new_tokens=30, **penalty).output_ids)) == 30
    assert len(set(plain)) < 30


def test_stream_is_cumulative_and_ends_with_the_whole(engine):
    inbox = send(engine, request(PROMPT, greedy=False, sampling_seed=9, stream=True, max_new_tokens=40))
    last = inbox.result()
    assert [len(update.output_ids) for update in inbox.updates] == list(range(1, 41))
    for update in inbox.updates:
        assert update.output_ids == last.output_ids[: len(update.output_ids)]
        assert last.text.startswith(update.text)
    assert last.text == engine.tokenizer.decode(last.output_ids)


def test_context_length_ends_a_request(folder):
    with running(folder, context_length=48) as engine:
        update = one(engine, PROMPT, max_new_tokens=100)
    assert update.finish_reason == {"type": "length", "length": 8}


# --- wrong requests


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "empty"), ([5, 259], "token id 259"), ([-1], "token id -1"), ([5] * 1024, "the context is 1024")],
)
def test_wrong_prompt_is_refused_by_name(engine, ids, message):
    with pytest.raises(EngineRequestError, match=message):
        engine.submit(request(ids), print)


def test_name_in_flight_is_refused(engine):
    engine.pause("in_place")
    req = request(PROMPT)
    inbox = send(engine, req)
    with pytest.raises(EngineRequestError, match=req.rid):
        engine.submit(req, print)
    engine.resume()
    inbox.result()


def test_stopped_engine_refuses(folder):
    with running(folder) as engine:
        pass
    with pytest.raises(EngineUnavailableError):
        engine.submit(request(PROMPT), print)


# --- abort and pause


def long_request(**options):
    return request(PROMPT, max_new_tokens=700, stream=True, **options)


def test_abort_returns_what_there_is(engine):
    req = long_request()
    inbox = send(engine, req, hold=5)
    inbox.tokens(5)
    engine.abort("unknown")
    engine.abort(req.rid)
    update = inbox.result()
    assert update.finish_reason == ABORTED
    assert 5 <= len(update.output_ids) == len(update.output_logprobs) < 700
    assert engine.stats.running == 0
    assert one(engine, PROMPT + update.output_ids).cached_tokens >= len(PROMPT) + 4


def test_abort_all_ends_waiting_requests_too(folder):
    with running(folder, max_running_requests=1) as engine:
        inboxes = [send(engine, long_request(), hold=2) for _ in range(3)]
        inboxes[0].tokens(2)
        engine.abort_all()
        assert [inbox.result().finish_reason for inbox in inboxes] == [ABORTED] * 3


def test_pause_abort_ends_requests_and_holds_new_ones(engine):
    running_one = send(engine, long_request(), hold=3)
    running_one.tokens(3)
    engine.pause("abort")
    assert running_one.result().finish_reason == ABORTED
    waiting = send(engine, request(PROMPT))
    assert engine.is_paused
    assert engine.flush_cache()
    assert not waiting.updates
    engine.resume()
    assert waiting.result().finish_reason["type"] == "length"


@pytest.mark.parametrize(("mode", "retractions"), [("in_place", 0), ("retract", 1)])
def test_paused_request_goes_on_as_if_never_paused(engine, mode, retractions):
    options = {"greedy": False, "sampling_seed": 4, "score": 0}
    undisturbed = send(engine, long_request(**options)).result()
    inbox = send(engine, long_request(**options), hold=20)
    inbox.tokens(20)
    engine.pause(mode)
    seen = len(inbox.updates)
    assert engine.flush_cache() is (mode == "retract")
    assert len(inbox.updates) == seen
    engine.resume()
    update = inbox.result()
    assert update.num_retractions == retractions
    assert update.output_ids == undisturbed.output_ids
    assert update.output_logprobs == pytest.approx(undisturbed.output_logprobs, abs=1e-4)
    assert len(update.input_logprobs) == len(PROMPT)


def test_short_memory_retracts_and_still_finishes(folder):
    prompts = [list(range(10 + i, 60 + i)) for i in range(4)]
    with running(folder) as engine:
        free = generate(engine, [request(p, max_new_tokens=60) for p in prompts])
    with running(folder, max_total_tokens=300) as engine:
        updates = generate(engine, [request(p, max_new_tokens=60) for p in prompts])
        stats = engine.stats
    assert all(map(same, updates, free))
    assert sum(update.num_retractions for update in updates) > 0
    assert stats.reusable_tokens <= stats.capacity == 300


def test_release_memory_holds_requests_until_resume(engine):
    one(engine, PROMPT)
    engine.release_memory()
    assert engine.stats.reusable_tokens == 0
    inbox = send(engine, request(PROMPT))
    assert engine.stats.running == 0
    engine.resume_memory()
    assert inbox.result().cached_tokens == 0


def test_release_memory_is_refused_while_requests_run(engine):
    inbox = send(engine, long_request(), hold=1)
    inbox.tokens(1)
    with pytest.raises(EngineError, match="requests hold"):
        engine.release_memory()
    engine.abort_all()
    inbox.result()


# --- weights


def weights_of(seed, **options):
    model = tiny_model(seed=seed, initializer_range=0.2, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def own_engine(folder):
    with running(folder) as engine:
        yield engine


def test_alias_makes_the_tensors_the_weights(own_engine):
    new = weights_of(1)
    own_engine.update_weights(new.items(), "1", alias=True, flush=True)
    held = dict(own_engine._runner.model.named_parameters())
    assert all(held[name].data_ptr() == tensor.data_ptr() for name, tensor in new.items())
    before = one(own_engine, PROMPT)
    with torch.no_grad():
        new["lm_head.weight"].mul_(2.0)
    own_engine.set_weight_version("2")
    after = one(own_engine, PROMPT)
    assert (before.weight_version, after.weight_version, after.cached_tokens) == ("1", "2", 0)
    assert before.output_logprobs != after.output_logprobs


def test_copy_after_alias_leaves_foreign_memory_alone(own_engine):
    shared, other = weights_of(1), weights_of(2)
    own_engine.update_weights(shared.items(), "1", alias=True, flush=True)
    own_engine.update_weights(other.items(), "2", alias=False, flush=True)
    kept = weights_of(1)
    assert all(torch.equal(shared[name], kept[name]) for name in kept)
    held = dict(own_engine._runner.model.named_parameters())
    assert all(torch.equal(held[name], other[name]) for name in other)


def test_other_dtype_is_copied(own_engine):
    new = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(1).items()}
    own_engine.update_weights(new.items(), "1", alias=True, flush=True)
    held = dict(own_engine._runner.model.named_parameters())
    assert all(torch.equal(held[name], tensor.float()) for name, tensor in new.items())


def test_tied_weights_stay_tied(tmp_path):
    options = {"tie_word_embeddings": True}
    folder = tiny_model_dir(tmp_path / "m", **options)
    new = weights_of(3, **options)
    assert "lm_head.weight" not in new
    with running(folder) as engine:
        engine.update_weights(new.items(), "1", alias=True, flush=True)
        model = engine._runner.model
        assert model.lm_head.weight.data_ptr() == new["model.embed_tokens.weight"].data_ptr()
        both = new | {"lm_head.weight": new["model.embed_tokens.weight"]}
        engine.update_weights(both.items(), "2", alias=True, flush=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.nothing": torch.zeros(1)}, "model.nothing"),
        (lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"}, "lm_head.weight"),
        (lambda w: w | {"lm_head.weight": torch.zeros(3, 64)}, r"lm_head.weight has shape \[3, 64\]"),
    ],
)
def test_update_that_does_not_fit_changes_nothing(engine, change, message):
    before = one(engine, PROMPT)
    with pytest.raises(EngineError, match=message):
        engine.update_weights(change(weights_of(1)).items(), "1", alias=False, flush=True)
    assert engine.weight_version == "default"
    assert same(one(engine, PROMPT), before)


@pytest.mark.parametrize("mode", ["in_place", "retract", None])
def test_update_during_a_request_makes_two_spans(own_engine, mode):
    inbox = send(own_engine, long_request(), hold=10)
    inbox.tokens(10)
    if mode:
        own_engine.pause(mode)
    own_engine.update_weights(weights_of(1).items(), "1", alias=False, flush=True)
    if mode:
        own_engine.resume()
    update = inbox.result()
    old, new = update.weight_versions
    assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "1", 700)
    assert 10 <= old["end"] == new["start"] < 700
    # What was computed with old weights is not reused after the flush, unless it was computed anew.
    again = one(own_engine, PROMPT + update.output_ids)
    assert again.cached_tokens == (len(PROMPT) + 699 if mode == "retract" else 0)


def test_update_without_flush_keeps_prefixes(own_engine):
    one(own_engine, PROMPT)
    own_engine.update_weights(weights_of(0).items(), "1", alias=False, flush=False)
    assert one(own_engine, PROMPT).cached_tokens == len(PROMPT) - 1


# --- failures


def test_failing_step_fails_its_requests_only(own_engine):
    runner = own_engine._runner
    forward = runner.forward

    def broken(*_):
        runner.forward = forward
        raise RuntimeError("out of luck")

    runner.forward = broken
    failed = one(own_engine, PROMPT)
    assert failed.finish_reason["type"] == "abort"
    assert failed.finish_reason["status_code"] == 500
    assert "out of luck" in failed.finish_reason["message"]
    assert one(own_engine, PROMPT).finish_reason["type"] == "length"


class NoMemory:
    """Stands before an object; one use of the named method, the first or a later one, fails as torch does."""

    def __init__(self, inner, method, after=0):
        self._inner, self._method, self.left = inner, method, after + 1

    def __getattr__(self, name):
        if name == self._method:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return getattr(self._inner, name)


def test_failing_admission_answers_its_request_and_loses_no_other(own_engine):
    scheduler = own_engine._scheduler
    own_engine.pause("in_place")
    inboxes = [send(own_engine, request(ids)) for ids in (PROMPT, PROMPT, range(100, 140), range(150, 160))]
    scheduler._shape = NoMemory(scheduler._shape, "buffer", after=1)
    own_engine.resume()
    reasons = [inbox.result().finish_reason for inbox in inboxes]
    assert "can't allocate" in reasons[2]["message"]
    assert [reason["type"] for reason in reasons] == ["abort", "length", "abort", "length"]
    assert own_engine.stats.running == own_engine.stats.waiting == 0


def test_what_cannot_be_kept_is_dropped_and_the_worker_lives_on(own_engine):
    scheduler, long = own_engine._scheduler, long_request()
    inbox = send(own_engine, long, hold=3)
    inbox.tokens(3)
    own_engine.pause("in_place")
    scheduler._cache = NoMemory(scheduler._cache, "read")
    own_engine.abort(long.rid)
    assert inbox.result().finish_reason == ABORTED
    assert scheduler._cache.left == 0
    own_engine.resume()
    assert one(own_engine, PROMPT).finish_reason["type"] == "length"


def test_failing_call_does_not_end_the_worker(own_engine, caplog):
    def call():
        raise ValueError("bad call")

    own_engine._post(call)
    assert one(own_engine, PROMPT).finish_reason["type"] == "length"
    assert "bad call" in caplog.text


def test_logits_that_are_not_finite_fail_the_request(own_engine):
    bad = weights_of(1)
    bad["lm_head.weight"] = torch.full_like(bad["lm_head.weight"], float("nan"))
    own_engine.update_weights(bad.items(), "1", alias=False, flush=True)
    assert "not finite" in one(own_engine, PROMPT).finish_reason["message"]
    own_engine.update_weights(weights_of(1).items(), "2", alias=False, flush=True)
    assert one(own_engine, PROMPT).finish_reason["type"] == "length"


def test_a_request_after_broken_weights_is_not_poisoned_by_the_slot(own_engine):
    bad = weights_of(1)
    bad["model.embed_tokens.weight"] = torch.full_like(bad["model.embed_tokens.weight"], float("nan"))
    running_on = send(own_engine, request(PROMPT, max_new_tokens=150, stream=True), hold=100)
    running_on.tokens(100)
    own_engine.update_weights(bad.items(), "1", alias=False, flush=True)
    assert "not finite" in running_on.result().finish_reason["message"]
    own_engine.update_weights(weights_of(1).items(), "2", alias=False, flush=True)
    updates = generate(own_engine, [request(PROMPT), request(range(3, 203))])
    assert [update.finish_reason["type"] for update in updates] == ["length", "length"]


def test_failing_listener_harms_nobody(engine):
    called = threading.Event()

    def listener(_):
        called.set()
        raise ValueError("listener")

    engine.submit(request(PROMPT), listener)
    assert one(engine, PROMPT).finish_reason["type"] == "length"
    assert called.is_set()


def test_shutdown_ends_requests_in_flight(folder):
    with running(folder) as engine:
        inbox = send(engine, long_request(), hold=1)
        inbox.tokens(1)
    assert inbox.result().finish_reason == ABORTED


def test_engine_knows_its_model(engine):
    assert isinstance(engine, Engine)
    assert (engine.vocab_size, engine.context_length, engine.eos_ids) == (259, 1024, frozenset([2]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_worker_that_dies_is_noticed_not_waited_for(folder):
    engine = Engine(str(folder), EngineConfig(num_threads=1))
    engine.start()
    with contextlib.suppress(EngineUnavailableError):
        engine._post(sys.exit)
        engine.flush_cache()
    engine.shutdown()
    assert not engine.is_alive
    with pytest.raises(EngineUnavailableError):
        engine.flush_cache()
