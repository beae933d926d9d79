"""Signs a certificate that is its own authority: `python -m gpuvirt.controller.webhookcertificate.signing NAME DAYS`.

The child prints the key and the certificate in PEM. It alone loads cryptography, which takes 16 MiB, for a signature in
two months. No key exists that could sign another certificate.
"""

import sys
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuvirt.clock import RealClock

_MOST_SUBJECT = 64
"""The characters of a common name; servers are known by their alternative names, which may be longer."""


def signed(name: str, days: int) -> bytes:
    """Return a key and a certificate for a server's DNS name, which is valid from now on, in PEM."""
    key, begins = ec.generate_private_key(ec.SECP256R1()), RealClock().now()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:_MOST_SUBJECT])])
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= dict.fromkeys(("crl_sign", "encipher_only", "decipher_only"), False)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)


if __name__ == "__main__":
    sys.stdout.buffer.write(signed(sys.argv[1], int(sys.argv[2])))
