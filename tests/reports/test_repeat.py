"""The curl that repeats a request does what it says, and tells no secret."""

import json
import os
import subprocess

import pytest

from loadgen.manifest.sections import LabelsSection, TargetSection
from reports.run.failures import curl
from tests.runs import changed

TARGET = TargetSection(
    kind="url",
    url="http://127.0.0.1:1",
    api="chat",
    model="m'\"; touch x; $(touch y)`z`",
    api_key_env=None,
    labels=LabelsSection(),
)


def arguments(command, tmp_path):
    """What a shell would hand to curl: its arguments, and last what it would read."""
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\ncat\n')
    (tmp_path / "curl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = subprocess.run(
        ["sh", "-c", command], capture_output=True, check=True, cwd=tmp_path,
        env={"PATH": path, "KEY": "from the environment"}, timeout=30,
    )  # fmt: skip
    return told.stdout.decode().split("\0")


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("chat", "chat/completions"), ("completions", "completions"),
        ("messages", "messages"), ("responses", "responses"),
    ],
)  # fmt: skip
def test_a_shell_sends_the_same_model_and_lengths(api, path, tmp_path):
    target = changed(TARGET, api=api, api_key_env="KEY", extra_body={"top_k": 1})
    sent = arguments(curl(target, 3, 24), tmp_path)
    assert sent[1] == f"http://127.0.0.1:1/v1/{path}"
    assert "authorization: Bearer from the environment" in sent
    body = json.loads(sent[-1])
    prompt = body["messages"][0]["content"] if "messages" in body else body.get("prompt")
    prompt = body["input"] if api == "responses" else prompt
    assert prompt.split() == ["hello"] * 3
    assert sent[-3:-1] == ["--data-binary", "@-"]
    limit = body["max_output_tokens" if api == "responses" else "max_tokens"]
    assert (body["model"], limit, body["stream"]) == (TARGET.model, 24, True)
    assert ("anthropic-version: 2023-06-01" in sent) == (api == "messages")
    assert body["top_k"] == 1
    assert sorted(os.listdir(tmp_path)) == ["curl"], "the model's name is text"


def test_a_prompt_longer_than_an_argument_may_be_is_sent_whole(tmp_path):
    body = json.loads(arguments(curl(TARGET, 200_000, 24), tmp_path)[-1])
    assert len(body["messages"][0]["content"].split()) == 200_000


def test_secrets_of_a_target_stay_out():
    target = changed(
        TARGET, url="https://user:pw@host/v1", headers=["x-api-key"],
        extra_body={"api_key": "s3cr3ts3cr3t"},
    )  # fmt: skip
    told = curl(target, 3, 24)
    assert "pw@" not in told
    assert "s3cr3t" not in told
    assert "x-api-key: [redacted]" in told


def test_what_is_no_http_api_has_none():
    assert curl(changed(TARGET, url="unix:/tmp/s"), 3, 24) == ""
    assert curl(changed(TARGET, kind="sim", url="sim://h100/8b", api=None), 3, 24) == ""
