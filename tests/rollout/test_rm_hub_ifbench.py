import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import RewardError
from slime.rollout.rm_hub import Invalid
from slime.rollout.rm_hub.ifbench import (
    CHECKERS,
    compute_ifbench_reward,
    constraints,
    follows,
    formats,
    ifbench_check,
    ifeval,
    loose_variants,
)
from slime.rollout.rm_hub.ifbench.languages import detected
from slime.rollout.rm_hub.ifbench.text import sentences

ENGLISH = "The cat is on the mat and it is happy."

CASES = [
    ("keywords:existence", {"keywords": ["cat", "mat"]}, "A Cat on a mat", "A cat"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, "Ha ha", "ha"),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "less than"}, "ha", "ha ha"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "a Cat!"),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        "Qq",
        "q",
    ),
    ("language:response_language", {"language": "de"}, "Das ist nicht die Katze", ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "A b. C d!", "A"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\n***\n\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
    ("length_constraints:number_words", {"num_words": 3.0, "relation": "at least"}, "a b c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "dog"},
        "cat sat\n\n'Dog' ran",
        "dog ran\n\ncat sat",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yes.\n\nP.S. no", "Yes."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p. p. s. no", "P.S. no"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'Well. the end."', "The end. Or not"),
    ("startend:quotation", {}, '"all"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO NO no",
        "NO no",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b", "a b c d"),
    ("count:unique_word_count", {"N": 2}, "a b a", "a A a."),
    ("count:conjunctions", {"small_n": 2}, "this and that, but So", "and And"),
    ("count:numbers", {"N": 2}, "1,000.5 and 7", "1 2 3"),
    ("count:punctuation", {}, "a, b; c: d! e? f. g?!", "a, b; c: d. g?!"),
    (
        "count:keywords_multiple",
        {"keyword1": "a", "keyword2": "b", "keyword3": "c", "keyword4": "d", "keyword5": "e"},
        "a b b c c c d d d d d e e e e e e e",
        "a b c d e",
    ),
    ("count:words_japanese", {"N": 2}, "one 二 three 四", "one two"),
    ("ratio:sentence_type", {}, "A b. C d. E f?", "A b. C d?"),
    ("ratio:sentence_balance", {}, "A b. C d! E f?", "A b. C d!"),
    ("ratio:sentence_words", {}, "Ab cd. Ef gh. Ij kl.", "Ab cd. Ab gh. Ij kl."),
    ("sentence:increment", {"small_n": 1}, "One. Two more. Three words now.", "One. Two. Three."),
    ("sentence:keyword", {"word": "cat", "N": 2}, "A dog. A cat.", "A cat. A dog."),
    ("sentence:alliteration_increment", {}, "Cat dog. Big blue dog. Five fine fish.", "Big blue. Cat dog."),
    ("words:alphabet", {}, "Yes, zebras are big", "a c"),
    ("words:vowel", {}, "banana", "education"),
    ("words:consonants", {}, "string plant", "a plant"),
    ("words:no_consecutive", {}, "a big cat", "big blue"),
    ("words:palindrome", {}, "level radar civic rotor kayak madam refer stats tenet solos", "level"),
    ("words:prime_lengths", {}, "cat seven", "four"),
    ("words:repeats", {"small_n": 1}, "a b", "a A"),
    ("words:last_first", {}, "I see you. You see me.", "I see you. I go."),
    ("words:paragraph_last_first", {}, "Cats love cats.\n\nDogs hate dogs", "Cats love dogs"),
    ("words:keywords_specific_position", {"keyword": "cat", "n": 2, "m": 2}, "Hi you. A cat.", "A cat."),
    ("words:words_position", {"keyword": "cat"}, "a cat or cat b", "cat a cat"),
    ("format:parentheses", {}, "([{((x))}])", "((((x))))"),
    ("format:quotes", {}, '"\'"x"\'"', "\"'x'\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "I guess yes"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "b"),
    ("format:options", {"options": "I know or I don't know"}, "i don't know", "or"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("format:emoji", {}, "Hello 🙂. Bye! 🚀", "Hello 🙂. Bye!"),
    ("format:line_indent", {}, "a\n b\n  c", "a\nb"),
    ("format:quote_unquote", {}, '"Yes" means yes', 'It is "yes"'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a"),
    ("format:thesis", {}, "<i>All is well.</i> Because", "All is well"),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n* c\n  - d"),
    ("format:no_bullets_bullets", {}, "A b. C d.\n* e\n* f", "A b.\n* e\n* f"),
    ("format:no_whitespace", {}, "abc", "a bc"),
    ("format:title_case", {}, "The Cat Is Here", "The cat Is Here"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Say it now"}, "Tell it now", "Say it now"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "ok"),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2},
        "b c",
        "b c d",
    ),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14"),
    (
        "custom:csv_city",
        {},
        "ID,Country,City,Year,Count\n" + "1,a,b,2000,3\n" * 7,
        "ID,Country,City,Year,Count\n1,a,b,2000,3\n",
    ),
    (
        "custom:csv_quotes",
        {},
        '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + '"1"\t"a"\t"b"\t"c"\t"3"\n' * 3,
        "StudentID\tSubject\tGrade\tSemester\tScore\n" + '"1"\t"a"\t"b"\t"c"\t"3"\n' * 3,
    ),
    (
        "custom:csv_special_character",
        {},
        "ProductID,Category,Brand,Price,Stock\n" + '1,a,"b&c",2,3\n' * 14,
        "ProductID,Category,Brand,Price,Stock\n" + '1,a,"bc",2,3\n' * 14,
    ),
    (
        "custom:sentence_alphabet",
        {},
        " ".join(f"{chr(65 + n)}nd so." for n in range(26)),
        "And so.",
    ),
]


@pytest.mark.parametrize(("instruction", "kwargs", "good", "bad"), CASES)
def test_each_instruction_is_told_from_its_breach(instruction, kwargs, good, bad):
    assert follows(instruction, kwargs, [good])
    assert not follows(instruction, kwargs, [bad])


def test_every_checker_has_a_case_and_all_of_ifeval_is_there():
    assert set(CHECKERS) == {case[0] for case in CASES}
    assert len(ifeval.CHECKERS) == 25
    assert len(CHECKERS) == len(ifeval.CHECKERS) + len(constraints.CHECKERS) + len(formats.CHECKERS)


def test_all_instructions_must_be_followed():
    spec = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least", "keyword": None}],
    }
    for label, metadata in ((json.dumps(spec), None), (spec, None), (None, spec), ("x", spec)):
        assert compute_ifbench_reward("one two", label, metadata) == 1.0
        assert compute_ifbench_reward("one, two", label, metadata) == 0.0
        assert compute_ifbench_reward("one", label, metadata) == 0.0
    assert ifbench_check("  ", spec) == Invalid(0.0, "empty_response")


def test_loose_forgives_a_first_or_last_line_and_asterisks():
    spec = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    response = 'Sure, here it is:\n**"all"**'
    assert compute_ifbench_reward(response, spec) == 0.0
    assert compute_ifbench_reward(response, spec, {"ifbench_mode": "loose"}) == 1.0
    assert len(loose_variants("a\nb\nc")) == 8


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        ({"instruction_id_list": ["words:start_verb"]}, "unknown_instruction", "'words:start_verb'"),
        (
            {"instruction_id_list": ["punctuation:no_commas"]},
            "unknown_instruction",
            "did you mean 'punctuation:no_comma'",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            "instruction",
            "missing a required",
        ),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{"x": 1}]}, "instruction", "unexpected"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{}, {}]}, "instruction", "1 .* 2 kwargs"),
        ({}, "instruction", "0 instructions"),
        (
            {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "tlh"}]},
            "instruction",
            "cannot tell",
        ),
        (
            {"instruction_id_list": ["startend:quotation"], "ifbench_mode": "lose"},
            "instruction",
            "not strict or loose",
        ),
    ],
)
def test_what_cannot_be_checked_is_a_failure_that_names_it(spec, reason, message):
    with pytest.raises(RewardError, match=message) as caught:
        ifbench_check("text", spec)
    assert caught.value.reason == reason


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.text(max_size=80))
def test_any_response_has_a_verdict(case, response):
    instruction, kwargs, *_ = case
    assert follows(instruction, kwargs, [response]) in (True, False)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", ENGLISH),
        ("es", "El gato no es un perro, pero está en la casa."),
        ("pt", "O gato não é um cão, mas ele está em uma casa."),
        ("fr", "Le chat est sur la table et il ne dort pas."),
        ("de", "Die Katze ist auf dem Tisch und schläft nicht."),
        ("it", "Il gatto è sulla tavola e non dorme, ma anche questo è vero."),
        ("fi", "Kissa on pöydällä, mutta se ei ole iloinen."),
        ("vi", "Tôi là một con mèo và không được ngủ."),
        ("sw", "Paka yupo katika nyumba ya watu hawa na pia kuna mbwa."),
        ("pl", "Kot nie jest psem, ale to się dla mnie nie liczy."),
        ("ru", "Это не собака, а кошка, и она спит на столе."),
        ("uk", "Це не собака, а кішка, і вона є на столі."),
        ("bg", "Това не е куче, а котка, която също спи."),
        ("ar", "هذا ليس كلبا بل قطة على الطاولة من هذا البيت"),
        ("fa", "این گربه است که در خانه می خوابد"),
        ("ur", "یہ ایک بلی ہے اور یہ گھر میں ہے"),
        ("hi", "यह एक बिल्ली है और यह घर में नहीं है"),
        ("mr", "ही एक मांजर आहे आणि ते घरात नाही"),
        ("ne", "यो बिरालो हो र घरमा छ"),
        ("ja", "これは猫です。犬ではありません。"),
        ("zh", "这是一只猫"),
        ("ko", "이것은 고양이입니다"),
        ("th", "นี่คือแมว"),
        ("ta", "இது ஒரு பூனை"),
        ("te", "ఇది ఒక పిల్లి"),
        ("bn", "এটি একটি বিড়াল"),
        ("kn", "ಇದು ಬೆಕ್ಕು"),
        ("gu", "આ એક બિલાડી છે"),
        ("pa", "ਇਹ ਇੱਕ ਬਿੱਲੀ ਹੈ"),
        ("ml", "ഇതൊരു പൂച്ചയാണ്"),
        ("he", "זה חתול"),
    ],
)
def test_the_languages_of_ifeval_are_told_apart(language, text):
    assert detected(text) == language


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Who has 3.5 cats. Yes.", 2),
        ('He said "no." Then he left', 2),
        ("A title\n\nA text.", 2),
        ("これは猫です。犬です。", 2),
        ("...", 0),
        ("", 0),
    ],
)
def test_sentences(text, count):
    assert len(sentences(text)) == count
