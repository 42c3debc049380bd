"""What looks like a secret on a command line is not shown, and everything else is."""

import pytest

from targets.secret_words import HIDDEN, hide_secrets


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
def test_a_secret_is_replaced_and_told_apart(words, shown):
    told, taken = hide_secrets(words)
    assert list(told) == shown
    assert taken[0].removeprefix("Bearer ") == "hf_1"


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-batched-tokens", "8192", "--tokenizer", "path", "--token-limit=7"],
        ["--api-key", "${KEY}", "--hf-token=${HF_TOKEN}"],
        ["--require-api-key", "--host", "h"],
        ["--ssl-keyfile", "/etc/key.pem", "--seed=7", "a:b", "http://host:80/x@y"],
    ],
)
def test_what_is_no_secret_is_shown_as_written(words):
    assert hide_secrets(words) == (tuple(words), ())
