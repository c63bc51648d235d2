"""TLS: whether the certificate and key that the settings name can be used.

Knows: files, Python's ssl. Must not know: the server. uvicorn loads them again; here a fault is found before a model is
loaded, and told in one line.
"""

from __future__ import annotations

from pinnate.core.errors import ConfigError


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """
    Raises:
        ConfigError: the certificate or its key cannot be read, or they do not belong together.
    """
    if certfile is None:
        return
    import ssl  # only where it is used: it costs some milliseconds of the start

    try:
        # Without a password given, a terminal would be asked for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"--ssl-certfile {certfile} --ssl-keyfile {keyfile}: {reason or error}; "
            "PEM files are needed, the key without a password"
        ) from None
