"""What looks like a secret goes; what merely talks about one stays."""

import pytest

from reports.redaction import redact


@pytest.mark.parametrize(
    "text",
    [
        "--header 'Authorization: Bearer s3cr3t'",
        '{"Authorization": "Bearer s3cr3t"}',
        "--set api_key=s3cr3t",
        "api-key: s3cr3t",
        '{"api_key": "s3cr3t", "url": "x"}',
        "OPENAI_API_KEY=s3cr3t slobench run",
        "password: s3cr3t",
        "https://user:s3cr3t@host/v1",
        "sk-s3cr3ts3cr3t",
        "hf_s3cr3ts3cr3t",
        "Basic s3cr3t==",
    ],
)
def test_secrets_are_taken_out(text: str) -> None:
    assert "s3cr3t" not in redact(text)
    assert "[redacted]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "api_key_env: OPENAI_API_KEY",
        "input_tokens: {kind: lognormal, median: 220}",
        "output_tokens: 64",
        "slobench run scenarios/chat.yaml --target http://127.0.0.1:8000",
        "ttft <= 500ms",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text
