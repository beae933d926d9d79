"""Issues certificates by the program openssl, since Python's standard library signs none.

A certificate is its own authority, so that no key exists which could sign another one. Keys are never on a disk.
"""

import subprocess

from gpuvirt.cluster.webhookcertificate.certificate import Pair, pair_of
from gpuvirt.errors import GpuvirtError

OPENSSL = "openssl"
WITHIN_S = 30.0
_REQUEST = """[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = {subject}
[extensions]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,digitalSignature,keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
subjectAltName = DNS:{name}
"""
_MOST_SUBJECT = 64
"""The characters of a common name; servers are known by their alternative names, which may be longer."""


class NotIssuedError(GpuvirtError):
    """No certificate could be issued; the text has the reason."""


def issue(name: str, days: int) -> Pair:
    """Return a new certificate for a server's DNS name, which is valid from now on; raise NotIssuedError."""
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", str(days), "-config", "/dev/stdin", "-keyout", "-", "-out", "-"]
    request = _REQUEST.format(subject=name[:_MOST_SUBJECT], name=name).encode()
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=WITHIN_S, check=False)
    except FileNotFoundError as error:
        raise NotIssuedError(f"the program {OPENSSL} is not installed; gpuvirt's image has it") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotIssuedError(f"{OPENSSL} can't be run: {error}") from error
    # Its output has the key, so only its errors may be shown.
    key, begin, certificate = done.stdout.partition(b"-----BEGIN CERTIFICATE-----")
    pair = pair_of(begin + certificate, key)
    if done.returncode or pair is None:
        detail = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        raise NotIssuedError(f"{OPENSSL} issued no certificate (exit status {done.returncode}): {detail}")
    return pair
