"""The authorities that a client trusts, in the preflight and in the load generator."""

import ssl
import subprocess

import pytest

from loadgen.errors import TargetFileError
from targets.dialer import tls_context


def authority(folder, name):
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN={name} -keyout {folder / name}.key -out {folder / name}.pem"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the openssl command to make a certificate")
    return folder / f"{name}.pem"


def names(context):
    return {dict(part[0] for part in cert["subject"])["commonName"] for cert in trusted(context)}


def trusted(context):
    return [cert for cert in context.get_ca_certs() if isinstance(cert, dict)]


def test_a_named_authority_is_trusted_in_addition_to_those_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority(tmp_path, "system")))
    assert names(tls_context(None)) == {"system"}
    both = tls_context(authority(tmp_path, "named"))
    assert names(both) == {"system", "named"}
    assert (both.verify_mode, both.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("content", ["", "-", "not PEM"])
def test_a_file_without_a_certificate_is_named(tmp_path, content):
    (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(TargetFileError, match=r"ca_cert: .*ca\.pem: holds no certificate"):
        tls_context(tmp_path / "ca.pem")


def test_a_missing_certificate_is_named(tmp_path):
    with pytest.raises(TargetFileError, match=r"ca_cert: .*ca\.pem: No such file"):
        tls_context(tmp_path / "ca.pem")
