"""A read that is redirected to a TLS server checks its certificate, wherever it came from."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from store.errors import StoreError
from store.objects.open import open_store
from tests.store.served import served

KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
FEW = {"attempts": 1, "timeout": 20.0}


class Server(ThreadingHTTPServer):
    """Answers everything with a few bytes, or with a redirect; notes what it was asked."""

    leads_to: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.command)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"" if self.server.leads_to else b"data"
        self.send_response(307 if self.server.leads_to else 200)
        if self.server.leads_to:
            self.send_header("Location", self.server.leads_to + self.path)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(certificate: Certificate | None = None) -> Iterator[Server]:
    """Run a server, over TLS with a certificate."""
    server = Server()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.path)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield server


@dataclass(frozen=True)
class Certificate:
    """What a server of this machine shows (with its key, in one file), and who vouches for it."""

    path: Path
    root: bytes


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name, name = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
        for text in ("nobody's root", "localhost")
    )
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)

    def signed(subject: x509.Name, public: Any, *, is_root: bool) -> bytes:
        made = (
            x509.CertificateBuilder(root_name, subject, public, x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(here, critical=False)
            .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
            .sign(root_key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(signed(name, key.public_key(), is_root=False) + secret)
    return Certificate(path, signed(root_name, root_key.public_key(), is_root=True))


def opened(kind: str, server: Server, scheme: str = "http", **client_options: Any) -> Any:
    where = f"{scheme}://{server.authority}"
    more = {**FEW, "client_options": client_options}
    if kind == "s3":
        return open_store("s3://bucket/run", {"endpoint": where, **KEYS, **more})
    return open_store(f"{where}/run", more)


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_a_certificate_that_nobody_vouches_for_is_refused(
    kind: str, certificate: Certificate
) -> None:
    with serving(certificate) as tls, serving() as plain:
        plain.leads_to = f"https://{tls.authority}"
        with pytest.raises(StoreError):
            opened(kind, plain).get("run.json", max_bytes=10)
        assert plain.asked == ["GET"]
        assert tls.asked == []


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_one_that_is_vouched_for_is_followed(kind: str, certificate: Certificate) -> None:
    with serving(certificate) as tls, serving() as plain:
        plain.leads_to = f"https://{tls.authority}"
        objects = opened(kind, plain, root_certificate=certificate.root)
        assert objects.get("run.json", max_bytes=10) == b"data"
        assert (plain.asked, tls.asked) == (["GET"], ["GET"])


def test_no_write_follows_a_redirect(certificate: Certificate) -> None:
    with serving(certificate) as tls, serving() as plain:
        plain.leads_to = f"https://{tls.authority}"
        objects = opened("s3", plain, root_certificate=certificate.root)
        with pytest.raises(StoreError, match="307"):
            objects.put("a", [b"x"])
        assert tls.asked == []


@pytest.mark.parametrize("kind", ["s3", "web"])
def test_tls_never_leads_to_plain_http(kind: str, certificate: Certificate) -> None:
    with serving(certificate) as tls, serving() as plain:
        tls.leads_to = f"http://{plain.authority}"
        objects = opened(kind, tls, "https", root_certificate=certificate.root)
        with pytest.raises(StoreError):
            objects.get("run.json", max_bytes=10)
        assert (tls.asked, plain.asked) == (["GET"], [])
