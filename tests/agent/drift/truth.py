"""What must hold of a session's samples, given what its engine was asked and sampled."""

import numpy as np

from tests.agent.drift.script import Answer


class Claims:
    """Which trained positions of which sample are accounted for."""

    def __init__(self, samples):
        self.samples = samples
        self.masks = [_mask(sample) for sample in samples]
        self.open = [mask.copy() for mask in self.masks]

    def take(self, record, *, is_partial=False):
        """Find the one sample that trains a record's tokens; returns how many of them."""
        best = max(
            (self._fit(index, record, is_partial) for index in range(len(self.samples))),
            key=lambda fit: fit[0],
            default=(0, 0, 0),
        )
        count, index, end = best
        start = len(record.input_ids)
        if count:
            self.open[index][start:end] = False
            self._check(self.samples[index], record, start, end)
        return count

    def _fit(self, index, record, is_partial):
        """Tokens of the record that this sample trains, in (count, sample, end)."""
        sample, start = self.samples[index], len(record.input_ids)
        tokens = record.tokens
        size = min(len(tokens), len(sample.tokens))
        differs = [a != b for a, b in zip(tokens[:size], sample.tokens[:size], strict=True)]
        common = differs.index(True) if True in differs else size
        is_cut = sample.metadata["truncated"] and common == len(sample.tokens)
        if common <= start or (common < len(tokens) and not is_partial and not is_cut):
            return 0, index, start
        return (common - start if self.open[index][start:common].all() else 0), index, common

    def _check(self, sample, record, start, end):
        offset = len(sample.tokens) - sample.response_length
        given = sample.rollout_log_probs[start - offset : end - offset]
        assert given == record.log_probs[: end - start]
        versions = {
            position: version
            for version, first, last in sample.metadata["weight_version_spans"]
            for position in range(first, last)
        }
        told = [versions.get(position) for position in range(start - offset, end - offset)]
        assert told == record.versions[: end - start]

    def assert_nothing_else_is_trained(self):
        for mask in self.open:
            assert not mask.any(), f"positions {np.flatnonzero(mask)} are trained but no turn's"


def _mask(sample):
    mask = np.zeros(len(sample.tokens), bool)
    mask[len(sample.tokens) - sample.response_length :] = sample.loss_mask
    return mask


def check(records, samples, tally, *, max_tokens=0):
    """Every sampled token is trained once, as it was sampled, or counted under the reason that is due."""
    lost = dict.fromkeys(("realigned", "truncated", "side", "abandoned"), 0)
    unseen = 0
    claims = Claims(samples)
    for record in records:
        fate, size = record.turn.fate, len(record.output_ids)
        if fate in ("side", "abandoned"):
            lost[fate] += size
            unseen += size if fate == "abandoned" else 0
            continue
        taken = claims.take(record, is_partial=fate == "realigned")
        if fate == "realigned":
            lost[fate] += size - taken
        elif max_tokens:
            lost["truncated"] += size - taken
        else:
            assert taken == size, f"{record.turn.says}: {taken} of {size} tokens are trained"
    claims.assert_nothing_else_is_trained()
    _check_rows(records, samples, max_tokens)
    _check_tally(records, lost, tally)


def _check_rows(records, samples, max_tokens):
    """Every row is what the engine really had: prompt and output of one of its calls."""
    held = [record.tokens for record in records]
    for sample in samples:
        sample.validate_lengths()
        cut = [tokens[: len(sample.tokens)] if max_tokens else tokens for tokens in held]
        assert sample.tokens in cut
        assert not max_tokens or len(sample.tokens) <= max_tokens


def _check_tally(records, lost, tally):
    """A client that left did not take all that was sampled: of abandoned tokens some may never have come."""
    sampled = sum(len(record.output_ids) for record in records)
    unseen = sampled - tally.tokens
    counted = {name: getattr(tally, f"tokens_{name}") for name in lost}
    assert 0 <= unseen <= lost["abandoned"]
    assert counted == lost | {"abandoned": lost["abandoned"] - unseen}
    assert (tally.tokens_abandoned > 0) == (lost["abandoned"] > 0)
    assert tally.unaccounted == 0
    assert tally.turns == sum(bool(record.output_ids) for record in records)


def check_prompts(records, template, tokenizer):
    """Prompts hold the history: turns that are named, as they were sampled and ended once; and all texts."""
    outputs = {id(record.turn): record.output_ids for record in records}
    for record in records:
        prompt, text = record.input_ids, tokenizer.decode(record.input_ids)
        token, letter = 0, 0
        for item in record.history:
            if not isinstance(item, Answer):
                letter = text.index(item.text.strip(), letter) + len(item.text.strip())
            elif item.source is not None and item.is_named:
                output = outputs[id(item.source)]
                token = _find(output, prompt, token) + len(output)
                ends = [given in template.stop_ids for given in (output[-1], prompt[token])]
                assert ends.count(True) == 1


def check_images(records, samples, template):
    """Prompts and rows hold the images of their history, in order, and a placeholder for each."""
    token = template.report.image_token
    for record in records:
        assert record.images == [image for item in record.history for image in getattr(item, "images", ())]
        if token:
            assert record.input_ids.count(*template.encode(token)) == len(record.images)
    for sample in samples:
        held = [record.images for record in records if record.tokens[: len(sample.tokens)] == sample.tokens]
        images = (sample.multimodal_inputs or {"images": []})["images"]
        assert any(given[: len(images)] == images for given in held)
        if token:
            assert sample.tokens.count(*template.encode(token)) == len(images)


def _find(part, tokens, start):
    """Where `part` stands in `tokens`, from `start` on."""
    size = len(part)
    found = (at for at in range(start, len(tokens) - size + 1) if tokens[at : at + size] == part)
    position = next(found, None)
    assert position is not None, "a turn does not stand in the prompt as it was sampled"
    return position
