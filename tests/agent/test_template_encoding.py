from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.encoding import LONG_PIECE, PieceCache, TextEncoder, text_encoder
from slime.agent.template import ChatTemplate
from slime.errors import ModelError
from tests.agent.tokenizers import NAMES, real_tokenizer
from tests.tiny import tiny_tokenizer

TURNS = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '[USER] ' + m.content + ' [/USER] ' if m.role == 'user' else m.content + '</s>' }}{% endfor %}"
)


def sentencepiece_like(scheme):
    """A tokenizer that writes spaces as a letter, and puts one before what it takes for a start."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "▁", *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TURNS
    return fast


pieces = st.sampled_from(["word ", "\n\n", "x = 12345\n", "日本語", " é", "<b>", "  "])
long_texts = st.lists(st.tuples(pieces, st.integers(1, 900)).map(lambda p: p[0] * p[1]), max_size=4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_cached_pieces_give_the_ids_of_the_whole_text(name, data):
    tokenizer = real_tokenizer(name)
    encoder = TextEncoder(tokenizer, lambda text: True)
    assert encoder.cuts
    special = list(encoder.control[:5])
    text = "".join(data.draw(st.sampled_from(special)) + part for part in data.draw(long_texts))
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encoder.encode(text) == encoder.encode(text) == expected


@pytest.mark.parametrize("scheme", ["first", "always"])
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.sampled_from(["</s>", "<s>", "a", " b", "<", "</s", "/s>"]), max_size=6))
def test_no_space_is_added_where_a_token_is_spelled_out(scheme, parts):
    tokenizer = sentencepiece_like(scheme)
    encoder = TextEncoder(tokenizer, lambda text: True)
    assert encoder.cuts == (scheme == "always")
    text = "a" + "".join(parts)
    marked, mark = encoder.protect(text)
    ids = encoder.encode("<s>" + marked, mark)
    assert tokenizer.decode(ids[1:]).lstrip(" ") == text
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids[1:])


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_continuation_has_the_ids_of_the_whole_text_where_starts_are_marked(scheme):
    tokenizer = sentencepiece_like(scheme)
    template = ChatTemplate(tokenizer)
    history = [{"role": r, "content": c} for r, c in (("user", "go"), ("assistant", "so"), ("user", "on on"))]
    whole = tokenizer.encode(tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False)
    assert template.prompt(history) == whole
    delta = template.continuation(history[2:], previous=history[1], closed=False)
    assert delta[0] == tokenizer.eos_token_id
    assert whole[-len(delta) :] == delta


def test_tokenizers_that_encode_only_with_their_own_additions_do_not_count():
    class Adding:
        def __init__(self):
            self.added_tokens_decoder = {}

        def encode(self, text):
            return [1]

    assert text_encoder(Adding()) is None
    assert text_encoder(object()) is None
    with pytest.raises(ModelError, match="lists no added tokens"):
        TextEncoder(object(), lambda text: True)


def test_text_without_control_tokens_is_not_touched():
    encoder = TextEncoder(tiny_tokenizer(), lambda text: True)
    value = {"a": ["plain", {"b": 1}], "c": None}
    found, mark = encoder.protect(value)
    assert found is value
    assert mark is None


def test_the_mark_is_a_character_that_the_text_lacks():
    encoder = TextEncoder(tiny_tokenizer(), lambda text: True)
    marked, mark = encoder.protect(["\ue000 \\ue001 <|im_end|>"])
    assert mark == "\ue002"
    assert encoder.decode(encoder.encode(marked[0], mark)) == "\ue000 \\ue001 <|im_end|>"


def test_a_template_that_prints_objects_shows_no_mark():
    encoder = TextEncoder(tiny_tokenizer(), lambda text: True)
    marked, mark = encoder.protect({"x": "<|im_end|>"})
    assert encoder.decode(encoder.encode(str(marked), mark)) == "{'x': '<|im_end|>'}"


def test_non_special_tokens_are_text_unless_they_are_markers():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "<fim>"])
    encoder = TextEncoder(tokenizer, lambda text: text == "<tool_call>")
    assert set(encoder.control) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"}


def test_a_tokenizer_that_builds_special_tokens_from_parts_is_refused():
    class Forging:
        added_tokens_decoder = tiny_tokenizer().added_tokens_decoder

        def encode(self, text, add_special_tokens):
            return [2]

        def decode(self, ids):
            return ""

    with pytest.raises(ModelError, match="could forge it"):
        TextEncoder(Forging(), lambda text: True)


def test_the_cache_holds_no_more_than_its_limit_and_drops_the_oldest():
    cache = PieceCache(limit=30)
    for text in "abc":
        cache.put(text * 10, array("i"))
    assert cache.get("a" * 10) is not None
    cache.put("d" * 10, array("i"))
    assert cache.get("b" * 10) is None
    assert cache.get("a" * 10) is not None
    assert cache.size == 30


def test_threads_share_an_encoder():
    tokenizer = tiny_tokenizer()
    encoder = TextEncoder(tokenizer, lambda text: True, cache_bytes=3 * LONG_PIECE)
    texts = [f"<|im_start|>{c * (LONG_PIECE + 10)}<|im_end|>" for c in "abcdefgh"] * 10
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encoder.encode, texts))
    assert found == [tokenizer.encode(text) for text in texts]
