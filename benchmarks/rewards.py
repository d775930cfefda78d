"""The math reward against math-verify: throughput, verdicts, and how long the event loop is held up.

    python benchmarks/rewards.py [--pairs 5000] [--workers 2] [--timeout 3]

Made pairs: 40 % integers, 15 % fractions, 10 % decimals, 15 % expressions, 10 % tuples, sets and intervals,
5 % words, 5 % without a box; half of them wrong. One pair in a hundred is pathological: towers of powers,
giant factorials and nestings, sums and integrals without end, text that backtracking regexes choke on.
math-verify runs in one process with its own defaults, and is spared the pathological ones. CPU seconds are
given too.
"""

import argparse
import asyncio
import multiprocessing
import random
import resource
import statistics
import time
from types import SimpleNamespace

from slime.rollout.rm_hub import Failed, Invalid, Valid, verdict_on
from slime.rollout.rm_hub.pool import close_shared_pools
from slime.utils.types import Sample

KINDS = ("integer",) * 8 + ("fraction",) * 3 + ("decimal",) * 2 + ("expression",) * 3 + ("row",) * 2
KINDS += ("words", "no box")
TICK_S = 0.001


def integer(rng):
    value = rng.randint(-(10**6), 10**6)
    forms = (f"{value}", f"{value:,}", f"{value}.0", f"x = {value}", rf"{value}\text{{ cm}}")
    return str(value), rng.choice(forms), str(value + rng.choice((-1, 1, 10)))


def fraction(rng):
    top, bottom = rng.choice([(1, 2), (3, 4), (5, 7), (2, 9), (11, 6), (7, 3), (13, 8)])
    right = rng.choice((rf"\dfrac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}"))
    return rf"\frac{{{top}}}{{{bottom}}}", right, rf"\frac{{{top + bottom}}}{{{bottom}}}"


def decimal(rng):
    value = rng.randint(-999, 999) / 8
    return f"{value}", f"{value}0", f"{value + 0.5}"


