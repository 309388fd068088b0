import os

import pytest

from trueup.records.files import filesystem_type, on_network, write_atomic

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/me/local\\040disk ext4 rw 0 0
host: /remote fuse.sshfs rw 0 0
"""


def test_a_write_replaces_the_whole_content(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"a longer first content")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_content_and_no_rest(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "text is not bytes")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/run.db", "ext4", False),
        ("/home/me/runs/run.db", "nfs4", True),
        ("/home/me/local disk/run.db", "ext4", False),
        ("/homework/run.db", "ext4", False),
        ("/remote/run.db", "fuse.sshfs", True),
    ],
)
def test_the_innermost_mount_decides_what_a_path_lies_on(path, kind, network, tmp_path):
    path = tmp_path.__class__(path)
    assert filesystem_type(path, MOUNTS) == kind
    assert on_network(path, MOUNTS) is network


def test_a_later_mount_on_the_same_point_hides_the_earlier(tmp_path):
    mounts = MOUNTS + "tmpfs / tmpfs rw 0 0\n"
    assert filesystem_type(tmp_path.__class__("/var/x"), mounts) == "tmpfs"
