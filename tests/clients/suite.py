"""A client's whole run against an adapter before a scripted engine, and what must hold of its tokens."""

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.serving.script import script_of, scripted_logprob
from slime.serving.scripted import start_scripted_server
from slime.utils.types import Sample
from tests.agent.tokenizers import real_tokenizer
from tests.clients.clients import ClientRun, available, run_client
from tests.clients.cutting_proxy import CuttingProxy

SID = "rollout-7/main"
CONTEXT = 200_000
START, END = 151644, 151645
SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")


@dataclass(frozen=True, repr=False)
class Act:
    """A run and what came of it.

    Attributes:
        calls: prompt and sampled tokens of each call that the engine was asked, in order; those of one that
            failed are none.
        sampled: tokens that the engine gave out.
    """

    run: ClientRun
    samples: list[Sample]
    tally: object
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]]
    sampled: int
    asked: list[str]
    counters: dict[str, int]
    events: list[str]
    logs: Path

    @property
    def segments(self):
        """Why each sample exists."""
        return [sample.metadata["segment"] for sample in self.samples]

    @property
    def trained(self):
        """Tokens with mask 1."""
        return sum(sum(sample.loss_mask) for sample in self.samples)

    def __repr__(self):
        run = f"rc {self.run.rc}, {self.run.seconds:.1f} s, logs in {self.logs}"
        asked = f"{len(self.calls)} requests: {self.asked}, {self.counters}"
        tokens = f"sampled {self.sampled}, trained {self.trained}, {self.segments}"
        return "\n".join((run, asked, tokens, str(self.tally), self.run.stderr[-1000:]))


def act(name, play, workdir, *, adapter, prompt="Do it.", session=None, serve=None, cut=None, **options):
    """Run client `name` in `workdir`; `play` is the policy behind the model.

    Args:
        adapter: the class.
        session: options of `open_session`.
        serve: options of the adapter.
        cut: (request, text, text): this answer is cut before a text, when another comes.
        options: of `run_client`.
    """
    if not available(name):
        pytest.skip(f"{name} is not installed: run `make clients`")
    tokenizer = real_tokenizer("qwen3")
    calls = []

    def policy(call):
        answer = play(call)
        given = () if answer.error else script_of(answer, call.params, tokenizer).token_ids
        calls.append((call.input_ids, tuple(given)))
        return answer

    with start_scripted_server(policy, tokenizer, context_length=CONTEXT) as server:
        served = adapter(tokenizer=tokenizer, sglang_url=server.url, **(serve or {}))
        served.open_session(SID, **(session or {}))
        handle = run_app_in_thread(served.app)
        options = {"context_tokens": 150_000, "timeout": 180} | options
        try:
            with _way_to(handle, cut) as url:
                run = run_client(
                    name, base_url=url, session_id=SID, workdir=workdir, prompt=prompt, **options
                )
            samples = asyncio.run(served.finish_session(SID, base_sample=Sample(index=7), reward=1.0))
        finally:
            handle.stop()
        sampled = server.engine.stats.decode_tokens
        done = Act(
            run,
            samples,
            served.manager.totals,
            calls,
            sampled,
            play.asked,
            served.counters,
            server.engine.events,
            workdir / ".harness",
        )
    print(f"\n{name}: {done}")
    return done


@contextmanager
def _way_to(handle, cut):
    """The URL of the adapter, or of a proxy before it, which must have cut."""
    if cut is None:
        yield handle.url
        return
    with CuttingProxy(int(handle.url.rpartition(":")[2]), cut=cut[0], before=cut[1], when=cut[2]) as proxy:
        yield proxy.url
    assert proxy.cuts == 1


def check(
    done, *, rc=0, segments=("final",), side=0, abandoned=0, untrained=(), unheard=False, says_special=False
):
    """What holds of every run: it ends by itself, and every token that was sampled is trained once.

    Args:
        segments: None where the client may go on in several ways: one is ``final``, others are ``wipe``.
        side: turns that are side requests.
        abandoned: turns that the client did not take; None: any number.
        untrained: numbers of the engine's calls that may be in no row.
        says_special: the client shows special tokens that stand in files or commands.
        unheard: the engine may have sampled tokens of an answer after its client had gone.
    """
    tally = done.tally
    assert done.run.rc == rc, done
    expected = ["final"] + ["wipe"] * (len(done.segments) - 1) if segments is None else segments
    assert sorted(done.segments) == sorted(expected), done
    lost = done.sampled - tally.tokens
    assert lost == 0 or (unheard and lost > 0), done
    assert tally.turns_side == side, done
    assert abandoned in (None, tally.turns_abandoned), done
    assert tally.unaccounted == tally.tokens_realigned == tally.tokens_truncated == 0, done
    assert done.trained == tally.tokens_trained, done
    assert done.trained == tally.tokens - tally.tokens_side - tally.tokens_abandoned, done
    for number, (prompt, given) in enumerate(done.calls):
        if given and number not in untrained:
            assert _rows_of(done.samples, prompt, given) == 1, (number, done)
    for prompt, _ in done.calls:
        assert prompt.count(START) == prompt.count(END) + 1, done
    for mark in SPECIAL if not says_special else ():
        assert mark not in done.run.stdout + done.run.stderr, done


def _rows_of(samples, prompt, given):
    """In how many samples a call stands as the engine saw it, and is trained."""
    return sum(_is_trained(sample, prompt, given) for sample in samples)


def _is_trained(sample, prompt, given):
    end = len(prompt) + len(given)
    if tuple(sample.tokens[:end]) != prompt + given:
        return False
    first = len(sample.tokens) - sample.response_length
    span = slice(len(prompt) - first, end - first)
    if len(prompt) < first or set(sample.loss_mask[span]) != {1}:
        return False
    values = sample.rollout_log_probs[span]
    assert values == pytest.approx([scripted_logprob(token) for token in given])
    return True
