from pathlib import Path

import pytest

from graftline.kv_transfer.protocol_choice import TransferPath, common_paths, host_id, rdma_devices

INTRA, RDMA, TCP = TransferPath.INTRA_NODE_GPU, TransferPath.RDMA, TransferPath.TCP


@pytest.mark.parametrize(
    ("same_host", "local", "peer", "paths"),
    [
        (True, [INTRA, TCP], [INTRA, TCP], [INTRA, TCP]),
        (True, [INTRA, RDMA, TCP], [INTRA, RDMA, TCP], [INTRA, RDMA, TCP]),
        (True, [INTRA, TCP], [TCP], [TCP]),
        (True, [RDMA, TCP], [INTRA, RDMA, TCP], [RDMA, TCP]),
        (False, [INTRA, TCP], [INTRA, TCP], [TCP]),
        (False, [TCP, RDMA, INTRA], [INTRA, RDMA, TCP], [RDMA, TCP]),
        (False, [INTRA, RDMA, TCP], [INTRA, TCP], [TCP]),
        (False, [RDMA], [TCP], []),
        (False, [INTRA], [INTRA], []),
    ],
)
def test_the_ways_that_both_have_fastest_first(
    same_host: bool, local: list[TransferPath], peer: list[TransferPath], paths: list[TransferPath]
) -> None:
    theirs = "host" if same_host else "other"
    assert common_paths("host", theirs, local, peer) == common_paths("host", theirs, peer, local) == paths


def test_an_unknown_host_is_another_one() -> None:
    assert common_paths("", "", [INTRA, TCP], [INTRA, TCP]) == [TCP]


def fake_proc(root: Path, boot_id: str) -> Path:
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/ipc").touch()
    return root


def test_a_host_is_a_boot_and_an_ipc_namespace(tmp_path: Path) -> None:
    first = fake_proc(tmp_path / "a", "boot-1")
    other_namespace, other_boot = fake_proc(tmp_path / "b", "boot-1"), fake_proc(tmp_path / "c", "boot-2")
    assert host_id(first) == host_id(first)
    assert len({host_id(first), host_id(other_namespace), host_id(other_boot)}) == 3
    assert host_id() == host_id()


def test_a_host_without_rdma_has_no_devices(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "absent") == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]
