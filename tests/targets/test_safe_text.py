"""Text before it is shown: secrets of requests and of command lines are removed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets.endpoint import read_target
from targets.safe_text import HIDDEN, SecretForms, hide_secrets, redact

KEY = "sk-do-not-show-me"
FILE = "url: http://h\nheaders: {x-api-key: gw-4711-secret, x-tenant: blue, x-version: '1'}\n"


def endpoint(text=FILE):
    return read_target(text, "t.yaml", {"OPENAI_API_KEY": KEY})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Incorrect API key provided: {KEY}.", "Incorrect API key provided: [redacted]."),
        (f"authorization: Bearer {KEY}", "authorization: Bearer [redacted]"),
        ("x-api-key gw-4711-secret of blue", "x-api-key [redacted] of [redacted]"),
        (f"{KEY}{KEY}", "[redacted][redacted]"),
        ("answered 401, version 1.1", "answered 401, version 1.1"),
        ("", ""),
    ],
)
def test_every_secret_of_a_request_is_removed(text, shown):
    assert endpoint().redact(text) == shown


@pytest.mark.parametrize("end", ["", "'", '"', "…"])
def test_a_secret_cut_short_by_the_end_of_a_message_is_removed(end):
    assert endpoint().redact(f"it starts 'key {KEY[:9]}{end}") == f"it starts 'key [redacted]{end}"


@pytest.mark.parametrize(("n_shown", "end"), [(3, KEY[:3]), (4, "[redacted]")])
def test_the_beginning_of_a_secret_is_removed_from_four_characters(n_shown, end):
    assert redact(f"the key {KEY[:n_shown]}", [KEY]) == f"the key {end}"


def test_a_key_that_an_authorization_header_replaces_is_still_a_secret():
    text = "url: http://h\nheaders: {Authorization: Basic bWU6c2VjcmV0}\n"
    redacted = endpoint(text).redact(f"{KEY} is not bWU6c2VjcmV0")
    assert redacted == "[redacted] is not [redacted]"


def test_an_endpoint_without_secrets_changes_nothing():
    assert read_target("url: http://h", "t.yaml", {}).redact("as it is") == "as it is"


def test_a_secret_is_found_in_the_notation_of_json_and_urls():
    secret = 'a/b"c\\d  e'
    for written in (
        secret,
        json.dumps(secret),
        json.dumps(secret).replace("/", "\\/"),
        "a%2Fb%22c%5Cd%20%20e",
        'a/b"c\\d e',  # white space is joined before a message is shown
    ):
        assert "[redacted]" in redact(f"<{written}>", [secret])
        assert "c" not in redact(f"<{written}>", [secret]).replace("[redacted]", "")


@given(st.text(min_size=4), st.text(), st.text())
def test_a_secret_never_survives_in_any_surroundings(secret, before, after):
    shown = redact(before + secret + after, [secret])
    assert secret not in shown.replace("[redacted]", "\0")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hf-token", "hf_1"], ["--hf-token", HIDDEN]),
        (["--hf_token=hf_1"], [f"--hf_token={HIDDEN}"]),
        (["-password", "hf_1"], ["-password", HIDDEN]),
        (["env", "HF_TOKEN=hf_1", "serve"], ["env", f"HF_TOKEN={HIDDEN}", "serve"]),
        (["--admin.secret", "hf_1"], ["--admin.secret", HIDDEN]),
        (["--header", "Authorization: Bearer hf_1"], ["--header", f"Authorization: {HIDDEN}"]),
        (["-H", "x-api-key:hf_1"], ["-H", f"x-api-key:{HIDDEN}"]),
        (["--from", "https://me:hf_1@h/x"], ["--from", f"https://me:{HIDDEN}@h/x"]),
        (["--ApiKey", "hf_1"], ["--ApiKey", HIDDEN]),
    ],
)
def test_a_secret_of_a_command_line_is_replaced_and_returned(words, shown):
    safe, secrets = hide_secrets(words)
    assert list(safe) == shown
    assert secrets[0].removeprefix("Bearer ") == "hf_1"


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-batched-tokens", "8192", "--tokenizer", "path", "--token-limit=7"],
        ["--api-key", "${KEY}", "--hf-token=${HF_TOKEN}"],
        ["--require-api-key", "--host", "h"],
        ["--ssl-keyfile", "/etc/key.pem", "--seed=7", "a:b", "http://host:80/x@y"],
    ],
)
def test_other_words_of_a_command_line_are_shown_as_written(words):
    assert hide_secrets(words) == (tuple(words), ())


@pytest.mark.parametrize(
    ("secrets", "body", "masked"),
    [
        ([KEY], f"a {KEY} b", "a ***************** b"),
        ([f"Bearer {KEY}"], f"a {KEY} b", "a ***************** b"),
        (["abcdefgh", "abcdefgh12345"], "abcdefgh abcdefgh12345", "******** *************"),
        (['quo"te-é-key'], 'x quo\\"te-\\u00e9-key', "x ******************"),
        (["data", "1"], "data: 1", "data: 1"),
    ],
)
def test_secrets_in_a_body_are_masked_without_a_change_of_its_length(secrets, body, masked):
    forms = SecretForms(secrets)
    assert forms.masked(body.encode()) == masked.encode()
    assert forms.are_in(body.encode()) is (body != masked)
    assert bool(forms) is (body != masked)