def expression(rng):
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    forms = (
        (f"{a}x^2+{b}x+{c}", f"{c}+{b}x+{a}x^2", f"{a}x^2+{b}x-{c}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"{a}\sqrt{{{b + 1}}}"),
        (rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", rf"\frac{{{a}\pi}}{{{b + 1}}}"),
        (f"({a}+x)({b}-x)", f"{a * b}+{b}x-{a}x-x^2", f"({a}+x)({b}+x)"),
        (rf"2^{{{a}}}\cdot y", f"{2**a}y", f"{2**a + 1}y"),
    )
    return rng.choice(forms)


def row(rng):
    a, b = rng.randint(-9, 0), rng.randint(1, 9)
    forms = (
        (f"({a},{b})", rf"\left( {a}, {b} \right)", f"({b},{a})"),
        (f"[{a},{b}]", f"[{a}, {b}]", f"[{a},{b + 1}]"),
        (rf"\{{{a},{b}\}}", rf"\{{{b},{a}\}}", rf"\{{{a},{b + 1}\}}"),
        (rf"(-\infty,{b})", rf"(-\infty, {b}.0)", rf"(-\infty,{b}]"),
    )
    return rng.choice(forms)


def words(rng):
    right, wrong = rng.sample(["red", "Evelyn", "no solution", "even", "C"], 2)
    return rf"\text{{{right}}}", right, wrong


MAKERS = {
    "integer": integer,
    "fraction": fraction,
    "decimal": decimal,
    "expression": expression,
    "row": row,
    "words": words,
}


def ordinary(count, rng):
    """Triples of kind, response and label, and whether the response is right."""
    pairs = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        label, right, wrong = MAKERS[kind if kind in MAKERS else "integer"](rng)
        good = rng.random() < 0.5 and kind != "no box"
        answer = right if good else wrong
        boxed = answer if kind == "no box" else rf"\boxed{{{answer}}}"
        pairs.append((kind, f"We compute step by step. Therefore the answer is {boxed}.", label, good))
    return pairs


def pathological(count, rng):
    """The same for what breaks checkers; the truth is None where nobody can say, or wants to."""
    nested = "x"
    for _ in range(300):
        nested = rf"\frac{{1}}{{{nested}}}"
    cases = [
        ("tower", r"\boxed{9^{9^{9^{9}}}}", r"\frac{5}{2}", None),
        ("python tower", r"\boxed{9**9**9**9}", r"\frac{5}{2}", None),
        ("factorial", r"\boxed{(10^{9})!}", r"\frac{1}{3}", None),
        ("tower, integer label", r"\boxed{9^{9^{9^{9}}}}", "5", False),
        ("nesting", rf"\boxed{{{nested}}}", "x", True),
        ("long sum", r"\boxed{" + "+".join(["x"] * 3000) + "}", "3000x", True),
        ("endless sum", r"\boxed{\sum_{k=1}^{10^{8}} \frac{1}{k}}", r"\frac{1}{2}", None),
        ("integral", r"\boxed{\int_0^1 \frac{\sin(x^2)}{1+e^x+\ln(x+1)} dx}", r"\frac{1}{2}", None),
        ("unclosed boxes", r"\boxed{" * 20_000, r"\frac{1}{2}", None),
        ("spaces", r"\boxed{x" + " " * 100_000 + r"y}", "x+y", None),
        ("dollars", r"\boxed{" + "$" * 1500 + "x}", r"\frac{x}{2}", None),
        ("commas", r"\boxed{" + "1," * 900 + "x}", r"\frac{x}{2}", None),
        ("open brackets", r"\boxed{" + r"\left(" * 300 + "}", r"\frac{x}{2}", None),
        ("text in text", r"\boxed{" + r"\text{" * 200 + "x" + "}" * 200 + "}", r"\frac{x}{2}", None),
        ("no text at all", "\x00" * 10_000, "5", False),
    ]
    return [cases[number % len(cases)] for number in range(count)]


async def ticker(stalls, done):
    while not done.is_set():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        stalls.append(time.perf_counter() - before - TICK_S)


async def ours(pairs, args):
    """Verdicts of all pairs at once, how long it took and how late each tick was."""
    for warm in range(2 * args.reward_num_workers):
        await verdict_on(args, Sample(index=-warm - 1, response=r"\boxed{x+1}", label="1+x"))
    stalls, done = [], asyncio.Event()
    ticking = asyncio.create_task(ticker(stalls, done))
    await asyncio.sleep(0.05)
    slots = asyncio.Semaphore(512)

    async def one(index, pair):
        async with slots:
            return await verdict_on(args, Sample(index=index, response=pair[1], label=pair[2]))

    started = time.perf_counter()
    verdicts = await asyncio.gather(*(one(index, pair) for index, pair in enumerate(pairs)))
    seconds = time.perf_counter() - started
    done.set()
    await ticking
    return verdicts, seconds, stalls


def math_verify_alone(pairs, answers):
    """math-verify as its README has it, in this process: verdicts, seconds, CPU seconds."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.ERROR)
    verify(parse("$x+1$"), parse("$1+x$"))
    started, cpu = time.perf_counter(), time.process_time()
    found = [bool(verify(parse(f"${label}$"), parse(response))) for _, response, label, _ in pairs]
    answers.put((found, time.perf_counter() - started, time.process_time() - cpu))


def cpu_seconds():
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def report_verdicts(pairs, verdicts):
    silent = hung = 0
    kinds = {}
    for (kind, _, _, truth), verdict in zip(pairs, verdicts, strict=True):
        counts = kinds.setdefault(kind, {"right": 0, "wrong": 0, "no answer": 0, "failed": 0, "mistaken": 0})
        if isinstance(verdict, Failed):
            counts["failed"] += 1
            hung += verdict.reason == "timeout"
            counts.setdefault(verdict.reason, 0)
            counts[verdict.reason] += 1
            continue
        name = "no answer" if isinstance(verdict, Invalid) else "right" if verdict.reward else "wrong"
        counts[name] += 1
        counts["mistaken"] += truth is not None and bool(verdict.reward) != truth
        silent += truth is True and isinstance(verdict, Valid) and not verdict.reward
    for kind, counts in kinds.items():
        print(f"  {kind:<22}", ", ".join(f"{name} {count}" for name, count in counts.items() if count))
    print(f"right answers that silently got 0: {silent}; checks killed at their deadline: {hung}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3.0)
    options = parser.parse_args()
    rng = random.Random(0)
    odd = options.pairs // 100
    normal = ordinary(options.pairs - odd, rng)
    pairs = normal + pathological(odd, rng)
    order = list(range(len(pairs)))
    rng.shuffle(order)
    args = SimpleNamespace(rm_type="math", reward_timeout=options.timeout, reward_num_workers=options.workers)
    before = cpu_seconds()
    verdicts, seconds, stalls = asyncio.run(ours([pairs[place] for place in order], args))
    close_shared_pools()
    cpu = cpu_seconds() - before
    back = dict(zip(order, verdicts, strict=True))
    verdicts = [back[place] for place in range(len(pairs))]

    answers = multiprocessing.Queue()
    process = multiprocessing.Process(target=math_verify_alone, args=(normal, answers))
    process.start()
    library, library_seconds, library_cpu = answers.get()
    process.join()

    print(f"{len(pairs)} pairs, {odd} of them pathological, {options.workers} processes:")
    report_verdicts(pairs, verdicts)
    rate, library_rate = len(pairs) / seconds, len(normal) / library_seconds
    print(f"slime        {rate:8.0f} pairs/s  {seconds:6.1f} s  {cpu:6.1f} CPU s (of all processes)")
    print(
        f"math-verify  {library_rate:8.0f} pairs/s  {library_seconds:6.1f} s  {library_cpu:6.1f} CPU s "
        "(one process, without the pathological)"
    )
    print(
        f"throughput {rate / library_rate:.2f} times, per CPU second "
        f"{(len(pairs) / cpu) / (len(normal) / library_cpu):.2f} times"
    )
    p99, most = statistics.quantiles(stalls, n=100)[98], max(stalls)
    print(
        f"event loop late by: p50 {statistics.median(stalls) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, "
        f"max {most * 1e3:.1f} ms over {len(stalls)} ticks"
    )
    differ = {}
    for (kind, response, label, truth), verdict, theirs in zip(normal, verdicts, library, strict=False):
        if not isinstance(verdict, Failed) and bool(verdict.reward) != theirs:
            differ.setdefault((kind, truth), []).append((response[47:], label, theirs))
    print("math-verify says otherwise:" if differ else "math-verify says the same of all ordinary pairs")
    for (kind, truth), cases in differ.items():
        print(f"  {kind} ({'right' if truth else 'wrong'} by construction): {len(cases)}, e.g. {cases[0]}")


if __name__ == "__main__":
    main()
