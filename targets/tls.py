"""The TLS settings of a client, one way for the probe and the load generator: what the preflight
found trustworthy must be so in the run.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from loadgen.errors import TargetFileError


def tls_context(ca_cert: Path | None) -> ssl.SSLContext:
    """Trusts the system's authorities and, besides them, those in the PEM file `ca_cert`.

    Not `create_default_context(cafile=…)`, which trusts that file alone. Raises TargetFileError
    when the file cannot be read or holds no certificate.
    """
    context = ssl.create_default_context()
    if ca_cert is None:
        return context
    try:
        context.load_verify_locations(ca_cert)
    except ssl.SSLError:
        raise TargetFileError(
            f"ca_cert: {ca_cert}: holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        ) from None
    except OSError as error:
        raise TargetFileError(f"ca_cert: {ca_cert}: {error.strerror}") from None
    return context
