"""Credentials are read whole or not at all, and are not shown."""

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind
from gpuvirt_schedules.hypervisors.libvirt.session import FIRST, PREFIX, CredentialFiles

COMPLETE = {"server": b"vcenter:8989\n", "ca": b"PEM\n", "user": b"gpuvirt@vsphere.local", "password": b"s3cret \n"}
BY_CERTIFICATE = {"server": b"host-1\n", "ca": b"CA\n", "certificate": b"CERT\n", "key": b"KEY\n"}
VSPHERE, LIBVIRT = HypervisorKind.VSPHERE, HypervisorKind.LIBVIRT


def test_a_secret_made_of_files_has_line_ends() -> None:
    assert HypervisorCredentials.of(VSPHERE, COMPLETE) == HypervisorCredentials(
        "vcenter:8989", "PEM", "gpuvirt@vsphere.local", "s3cret "
    )
    assert HypervisorCredentials.of(LIBVIRT, BY_CERTIFICATE) == HypervisorCredentials(
        "host-1", "CA", certificate="CERT", key="KEY"
    )


def test_each_hypervisor_has_its_keys() -> None:
    assert HypervisorCredentials.of(LIBVIRT, COMPLETE) == ("certificate", "key")
    assert HypervisorCredentials.of(VSPHERE, BY_CERTIFICATE) == ("user", "password")


@given(st.sets(st.sampled_from(sorted(COMPLETE)), min_size=1), st.sampled_from([None, b"", b" \n", b"\xff"]))
def test_keys_that_are_missing_empty_or_no_text_are_named(keys: set[str], value: bytes | None) -> None:
    data = {key: text for key, text in COMPLETE.items() if key not in keys}
    lacking = HypervisorCredentials.of(VSPHERE, data if value is None else data | dict.fromkeys(keys, value))
    assert lacking == tuple(key for key in COMPLETE if key in keys)


def test_only_the_server_is_shown() -> None:
    assert repr(HypervisorCredentials.of(VSPHERE, COMPLETE)) == "HypervisorCredentials(server='vcenter:8989')"
    assert repr(HypervisorCredentials.of(LIBVIRT, BY_CERTIFICATE)) == "HypervisorCredentials(server='host-1')"


def test_credentials_are_files_in_memory_and_what_dead_children_left_is_removed() -> None:
    with CredentialFiles("other CA", "other certificate", "other key").folder() as alive:
        left = alive.with_name(f"{PREFIX}left")
        left.mkdir(exist_ok=True)
        (left / FIRST).symlink_to("/proc/0/fd/0")
        with CredentialFiles("CA", "certificate", "key").folder() as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert {path.name: path.read_text() for path in folder.iterdir()} == {
                "cacert.pem": "CA",
                "clientcert.pem": "certificate",
                "clientkey.pem": "key",
            }
            assert all(path.is_symlink() for path in folder.iterdir())
            assert not left.exists()
        assert not folder.exists()
        assert (alive / FIRST).read_text() == "other CA"
