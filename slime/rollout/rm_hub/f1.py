"""Token F1 by the rules of SQuAD (Rajpurkar et al., 2016; evaluation script 1.1).

Pure functions of two texts; they run in a worker process.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the tokens; zeros without a prediction or where a yes/no differs."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if predicted != truth and {predicted, truth} & _CLOSED_ANSWERS:
        return 0.0, 0.0, 0.0
    predicted_tokens, truth_tokens = predicted.split(), truth.split()
    common = (Counter(predicted_tokens) & Counter(truth_tokens)).total()
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted_tokens), common / len(truth_tokens)
    return 2 * precision * recall / (precision + recall), precision, recall


def f1_reward(response: str, label: str) -> float:
    """The F1 alone."""
    return f1_score(response, label)[0]
