import random

import pytest

from dustin_trt.runtime.text import TextStream
from tests import tokenizer as tiny_tokenizer

TOKENIZER = tiny_tokenizer.make()


def tokens_of(text):
    return TOKENIZER(text).input_ids


def feed(stream, tokens):
    """Push until a stop string; the pieces given out after each token, the last one final."""
    pieces, stopped = [], False
    for token in tokens:
        stopped = stream.push(token)
        if stopped:
            break
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take(final=True))
    return pieces, stopped


@pytest.mark.parametrize(
    "text", ["", "the thing", "naïve — 日本語 🎉!", " \n\t the  of ", "👩‍👩‍👧‍👦é"]
)
def test_text_comes_back_whatever_the_tokens_are(text):
    pieces, stopped = feed(stream := TextStream(TOKENIZER), tokens_of(text))
    assert not stopped
    assert stream.text == "".join(pieces) == text


def test_a_character_is_given_out_when_its_last_byte_is_there():
    tokens = tokens_of("日")
    assert len(tokens) == 3  # one byte each
    stream = TextStream(TOKENIZER)
    given = []
    for token in tokens:
        stream.push(token)
        given.append(stream.take())
    assert given == ["", "", "日"]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    pieces, _ = feed(stream := TextStream(TOKENIZER), tokens_of("a日")[:-1])
    assert stream.text == "".join(pieces) == "a\ufffd"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows():
    lone = tokens_of("日")[-1]  # a continuation byte without its beginning
    pieces, _ = feed(stream := TextStream(TOKENIZER), [lone, *tokens_of("the end")])
    assert stream.text == "".join(pieces) == "\ufffdthe end"
    assert "".join(pieces[:-1]) == "\ufffdthe end"


def test_special_tokens_are_not_text():
    tokens = [*tokens_of("the"), 1, *tokens_of(" end"), 0]
    pieces, _ = feed(stream := TextStream(TOKENIZER), tokens)
    assert stream.text == "".join(pieces) == "the end"


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one END two", ("END",), "one "),
        ("the thing and", ("ng a",), "the thi"),  # begins in one token, ends in another
        ("say 日本 now", ("日本",), "say "),  # of multi-byte characters
        ("a. b, c", (",", "."), "a"),  # the first in the text, not in the list
        ("xENDENDx", ("END",), "x"),
        ("END", ("END",), ""),
        ("aaab", ("aab",), "a"),  # overlaps itself
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(text, stop, left):
    pieces, stopped = feed(stream := TextStream(TOKENIZER, stop), tokens_of(text))
    assert stopped
    assert stream.text == "".join(pieces) == left


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not():
    stream = TextStream(TOKENIZER, ("END", "Nx"))
    given = []
    for token in tokens_of("aENz"):
        assert not stream.push(token)
        given.append(stream.take())
    assert given == ["a", "", "", "ENz"]


def test_what_was_held_back_is_given_out_at_the_end():
    pieces, stopped = feed(stream := TextStream(TOKENIZER, ("END",)), tokens_of("the EN"))
    assert not stopped
    assert stream.text == "".join(pieces) == "the EN"
    assert pieces[-1] == "EN"


def test_random_tokens_stream_to_what_they_decode_to():
    random.seed(0)
    for _ in range(200):
        tokens = [random.randrange(tiny_tokenizer.VOCAB) for _ in range(30)]
        pieces, _ = feed(stream := TextStream(TOKENIZER), tokens)
        assert "".join(pieces) == stream.text
        assert stream.text == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_given_out_text_is_never_taken_back_by_a_stop_string():
    random.seed(1)
    for _ in range(200):
        text = "".join(random.choice("abé日") for _ in range(20))
        stop = ("".join(random.choice("abé日") for _ in range(random.randint(1, 4))),)
        pieces, stopped = feed(stream := TextStream(TOKENIZER, stop), tokens_of(text))
        at = text.find(stop[0])
        assert stopped == (at >= 0)
        assert stream.text == "".join(pieces) == (text[:at] if stopped else text)


def test_without_a_tokenizer_there_is_no_text():
    pieces, stopped = feed(stream := TextStream(None), [1, 2, 3])
    assert not stopped
    assert stream.text == "".join(pieces) == ""
