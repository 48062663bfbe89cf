"""What is said where a Ray cannot be joined; a scripted head answers as Ray's do."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from ray.core.generated import gcs_service_pb2 as pb
from ray.core.generated import gcs_service_pb2_grpc

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.joined_ray import JoinedRay
from kvrelay.deploy.nodes.local_ray import ray


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):  # type: ignore[misc]
    version = ray.__version__
    refuses = False

    def CheckAlive(self, request: pb.CheckAliveRequest, context: grpc.ServicerContext):  # noqa: N802
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return pb.CheckAliveReply(ray_version=self.version)


@pytest.fixture
def head() -> Head:
    return Head()


@pytest.fixture
def address(head: Head) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(head, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def refusal(address: str) -> str:
    with pytest.raises(ClusterError) as caught, JoinedRay(address, "kvrelay/default"):
        pass
    return str(caught.value)


def test_another_version_of_ray_is_said(head: Head, address: str):
    head.version = "2.9.9"
    said = f"--ray-address: the Ray at {address} is 2.9.9, here it is {ray.__version__}"
    assert refusal(address).startswith(said)


def test_a_wrong_token_is_said(head: Head, address: str):
    head.refuses = True
    said = refusal(address)
    assert said.startswith(f"--ray-address: the Ray at {address} refuses the token")
    assert "RAY_AUTH_TOKEN" in said


def test_nobody_there_is_said():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*unused.getsockname())
        assert refusal(address) == f"--ray-address: no Ray answers at {address}"


def test_something_else_there_is_said():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    said = refusal(f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert re.match(r"--ray-address: what answers at 127.0.0.1:\d+ is no Ray's head", said)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("Version mismatch: The cluster was\nstarted with: Python: 3.9.1", "Python: 3.9.1"),
        ("Can't find a raylet", "`ray start` makes this machine a node of it: Can't find a"),
    ],
)
def test_why_ray_refuses_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, problem: str, said: str
):
    def init(**_: object) -> None:
        raise RuntimeError(problem)

    ended = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    why = refusal(address)
    assert said in why
    assert "\n" not in why
    assert ended
