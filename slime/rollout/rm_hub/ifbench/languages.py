"""Which language a text is written in, of those that IFEval asks for: by script, then by frequent words.

Invariant: a language that is not known here is an error, never a wrong answer. No data is downloaded.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from slime.rollout.rm_hub.ifbench.text import spaced_words

_SCRIPTS = {
    "LATIN": "en es pt fr de it nl sv fi vi sw pl tr",
    "CYRILLIC": "ru uk bg",
    "ARABIC": "ar fa ur",
    "DEVANAGARI": "hi mr ne",
    "BENGALI": "bn",
    "THAI": "th",
    "TAMIL": "ta",
    "TELUGU": "te",
    "HANGUL": "ko",
    "HEBREW": "he",
    "KANNADA": "kn",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "MALAYALAM": "ml",
    "GREEK": "el",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
}
_FREQUENT = {
    "en": "the of and to in is that it for was with as are this be have you not on his by they at",
    "es": "de la que el en y los las un una por con para es del se no su como más está son pero",
    "pt": "de que o a e do da em um uma para com não os as no na por mais dos como mas foi ao ele",
    "fr": "de la le et les des en un une du que est dans pour qui sur pas plus par au avec ce ne",
    "de": "der die und das ist nicht zu den mit von ein eine auf für dem sich des im auch als es ich",
    "it": "di che il la e in un una per non con del della sono le si da come più anche gli questo ma",
    "nl": "de het een en van ik te dat die in is niet op met voor zijn er aan om ook maar",
    "sv": "och att det som en på är av för med till den har de inte om ett men var jag",
    "fi": "ja on ei että se hän oli mutta joka kun myös tai niin olen ovat sekä kuin mitä tämä",
    "vi": "của và là có không được trong cho một những các với người này đã để khi như tôi",
    "sw": "ya na wa kwa ni katika za la kuwa hii kama yake au lakini pia sana watu hiyo huu",
    "pl": "i w nie na się jest to że z do jak ale po co tak za od jego przez jako są dla",
    "tr": "ve bir bu da de için ile çok ne gibi daha var ama en o olarak kadar sonra değil",
    "ru": "и в не на что с он как это по но из у за от же так для бы ы э ё ъ",
    "uk": "і в не на що з як це та до але за від у є ї ґ також який було",
    "bg": "и на да се за от в не с е са по това че като но един към или също ще",
    "ar": "في من على إلى أن هذا التي الذي ما لا هو كان مع عن هذه ذلك",
    "fa": "و در به از که این را با است برای آن یک می های شد ها پ چ گ",
    "ur": "کے میں کی ہے اور سے کا کو یہ نے پر ہیں کہ اس ایک ٹ ڈ",
    "hi": "के में की है और से का को यह ने पर हैं कि एक नहीं इस भी था",
    "mr": "आहे आणि या च्या मध्ये ते तो ही हे नाही होते आहेत एक केला साठी त्या",
    "ne": "छ र को मा ले का यो पनि गर्न छन् हुन् भएको गरेको हो त्यो लागि",
}
"""Language -> frequent words, and letters by which it differs from others of its script."""
KNOWN = frozenset(" ".join(_SCRIPTS.values()).split())
_LETTER_MARKS = re.compile(r"^\w$")


def is_language(text: str, code: str) -> bool:
    """Whether a text is in the language of an ISO 639-1 code.

    Raises:
        ValueError: the code is not known.
    """
    wanted = code.lower().split("-")[0]
    if wanted not in KNOWN:
        raise ValueError(
            f"cannot tell whether a text is in language {code!r}; known: {', '.join(sorted(KNOWN))}"
        )
    return detected(text) == wanted


def detected(text: str) -> str | None:
    """The likeliest language of a text; None for one without letters or frequent words."""
    scripts = _scripts(text)
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"]:
        scripts["HIRAGANA"] += scripts.pop("CJK", 0)
    candidates = _SCRIPTS[scripts.most_common(1)[0][0]].split()
    if len(candidates) == 1:
        return candidates[0]
    found = Counter(spaced_words(text))
    letters = Counter(text.lower())
    scores = {language: _score(language, found, letters) for language in candidates}
    best = max(scores, key=lambda language: scores[language])
    return best if scores[best] > 0 else None


def _scripts(text: str) -> Counter[str]:
    """Letters by script."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        script = unicodedata.name(letter, "").split(" ")[0] if letter.isalpha() else ""
        if script in _SCRIPTS:
            counts[script] += count
    return counts


def _score(language: str, found: Counter[str], letters: Counter[str]) -> float:
    marks = _FREQUENT[language].split()
    by_word = sum(found[mark] for mark in marks)
    non_latin = language in ("ru", "uk", "bg", "ar", "fa", "ur")
    by_letter = sum(letters[m] for m in marks if non_latin and _LETTER_MARKS.match(m) and m in "ыэёъїґєپچگٹڈ")
    return by_word + by_letter
