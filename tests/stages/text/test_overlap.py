"""Leaks however they are dressed, against a brute-force comparison."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.text.overlap import Document, OverlapIndex, document_of


def met(items, row, **settings):
    return {(m.item_id, m.kind, round(m.overlap, 6)) for m in OverlapIndex(items, **settings).meet(row)}


STORY = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


def test_system_turns_ids_and_list_contents_cannot_hide_a_row():
    item = document_of("a", [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])
    dressed = document_of(
        "b",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
            {"role": "assistant", "content": "So."},
        ],
    )
    assert met([item], dressed) == {("a", "exact", 1.0)}


def test_one_word_more_or_less_leaves_an_ngram_match():
    item = Document("a", STORY, "end")  # 17 words: five 13-grams, of which the row holds four
    assert met([item], Document("b", "", f"before {STORY} after")) == {("a", "ngram", 0.8)}
    assert met([item], Document("b", "", f"before {STORY} after"), threshold=0.81) == set()


def test_a_short_item_is_met_inside_a_longer_text():
    item = Document("a", "what is the capital of the french republic", "Paris")
    page = "quiz what is the capital of the French republic Paris next"
    assert met([item], Document("b", "", page)) == {("a", "ngram", 1.0)}


def test_an_instruction_common_to_the_items_is_no_leak():
    items = [Document(f"i{k}", STORY, f"answer {k}") for k in range(3)]
    assert met(items, Document("b", STORY, "something else entirely")) == set()
    assert met(items[:2], Document("b", STORY, "something else entirely"), threshold=0.2) == {
        ("i0", "prompt", 1.0),
        ("i1", "prompt", 1.0),
    }
    assert met(items, Document("b", STORY, "Answer 1")) == {("i1", "normalised", 1.0)}


vocabulary = st.lists(st.sampled_from("abc"), min_size=0, max_size=9).map(" ".join)


@given(st.lists(vocabulary, min_size=1, max_size=4), vocabulary)
def test_shares_equal_a_count_by_hand(texts, row):
    n, least = 3, 2
    items = [Document(str(i), "", text) for i, text in enumerate(texts)]

    def grams(text, size):
        parts = text.split()
        return {tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)}

    expected = set()
    sized = [(min(n, len(t.split())), t) for t in texts]
    for i, (size, text) in enumerate(sized):
        if text == row:
            expected.add((str(i), "exact", 1.0))
            continue
        if size < least:
            continue
        telling = {g for g in grams(text, size) if sum(s == size and g in grams(t, s) for s, t in sized) < 3}
        share = len(telling & grams(row, size)) / len(telling) if telling else 0.0
        if share >= 0.5:
            expected.add((str(i), "ngram", round(share, 6)))
    assert met(items, Document("r", "", row), n=n, least_words=least) == expected
